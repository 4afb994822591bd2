"""Load data sets by name: scikit-learn's digits, files, and data sets from the Hugging Face hub."""

from __future__ import annotations

import importlib.metadata
import math
import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from numpy.lib.npyio import NpzFile
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor

from fedstrata.base.config import Setting, from_word
from fedstrata.base.errors import DataError, SpecError, nearest
from fedstrata.base.inputs import Shape, each
from fedstrata.base.rng import rng
from fedstrata.data.arrays import check_seen, decoded
from fedstrata.data.augmentation import AnyAugmentation
from fedstrata.data.catalog import KNOWN, folders, names_there
from fedstrata.data.dataset import Dataset, from_arrays, normalisation
from fedstrata.data.fitting import Unfitted, fit
from fedstrata.data.hub import load_hub
from fedstrata.data.normalisation import Normalize
from fedstrata.data.schema import Schema, another_unit, held_out
from fedstrata.data.subsets import stratified
from fedstrata.data.tables import SUFFIXES, dataset_of, read_table, task_of_table
from fedstrata.data.tasks.base import Task

Arrays = dict[str, Any]
"""A mapping from names to arrays.

If a model has several inputs, ``x_train`` and ``x_test`` are mappings from input names to arrays.
"""

NEEDED = ("x_train", "y_train", "x_test", "y_test")
"""The arrays that a ``.npz`` file must contain."""

MOST = 1 << 38
"""The maximum total size in bytes of the arrays in a ``.npz`` file."""

_reading = threading.Lock()
"""A lock for reading ``.npz`` files.

NumPy parses the headers of these files with ``ast``. In Python 3.11 and 3.12, ``ast`` may fail if two threads use it at
once (CPython issue 106905). NumPy then reports an intact file as damaged.
"""


with warnings.catch_warnings():
    # Pydantic warns, because the field `name` replaces an attribute of `Setting`, and `schema` replaces a method of
    # pydantic.
    warnings.filterwarnings("ignore", message='Field name "(name|schema)" in "Data" shadows', category=UserWarning)

    class Data(Setting):
        """The data set, and how it is read and normalised.

        Args:
            name: Name or path of the data set. ``fedstrata datasets`` lists the names. A path refers to a ``.npz``,
                ``.csv`` or ``.parquet`` file, or to a folder of ``.npy`` files if the path ends with ``/``.
                ``"hub:owner/name"`` or ``"hub:owner/name:configuration"`` is a data set of the Hugging Face hub.
            normalize: Scaling of each channel or feature, computed from training samples. ``standard``: scaling to mean
                0 and standard deviation 1. ``unit``: scaling to [0, 1]. ``none``: only conversion to float32. ``keep``:
                integers stay integers, as token models require.
            limit: Number of training samples to use, drawn at random and stratified by class. Default: all samples.
            client: Column of a Hugging Face data set that gives each sample's client, for the partition ``natural``.
            schema: Description of the columns of a ``.csv`` or ``.parquet`` file, or only the name of the label column.
            shape: Shape of one sample in an array file: (channels, height, width) or (features,). If set, normalisation
                statistics come only from samples that clients train on.
            classes: Number C of classes in an array file. The labels must be integers from 0 to C − 1.
            range: Minimum and maximum allowed value in an array file.
            shift: Numbers that normalisation subtracts, one per channel or feature. Default: depends on ``normalize``.
            scale: Factors by which normalisation multiplies inputs after subtracting ``shift``, one per channel or
                feature. Set both ``shift`` and ``scale``, or neither.
            augment: Random change of each training batch: ``crop-flip`` for images, or your own ``"module:function"``.
            custom: Description of arrays passed from Python. Set by fedstrata, not by users.
        """

        name: str = "digits"  # type: ignore[misc]  # replaces an attribute of ``Setting``
        normalize: Normalize = "standard"
        limit: PositiveInt | None = None
        client: str | None = None
        schema: Annotated[Schema | None, from_word(Schema, "label")] = None  # type: ignore[assignment]  # see above
        shape: Annotated[tuple[PositiveInt, ...], Field(min_length=1, max_length=3)] | None = None
        classes: PositiveInt | None = None
        range: tuple[float, float] | None = None
        shift: tuple[float, ...] | None = None
        scale: tuple[float, ...] | None = None
        augment: AnyAugmentation | None = None
        custom: str | None = None

        @model_validator(mode="after")
        def _agree(self) -> Data:
            for key, other in (("shape", "classes"), ("classes", "shape"), ("shift", "scale"), ("scale", "shift")):
                if getattr(self, key) is not None and getattr(self, other) is None:
                    raise SpecError(other, f"must be set together with {key!r}. Set both keys or neither.")
            for key in ("shape", "range"):
                if getattr(self, key) is not None and (self.schema is not None or self.shape is None):
                    problem = (
                        "works only for arrays that data.shape and data.classes describe. For a table, set the range "
                        "of each column in data.schema."
                    )
                    raise SpecError(key, problem, list(getattr(self, key)))
            if self.shift is not None and self.scale is not None and len(self.shift) != len(self.scale):
                raise SpecError(
                    "scale",
                    f"has {len(self.scale)} numbers, but 'shift' has {len(self.shift)}. Make both equally long.",
                    list(self.scale),
                )
            return self

        def __init__(self, name: str = "digits", **settings: Any) -> None:
            super().__init__(**{"name": name, **settings})

        def load(self, seed: int = 0, task: Task | None = None) -> Dataset:
            """Read the data set into memory.

            Args:
                seed: The seed for the random choice of training samples (if ``limit`` is set) and of test samples (if
                    the data set has no separate test set).
                task: The task. If None, the targets determine the task; see ``task_of``.

            Raises:
                SpecError: No data set has the given name.
                DataError: The data set is missing or cannot be used.
                ExtraMissingError: The data set needs an extra that is not installed.
            """
            try:
                data = (
                    self._table(seed, task) if self.name.endswith(SUFFIXES) else self.declared(self._arrays(seed, task))
                )
            except DataError as error:
                problem = str(error).removeprefix(self.name).lstrip(", ")  # do not repeat the name of the file
                raise DataError(f"data.name = {self.name!r}: {problem}") from None
            if self.limit is not None and self.limit < data.train_size:
                draws = rng(seed, "data limit")
                if data.task.has_classes:
                    chosen = torch.from_numpy(stratified(data.y_train.numpy(), self.limit, draws))
                else:
                    chosen = torch.from_numpy(np.sort(draws.permutation(data.train_size)[: self.limit]))
                keys = ("x_train", "y_train", "domain_train", "client_train")
                fields = data.tensors()
                limited: dict[str, Any] = {
                    key: each(fields[key], lambda part: part[chosen]) for key in keys if key in fields
                }
                if data.task.has_classes:
                    check_seen(limited["y_train"], data.y_test, data.class_names)
                if (unfitted := data.unfitted) is not None:
                    limited["unfitted"] = replace(unfitted, train=unfitted.train[chosen])
                data = replace(data, **limited, mapped={})  # the drawn samples are in memory, not in mapped files
            if data.unfitted is not None:
                return fit(data, data.unfitted.statistics([np.arange(data.train_size)]), again=True)
            if self.normalize == "keep":
                return data
            shift, scale = self.given(data.shape) or normalisation(data.x_train, self.normalize)
            return replace(data, shift=shift, scale=scale)

        def given(self, shape: Shape) -> tuple[Tensor, Tensor] | None:
            """Return the shift and scale that the spec sets; None if the spec does not set them.

            Raises:
                SpecError: The number of values is not the number of channels or features.
            """
            if self.shift is None or self.scale is None:
                return None
            if isinstance(shape, Mapping):
                problem = "works only if a sample is one tensor, but these samples have several inputs. Remove the key."
                raise SpecError("data.shift", problem, list(self.shift))
            if len(self.shift) != shape[0]:
                problem = (
                    f"has {len(self.shift)} numbers, but the data have {shape[0]} channels or features. Give one "
                    "number for each."
                )
                raise SpecError("data.shift", problem, list(self.shift))
            return torch.tensor(self.shift), torch.tensor(self.scale)

        def declared(self, data: Dataset) -> Dataset:
            """Check arrays against the shape, classes and range in the spec, and keep the raw samples for ``fit``.

            Without ``shape``, return the data set unchanged.

            Raises:
                DataError: The arrays do not match the spec.
            """
            if self.shape is None or self.classes is None:
                return data
            if not isinstance(data.x_train, Tensor) or not isinstance(data.x_test, Tensor):
                problem = (
                    "works only if a sample is one tensor, but these samples have several inputs. "
                    "Remove data.shape and data.classes."
                )
                raise SpecError("data.shape", problem, list(self.shape))
            for part in ("train", "test"):
                x, y = getattr(data, f"x_{part}"), getattr(data, f"y_{part}")
                if not len(y):
                    continue
                if data.shape != self.shape:
                    accepted = f"data.shape is {list(self.shape)}. Correct the data or data.shape."
                    error = DataError(f"a sample has the shape {list(data.shape)}, but {accepted}")
                    raise error.publicly(f"samples have the wrong shape: {accepted}")
                if not 0 <= int(y.min()) <= int(y.max()) < self.classes:
                    wrong = int(y.max()) if int(y.min()) >= 0 else int(y.min())
                    accepted = f"Use 0…{self.classes - 1}, because data.classes = {self.classes}."
                    error = DataError(f"y_{part}: {wrong} is not a class. {accepted}")
                    raise error.publicly(f"y_{part}: some labels are out of range. {accepted}")
                span = self.range or (-math.inf, math.inf)
                for end in (float(x.min()), float(x.max())):
                    if not span[0] <= end <= span[1]:
                        accepted = f"Use {span[0]:g} to {span[1]:g} (data.range)."
                        error = DataError(f"x_{part}: {end:g} is out of range. {accepted}{another_unit(end, span)}")
                        raise error.publicly(f"x_{part}: some values are out of range. {accepted}")
            raw = Unfitted(self.normalize, data.x_train, data.x_test, given=self.given(self.shape))
            return replace(data, unfitted=raw)

        def _table(self, seed: int, task: Task | None) -> Dataset:
            if self.client is not None:
                problem = "has an effect only for a data set from Hugging Face. For a table, set data.schema.client."
                raise SpecError("data.client", problem, self.client)
            if self.schema is None:
                problem = "is required for a table, but not set. Add [data.schema] with at least label = 'COLUMN'."
                raise SpecError("data.schema", problem)
            table = read_table(Path(self.name), self.schema)
            schema = self.schema.completed(table)
            task = task or task_of_table(table, schema)
            held, given = held_out(table, schema, seed, task=task), self.given((len(schema.names()),))
            return dataset_of(table, schema, held, name=self.name, normalize=self.normalize, given=given, task=task)

        def _arrays(self, seed: int, task: Task | None) -> Dataset:
            """Load arrays without normalising them."""
            arrays = self._read(seed)
            clients = arrays.get("client_train", arrays.get("client"))
            numbered = None if self.classes is None else [str(label) for label in range(self.classes)]
            return from_arrays(
                *(arrays[key] for key in NEEDED),
                name=self.name,
                domain_train=arrays.get("domain_train"),
                domain_test=arrays.get("domain_test"),
                class_names=_names(arrays, "classes") or numbered,
                domain_names=_names(arrays, "domains"),
                clients=clients,
                clients_test=arrays.get("client_test"),
                normalize="keep" if self.normalize == "keep" else "none",
                task=task,
            )

        def _read(self, seed: int) -> Arrays:
            hub = self.name.startswith("hub:")
            if self.client is not None and not hub:
                problem = (
                    "has an effect only for a data set from Hugging Face. For a .npz file, store client_train and "
                )
                problem += "client_test in the file."
                raise SpecError("data.client", problem, self.client)
            if self.schema is not None:
                problem = f"has an effect only for a .csv or .parquet file, but data.name is {self.name!r}. "
                raise SpecError("data.schema", f"{problem}Remove the key, or change data.name.")
            return load_hub(self.name.removeprefix("hub:"), seed, self.client) if hub else _read(self.name)


OPTIONAL = ("domain_train", "domain_test", "classes", "domains", "client", "client_train", "client_test")
"""The arrays that a file or folder may contain."""


def read_folder(folder: Path) -> Arrays:
    """Open the arrays of a data set in a folder of ``.npy`` files. Inputs are memory-mapped.

    Args:
        folder: The path of the folder. The files are named like the arrays of a ``.npz`` file; see ``read_npz``.

    Raises:
        DataError: The folder lacks a file, or a file is damaged.
    """
    if not folder.is_dir():
        raise DataError(f"the folder {folder.absolute()} does not exist. Check the path.")
    arrays: Arrays = {}
    for file in sorted(folder.glob("*.npy")):
        if file.stem.partition(".")[0] in (*NEEDED, *OPTIONAL):
            try:
                arrays[file.stem] = np.load(file, mmap_mode="r" if file.stem.startswith("x_") else None)
            except (OSError, ValueError, EOFError) as error:
                raise DataError(f"{file} is not a .npy file, or is damaged: {error}. Check the file.") from None
    arrays = _joined(arrays)
    if missing := [f"{key}.npy" for key in NEEDED if key not in arrays]:
        raise DataError(f"{folder} lacks {', '.join(missing)}. Save each array with np.save(file, array).")
    return arrays


def _joined(arrays: Arrays) -> Arrays:
    """Collect all arrays called ``x_train.NAME`` in one mapping ``x_train``, and likewise for ``x_test``."""
    joined: Arrays = {}
    for key, array in arrays.items():
        whole, _, name = key.partition(".")
        if not name:
            joined[key] = array
        elif whole not in arrays:
            joined.setdefault(whole, {})[name] = array
    return joined


def read_npz(path: Path) -> Arrays:
    """Read the arrays of a data set from an ``.npz`` file.

    Args:
        path: The path of the file. The file must contain ``x_train``, ``y_train``, ``x_test`` and ``y_test``. If a
            model has several inputs, the arrays have names such as ``x_train.ids`` and ``x_train.mask``. The file may
            also contain ``domain_train``, ``domain_test``, ``domains`` and ``classes`` (the name of each label 0…C−1).
            The arrays ``client_train`` and ``client_test`` contain the client of each sample. The file may use the name
            ``client`` instead of ``client_train``.

    Raises:
        DataError: The file is missing or damaged, contains Python objects or lacks an array.
    """
    return read_arrays(path, NEEDED, OPTIONAL)


def read_arrays(path: Path, needed: Sequence[str], optional: Sequence[str] = ()) -> Arrays:
    """Read arrays with given names from an ``.npz`` file.

    Args:
        path: The path of the file.
        needed: The names of arrays that the file must contain. Instead of ``x_train``, the file may contain an array
            ``x_train.NAME`` for each of several inputs. The result then contains these arrays in a mapping ``x_train``.
        optional: The names of further arrays, which are read if the file contains them.

    Raises:
        DataError: The file is missing, damaged or too large, contains Python objects or lacks an array.
    """
    try:
        path = path.expanduser()
        if path.exists() and not path.is_file():
            raise DataError(f"{path} is not a file. Give a .npz file.")  # reading from a pipe could block for ever
        with _reading, path.open("rb") as file:  # NumPy would not close a damaged file
            if not file.read(6).startswith((b"PK", b"\x93NUMPY")):  # NumPy would treat other files as pickles
                raise ValueError("its first bytes are wrong")
            file.seek(0)
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, NpzFile) or archive.zip is None:
                raise DataError(f"{path} is a single array. Save all arrays with np.savez(file, {needed[0]}=…, …).")
            several = [name for name in archive if name.partition(".")[0] in needed and name.startswith("x_")]
            there = {*archive, *(name.partition(".")[0] for name in several)}
            if missing := [key for key in needed if key not in there]:
                error = DataError(
                    f"{path} lacks the arrays {', '.join(missing)}, and has only {', '.join(archive)}. Add the arrays."
                )
                raise error.publicly(f"these arrays are missing: {', '.join(missing)}. Add the arrays.")
            if (size := sum(int(info.file_size) for info in archive.zip.infolist())) > MOST:
                raise DataError(f"{path} contains {size / 2**30:,.1f} GiB of arrays. Use at most {MOST >> 30} GiB.")
            if damaged := archive.zip.testzip():  # NumPy skips the checksum if a header declares too few bytes
                raise ValueError(f"the checksum of {damaged} is wrong")
            wanted = dict.fromkeys([*needed, *optional, *several])
            arrays: Arrays = {key: archive[key] for key in wanted if key in archive}
            if other := [key for key, array in arrays.items() if not isinstance(array, np.ndarray)]:
                raise ValueError(f"{other[0]} is not an array")  # NumPy returns other files in the archive as bytes
            return _joined(arrays)
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(f"there is no file {path.absolute()}. Check the path.") from None
    except Exception as error:  # zipfile, zlib and NumPy raise many kinds of errors for damaged files
        problem = str(error).rstrip(".") or type(error).__name__
        raise DataError(f"{path} is not a .npz file, or is damaged: {problem}. Check the file.") from None


def _read(name: str) -> Arrays:
    if name == "custom":
        raise DataError(
            "the data of this run were arrays from a Python program. Pass the same arrays again: "
            "fedstrata.run(spec, data=…, resume=True)."
        )
    if name.endswith(".npz"):
        return read_npz(Path(name))
    if name.endswith(("/", "\\")):
        return read_folder(Path(name).expanduser())
    if name == "digits":
        return _digits()
    for folder in folders():
        path = folder / f"{name}.npz"
        with suppress(OSError):  # raised if the name is too long
            if path.name == f"{name}.npz" and path.is_file():
                return read_npz(path)
    looked = " and ".join(str(folder) for folder in folders())
    if name in KNOWN:
        problem = f"the file {name}.npz was not found in {looked}. Put the file there, with the arrays"
        raise DataError(
            f"{problem} {', '.join(NEEDED)}, or use a data set from Hugging Face: data.name = 'hub:owner/name'."
        )
    available = ", ".join(["digits", *names_there()])
    accepted = f"Use one of: {available} (found in {looked}), a path that ends in .npz, .csv or .parquet, or "
    accepted += "'hub:owner/name'."
    hint = nearest(name, [*KNOWN, *names_there()])
    raise SpecError("data.name", f"is not a known data set{hint} {accepted}", name)


def _names(arrays: Arrays, key: str) -> list[str] | None:
    if key not in arrays:
        return None
    names = decoded(np.asarray(arrays[key]), key)
    if names.ndim != 1 or names.dtype.kind not in "Uiub":
        raise DataError(f"{key} is of type {names.dtype} and shape {names.shape}. Give a list of names.")
    return [str(name) for name in names]


def _digits() -> Arrays:
    """Load scikit-learn's digits, with grey levels scaled from 0…16 to 0…255, and a fixed stratified test set (20 %).

    The file is read without importing scikit-learn, because the import takes longer than a round of training.
    """
    file = importlib.metadata.distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    table = np.loadtxt(str(file), delimiter=",")
    x, y = np.rint(table[:, :-1].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8), table[:, -1].astype(np.int64)
    test = stratified(y, 360, rng(0, "digits split"))
    train = np.setdiff1d(np.arange(len(y)), test)
    return {"x_train": x[train], "y_train": y[train], "x_test": x[test], "y_test": y[test]}
