"""Data sets by name: bundled with scikit-learn, ``.npz`` files, the Hugging Face hub."""

from __future__ import annotations

import lzma
import warnings
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import PositiveInt

from fedstrata.config import Setting
from fedstrata.data.arrays import Normalize, normalisation
from fedstrata.data.catalog import KNOWN, folders, names_there
from fedstrata.data.dataset import Dataset, from_arrays
from fedstrata.data.hub import load_hub
from fedstrata.data.subsets import stratified
from fedstrata.errors import DataError, SpecError, nearest
from fedstrata.rng import rng

Arrays = dict[str, NDArray[Any]]

NEEDED = ("x_train", "y_train", "x_test", "y_test")
"""What a ``.npz`` file must hold."""


with warnings.catch_warnings():
    # `name` is what the registry calls a setting; for data it is a setting itself, and pydantic remarks on
    # that.
    warnings.filterwarnings("ignore", message='Field name "name" in "Data" shadows', category=UserWarning)

    class Data(Setting):
        """Which data set, and how it is prepared.

        Args:
            name: A known name (``fedstrata datasets`` lists them), the NAME of a file NAME.npz in
                ``$FEDSTRATA_DATA`` or ``~/.cache/fedstrata``, a path that ends in ``.npz``, or ``"hub:owner/name"``
                (``"hub:owner/name:configuration"``).
            normalize: ``"standard"``: each channel or feature gets mean 0 and deviation 1 on the training set;
                ``"unit"``: it lies in [0, 1] there; ``"none"``: values stay as they are.
            limit: Use only so many training samples, chosen at random with the classes in proportion: for
                quick trials.
            custom: What arrays of the user's own were, in the spec that a run leaves behind; not to be given.
        """

        name: str = "digits"  # type: ignore[misc]  # see above
        normalize: Normalize = "standard"
        limit: PositiveInt | None = None
        custom: str | None = None

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
                arrays = _read(self.name, seed)
                data = from_arrays(
                    *(arrays[key] for key in NEEDED),
                    name=self.name,
                    domain_train=arrays.get("domain_train"),
                    domain_test=arrays.get("domain_test"),
                    class_names=_strings(arrays.get("classes")),
                    domain_names=_strings(arrays.get("domains")),
                    normalize="none",
                )
            except DataError as error:
                raise DataError(f"data {self.name!r}: {error}") from None
            if self.limit is not None and self.limit < data.train_size:
                kept = torch.from_numpy(stratified(data.y_train.numpy(), self.limit, rng(seed, "data limit")))
                domain = None if data.domain_train is None else data.domain_train[kept]
                data = replace(data, x_train=data.x_train[kept], y_train=data.y_train[kept], domain_train=domain)
            shift, scale = normalisation(data.x_train, self.normalize)
            return replace(data, shift=shift, scale=scale)


def read_npz(path: Path) -> Arrays:
    """The arrays of a ``.npz`` file.

    Args:
        path: The file; needs ``x_train y_train x_test y_test``, and may hold ``domain_train domain_test``,
            ``classes`` (the name of each label 0…C−1) and ``domains``.

    Raises:
        DataError: There is no such file, it is damaged, holds Python objects or lacks an array.
    """
    try:
        with path.open("rb") as file:  # NumPy would leave a damaged file open
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise DataError(f"{path} holds a single array; save it with np.savez(file, x_train=…, …)")
            missing = [key for key in NEEDED if key not in archive.files]
            if missing:
                raise DataError(f"{path} has no {', '.join(missing)}; it holds: {', '.join(archive.files)}")
            optional = [key for key in ("domain_train", "domain_test", "classes", "domains") if key in archive.files]
            return {key: archive[key] for key in (*NEEDED, *optional)}
    except FileNotFoundError:
        raise DataError(f"there is no file {path.absolute()}") from None
    except ValueError as error:
        raise DataError(f"{path} cannot be read without pickle, which is never used: {error}") from None
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{path} is no .npz file or is damaged: {error}") from None


def _read(name: str, seed: int) -> Arrays:
    if name == "custom":
        raise DataError("these were arrays of your own: go on in Python, fedstrata.run(spec, data=…, resume=True)")
    if name.startswith("hub:"):
        return load_hub(name.removeprefix("hub:"), seed)
    if name.endswith(".npz"):
        return read_npz(Path(name).expanduser())
    if name == "digits":
        return _digits()
    for folder in folders():
        path = folder / f"{name}.npz"
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
    accepted = f"there are: {there} (looked in {looked}), or a path ending in .npz, or 'hub:owner/name'"
    raise SpecError("data.name", f"no such data set; {accepted}{nearest(name, [*KNOWN, *names_there()])}", name)


def _strings(values: NDArray[Any] | None) -> list[str] | None:
    return None if values is None else [str(value) for value in values]


def _digits() -> Arrays:
    """scikit-learn's digits, grey levels 0…16 stretched to bytes; one fixed stratified split, 20 % test."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x, y = np.rint(bunch.images * (255 / 16)).astype(np.uint8), bunch.target.astype(np.int64)
    test = stratified(y, 360, rng(0, "digits split"))
    train = np.setdiff1d(np.arange(len(y)), test)
    return {"x_train": x[train], "y_train": y[train], "x_test": x[test], "y_test": y[test]}
