"""Compute the identity of a run: its spec, and checksums of its data, model, partition and code.

The identity is stored in a run folder's ``run.json`` and in every checkpoint. A run can be resumed only with the same
identity, except for settings that are marked with ``config.MayChange``. If the software versions or the processor
differ when a run is resumed, a warning says that results may differ in the last bits.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstrata.base.config import MayChange, Setting
from fedstrata.base.errors import SpecError
from fedstrata.base.inputs import Inputs
from fedstrata.clients.training.devices import device_of
from fedstrata.data.dataset import Dataset
from fedstrata.data.partitions.base import Assignment
from fedstrata.models.model import Model
from fedstrata.spec.experiment import Experiment

RESULTS = 2
"""The version of fedstrata's results. A commit that changes the results of a spec must increase this version.

``tests/integration/test_golden.py`` detects such changes. If the results of a table in ``fedstrata.papers`` change, the
commit must also increase the table's ``version``.
"""

LONG = 20
"""If a list in the identity has more than ``LONG * LONG`` characters, only the list's checksum is stored."""


def identity_of(spec: Experiment, data: Dataset, model: Model, assignment: Assignment) -> dict[str, Any]:
    """Return the identity of a run, as values that JSON can represent.

    Args:
        spec: The experiment.
        data: The data set.
        model: The model with its initial parameters.
        assignment: The samples of each client.
    """
    identity = {
        "results_version": RESULTS,
        "spec": dict(_flat({key: value for key, value in spec.to_spec().items() if key != "tracking"})),
        "data": fingerprint_of_data(data),
        "model": fingerprint_of_model(model),
        "partition": _digest(assignment.indices.tobytes(), assignment.offsets.tobytes()),
        "code": dict(sorted(_code(spec))),
    }
    frozen = fingerprints_of_frozen(model)
    return identity | {"frozen": frozen} if frozen else identity


def well_formed(identity: object) -> bool:
    """Return True if a value from a file has the keys and types of an identity."""
    kinds = {"results_version": int, "spec": dict, "data": str, "model": str, "partition": str, "code": dict}
    if not isinstance(identity, dict) or not isinstance(identity.get("frozen", {}), dict):
        return False
    return all(isinstance(identity.get(key), kind) for key, kind in kinds.items())


def about_data(data: Dataset) -> str:
    """Return the string that represents the user's data in a spec: the checksum, numbers of samples and shape."""
    outputs = "classes" if data.task.has_classes else "outputs"
    sizes = f"{data.train_size} training and {len(data.y_test)} test samples of shape {data.shape}"
    return f"sha256 {fingerprint_of_data(data)}: {sizes}, {data.outputs} {outputs}"


def about_model(model: Model) -> str:
    """Return the string that represents the user's module in a spec: the checksum, class and number of parameters."""
    cls, count = type(model.module), sum(w.numel() for w in model.params().values())
    return f"sha256 {fingerprint_of_model(model)}: {cls.__module__}.{cls.__qualname__}, {count} parameters"


def fingerprint_of_data(data: Dataset) -> str:
    """Return the SHA-256 over a data set's samples, labels, class names, normalisation and client ids (if any)."""
    tensors = [data.x_train, data.y_train, data.x_test, data.y_test, data.shift, data.scale]
    names = [*data.class_names]
    if data.client_train is not None:
        tensors += [data.client_train, data.client_test]
        names += data.client_names
    return _digest(*tensors, *(name.encode() for name in names))


def fingerprint_of_model(model: Model) -> str:
    """Return the SHA-256 over a model's architecture, initial parameters and buffers."""
    named = {**model.params(), **model.untrained.all}
    parts = [part for name, tensor in named.items() for part in (name.encode(), tensor)]
    return _digest(str(model.module).encode(), *parts)


def fingerprints_of_frozen(model: Model) -> dict[str, str]:
    """Return a mapping from the name of each frozen tensor to the SHA-256 of the tensor's type, shape and values."""
    return {name: _digest(tensor) for name, tensor in model.untrained.frozen.items()}


def require_same_frozen(before: Mapping[str, str], now: Mapping[str, str], whose: str) -> None:
    """Raise ``SpecError`` if a frozen tensor differs from the tensor with the same name in an earlier run.

    Args:
        before: The fingerprints of the expected tensors; see ``fingerprints_of_frozen``.
        now: The fingerprints of the given model's frozen tensors.
        whose: How the error message names the run with the expected tensors, such as ``the run in FOLDER``.
    """
    for name in {**before, **now}:
        if before.get(name) != now.get(name):
            was, is_now = (f"{each[name][:12]}…" if name in each else "missing" for each in (before, now))
            problem = f"the frozen tensor {name} differs: its checksum is {is_now} here, but {was} in {whose}"
            raise SpecError("model", f"{problem}. Use the same model weights, or the same seed.")


@cache
def environment(device: str = "cpu") -> dict[str, str]:
    """Return a description of the environment: versions of fedstrata, PyTorch and Python, and the hardware.

    Args:
        device: The value of ``training.device``. If the device is a GPU, the description contains the GPU's name.
    """
    place = device_of(device)
    gpu = {} if place.type == "cpu" else {"gpu": torch.cuda.get_device_name(place)}
    return {
        "fedstrata": importlib.metadata.version("fedstrata"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": processor(),
        **gpu,
    }


@cache
def processor() -> str:
    """Return the name and the instruction sets of the processor. Equal processors give bit-identical results."""
    name = platform.processor() or platform.machine()
    with suppress(OSError):
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
        about = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
        if "model name" in about:
            name = f"{about['model name']}, family {about.get('cpu family')}, model {about.get('model')}"
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def require_same(before: Mapping[str, Any], now: Mapping[str, Any], where: str) -> list[str]:
    """Raise an error if an experiment differs so much from a run's experiment that the run cannot be resumed.

    Args:
        before: The identity of the run, which was read from JSON.
        now: The identity of the experiment.
        where: The run folder, for the error message.

    Returns:
        A description of each permitted difference.

    Raises:
        SpecError: A difference is not permitted, because it would change the results.
    """
    elsewhere = f"or use another folder than {where}."
    advice = f". Use the run's value, {elsewhere}"
    require_same_frozen(before.get("frozen", {}), now.get("frozen", {}), f"the run in {where}")
    changes = []
    old, new = before["spec"], now["spec"]
    for key in sorted(old.keys() | new.keys()):
        was, will = old.get(key, "left out"), new.get(key, "left out")
        if was == will:
            continue
        allowed = _may_change(key)
        if allowed is None or (allowed.upwards and not _grows(was, will)):
            only = ", and you may only increase this value" if allowed is not None else ""
            raise SpecError(key, f"the run in this folder has {was!r}{only}{advice}", will)
        changes.append(f"{key} was {was!r} and is {will!r}")
    if any(change.startswith("training.rounds ") for change in changes) and (why := _rounds_decide(new)):
        problem = (
            f"the run in this folder has {old['training.rounds']} rounds. With {why}, every round depends on the total "
            f"number of rounds{advice}"
        )
        raise SpecError("training.rounds", problem, new["training.rounds"])
    for key, what in (("data", "data"), ("model", "model"), ("partition", "partition")):
        if before[key] != now[key]:
            raise SpecError(
                what,
                f"differs from the {what} of the run in this folder (hash {before[key][:12]}…, now "
                f"{now[key][:12]}…). Use the same {what}, {elsewhere}",
            )
    for name in sorted(before["code"].keys() | now["code"].keys()):
        if before["code"].get(name) != now["code"].get(name):
            problem = f"the Python module {name!r} has changed since the run in this folder began"
            raise SpecError("code", f"{problem}. Restore the module, {elsewhere}")
    if before["results_version"] != now["results_version"]:
        raise SpecError(
            "out",
            "the run in this folder was started with a version of fedstrata that computes different results. Use that "
            f"version, {elsewhere}",
            where,
        )
    return changes


def _may_change(key: str) -> MayChange | None:
    """Return the ``MayChange`` mark of a setting, which permits changes when a run is resumed; None without a mark."""
    section, name = key.split(".")[0], ".".join(key.split(".")[1:2])
    field = Experiment.model_fields.get(section)
    cls = field.annotation if field else None
    if not (inspect.isclass(cls) and issubclass(cls, Setting)) or name not in cls.model_fields:
        return None
    return next((item for item in cls.model_fields[name].metadata if isinstance(item, MayChange)), None)


def _grows(was: Any, will: Any) -> bool:
    return isinstance(was, int) and isinstance(will, int) and will > was


def _rounds_decide(spec: Mapping[str, Any]) -> str | None:
    """Return the setting that makes every round depend on the total number of rounds; None without such a setting."""
    for key, value in spec.items():
        if key.rpartition(".")[2] == "schedule" and value == "cosine":
            return f"{key} = 'cosine'"
    return "method.mode = 'hybrid'" if spec.get("method.mode") == "hybrid" else None


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each entry of a nested dict. A checksum replaces each long list."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, list) and len(str(value)) > LONG * LONG:
            yield prefix + key, f"{len(value)} items, sha256 {_digest(str(value).encode())}"
        else:
            yield prefix + key, value


def _code(spec: Experiment) -> Iterator[tuple[str, str]]:
    """Yield the name and the SHA-256 of each user-written Python module that implements a setting of the spec."""
    for code in (value.implementation for value in _settings(spec)):
        if code.__module__.partition(".")[0] == "fedstrata":
            continue
        try:
            source = inspect.getsource(sys.modules[code.__module__] if code.__module__ != "__main__" else code)
        except (OSError, TypeError, KeyError):  # code that was typed into a Python prompt has no source file
            continue
        yield code.__module__, _digest(source.encode())


def _settings(value: Any) -> Iterator[Setting]:
    if isinstance(value, tuple):
        for item in value:
            yield from _settings(item)
    elif isinstance(value, Setting):
        yield value
        for name in type(value).model_fields:
            yield from _settings(getattr(value, name))


def _digest(*parts: bytes | Inputs | None) -> str:
    """Return the SHA-256 over several parts and their lengths, so that ("ab", "c") and ("a", "bc") differ."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Mapping):
            for name in sorted(part):
                _add(digest, name.encode())
                _add(digest, *_pieces(part[name]))
        elif isinstance(part, Tensor):
            _add(digest, *_pieces(part))
        else:
            _add(digest, b"none" if part is None else part)
    return digest.hexdigest()


def _add(digest: hashlib._Hash, *pieces: Any) -> None:
    """Update a digest with the length of a part, and then with the bytes of the part's pieces."""
    digest.update(sum(map(len, pieces)).to_bytes(8, "little"))
    for piece in pieces:
        digest.update(piece)


def _pieces(tensor: Tensor) -> tuple[bytes, NDArray[np.uint8]]:
    """Return a tensor's type and shape as bytes, and a view of its values as bytes."""
    flat = tensor.detach().cpu().contiguous()
    # View the values as bytes, because NumPy does not have all types of PyTorch.
    values = flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)
    return f"{str(tensor.dtype).removeprefix('torch.')}{tuple(tensor.shape)}".encode(), values.numpy()
