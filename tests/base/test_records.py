from __future__ import annotations

import dataclasses
import importlib
import json
import pickle
import pkgutil
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fedstrata
from fedstrata.base import outer, records
from fedstrata.base.errors import WireError
from fedstrata.base.records import add, decode, encode, record, require_types, same, size
from fedstrata.federation.messages import FitReply, Weights
from fedstrata.sampling.client_sizes import SizeReport
from fedstrata.sampling.label_counts import LabelReport
from fedstrata.stratify.messages import GradientReply


@record("test/Pair")
class Pair:
    first: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class Stranger:
    value: int


class Bomb:
    """Unpickling it would raise."""

    def __reduce__(self):
        return exec, ("raise SystemExit('unpickled')",)


def alike(a: Any, b: Any) -> bool:
    """Equal in value and in kind, with NaN equal to itself."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape and same_bits(a.numpy(), b.numpy())
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and same_bits(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, Pair):
        return alike(a.first, b.first) and alike(a.second, b.second)
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            alike(x, y) for pair in zip(a.items(), b.items(), strict=True) for x, y in zip(*pair, strict=True)
        )
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    return a == b


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.tobytes() == b.tobytes()


arrays = st.builds(
    lambda dtype, shape, seed: (np.random.default_rng(seed).normal(size=shape) * 100).astype(np.float64).astype(dtype),
    st.sampled_from([np.float32, np.float64, np.int64, np.int32, np.bool_]),
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
    st.integers(0, 1000),
).map(np.asarray)
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | arrays
    | arrays.map(torch.tensor)
)
keys = st.text(max_size=3) | st.integers() | st.sampled_from(["$t", "$r", "$i", "$m"])
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=8,
)


@pytest.mark.slow
@given(trees)
@settings(max_examples=150, deadline=None)
def test_a_tree_comes_back_as_it_was_and_its_size_is_known_without_encoding(tree):
    data = encode(tree)
    assert size(tree) == len(data)
    assert alike(decode(data), tree)
    assert encode(decode(data)) == data


def test_nan_infinity_and_minus_zero_survive():
    tree = {"n": [float("nan"), float("inf"), float("-inf"), -0.0], "t": torch.tensor([torch.nan, -torch.inf, -0.0])}
    assert alike(decode(encode(tree)), tree)


@pytest.mark.parametrize(
    "node",
    [np.array(3.0), np.arange(6).reshape(2, 3).T, np.arange(4)[::-1], np.zeros((0, 3)), torch.ones(2, 3).t()],
    ids=["0-d", "transposed", "reversed", "empty", "tensor"],
)
def test_arrays_of_any_layout(node):
    back = decode(encode(node))
    assert back.shape == node.shape
    assert (back == node).all()


def test_an_array_that_cannot_be_written_to():
    frozen = np.arange(3)
    frozen.flags.writeable = False
    assert decode(encode(frozen)).tolist() == [0, 1, 2]


def test_tensors_that_share_memory():
    whole = torch.arange(6.0)
    tree = {"a": whole, "b": whole, "c": whole[:3], "d": whole[1:]}
    assert alike(decode(encode(tree)), tree)
    assert size(tree) == len(encode(tree))


def test_a_numpy_number_becomes_a_plain_one():
    assert alike(decode(encode((np.float32(0.5), np.int64(3), np.bool_(True)))), (0.5, 3, True))


def test_the_length_depends_on_shape_and_not_on_values():
    def reply(samples: int, loss: float) -> GradientReply:
        return GradientReply({"w": torch.full((3,), loss)}, samples, loss, {})

    assert size(reply(1, 0.5)) == size(reply(123456789, -1.2345678901234567e-89)) == size(reply(0, float("nan")))


def test_what_is_no_plain_value_is_not_encoded():
    for node in (Stranger(1), object(), {1, 2}, np.array(["text"]), np.array([None])):
        with pytest.raises(TypeError):
            encode({"x": node})


REPLY = FitReply(Weights({"w": torch.ones(2, 3)}, {"n": torch.tensor(4)}), 10, 2, 20, 0.25, {"c": {"w": torch.ones(1)}})


def test_every_truncation_is_refused():
    data = encode(REPLY)
    for length in range(len(data)):
        with pytest.raises(WireError):
            decode(data[:length])


def test_a_longer_message_is_refused():
    with pytest.raises(WireError):
        decode(encode(REPLY) + b"\0")


@pytest.mark.slow
@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_damaged_byte_is_refused_or_changes_a_value_and_never_anything_else(data):
    message = bytearray(encode(REPLY))
    message[data.draw(st.integers(0, len(message) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        decode(bytes(message))
    except WireError:
        return  # any other exception fails the test


@pytest.mark.slow
@given(st.binary(max_size=200))
def test_noise_is_refused_and_raises_nothing_else(noise):
    try:
        found = decode(noise)
    except WireError:
        return
    assert encode(found)  # by chance a message


def test_a_message_over_the_limit_is_refused():
    data = encode(torch.zeros(100))
    assert decode(data, limit=len(data)).shape == (100,)
    with pytest.raises(WireError, match=rf"{len(data)} bytes, but the limit is {len(data) - 1}"):
        decode(data, limit=len(data) - 1)


def skeleton(text: object) -> bytes:
    """A message without tensors."""
    data = json.dumps(text).encode()
    return struct.pack("<Q", len(data)) + data


@pytest.mark.parametrize(
    "name",
    ["builtins.eval", "subprocess.Popen", f"{__name__}.Pair", f"{__name__}.Bomb", "fedstrata.spec.experiment.Data"],
)
def test_a_record_that_was_not_declared_is_refused(name):
    with pytest.raises(WireError, match=f"the record type '{name}' is unknown"):
        decode(skeleton({"$r": name, "f": {}}))


def test_missing_and_additional_fields_are_refused():
    kind = "test/Pair"
    assert decode(skeleton({"$r": kind, "f": {"first": None, "second": None}})) == Pair(None, None)
    for fields in ({"first": None}, {"first": None, "second": None, "third": None}):
        with pytest.raises(WireError):
            decode(skeleton({"$r": kind, "f": fields}))


def test_pickles_are_refused_and_never_loaded(tmp_path):
    torch.save({"x": Bomb()}, tmp_path / "bomb.pt")
    for data in (pickle.dumps(Bomb()), (tmp_path / "bomb.pt").read_bytes()):
        for message in (data, struct.pack("<Q", len(data)) + data, skeleton(None) + data):
            with pytest.raises(WireError):
                decode(message)
    length = struct.pack("<Q", 100)
    with pytest.raises(WireError, match="are missing"):
        decode(length + b"0")


def test_references_to_tensors_that_are_not_there_are_refused():
    for text in ({"$t": 0}, {"$a": 1}, {"$b": 0}, {"$i": 0}, {"$f": 3}, {"$u": None}, {"$m": [[1]]}, {"$t": {}}):
        with pytest.raises(WireError):
            decode(skeleton(text))


def test_deep_nesting_is_refused():
    text = b"[" * 100_000 + b"]" * 100_000
    with pytest.raises(WireError):
        decode(struct.pack("<Q", len(text)) + text)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"samples": 1.5}, "FitReply.samples"),
        ({"samples": True}, "FitReply.samples"),
        ({"samples": "10"}, "FitReply.samples"),
        ({"loss": None}, "FitReply.loss"),
        ({"loss": "low"}, "FitReply.loss"),
        ({"message": {"c": torch.ones(1)}}, "FitReply.message.c"),
        ({"message": {"c": {"w": 1.0}}}, "FitReply.message.c.w"),
        ({"weights": {"params": {}, "buffers": {}}}, "FitReply.weights"),
        ({"weights": Weights({"w": [1.0]}, {})}, "Weights.params.w"),
        ({"weights": Weights({3: torch.ones(1)}, {})}, "Weights.params.3"),
    ],
)
def test_a_message_with_a_field_of_another_type_is_refused(change, where):
    wrong = dataclasses.replace(REPLY, **change)
    with pytest.raises(WireError, match=where.replace(".", r"\.")):
        decode(encode(wrong))
    with pytest.raises(WireError, match=where.replace(".", r"\.")):
        require_types(wrong)


def test_messages_come_back():
    for message in (REPLY, SizeReport(1, 100, 0.5), LabelReport()):
        back = decode(encode(message))
        assert type(back) is type(message)
        require_types(back)
    assert back == LabelReport()


def test_sums_are_taken_leaf_by_leaf():
    @record("test/Part")
    class Part:
        n: int
        g: dict[str, Tensor]
        context: str = same()

    total = add(Part(1, {"w": torch.ones(2)}, "s"), Part(2, {"w": torch.full((2,), 3.0)}, "t"))
    assert (total.n, total.g["w"].tolist(), total.context) == (3, [4.0, 4.0], "s")
    with pytest.raises(TypeError, match="cannot be added"):
        add(Part(1, {"w": torch.ones(2)}, "s"), Part(2, {"v": torch.ones(2)}, "s"))
    with pytest.raises(TypeError, match="cannot be added"):
        add(Part(1, {}, ""), Pair(1, 2))


def test_leaves_come_in_order():
    tree = Pair({"a": 1, "b": (torch.ones(1), "t")}, [None, 2.5])
    assert [type(leaf).__name__ for leaf in records.leaves_of(tree)] == ["int", "Tensor", "str", "NoneType", "float"]


@pytest.mark.parametrize("dtype", [*records._SAFETENSORS, torch.complex64, torch.uint16, torch.float8_e5m2])
def test_the_size_of_every_dtype_beside_others(dtype):
    for shape in ((), (0,), (3,), (12, 1, 105)):
        mixed = [torch.zeros(shape, dtype=each) for each in (torch.bool, dtype, torch.float32, dtype, torch.int64)]
        tree = {"many": [*mixed, *mixed, *mixed], "n": (1, 0.5, 2**70, True)}
        assert size(tree) == len(encode(tree)) == size(tree)


def test_the_tensors_of_a_message_are_a_block_that_safetensors_would_write():
    shapes = ((), (0,), (3,), (12, 1, 105))
    tensors = [torch.ones(shape, dtype=dtype) for shape in shapes for dtype in records._SAFETENSORS]
    strided = [torch.arange(12.0).reshape(3, 4).T, torch.arange(8)[::2], torch.ones(1).expand(5), torch.arange(8)[::8]]
    named = {str(place): tensor.contiguous() for place, tensor in enumerate([*tensors, *strided])}
    data = encode([*tensors, *strided])
    text = int.from_bytes(data[:8], "little")
    assert data[8 + text :] == safetensors.torch.save(named)


def test_trees_of_one_form_are_told_from_others():
    alike_but_not = [
        [1],
        (1,),
        {"a": 1},
        {"$a": 1},
        {1: 1},
        {True: 1},
        {2**64: 1},
        [True],
        [False],
        [None],
        [1.0],
        ["1"],
        ["11"],
        [b"1"],
        [b"11"],
        [np.zeros(1)],
        [torch.zeros(1)],
        [torch.zeros(1, 1)],
        [2**64],
        [2**65 + 2**90],
        Pair(1, [1]),
        OrderedDict(a=torch.zeros(7)),
        OrderedDict(a=torch.zeros(8)),
    ]
    for tree in alike_but_not * 2:
        assert size(tree) == len(encode(tree))


@pytest.mark.parametrize("kind", ["$b", "$a", "$t"])
def test_a_tensor_stands_in_one_place(kind):
    """A megabyte and a few bytes of text for each further copy could fill the memory."""
    whole, text = encode({"data": bytes(1000)}), b'{"data":{"$b":0}}'
    block = whole.split(text)[1]

    def message(text: bytes) -> bytes:
        return struct.pack("<Q", len(text)) + text + block

    assert message(text) == whole
    assert len(decode(message(b'{"data":[{"%s":0}]}' % kind.encode()))["data"]) == 1
    with pytest.raises(WireError):
        decode(message(b'{"data":[{"%s":0},{"%s":0}]}' % (kind.encode(), kind.encode())))


def test_lists_add_up_leaf_by_leaf():
    """They were put one behind the other."""
    assert add([1, 2], [3, 4]) == [4, 6]
    assert add({"a": (1, [2.0])}, {"a": (3, [0.5])}) == {"a": (4, [2.5])}
    assert add({"name": "x", "none": None}, {"name": "x", "none": None}) == {"name": "x", "none": None}
    with pytest.raises(TypeError, match="a list of length 2 and a list of length 1 cannot be added"):
        add([1, 2], [3])
    with pytest.raises(TypeError, match=r"'a' and 'b' cannot be added\. Use same\(\) to declare a field that is equal"):
        add("a", "b")


WIRE_NAMES = Path(__file__).with_name("wire_names.json")


def declared() -> dict[str, list[str]]:
    """The package's records and their fields by wire name, with all of its modules imported."""
    for module in pkgutil.walk_packages(fedstrata.__path__, "fedstrata."):
        if not any(part in module.name for part in (".templates", ".deploy.job", "__main__")):
            importlib.import_module(module.name)
    found = {name: cls for name, cls in records.RECORDS.items() if cls.__module__.startswith("fedstrata.")}
    return {name: list(records._FIELDS[cls]) for name, cls in sorted(found.items())}


@pytest.mark.slow
def test_wire_names_and_fields_stay():
    """A message of a party with another version, and a checkpoint, are read by these names."""
    found, expected = declared(), json.loads(WIRE_NAMES.read_text())
    if outer.installed() != list(outer.OUTER):  # their names are absent with them
        expected = {name: fields for name, fields in expected.items() if name in found}
    assert found == expected, "write it again: python tests/base/test_records.py"


def test_two_classes_cannot_share_a_wire_name():
    with pytest.raises(ValueError, match=r"@record\('test/Pair'\) of .*Other: .*Pair already has this wire name\."):

        @record("test/Pair")
        class Other:
            pass


def test_a_class_may_be_declared_twice_as_in_a_notebook():
    def declare():
        @record("test/Again")
        class Again:
            value: int

        return Again

    declare()
    newer = declare()
    assert type(decode(encode(newer(1)))) is newer


if __name__ == "__main__":
    WIRE_NAMES.write_text(json.dumps(declared(), indent=1) + "\n")
