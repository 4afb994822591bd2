"""Inputs that once revealed errors. The fuzzer tries them first, and then random changes of them."""

from __future__ import annotations

import io
import struct
import zipfile
from typing import Any

import numpy as np
import torch

BIG = 10**400
HUGE = 10**30

ONE_SAMPLE = [list(range(20)), list(range(20, 40)), list(range(40, 59)), [59]]
"""The sample indices of four clients, of which the last has only one sample."""

SPEC_TEXTS: dict[str, bytes] = {
    "nothing": b"",
    "nested arrays": b"seed = " + b"[" * 1500 + b"]" * 1500,
    "nested tables": b"seed = " + b"{a=" * 1500 + b"1" + b"}" * 1500,
    "an integer of 5,000 digits": b"seed = " + b"9" * 5000,
    "a key of 5,000 parts": b".".join([b"a"] * 5000) + b" = 1",
    "a section of 5,000 parts": b"[" + b".".join([b"a"] * 5000) + b"]",
    "no text": b"\xff\xfe\x00seed = 1",
    "NUL in a name": b'[method]\nname = "fed\\u0000avg"',
    "NUL in a path": b'[data]\nname = "a\\u0000.npz"',
    "a date": b"seed = 1979-05-27T07:32:00Z",
    "a surrogate": b'[data]\nname = "\\ud800"',
    "a module that is no identifier": b'[method]\nname = "a b:c d"',
    "a module that fails": b'[method]\nname = "asyncio.windows_events:Method"',
    "a function for a method": b'[method]\nname = "os:getcwd"',
    "a class of something else": b'[partition]\nname = "collections:OrderedDict"',
    "a model that is a module": b'[model]\nname = "os:path"',
    "sections that are values": b"data = 1\nmethod = 2\ntraining = 3",
    "lists for tables": b"training = [1]\nevaluation = []\nmethod = []",
}

SPEC_SETTINGS: list[list[str]] = [
    [f"seed={BIG}"],
    ["seed=18446744073709551616"],
    ["seed=-1"],
    ["training.threads=100000"],
    ["training.lr=1.7e308"],
    ["training.lr=5e-324"],
    ["training.momentum=0.9999999999999999"],
    ["training.weight_decay=1e308"],
    ["training.clip=5e-324"],
    [f"training.batch_size={HUGE}"],
    [f"training.clients_per_round={HUGE}"],
    [f"training.rounds={HUGE}"],
    [f"training.workers={HUGE}"],
    ["training.device=cuda:99"],
    ["availability.speed_spread=10000", "availability.deadline=1"],
    ["availability.seconds_per_sample=1e308", "availability.deadline=1"],
    ["availability.name=persistent", f"availability.period={HUGE}"],
    ["availability.name=bernoulli", "availability.p=5e-324"],
    ["availability.name=cyclic", "availability.p=5e-324", f"availability.period={HUGE}"],
    ["availability.name=diurnal", "availability.period=5e-324"],
    ["availability.name=markov", "availability.offline_rounds=1e18"],
    ["availability.name=label-correlated", "availability.concentration=1e-9", "availability.pattern=markov"],
    ["availability.name=size-correlated", "availability.exponent=-10", "availability.mean=5e-324"],
    ["availability=[]"],
    ["availability=[[{name='markov'}], 3]"],
    ["availability.name=groups", f"availability.groups=[{{clients={HUGE}, p=1.0}}]"],
    ["availability.name=trace", "availability.file=/dev/null"],
    ["availability.name=trace", "availability.file=."],
    ["method.name=stratify", f"method.cap={HUGE}"],
    ["method.name=stratify", "method.cap=1000000000000"],
    ["method.name=stratify", "method.mode=single", f"method.chunk_size={HUGE}"],
    ["method.name=stratify", "method.mode=single", "method.chunk_size=1000000000000"],
    ["method.name=stratify", f"method.batch_size={HUGE}"],
    ["method.name=stratify", "method.server.lr=1.7e308"],
    ["method.name=stratify", "method.mode=hybrid", f"method.pretraining={HUGE}"],
    ["method.name=stratify", "method.mode=hybrid", "method.stream=5e-324"],
    ["method.name=fedsampling", f"method.samples={HUGE}"],
    ["method.name=fedsampling", "method.epsilon=5e-324", f"method.bound={HUGE}"],
    ["method.name=fedsampling", "method.epsilon=1e308", "method.bound=1000000000000"],
    ["method.name=fedstas", "method.strata=2", "method.epsilon=1e-300", "method.bound=1000000"],
    ["method.name=fedstas", f"method.samples={HUGE}"],
    ["method.name=fedsts", f"method.coordinates={HUGE}"],
    ["method.name=fedsts", f"method.strata={HUGE}"],
    ["method.name=clustered", f"method.coordinates={HUGE}"],
    ["method.name=fedssar", f"method.optics_max={HUGE}", f"method.min_samples={HUGE}"],
    ["method.name=power-of-choice", f"method.client_sampler.candidates={HUGE}"],
    ["method.name=fedprox", "method.mu=1.7e308"],
    ["method.name=feddyn", "method.alpha=5e-324"],
    ["method.name=feddyn", "method.alpha=1.7e308"],
    ["method.name=moon", "method.objective.temperature=5e-324"],
    ["method.name=rebafl", "method.mu=1e308"],
    ["method.name=fedlc", "method.tau=1.7e308"],
    ["method.name=fedavg-ft", f"method.per_class={HUGE}"],
    ["method.name=fedbabu", f"method.fine_tune.per_class={HUGE}"],
    ["method.aggregator.name=size", "method.aggregator.server.lr=1.7e308"],
    ["method.aggregator.name=size", "method.aggregator.server.optimizer=adam", "method.aggregator.server.lr=1.7e308"],
    ["method.aggregator.name=size", "method.aggregator.server.optimizer=yogi", "method.aggregator.server.eps=5e-324"],
    [
        "method.aggregator.name=size",
        "method.aggregator.server.optimizer=adagrad",
        "method.aggregator.server.lr=1.7e308",
    ],
    ["method.aggregator.name=size", "method.aggregator.server.weight_decay=1.7e308"],
    ["model.hidden=[1000000000000]"],
    [f"model.hidden=[{HUGE}]"],
    ["model.hidden=[300000, 300000]"],
    ["model={name='cnn', channels=[1000000000]}"],
    [f"model={{name='cnn', hidden={HUGE}}}"],
    ["partition.alpha=5e-324"],
    ["partition.alpha=1.7e308"],
    [f"partition.clients={HUGE}"],
    ["partition.clients=1000000000000", "partition.min_size=0"],
    [f"partition.min_size={HUGE}"],
    ["partition={name='power-law', exponent=1e308}"],
    [f"partition={{name='shards', per_client={HUGE}}}"],
    [f"partition={{name='classes', size={HUGE}}}"],
    [f"partition={{name='classes', per_client={HUGE}}}"],
    [f"partition={{name='given', indices=[[{HUGE}]]}}"],
    ["partition={name='given', indices=[[-1]]}"],
    ["partition={name='given', indices=[]}"],
    ["partition={name='given', indices=[[]]}"],
    ["partition={name='given', file='/dev/null'}"],
    ["partition={name='given', file='.'}"],
    ["partition={name='given', file=5}"],
    [f"data.limit={HUGE}"],
    ["data.limit=1"],
    ["data.name=hub:"],
    ["data.name=../../etc/passwd"],
    [f"evaluation.batch_size={HUGE}"],
    ["evaluation.targets=[]"],
    [f"evaluation.every={HUGE}"],
    [".".join(["a"] * 5000) + "=1"],
    ["=", "a=1"],
    ["training=1", "training.lr=0.1"],
    ["seed=" + "[" * 1500 + "]" * 1500],
    ["seed=" + "9" * 5000],
    ["method.name=sfl", "method.client_sampler.name=fedsts", "method.client_sampler.refresh=participants"],
    ["method.name=fedtan", "model={name='resnet9'}", f"partition={{name='given', indices={ONE_SAMPLE}}}"],
]


def npy(dtype: str, shape: tuple[int, ...], body: bytes = b"", text: str | None = None) -> bytes:
    """Return the bytes of a .npy file with any header, which need not fit the body."""
    header = (text or repr({"descr": dtype, "fortran_order": False, "shape": shape})).encode("latin1")
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + body


def saved(array: np.ndarray[Any, Any]) -> bytes:
    """Return the bytes of a .npy file as NumPy writes it."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def zipped(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """Return a .npz file with given members."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return file.getvalue()


def arrays() -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of a valid data set."""
    generator = np.random.default_rng(0)
    return {
        "x_train": generator.normal(size=(12, 3)).astype(np.float32),
        "y_train": np.arange(12) % 3,
        "x_test": generator.normal(size=(6, 3)).astype(np.float32),
        "y_test": np.arange(6) % 3,
    }


def with_(**others: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of ``arrays``, with some of them replaced or added."""
    return {**arrays(), **others}


def _members(**others: bytes) -> bytes:
    return zipped({**{key: saved(array) for key, array in arrays().items()}, **others})


DATA_FILES: dict[str, bytes] = {
    "nothing": b"",
    "no zip": b"PK\x03\x04 and no more",
    "one array": saved(np.arange(3)),
    "a header that is no Python": _members(x_train=npy("<f4", (12, 3), b"\0" * 144, "{'descr': '<f4', 'shape': (12,")),
    "a header that ends early": _members(x_train=npy("<f4", (12, 3))[:9]),
    "a header that claims terabytes": _members(x_train=npy("<f8", (1 << 40, 4))),
    "a header of negative sizes": _members(x_train=npy("<f8", (-1, 3), b"\0" * 8)),
    "a header of a huge product": _members(x_train=npy("<f8", (1 << 62, 1 << 62))),
    "a header of objects": _members(x_train=npy("|O", (12, 3), b"\0" * 288)),
    "a header with a strange version": _members(x_train=b"\x93NUMPY\x09\x00" + b"\0" * 60),
    "a zip bomb": zipped({"x_train": npy("|u1", (1 << 28, 1)) + b"\0" * (1 << 24)}, zipfile.ZIP_DEFLATED),
    "a member that lies about its length": _members(x_train=npy("<f8", (12, 3), b"\0" * 3)),
}

DATA_ARRAYS: dict[str, dict[str, np.ndarray[Any, Any]]] = {
    "floats beyond int64": with_(y_train=np.array([1e300, 2e300] * 6), y_test=np.array([1e300] * 6)),
    "floats at 2**63": with_(y_train=np.array([2.0**63, -(2.0**63)] * 6), y_test=np.array([2.0**63] * 6)),
    "uint64 beside int64": with_(
        y_train=np.array([0, 1, 2**63 + 1, 2**63 + 2] * 3, dtype=np.uint64), y_test=np.array([0, 1, 0, 1, 0, 1])
    ),
    "large int64 beside uint64": with_(
        y_train=np.array([2**53, 2**53 + 1] * 6), y_test=np.array([2**53] * 6, dtype=np.uint64)
    ),
    "uint64 inputs from 2**63": with_(x_train=np.full((12, 3), 2**63 + 5, dtype=np.uint64)),
    "bytes beyond ASCII": with_(y_train=np.array([b"\xff\xfe", b"a"] * 6), y_test=np.array([b"a"] * 6)),
    "strings with NUL": with_(y_train=np.array(["a\0b", "a"] * 6), y_test=np.array(["a"] * 6)),
    "classes without a dimension": with_(classes=np.array("abc")),
    "classes of bytes": with_(classes=np.array([b"\xff", b"b", b"c"])),
    "classes twice": with_(classes=np.array(["a", "a", "b"])),
    "two dimensions of classes": with_(classes=np.array([["a", "b", "c"]])),
    "labels that only the test set has": with_(y_test=np.array([0, 1, 2, 3, 4, 5])),
    "complex inputs": with_(x_train=np.ones((12, 3), dtype=complex)),
    "long double labels": with_(y_train=np.array([0, 1, 2] * 4, dtype=np.longdouble)),
    "times": with_(y_train=np.arange(12).astype("datetime64[D]")),
    "times as inputs": with_(x_train=np.ones((12, 3)).astype("timedelta64[s]")),
    "bool labels": with_(y_train=np.array([True, False] * 6), y_test=np.array([1, 0] * 3)),
    "NaN": with_(x_train=np.full((12, 3), np.nan, dtype=np.float32)),
    "infinity when narrowed": with_(x_train=np.full((12, 3), 1e300)),
    "no samples": with_(x_train=np.empty((0, 3)), y_train=np.empty(0, dtype=int)),
    "no tests": with_(x_test=np.empty((0, 3)), y_test=np.empty(0, dtype=int)),
    "no features": with_(x_train=np.empty((12, 0)), x_test=np.empty((6, 0))),
    "a structured array": with_(x_train=np.zeros(12, dtype=[("a", "f4"), ("b", "i4")])),
    "big-endian": with_(x_train=arrays()["x_train"].astype(">f8"), y_train=arrays()["y_train"].astype(">i2")),
    "half": with_(x_train=np.full((12, 3), 70000.0).astype(np.float32), x_test=np.ones((6, 3), dtype=np.float16)),
    "labels in columns": with_(y_train=np.eye(3)[np.arange(12) % 3]),
    "domains without tests": with_(domain_train=np.arange(12)),
    "domains of the wrong length": with_(domain_train=np.arange(3), domain_test=np.arange(6)),
}


def messages() -> list[Any]:
    """Return messages of every kind."""
    from fedstrata.federation.communication.codecs import PowerSGD, TopK, pack
    from fedstrata.federation.communication.messages import Coefficients, Encoded, EncodedReply, ModelDelivery
    from fedstrata.federation.messages import Fit, FitReply, Weights
    from fedstrata.sampling.label_counts import LabelReply
    from fedstrata.sampling.power_of_choice import LossReply
    from fedstrata.stratify.messages import Reserve

    weights = Weights({"a.weight": torch.randn(3, 2), "a.bias": torch.zeros(3)}, {"n": torch.tensor(3)})
    ints = torch.arange(4)
    chance, fit = np.random.default_rng(0), Fit(1, weights, {}, 1.0, 5.0)
    payload = pack(TopK().encode(weights.params, chance), TopK().forms(weights.params))
    matrix = {"a": torch.randn(9, 8)}
    basis = pack(PowerSGD().first_basis(matrix, chance), PowerSGD().forms_of_basis(matrix))
    delivery = ModelDelivery(3, b"digest", 1, [payload, payload], {})
    return [
        Encoded(fit, 1, 4, delivery, False, basis),
        EncodedReply(FitReply(weights, 10, 5, 50, 0.25, {}), payload),
        Coefficients(4, torch.randn(9).view(torch.uint8)),
        Fit(1, weights, {"c": weights.params}, 1.0, 5.0),
        FitReply(weights, 10, 5, 50, 0.25, {"delta_c": weights.params}),
        LossReply(0.5),
        LabelReply(ints, ints + 1),
        Reserve(round=1, batches=ints, labels=ints, refill=ints[:0], fresh=True, window=(0.0, 1.0)),
        {"a": [1, 2.5, None, True, "text", b"bytes", (1, (2,))], 3: np.arange(5.0), "$t": 1},
        [],
        None,
        float("nan"),
        10**40,
    ]


MESSAGE_BYTES: dict[str, bytes] = {
    "nothing": b"",
    "a length alone": struct.pack("<Q", 2**63),
    "deeply nested": struct.pack("<Q", 20000) + b"[" * 10000 + b"]" * 10000,
    "an unknown record": struct.pack("<Q", 31) + b'{"$r":"os.system","f":{"a":"b"}}'[:31],
    "a number that is not there": struct.pack("<Q", 8) + b'{"$i":5}',
    "a tensor that is not there": struct.pack("<Q", 8) + b'{"$t":5}',
    "a key of a list": struct.pack("<Q", 16) + b'{"$m":[[[1],2]]}',
    "a number of 5,000 digits": struct.pack("<Q", 5000) + b"9" * 5000,
}
