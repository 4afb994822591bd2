"""Data sets by name: bundled with scikit-learn, ``.npz`` files, the Hugging Face hub."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor

from fedstrata.base.config import Setting, from_word
from fedstrata.base.errors import DataError, SpecError, nearest
from fedstrata.base.rng import rng
from fedstrata.data.arrays import Normalize, check_seen, decoded, normalisation
from fedstrata.data.catalog import KNOWN, folders, names_there
from fedstrata.data.dataset import Dataset, from_arrays
from fedstrata.data.fitting import Unfitted, fit
from fedstrata.data.hub import load_hub
from fedstrata.data.schema import Schema, another_unit, held_out
from fedstrata.data.subsets import stratified
from fedstrata.data.tables import SUFFIXES, dataset_of, read_table

Arrays = dict[str, NDArray[Any]]

NEEDED = ("x_train", "y_train", "x_test", "y_test")
"""What a ``.npz`` file must hold."""

MOST = 1 << 38
"""Bytes of arrays that a ``.npz`` file may declare."""

_reading = threading.Lock()
"""NumPy reads a header with ``ast``, which in Python 3.11 and 3.12 fails now and then in two threads at once (CPython's
issue 106905): a sound file was said to be damaged."""


with warnings.catch_warnings():
    # `name` is what the registry calls a setting and `schema` an old method of pydantic's; for data they are settings
    # themselves, and pydantic remarks on that.
    warnings.filterwarnings("ignore", message='Field name "(name|schema)" in "Data" shadows', category=UserWarning)

    class Data(Setting):
        """Which data set, and how it is prepared.

        Args:
            name: A known name (``fedstrata datasets`` lists them), the NAME of a file NAME.npz in
                ``$FEDSTRATA_DATA`` or ``~/.cache/fedstrata``, a path that ends in ``.npz``, ``.csv`` or ``.parquet``,
                or ``"hub:owner/name"`` (``"hub:owner/name:configuration"``).
            normalize: ``"standard"``: each channel or feature gets mean 0 and deviation 1 on the training set;
                ``"unit"``: it lies in [0, 1] there; ``"none"``: values stay as they are.
            limit: Use only so many training samples, chosen at random with the classes in proportion: for
                quick trials.
            client: The column of a hub data set that says whose a sample is, for the partition ``natural``.
            schema: What the columns of a ``.csv`` or ``.parquet`` file mean; the word alone names the label.
            shape: Of one sample of arrays as a model sees it, (channels, height, width) or (features,). It and
                ``classes`` must be known where sites keep their arrays. They are checked wherever arrays are read, and
                arrays of which they are said are normalised by the samples that clients train on alone.
            classes: How many classes the labels of arrays are of, 0 … C−1.
            range: The least and the greatest value that can be in arrays.
            shift: Subtracted from every channel or feature, instead of what ``normalize`` finds.
            scale: Multiplied after that.
            custom: What arrays of the user's own were, in the spec that a run leaves behind; not to be given.
        """

        name: str = "digits"  # type: ignore[misc]  # see above
        normalize: Normalize = "standard"
        limit: PositiveInt | None = None
        client: str | None = None
        schema: Annotated[Schema | None, from_word(Schema, "label")] = None  # type: ignore[assignment]  # see above
        shape: Annotated[tuple[PositiveInt, ...], Field(min_length=1, max_length=3)] | None = None
        classes: PositiveInt | None = None
        range: tuple[float, float] | None = None
        shift: tuple[float, ...] | None = None
        scale: tuple[float, ...] | None = None
        custom: str | None = None

        @model_validator(mode="after")
        def _agree(self) -> Data:
            for key, other in (("shape", "classes"), ("classes", "shape"), ("shift", "scale"), ("scale", "shift")):
                if getattr(self, key) is not None and getattr(self, other) is None:
                    raise SpecError(other, f"belongs to {key}; give both or neither")
            for key in ("shape", "range"):
                if getattr(self, key) is not None and (self.schema is not None or self.shape is None):
                    problem = "is of arrays, with shape and classes; the columns of a table have ranges in data.schema"
                    raise SpecError(key, problem, list(getattr(self, key)))
            if self.shift is not None and self.scale is not None and len(self.shift) != len(self.scale):
                raise SpecError("scale", f"{len(self.scale)} numbers; shift has {len(self.shift)}", list(self.scale))
            return self

        def __init__(self, name: str = "digits", **settings: Any) -> None:
            super().__init__(**{"name": name, **settings})

        def load(self, seed: int = 0) -> Dataset:
            """Read the data set into memory.

            Args:
                seed: Decides which samples ``limit`` keeps, and the split of a hub data set that has none.

            Raises:
                SpecError: No data set has that name.
                DataError: It is not there or cannot be used.
                ExtraMissingError: ``hub:`` without the extra ``hub``.
            """
            try:
                data = self._table(seed) if self.name.endswith(SUFFIXES) else self.declared(self._arrays(seed))
            except DataError as error:
                raise DataError(f"data {self.name!r}: {error}") from None
            if self.limit is not None and self.limit < data.train_size:
                kept = torch.from_numpy(stratified(data.y_train.numpy(), self.limit, rng(seed, "data limit")))
                keys = ("x_train", "y_train", "domain_train", "client_train")
                cut: dict[str, Any] = {}
                cut |= {key: None if (whole := getattr(data, key)) is None else whole[kept] for key in keys}
                check_seen(data.y_train[kept], data.y_test, data.class_names)
                if (unfitted := data.unfitted) is not None:
                    cut["unfitted"] = replace(unfitted, train=unfitted.train[kept])
                data = replace(data, **cut)
            if data.unfitted is not None:
                return fit(data, data.unfitted.statistics([np.arange(data.train_size)]), again=True)
            shift, scale = self.given(data.shape) or normalisation(data.x_train, self.normalize)
            return replace(data, shift=shift, scale=scale)

        def given(self, shape: tuple[int, ...]) -> tuple[Tensor, Tensor] | None:
            """Shift and scale where they are known beforehand.

            Raises:
                SpecError: There is not one for each channel or feature.
            """
            if self.shift is None or self.scale is None:
                return None
            if len(self.shift) != shape[0]:
                problem = f"{len(self.shift)} numbers for {shape[0]} channels or features"
                raise SpecError("data.shift", problem, list(self.shift))
            return torch.tensor(self.shift), torch.tensor(self.scale)

        def declared(self, data: Dataset) -> Dataset:
            """Arrays of which the spec says what they look like, checked; others as they are.

            Raises:
                DataError: They look otherwise.
            """
            if self.shape is None or self.classes is None:
                return data
            for part in ("train", "test"):
                x, y = getattr(data, f"x_{part}"), getattr(data, f"y_{part}")
                if not len(y):
                    continue
                if data.shape != self.shape:
                    accepted = f"data.shape is {list(self.shape)}"
                    error = DataError(f"a sample has the shape {list(data.shape)}; {accepted}")
                    raise error.publicly(f"samples have another shape; {accepted}")
                if not 0 <= int(y.min()) <= int(y.max()) < self.classes:
                    wrong = int(y.max()) if int(y.min()) >= 0 else int(y.min())
                    accepted = f"accepted: 0…{self.classes - 1}, by data.classes"
                    error = DataError(f"y_{part} holds {wrong}; {accepted}")
                    raise error.publicly(f"y_{part}: not all labels are classes; {accepted}")
                span = self.range or (-math.inf, math.inf)
                for end in (float(x.min()), float(x.max())):
                    if not span[0] <= end <= span[1]:
                        accepted = f"accepted: {span[0]:g} to {span[1]:g}, by data.range"
                        error = DataError(f"x_{part} holds {end:g}; {accepted}{another_unit(end, span)}")
                        raise error.publicly(f"x_{part}: not all values are in range; {accepted}")
            how = Unfitted(self.normalize, data.x_train, data.x_test, given=self.given(self.shape))
            return replace(data, unfitted=how)

        def _table(self, seed: int) -> Dataset:
            """The rows of a file."""
            if self.client is not None:
                problem = "names a column of a hub data set; here data.schema.client does"
                raise SpecError("data.client", problem, self.client)
            if self.schema is None:
                problem = "a table needs it: [data.schema] label = 'COLUMN' at least, the column to learn"
                raise SpecError("data.schema", problem)
            table = read_table(Path(self.name), self.schema)
            schema = self.schema.completed(table)
            held, given = held_out(table, schema, seed), self.given((len(schema.names()),))
            return dataset_of(table, schema, held, name=self.name, normalize=self.normalize, given=given)

        def _arrays(self, seed: int) -> Dataset:
            """The arrays that the name stands for, not normalised yet."""
            arrays = self._read(seed)
            numbered = None if self.classes is None else [str(label) for label in range(self.classes)]
            return from_arrays(
                *(arrays[key] for key in NEEDED),
                name=self.name,
                domain_train=arrays.get("domain_train"),
                domain_test=arrays.get("domain_test"),
                class_names=_names(arrays, "classes") or numbered,
                domain_names=_names(arrays, "domains"),
                clients=arrays.get("client_train"),
                clients_test=arrays.get("client_test"),
                normalize="none",
            )

        def _read(self, seed: int) -> Arrays:
            hub = self.name.startswith("hub:")
            if self.client is not None and not hub:
                problem = "names a column of a hub data set; a .npz file holds client_train and client_test"
                raise SpecError("data.client", problem, self.client)
            if self.schema is not None:
                raise SpecError("data.schema", "says what the columns of a .csv or .parquet file mean", self.name)
            return load_hub(self.name.removeprefix("hub:"), seed, self.client) if hub else _read(self.name)


def read_npz(path: Path) -> Arrays:
    """The arrays of a ``.npz`` file.

    Args:
        path: The file; needs ``x_train y_train x_test y_test``, and may hold ``domain_train domain_test``,
            ``classes`` (the name of each label 0…C−1), ``domains``, and ``client_train client_test``, whose a
            sample is; ``client`` alone is taken for ``client_train``.

    Raises:
        DataError: There is no such file, it is damaged, holds Python objects or lacks an array.
    """
    optional = ("domain_train", "domain_test", "classes", "domains", "client", "client_train", "client_test")
    arrays = read_arrays(path, NEEDED, optional)
    if "client" in arrays:
        arrays.setdefault("client_train", arrays.pop("client"))
    return arrays


def read_arrays(path: Path, needed: Sequence[str], optional: Sequence[str] = ()) -> Arrays:
    """Some arrays of a ``.npz`` file.

    Args:
        path: The file.
        needed: Arrays that it must hold.
        optional: Arrays that it may hold.

    Raises:
        DataError: There is no such file, it is damaged, holds Python objects, is too large or lacks an array.
    """
    try:
        path = path.expanduser()
        if path.exists() and not path.is_file():
            raise DataError(f"{path} is no file")  # reading from a pipe could wait for ever
        with _reading, path.open("rb") as file:  # which NumPy leaves open where it is damaged
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, NpzFile) or archive.zip is None:
                raise DataError(f"{path} holds a single array; save it with np.savez(file, {needed[0]}=…, …)")
            if missing := [key for key in needed if key not in archive]:
                error = DataError(f"{path} has no {', '.join(missing)}; it holds: {', '.join(archive)}")
                raise error.publicly(f"there is no {', '.join(missing)}")
            if (size := sum(int(info.file_size) for info in archive.zip.infolist())) > MOST:
                raise DataError(f"{path} holds {size / 2**30:,.1f} GiB of arrays; accepted: at most {MOST >> 30}")
            if damaged := archive.zip.testzip():  # NumPy reads no checksum where a header claims too little
                raise ValueError(f"{damaged} does not fit its checksum")
            arrays = {key: archive[key] for key in (*needed, *optional) if key in archive}
            if other := [key for key, array in arrays.items() if not isinstance(array, np.ndarray)]:
                raise ValueError(f"{other[0]} is not an array")  # NumPy gives the bytes of what has no header
            return arrays
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(f"there is no file {path.absolute()}") from None
    except Exception as error:  # zipfile, zlib and NumPy each trip over bad bytes in ways of their own
        raise DataError(f"{path} is no .npz file or is damaged: {str(error) or type(error).__name__}") from None


def _read(name: str) -> Arrays:
    if name == "custom":
        raise DataError("these were arrays of your own: go on in Python, fedstrata.run(spec, data=…, resume=True)")
    if name.endswith(".npz"):
        return read_npz(Path(name))
    if name == "digits":
        return _digits()
    for folder in folders():
        path = folder / f"{name}.npz"
        with suppress(OSError):  # longer than a file's name can be
            if path.name == f"{name}.npz" and path.is_file():
                return read_npz(path)
    looked = " and ".join(str(folder) for folder in folders())
    if name in KNOWN:
        keys = ", ".join(NEEDED)
        raise DataError(
            f"there is no {name}.npz in {looked}; put it there, with arrays {keys}, or take one from Hugging Face: "
            "data.name = 'hub:owner/name'"
        )
    there = ", ".join(["digits", *names_there()])
    accepted = (
        f"there are: {there} (looked in {looked}), or a path ending in .npz, .csv or .parquet, or 'hub:owner/name'"
    )
    raise SpecError("data.name", f"no such data set; {accepted}{nearest(name, [*KNOWN, *names_there()])}", name)


def _names(arrays: Arrays, key: str) -> list[str] | None:
    if key not in arrays:
        return None
    names = decoded(np.asarray(arrays[key]), key)
    if names.ndim != 1 or names.dtype.kind not in "Uiub":
        raise DataError(f"{key}: of type {names.dtype} and shape {names.shape}; expected a list of names")
    return [str(name) for name in names]


def _digits() -> Arrays:
    """scikit-learn's digits, grey levels 0…16 stretched to bytes; one fixed stratified split, 20 % test."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x, y = np.rint(bunch.images * (255 / 16)).astype(np.uint8), bunch.target.astype(np.int64)
    test = stratified(y, 360, rng(0, "digits split"))
    train = np.setdiff1d(np.arange(len(y)), test)
    return {"x_train": x[train], "y_train": y[train], "x_test": x[test], "y_test": y[test]}
