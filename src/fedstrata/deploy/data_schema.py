"""Data that each site brings: what was agreed about them, and the world of one site."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedstrata.clients.context import ClientContext
from fedstrata.data.arrays import checked_inputs
from fedstrata.data.dataset import Dataset
from fedstrata.data.sources import read_arrays
from fedstrata.engines.nvflare.wire import Agreed, Begin
from fedstrata.errors import DataError, SpecError
from fedstrata.partitions import Assignment
from fedstrata.preparation import Prepared, assemble, prepare
from fedstrata.simulation import make_context
from fedstrata.spec import Experiment, parse_toml
from fedstrata.stratify.masking.key_store import KeyRing


def context_of(begin: Begin, data: Path | None, keys: KeyRing) -> ClientContext:
    """What the clients of one site share: the spec's data by its partition, or the site's own file.

    Raises:
        SpecError: The spec is wrong, or a site lacks a data file, or has one that nobody asked for.
        DataError: The file is missing, damaged or not what was agreed.
    """
    spec = Experiment.from_table(parse_toml(begin.spec))
    if begin.agreed is None:
        if data is not None:
            raise SpecError("data", "this site has a data file of its own, but the run is about the spec's")
        prepared = prepare(spec)
    else:
        if data is None:
            raise SpecError("data", "the run is about the sites' own data, and this site's settings name no file")
        if len(begin.clients) != 1:
            raise SpecError("data", "a site's own data are those of one client", begin.clients)
        own = read_own(data, begin.agreed, "train")
        client, size = begin.clients[0], own.train_size
        ends = np.zeros(begin.total + 1, dtype=np.int64)
        ends[client + 1 :] = size
        prepared = assemble(spec, own, Assignment(np.arange(size, dtype=np.int64), ends), sizes_known=False)
    if len(prepared.assignment) != begin.total:
        raise SpecError("partition.clients", f"there are {begin.total} clients", len(prepared.assignment))
    return make_context(prepared, keys)


def prepare_server(spec: Experiment, agreed: Agreed, test: Path, clients: int) -> Prepared:
    """The experiment as its server sees it where the sites' data are their own: it holds the test samples only.

    Raises:
        SpecError: A setting does not fit.
        DataError: The test file is missing, damaged or not what was agreed.
    """
    nobody = Assignment(np.empty(0, dtype=np.int64), np.zeros(clients + 1, dtype=np.int64))
    return assemble(spec, read_own(test, agreed, "test"), nobody, sizes_known=False)


def read_own(path: Path, agreed: Agreed, split: str) -> Dataset:
    """One split of a ``.npz`` file, as was agreed.

    Args:
        path: The file, with ``x_train`` and ``y_train`` (or ``x_test`` and ``y_test``); labels are 0…C−1.
        agreed: What it must look like.
        split: ``"train"`` or ``"test"``; the other is left empty.

    Raises:
        DataError: It is missing, damaged, or not what was agreed.
    """
    arrays = read_arrays(path, (f"x_{split}", f"y_{split}"))
    x, y = checked_inputs(arrays[f"x_{split}"], f"x_{split}"), arrays[f"y_{split}"]
    if y.dtype.kind not in "iu" or y.shape != (len(x),):
        raise DataError(f"{path}: y_{split} is {y.dtype} {y.shape}; expected one whole number for each of {len(x)}")
    if len(y) and not 0 <= int(y.min()) <= int(y.max()) < agreed.classes:
        raise DataError(f"{path}: y_{split} holds other labels than 0…{agreed.classes - 1}, which are agreed")
    labels, none = torch.from_numpy(y.astype(np.int64)), (x[:0], torch.empty(0, dtype=torch.int64))
    train, test = ((x, labels), none) if split == "train" else (none, (x, labels))
    names = tuple(str(label) for label in range(agreed.classes))
    shift, scale = _channels(agreed.shift), _channels(agreed.scale)
    if (shift is None) != (scale is None):
        width = len(agreed.shift or agreed.scale)
        shift = torch.zeros(width) if shift is None else shift
        scale = torch.ones(width) if scale is None else scale
    data = Dataset("own", *train, *test, names, shift=shift, scale=scale)
    if list(data.shape) != list(agreed.shape):
        raise DataError(f"{path}: a sample has the shape {list(data.shape)}; agreed is {list(agreed.shape)}")
    return data


def _channels(values: list[float]) -> Tensor | None:
    return torch.tensor(values, dtype=torch.float32) if values else None
