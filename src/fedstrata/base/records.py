"""Encode nested structures (trees) of plain values and tensors as bytes.

Every message and every checkpoint is a tree of records (frozen dataclasses), mappings, lists, plain values, tensors and
arrays. The function ``encode`` writes a JSON text with the structure of the tree (its "skeleton"), and then one
safetensors block with all tensors and numbers. The encoding begins with the length of the JSON text. The JSON text does
not contain numbers, so the length of a message does not depend on the values of numbers. The function ``decode``
creates only records that were declared with ``@record``, and checks the types of a message's fields. Neither function
uses Python's ``pickle``.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, ClassVar, TypeVar, dataclass_transform, get_args, get_origin, get_type_hints

import numpy as np
import safetensors.torch
import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import Tensor
from typing_extensions import TypedDict

from fedstrata.base.errors import WireError

Tree = Any
"""A nested structure of records, mappings, lists, tuples, tensors, arrays and plain values (bytes, str, int …)."""

DEFAULT_LIMIT = 2 << 30
"""The maximum size of a message that ``decode`` accepts by default, in bytes."""

RECORDS: dict[str, type] = {}
"""A mapping from wire names to the Python classes of declared records; ``decode`` creates objects of only these
classes."""
_WIRE_NAMES: dict[type, str] = {}
_FIELDS: dict[type, tuple[str, ...]] = {}
_CHECKERS: dict[type, TypeAdapter[Any]] = {}
_TESTS: dict[type, list[tuple[str, Callable[[Any], bool]]]] = {}
_SIZES: dict[Hashable, int] = {}
_MOST_FORMS = 4096
_PLAIN = (int, float, bool, str, bytes, Tensor)
_LENGTH = struct.Struct("<Q")
_SAFETENSORS = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""A mapping from common dtypes to their names in safetensors, in the order in which safetensors sorts tensors."""
_RANK = {dtype: rank for rank, dtype in enumerate(_SAFETENSORS)}
T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def record(name: str) -> Callable[[type[T]], type[T]]:
    """Turn a class into a frozen dataclass that ``encode`` and ``decode`` support.

    Args:
        name: The wire name, which stands for the class in encoded bytes. Do not change the wire name when you move or
            rename the class. Begin your own names with a prefix, such as ``"my/State"``.

    Raises:
        ValueError: Another class already has this wire name.
    """

    def declare(cls: type[T]) -> type[T]:
        new = dataclasses.dataclass(frozen=True)(cls)
        old = RECORDS.get(name, new)
        # Accept an equal class, because a notebook cell that runs twice declares the same class twice.
        if old.__qualname__ != new.__qualname__ or fields_of(old) != fields_of(new):
            problem = f"{old.__module__}.{old.__qualname__} already has this wire name. Choose another name"
            raise ValueError(f"@record({name!r}) of {new.__module__}.{new.__qualname__}: {problem}.")
        register({name: new})
        return new

    return declare


def register(classes: Mapping[str, type]) -> None:
    """Let ``decode`` create objects of record classes that another process declared.

    Args:
        classes: A mapping from wire name to class.
    """
    for name, cls in classes.items():
        RECORDS[name], _WIRE_NAMES[cls], _FIELDS[cls] = cls, name, fields_of(cls)


def fields_of(cls: type) -> tuple[str, ...]:
    """Return the names of a dataclass's fields."""
    return tuple(field.name for field in dataclasses.fields(cls))


class Message:
    """Base class of records that another party sends. ``decode`` checks the types of a message's fields."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


def encode(tree: Tree) -> bytes:
    """Encode a tree as bytes.

    Raises:
        TypeError: The tree contains an object that is neither a record nor a plain value.

    >>> decode(encode({"a": (1, None), "b": torch.ones(2)}))
    {'a': (1, None), 'b': tensor([1., 1.])}
    """
    text, named = _separated(tree)
    return b"".join((_LENGTH.pack(len(text)), text, *_block(named)))


def size(tree: Tree) -> int:
    """Return ``len(encode(tree))``.

    Results are cached. Trees with the same structure and the same tensor shapes use the same cached result.
    """
    form = _form(tree)
    length = _SIZES.get(form)
    if length is None:
        text, named = _separated(tree)
        if len(_SIZES) >= _MOST_FORMS:
            _SIZES.clear()
        length = _SIZES[form] = _LENGTH.size + len(text) + sum(map(len, _block(named)))
    return length


def _form(tree: Tree) -> Hashable:
    """Return a cache key for ``size``: trees with equal keys have encodings of equal length.

    The key is a flat tuple of everything that determines the length: types of nodes, keys of mappings, strings, shapes
    and dtypes. The key does not contain values of numbers and tensors. In the tuple, each node comes before its
    children.
    """
    form: list[Any] = []
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, np.generic):
            node = node.item()
        if (fields := _FIELDS.get(type(node))) is not None:
            form.append(type(node))
            pending += map(partial(getattr, node), reversed(fields))
        elif isinstance(node, (Tensor, np.ndarray)):
            form += (node.dtype, node.shape)
        elif node is None or isinstance(node, str):
            form.append(node)
        elif isinstance(node, bool):
            form += (bool, node)
        elif isinstance(node, float):
            form.append(float)
        elif isinstance(node, int):
            form += (int,) if -(2**63) <= node < 2**63 else (int, node)
        elif isinstance(node, Mapping):
            form += (dict, len(node))
            for item in reversed([*node.items()]):
                pending += reversed(item)
        elif isinstance(node, (list, tuple)):
            form += (list if isinstance(node, list) else tuple, len(node))
            pending += reversed(node)
        elif isinstance(node, bytes):
            form += (bytes, len(node))
        else:
            raise _neither(node)
    return tuple(form)


def _block(named: Mapping[str, Tensor]) -> list[Any]:
    """Return the parts of a safetensors block: its header, and the data of each tensor.

    The header is a JSON text, padded to a multiple of 8 bytes and preceded by its length. ``safetensors.torch.save``
    writes the same bytes, but takes longer (``benchmarks/fast_paths.py``).
    """
    if not named:
        return []
    if any(tensor.dtype not in _SAFETENSORS for tensor in named.values()):
        return [safetensors.torch.save({name: tensor.clone() for name, tensor in named.items()})]
    header, parts, end = {}, [], 0
    for name in sorted(named, key=lambda name: (_RANK[named[name].dtype], name)):
        tensor = named[name].cpu().contiguous()
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _SAFETENSORS[tensor.dtype], "shape": tensor.shape, "data_offsets": (begin, end)}
        # Use ``as_strided`` instead of ``reshape(-1)``, which may keep a stride other than 1 for a tensor with one
        # element. ``view`` would then fail.
        parts.append(tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy())
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [_LENGTH.pack(len(text)) + text, *parts]


def decode(data: bytes, *, limit: int | None = DEFAULT_LIMIT) -> Tree:
    """Restore a tree from its encoding.

    Args:
        data: Bytes from ``encode``.
        limit: The maximum number of bytes; None for any number. Use None only for bytes that you encoded yourself.

    Raises:
        WireError: The bytes are damaged or exceed ``limit``, a record is unknown, or a field of a message does not have
            its declared type.
    """
    if limit is not None and len(data) > limit:
        raise WireError(f"the message has {len(data)} bytes, but the limit is {limit}.")
    try:
        (length,) = _LENGTH.unpack_from(data)
        if length > len(data) - _LENGTH.size:
            raise WireError(f"the last {length + _LENGTH.size - len(data)} bytes of the message are missing.")
        skeleton = json.loads(data[_LENGTH.size : _LENGTH.size + length])
        block = data[_LENGTH.size + length :]
        tensors = safetensors.torch.load(block) if block else {}
        ints, floats = (tensors[key].tolist() if key in tensors else [] for key in ("i", "f"))
        return _rebuild(skeleton, tensors, ints, floats)
    except WireError:
        raise
    except Exception as error:
        raise WireError(f"these bytes are not a fedstrata message: {type(error).__name__}: {error}") from error


@dataclasses.dataclass
class _Values:
    """The tensors and numbers of a tree, which are stored outside the tree's JSON skeleton.

    Numbers are not in the skeleton, so that the skeleton's length does not depend on the values of numbers.
    """

    tensors: list[Tensor] = dataclasses.field(default_factory=list)
    ints: list[int] = dataclasses.field(default_factory=list)
    floats: list[float] = dataclasses.field(default_factory=list)


def _separated(tree: Tree) -> tuple[bytes, dict[str, Tensor]]:
    """Return a tree's JSON skeleton, and the named tensors that contain its values."""
    values = _Values()
    text = json.dumps(_flatten(tree, values), separators=(",", ":")).encode()
    named = {str(index): tensor for index, tensor in enumerate(values.tensors)}
    if values.ints:
        named["i"] = torch.tensor(values.ints, dtype=torch.int64)
    if values.floats:
        named["f"] = torch.tensor(values.floats, dtype=torch.float64)
    return text, named


def _flatten(node: Tree, values: _Values) -> Any:
    """Return the skeleton of a node, and append the node's tensors and numbers to ``values``."""
    if isinstance(node, np.generic):
        node = node.item()
    if node is None or isinstance(node, (bool, str)) or (isinstance(node, int) and not -(2**63) <= node < 2**63):
        return node
    if isinstance(node, float):
        return _stored("$f", node, values.floats)
    if isinstance(node, int):
        return _stored("$i", node, values.ints)
    if isinstance(node, Tensor):
        return _stored("$t", node.detach(), values.tensors)
    if isinstance(node, np.ndarray):
        # Copy read-only arrays, because PyTorch warns about them.
        return _stored("$a", torch.from_numpy(np.require(node, requirements=("C", "W"))), values.tensors)
    if isinstance(node, bytes):
        return _stored("$b", torch.from_numpy(np.frombuffer(bytearray(node), dtype=np.uint8)), values.tensors)
    if (wire_name := _WIRE_NAMES.get(type(node))) is not None:
        fields = {name: _flatten(getattr(node, name), values) for name in _FIELDS[type(node)]}
        return {"$r": wire_name, "f": fields}
    if isinstance(node, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in node):
            return {key: _flatten(item, values) for key, item in node.items()}
        return {"$m": [[_flatten(key, values), _flatten(item, values)] for key, item in node.items()]}
    if isinstance(node, list):
        return [_flatten(item, values) for item in node]
    if isinstance(node, tuple):
        return {"$u": [_flatten(item, values) for item in node]}
    raise _neither(node)


def _stored(kind: str, value: T, values: list[T]) -> dict[str, int]:
    values.append(value)
    return {kind: len(values) - 1}


def _neither(node: object) -> TypeError:
    return TypeError(f"{type(node).__module__}.{type(node).__qualname__} is neither a record nor a plain value")


def _rebuild(node: Any, tensors: dict[str, Tensor], ints: list[int], floats: list[float]) -> Tree:
    def rebuild(inner: Any) -> Tree:
        return _rebuild(inner, tensors, ints, floats)

    if isinstance(node, list):
        return [rebuild(item) for item in node]
    if not isinstance(node, dict):
        return node
    if "$i" in node:
        return ints[node["$i"]]
    if "$f" in node:
        return floats[node["$f"]]
    # ``pop`` lets a message use each tensor only once. Otherwise, a short message could repeat a large tensor.
    if "$t" in node:
        return tensors.pop(str(node["$t"]))
    if "$a" in node:
        return tensors.pop(str(node["$a"])).numpy()
    if "$b" in node:
        return tensors.pop(str(node["$b"])).numpy().tobytes()
    if "$u" in node:
        return tuple(rebuild(item) for item in node["$u"])
    if "$m" in node:
        return {rebuild(key): rebuild(item) for key, item in node["$m"]}
    if "$r" in node:
        return _make(str(node["$r"]), {key: rebuild(item) for key, item in node["f"].items()})
    return {key: rebuild(item) for key, item in node.items()}


def _make(name: str, fields: dict[str, Any]) -> Any:
    cls = RECORDS.get(name)
    if cls is None:
        raise WireError(f"the record type {name!r} is unknown. Use the same version of fedstrata on both sides.")
    if not issubclass(cls, Message):
        return cls(**fields)
    try:
        return cls(**_checker(cls).validate_python(fields))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise WireError(f"{cls.__name__}.{where}: {first['msg'].lower()}") from None


def require_types(message: Message) -> None:
    """Check the field types of a message that was not encoded. The function ``decode`` checks encoded messages.

    Raises:
        WireError: A field of the message or of a nested message does not have its declared type.
    """
    if _obvious(message):
        return
    fields = {name: getattr(message, name) for name in _FIELDS[type(message)]}
    for value in fields.values():
        if isinstance(value, Message):
            require_types(value)
    plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in fields.items()}
    _make(_WIRE_NAMES[type(message)], plain)


def _obvious(message: Message) -> bool:
    """Return True if a quick test shows that all fields have the declared types.

    If the result is False, pydantic must check the message. The quick test saves time, because pydantic's check is slow
    compared with the work of a client with few samples.
    """
    cls = type(message)
    if cls not in _TESTS:
        hints = get_type_hints(cls)
        _TESTS[cls] = [(name, _test_of(hints[name])) for name in _FIELDS[cls]]
    for name, plainly_right in _TESTS[cls]:  # noqa: SIM110 - twice as fast as all()
        if not plainly_right(getattr(message, name)):
            return False
    return True


def _test_of(hint: Any) -> Callable[[Any], bool]:
    """Return a function that quickly tests whether a value has the type ``hint``.

    True means that the value has the type. False means that pydantic must check the value.
    """
    if get_origin(hint) is dict and get_args(hint)[0] is str:
        item = get_args(hint)[1]
        if item in _PLAIN:
            return lambda value: (
                type(value) is dict and {*map(type, value)} <= {str} and {*map(type, value.values())} <= {item}
            )
        inner = _test_of(item)
        return lambda value: type(value) is dict and {*map(type, value)} <= {str} and all(map(inner, value.values()))
    if hint in _PLAIN:
        return lambda value: type(value) is hint
    if isinstance(hint, type) and issubclass(hint, Message):
        return lambda value: type(value) is hint and _obvious(value)
    return lambda value: False


def _checker(cls: type) -> TypeAdapter[Any]:
    if cls not in _CHECKERS:
        # Check the fields as a TypedDict. In strict mode, pydantic accepts a dict for a TypedDict, but not for a
        # dataclass.
        hints = get_type_hints(cls)
        table = TypedDict(cls.__name__, {name: hints[name] for name in _FIELDS[cls]})  # type: ignore[misc]
        table.__pydantic_config__ = ConfigDict(  # type: ignore[attr-defined]
            arbitrary_types_allowed=True, strict=True, extra="forbid"
        )
        _CHECKERS[cls] = TypeAdapter(table)
    return _CHECKERS[cls]


def leaves_of(tree: Tree) -> list[Any]:
    """Return the leaves of a tree (tensors, arrays and plain values) in order."""
    leaves: list[Any] = []
    pending = [tree]
    while pending:
        node = pending.pop()
        if (fields := _FIELDS.get(type(node))) is not None:
            pending += map(partial(getattr, node), reversed(fields))
        elif isinstance(node, dict):
            pending += reversed(node.values())
        elif isinstance(node, (list, tuple)):
            pending += reversed(node)
        else:
            leaves.append(node)
    return leaves


def add(first: Any, second: Any) -> Any:
    """Add two trees of the same structure, leaf by leaf. Fields declared with ``same`` keep the value of ``first``.

    >>> add({"n": 1, "g": torch.ones(2)}, {"n": 2, "g": torch.ones(2)})
    {'n': 3, 'g': tensor([2., 2.])}
    """
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        if type(first) is not type(second):
            raise TypeError(f"{type(first).__name__} and {type(second).__name__} cannot be added")
        summed = {
            f.name: getattr(first, f.name)
            if f.metadata.get("same")
            else add(getattr(first, f.name), getattr(second, f.name))
            for f in dataclasses.fields(first)
        }
        return type(first)(**summed)
    if isinstance(first, Mapping):
        if first.keys() != second.keys():
            raise TypeError(f"mappings with different keys, {sorted(first)} and {sorted(second)}, cannot be added")
        return {key: add(first[key], second[key]) for key in first}
    if isinstance(first, (list, tuple)):
        if type(first) is not type(second) or len(first) != len(second):
            raise TypeError(f"a list of length {len(first)} and a list of length {len(second)} cannot be added")
        return type(first)(map(add, first, second))
    if first is None or isinstance(first, (str, bytes)):
        if first != second:
            problem = "cannot be added. Use same() to declare a field that is equal in all replies"
            raise TypeError(f"{first!r} and {second!r} {problem}")
        return first
    return first + second


def same() -> Any:
    """Declare a record field whose value is equal in all replies. ``add`` keeps this value instead of adding values."""
    return dataclasses.field(metadata={"same": True})
