"""A family of data files that are damaged, strange or empty: they must be read correctly, or be refused."""

from __future__ import annotations

import io
import random
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tests.fuzz.cases import RAN, REFUSED, Family, SilentDifferenceError, damaged
from tests.fuzz.corpus import DATA_ARRAYS, DATA_FILES, arrays, npy, saved, zipped

from fedstrata.base.errors import FedstrataError
from fedstrata.data.dataset import Dataset
from fedstrata.data.sources import Data

DTYPES = ("<f4", "<f8", ">f4", "<f2", "i1", "<i2", "<i4", "<i8", ">i8", "u1", "<u2", "<u4", "<u8", "?", "<c8", "g")
LABEL_DTYPES = ("i1", "<i4", "<i8", ">i4", "u1", "<u8", "<f4", "<f8", "?", "<U3", "S3", "g")
SHAPES: tuple[tuple[int, ...], ...] = (
    (12, 3),
    (12, 4, 4),
    (12, 3, 4, 4),
    (12, 4, 4, 1),
    (12,),
    (12, 1),
    (0, 3),
    (12, 0),
    (),
)
EXTREME_NUMBERS = (0, 1, 2, -1, 127, 255, 2**31, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63))
EXTREME_FLOATS = (0.0, -0.0, 1.0, 0.5, 1e300, 2e300, 2.0**63, -(2.0**63), 2.0**53, np.nan, np.inf, 5e-324, 70000.0)
WORDS = ("a", "b", "ü", "", "a\0b", "1", "1.0", "nan", "x" * 30)


def try_one(number: int, chance: random.Random, place: Path) -> str:
    """Read a file of the corpus or a random one, and compare the data with the arrays that were written."""
    files, sets = list(DATA_FILES.values()), list(DATA_ARRAYS.values())
    wrote: dict[str, Any] | None = None
    if number < len(files):
        content = files[number]
    else:
        wrote = sets[number - len(files)] if number < len(files) + len(sets) else made_up(chance)
        content = packed(wrote, chance)
        if number >= len(files) + len(sets) and chance.random() < 0.4:
            content = damaged(content, chance) if chance.random() < 0.7 else with_damaged_member(wrote, chance)
    path = place / "data.npz"
    path.write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        normalize = chance.choice(["standard", "unit", "none"])
        try:
            data = Data(str(path), normalize=normalize).load(0)
            data.inputs(slice(0, 4)), data.inputs(slice(0, 4), "test")
        except FedstrataError:
            return REFUSED
    if wrote is not None:
        compare(data, wrote)
    return RAN


def packed(wrote: dict[str, Any], chance: random.Random) -> bytes:
    """Return arrays as the bytes of a .npz file."""
    file = io.BytesIO()
    (np.savez if chance.random() < 0.7 else np.savez_compressed)(file, **wrote)
    return file.getvalue()


def with_damaged_member(wrote: dict[str, Any], chance: random.Random) -> bytes:
    """Return a .npz file in which one array is damaged, although the checksums of the zip file are correct."""
    members = {key: saved(np.asarray(array)) for key, array in wrote.items()}
    which = chance.choice(list(members))
    if chance.random() < 0.5:
        head = members[which][:128]
        members[which] = damaged(head, chance) + members[which][128:]
        wrote[which] = None  # the damaged header may describe another valid array, so do not compare it
    else:
        shape = tuple(chance.choice([0, 1, 3, 12, -1, 2**31, 2**40]) for _ in range(chance.randint(0, 4)))
        members[which] = npy(
            chance.choice((*DTYPES, "|O", "<M8[s]", "|V8")), shape, chance.randbytes(chance.randrange(400))
        )
        wrote[which] = None
    return zipped(members, chance.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]))


def made_up(chance: random.Random) -> dict[str, Any]:
    """Return random arrays of any type and shape."""
    wrote: dict[str, Any] = dict(arrays())
    for _ in range(chance.choice([1, 1, 2, 3])):
        key = chance.choice(["x", "x", "y", "y", "domain", "classes", "missing", "domains"])
        if key == "x":
            shape = chance.choice(SHAPES)
            dtype = chance.choice(DTYPES)
            wrote["x_train"] = filled(shape, dtype, chance)
            if chance.random() < 0.8:
                wrote["x_test"] = filled(
                    (6, *shape[1:]), dtype if chance.random() < 0.8 else chance.choice(DTYPES), chance
                )
        elif key == "y":
            dtype = chance.choice(LABEL_DTYPES)
            wrote["y_train"] = filled(chance.choice([(12,), (12,), (12,), (12, 1), (11,), (12, 2)]), dtype, chance)
            if chance.random() < 0.9:
                other = dtype if chance.random() < 0.8 else chance.choice(LABEL_DTYPES)
                wrote["y_test"] = filled((6,), other, chance)
        elif key == "domain":
            wrote["domain_train"], wrote["domain_test"] = (
                filled((n,), chance.choice(LABEL_DTYPES), chance) for n in (12, 6)
            )
        elif key == "missing":
            wrote.pop(chance.choice(list(wrote)))
        else:
            wrote[key] = filled(
                chance.choice([(3,), (3,), (4,), (), (1, 3)]), chance.choice(["<U3", "S3", "<i8"]), chance
            )
    return wrote


def filled(shape: Sequence[int], dtype: str, chance: random.Random) -> np.ndarray[Any, Any]:
    """Return an array of a type, either with numbers of all sizes or with small numbers that repeat."""
    kind = np.dtype(dtype).kind
    count = int(np.prod(shape, dtype=np.int64))
    wild = chance.random() < 0.4
    if kind in "US":
        words = [chance.choice(WORDS if wild else WORDS[:3]) for _ in range(count)]
        if kind == "S":
            return np.array([word.encode("utf-8") for word in words], dtype=dtype).reshape(shape)
        return np.array(words, dtype=dtype).reshape(shape)
    if kind in "fc":
        numbers: list[Any] = [chance.choice(EXTREME_FLOATS if wild else EXTREME_FLOATS[:3]) for _ in range(count)]
        if not wild and chance.random() < 0.5:
            numbers = [chance.gauss(0, 1) for _ in range(count)]
    elif kind == "b":
        numbers = [chance.random() < 0.5 for _ in range(count)]
    else:
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        pool = [n for n in EXTREME_NUMBERS if low <= n <= high]
        numbers = [chance.choice(pool if wild else [0, 1, 2]) for _ in range(count)]
    with np.errstate(all="ignore"):
        return np.array(numbers, dtype=dtype).reshape(shape)


def compare(data: Dataset, wrote: dict[str, Any]) -> None:
    """Compare the values of a data set with the arrays that were written, as Python numbers.

    Raises:
        SilentDifferenceError: The values differ.
    """
    for split, found in (("train", data.x_train), ("test", data.x_test)):
        was = wrote.get(f"x_{split}")
        if was is None:
            continue
        if was.ndim == 4 and tuple(found.shape) != was.shape:
            was = was.transpose(0, 2, 3, 1)
        flat, there = was.reshape(-1).tolist(), found.reshape(-1).tolist()
        if len(flat) != len(there):
            raise SilentDifferenceError(f"x_{split}: {len(flat)} values were written and {len(there)} read")
        with np.errstate(all="ignore"):
            same = [a == b or float(np.float32(a)) == b for a, b in zip(flat, there, strict=True)]
        if not all(same):
            bad = same.index(False)
            raise SilentDifferenceError(f"x_{split}: {flat[bad]!r} was written and {there[bad]!r} read ({was.dtype})")
    labels = [wrote.get("y_train"), wrote.get("y_test")]
    if any(part is None for part in labels):
        return
    if not data.task.has_classes:
        compare_numbers(data, labels)
    elif "classes" not in wrote:
        compare_classes(data, labels)


def compare_numbers(data: Dataset, wrote: Sequence[Any]) -> None:
    """Compare the targets of a task without classes with the targets that were written."""
    for split, was, found in zip(("train", "test"), wrote, (data.y_train, data.y_test), strict=True):
        if found.reshape(-1).tolist() != was.astype(np.float64).reshape(-1).tolist():
            raise SilentDifferenceError(f"y_{split}: {was.tolist()} was written and {found.tolist()} read")


def compare_classes(data: Dataset, labels: Sequence[Any]) -> None:
    """Compare the classes and their names with the labels that were written."""
    values = [_exact(value) for part in labels for value in part.reshape(-1).tolist()]
    codes = [*data.y_train.tolist(), *data.y_test.tolist()]
    pairs = set(zip(values, codes, strict=True))
    if not len(pairs) == len(set(values)) == len(set(codes)):
        raise SilentDifferenceError(f"labels: {len(set(values))} different ones became {len(set(codes))} classes")
    for value, code in pairs:
        if data.class_names[code] not in (
            str(value),
            *(("False", "True")[value : value + 1] if value in (0, 1) else ()),
        ):
            raise SilentDifferenceError(f"label {value!r} is called {data.class_names[code]!r}")


def _exact(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    if isinstance(value, (bool, float)) or type(value).__name__ == "longdouble":
        return int(value)
    return value


FAMILY = Family("data", try_one)
