"""Data that each site brings: what was agreed about them, and the world of one site."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstrata.clients.context import ClientContext
from fedstrata.data.arrays import checked_inputs
from fedstrata.data.dataset import Dataset
from fedstrata.data.sources import read_arrays
from fedstrata.engines.nvflare.wire import Agreed, Begin
from fedstrata.errors import DataError, SpecError
from fedstrata.evaluation.metrics import METRICS, Metric
from fedstrata.partitions import Assignment
from fedstrata.preparation import Prepared, assemble, prepare
from fedstrata.simulation import make_context
from fedstrata.spec import Experiment, parse_toml
from fedstrata.stratify.masking.key_store import KeyRing

_PREPARING = Lock()
"""Initial parameters are drawn from PyTorch's generator, which all threads share: sites of one process take turns."""

_NO_LABELS = torch.empty(0, dtype=torch.int64)


def context_of(begin: Begin, data: Path | None, keys: KeyRing, *, tells: bool = False) -> ClientContext:
    """What the clients of one site share: the spec's data by its partition, or the site's own file.

    Args:
        begin: The run.
        data: The site's own file.
        keys: For masked labels.
        tells: Whether the server may learn how good a model is on the site's own samples, beside sums that add up.

    Raises:
        SpecError: The spec is wrong, or a site lacks a data file, or has one that nobody asked for.
        DataError: The file is missing, damaged or not what was agreed.
    """
    spec = Experiment.from_table(parse_toml(begin.spec))
    with _PREPARING:
        if begin.agreed is None:
            if data is not None:
                raise SpecError("data", "this site has a data file of its own, but the run is about the spec's")
            prepared = prepare(spec)
        else:
            if data is None:
                raise SpecError("data", "the run is about the sites' own data, and this site's settings name no file")
            if len(begin.clients) != 1:
                raise SpecError("data", "a site's own data are those of one client", begin.clients)
            own = read_own(data, begin.agreed, "train", both=spec.evaluation.client_test is not None)
            client = begin.clients[0]
            brought = _all_of(client, len(own.y_test), begin.total) if len(own.y_test) else None
            whole = _all_of(client, own.train_size, begin.total)
            prepared = assemble(spec, own, whole, sizes_known=False, brought=brought)
    if len(prepared.assignment) != begin.total:
        raise SpecError("partition.clients", f"there are {begin.total} clients", len(prepared.assignment))
    # What can be known of the spec's own data is no secret of a site's.
    return dataclasses.replace(make_context(prepared, keys), tells_values=tells or begin.agreed is None)


def _all_of(client: int, size: int, clients: int) -> Assignment:
    """All samples are one client's."""
    ends = np.zeros(clients + 1, dtype=np.int64)
    ends[client + 1 :] = size
    return Assignment(np.arange(size, dtype=np.int64), ends)


def prepare_server(spec: Experiment, agreed: Agreed, test: Path | None, clients: int) -> Prepared:
    """The experiment as its server sees it where the sites' data are their own: it holds test samples, or none.

    Args:
        spec: The experiment.
        agreed: What the sites' data look like.
        test: The server's file of test samples; None where sites measure the model on test parts of their own.
        clients: N.

    Raises:
        SpecError: A setting does not fit, or nobody has test samples.
        DataError: The test file is missing, damaged or not what was agreed.
    """
    evaluation = spec.evaluation
    if test is None and evaluation.client_test is None:
        problem = "the server's settings name no file with test samples: give one, or let each site hold out a part of "
        raise SpecError("evaluation.client_test", problem + "its own samples, such as 0.2")
    _refuse_telling(spec)
    elsewhere = evaluation.client_test is not None or evaluation.validation is not None
    if elsewhere and (alone := [metric.label for metric in evaluation.metrics if not metric.adds_up]):
        added = ", ".join(name for name in METRICS if METRICS.find(name).of_sums is not Metric.of_sums)
        problem = f"cannot be computed from sums, which is what sites send; accepted: {added}, or of_sums of its own"
        raise SpecError("evaluation.metrics", problem, alone[0])
    nobody = Assignment(np.empty(0, dtype=np.int64), np.zeros(clients + 1, dtype=np.int64))
    data = _nothing(agreed) if test is None else read_own(test, agreed, "test")
    return assemble(spec, data, nobody, sizes_known=False)


def _refuse_telling(spec: Experiment) -> None:
    """Sums over a site's samples tell how many it has of each class: nothing for a method that keeps these private.

    Raises:
        SpecError: It does.
    """
    evaluation, method = spec.evaluation, spec.method
    sizes = getattr(getattr(method, "data_sampler", None), "private", False)
    labels = getattr(method, "masking", "none") not in ("none", None)
    for key in ("client_test", "validation"):
        if getattr(evaluation, key) is not None and (sizes or labels):
            what = "sizes" if sizes else "labels"
            problem = f"what sites answer tells their {what}, which the method keeps private: leave it out, and give "
            raise SpecError(f"evaluation.{key}", problem + "the server test samples", getattr(evaluation, key))


def _nothing(agreed: Agreed) -> Dataset:
    """A data set without samples of the shape that was agreed."""
    shape = tuple(agreed.shape)
    x = torch.zeros(0, *((*shape[1:], shape[0]) if len(shape) == 3 else shape))
    return _dataset(agreed, (x, _NO_LABELS), (x, _NO_LABELS))


def read_own(path: Path, agreed: Agreed, split: str, *, both: bool = False) -> Dataset:
    """One split of a ``.npz`` file, as was agreed.

    Args:
        path: The file, with ``x_train`` and ``y_train`` (or ``x_test`` and ``y_test``); labels are 0…C−1.
        agreed: What it must look like.
        split: ``"train"`` or ``"test"``; the other is left empty.
        both: Whether the other is read too where it is there.

    Raises:
        DataError: It is missing, damaged, or not what was agreed.
    """
    other = "test" if split == "train" else "train"
    arrays = read_arrays(path, (f"x_{split}", f"y_{split}"), (f"x_{other}", f"y_{other}") if both else ())
    there = _samples(path, arrays, split, agreed)
    rest = there[0][:0], _NO_LABELS
    if f"x_{other}" in arrays:
        if f"y_{other}" not in arrays:
            raise DataError(f"{path} has x_{other} and no y_{other}")
        rest = _samples(path, arrays, other, agreed)
        if rest[0].shape[1:] != there[0].shape[1:]:
            raise DataError(f"{path}: samples of x_{other} have another shape than those of x_{split}")
    data = _dataset(agreed, *((there, rest) if split == "train" else (rest, there)))
    if list(data.shape) != list(agreed.shape):
        raise DataError(f"{path}: a sample has the shape {list(data.shape)}; agreed is {list(agreed.shape)}")
    return data


def _samples(path: Path, arrays: Mapping[str, Any], split: str, agreed: Agreed) -> tuple[Tensor, Tensor]:
    """Inputs and labels of one split."""
    x, y = checked_inputs(arrays[f"x_{split}"], f"x_{split}"), arrays[f"y_{split}"]
    if y.dtype.kind not in "iu" or y.shape != (len(x),):
        raise DataError(f"{path}: y_{split} is {y.dtype} {y.shape}; expected one whole number for each of {len(x)}")
    if len(y) and not 0 <= int(y.min()) <= int(y.max()) < agreed.classes:
        raise DataError(f"{path}: y_{split} holds other labels than 0…{agreed.classes - 1}, which are agreed")
    return x, torch.from_numpy(y.astype(np.int64))


def _dataset(agreed: Agreed, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> Dataset:
    names = tuple(str(label) for label in range(agreed.classes))
    shift, scale = _channels(agreed.shift), _channels(agreed.scale)
    if (shift is None) != (scale is None):
        width = len(agreed.shift or agreed.scale)
        shift = torch.zeros(width) if shift is None else shift
        scale = torch.ones(width) if scale is None else scale
    return Dataset("own", *train, *test, names, shift=shift, scale=scale)


def _channels(values: list[float]) -> Tensor | None:
    return torch.tensor(values, dtype=torch.float32) if values else None
