"""Trees of plain values and tensors, and their bytes.

Everything that crosses a wire or goes into a checkpoint is a tree of records (frozen dataclasses), mappings, lists,
plain values, tensors and arrays. ``encode`` writes it as a length, a JSON skeleton and one safetensors block;
``decode`` reads only records that were declared with ``@record`` and checks the types of a message's fields. Nothing
is pickled.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, ClassVar, TypeVar, dataclass_transform

import numpy as np
import safetensors.torch
import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import Tensor

from fedstrata.errors import WireError

Tree = Any
"""Records, mappings, lists, tuples, tensors, arrays, bytes, str, int, float, bool and None, nested."""

DEFAULT_LIMIT = 2 << 30
"""Largest message that is read, in bytes."""

_RECORDS: dict[str, type] = {}
_CHECKERS: dict[type, TypeAdapter[Any]] = {}
_LENGTH = struct.Struct("<Q")
T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def record(cls: type[T]) -> type[T]:
    """Declare a frozen dataclass that may be encoded, and so decoded."""
    made = dataclasses.dataclass(frozen=True)(cls)
    _RECORDS[_kind(made)] = made
    return made


class Message:
    """A record that another party sends: its fields' types are checked when it is decoded."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


def _kind(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def encode(tree: Tree) -> bytes:
    """The bytes of a tree.

    Raises:
        TypeError: It holds something that is neither a record nor a plain value.

    >>> decode(encode({"a": (1, None), "b": torch.ones(2)}))
    {'a': (1, None), 'b': tensor([1., 1.])}
    """
    tensors: list[Tensor] = []
    text = _skeleton(tree, tensors)
    block = safetensors.torch.save({str(i): t for i, t in enumerate(tensors)}) if tensors else b""
    return b"".join((_LENGTH.pack(len(text)), text, block))


def size(tree: Tree) -> int:
    """``len(encode(tree))`` without copying the tensors."""
    tensors: list[Tensor] = []
    text = _skeleton(tree, tensors)
    return _LENGTH.size + len(text) + _block_size(tuple((t.dtype, tuple(t.shape)) for t in tensors))


@lru_cache(maxsize=4096)
def _block_size(signature: tuple[tuple[torch.dtype, tuple[int, ...]], ...]) -> int:
    if not signature:
        return 0
    empty = {str(i): torch.empty(shape, dtype=dtype) for i, (dtype, shape) in enumerate(signature)}
    return len(safetensors.torch.save(empty))


def decode(data: bytes, *, limit: int = DEFAULT_LIMIT) -> Tree:
    """The tree that ``data`` encodes.

    Raises:
        WireError: The bytes are damaged or larger than ``limit``, a record is unknown, or a message's field has
            another type than was declared.
    """
    if len(data) > limit:
        raise WireError(f"a message of {len(data)} bytes is over the limit of {limit}")
    try:
        (length,) = _LENGTH.unpack_from(data)
        skeleton = json.loads(data[_LENGTH.size : _LENGTH.size + length])
        block = data[_LENGTH.size + length :]
        tensors = safetensors.torch.load(block) if block else {}
        return _rebuild(skeleton, tensors)
    except WireError:
        raise
    except Exception as error:
        raise WireError(f"not a message of fedstrata: {type(error).__name__}: {error}") from error


def _skeleton(tree: Tree, tensors: list[Tensor]) -> bytes:
    return json.dumps(_flatten(tree, tensors), separators=(",", ":")).encode()


def _flatten(node: Tree, tensors: list[Tensor]) -> Any:
    if node is None or isinstance(node, (bool, int, float, str)):
        return node.item() if isinstance(node, np.generic) else node
    if isinstance(node, Tensor):
        tensors.append(node.detach().contiguous())
        return {"$t": len(tensors) - 1}
    if isinstance(node, np.ndarray):
        tensors.append(torch.from_numpy(np.ascontiguousarray(node)))
        return {"$a": len(tensors) - 1}
    if isinstance(node, bytes):
        tensors.append(torch.frombuffer(bytearray(node), dtype=torch.uint8) if node else torch.empty(0).byte())
        return {"$b": len(tensors) - 1}
    if _kind(type(node)) in _RECORDS:
        fields = dataclasses.fields(node)
        return {
            "$r": _kind(type(node)),
            "f": {f.name: _flatten(getattr(node, f.name), tensors) for f in fields},
        }
    if isinstance(node, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in node):
            return {key: _flatten(item, tensors) for key, item in node.items()}
        return {"$m": [[_flatten(key, tensors), _flatten(item, tensors)] for key, item in node.items()]}
    if isinstance(node, list):
        return [_flatten(item, tensors) for item in node]
    if isinstance(node, tuple):
        return {"$u": [_flatten(item, tensors) for item in node]}
    if isinstance(node, np.generic):
        return node.item()
    raise TypeError(f"{type(node).__module__}.{type(node).__qualname__} is neither a record nor a plain value")


def _rebuild(node: Any, tensors: Mapping[str, Tensor]) -> Tree:
    if isinstance(node, list):
        return [_rebuild(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    if "$t" in node:
        return tensors[str(node["$t"])]
    if "$a" in node:
        return tensors[str(node["$a"])].numpy()
    if "$b" in node:
        return tensors[str(node["$b"])].numpy().tobytes()
    if "$u" in node:
        return tuple(_rebuild(item, tensors) for item in node["$u"])
    if "$m" in node:
        return {_rebuild(key, tensors): _rebuild(item, tensors) for key, item in node["$m"]}
    if "$r" in node:
        return _make(str(node["$r"]), {key: _rebuild(item, tensors) for key, item in node["f"].items()})
    return {key: _rebuild(item, tensors) for key, item in node.items()}


def _make(kind: str, fields: dict[str, Any]) -> Any:
    cls = _RECORDS.get(kind)
    if cls is None:
        raise WireError(f"unknown kind of record {kind!r}")
    if not issubclass(cls, Message):
        return cls(**fields)
    try:
        return _checker(cls).validate_python(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise WireError(f"{cls.__name__}.{where}: {first['msg'].lower()}") from None


def _checker(cls: type) -> TypeAdapter[Any]:
    if cls not in _CHECKERS:
        config = ConfigDict(arbitrary_types_allowed=True, strict=True, extra="forbid")
        cls.__pydantic_config__ = config  # type: ignore[attr-defined]  # where pydantic looks for a dataclass's
        _CHECKERS[cls] = TypeAdapter(cls)
    return _CHECKERS[cls]


def leaves_of(tree: Tree) -> Iterator[Any]:
    """Every leaf of a tree, in order: tensors, arrays and plain values."""
    if isinstance(tree, (Tensor, str, int, float)) or tree is None:
        yield tree
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from leaves_of(item)
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from leaves_of(item)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from leaves_of(getattr(tree, field.name))
    else:
        yield tree


R = TypeVar("R")


def add(first: R, second: R) -> R:
    """The sum of two trees of the same shape, leaf by leaf; a field declared ``same`` is the first's.

    >>> add({"n": 1, "g": torch.ones(2)}, {"n": 2, "g": torch.ones(2)})
    {'n': 3, 'g': tensor([2., 2.])}
    """
    summed: R = _zip_with(lambda a, b: a + b, first, second)
    return summed


def _zip_with(combine: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    if dataclasses.is_dataclass(a) and not isinstance(a, type):
        if type(a) is not type(b):
            raise TypeError(f"{type(a).__name__} and {type(b).__name__} do not add up")
        summed = {
            f.name: getattr(a, f.name)
            if f.metadata.get("same")
            else _zip_with(combine, getattr(a, f.name), getattr(b, f.name))
            for f in dataclasses.fields(a)
        }
        return type(a)(**summed)
    if isinstance(a, Mapping):
        if a.keys() != b.keys():
            raise TypeError(f"the keys {sorted(a)} and {sorted(b)} do not add up")
        return {key: _zip_with(combine, a[key], b[key]) for key in a}
    return combine(a, b)


def same() -> Any:
    """A field that every party's reply holds alike, so that a sum of replies keeps the first."""
    return dataclasses.field(metadata={"same": True})
