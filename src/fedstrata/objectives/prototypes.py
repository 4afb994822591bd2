"""Prototypes: the mean feature of every class, at a client and over the federation (ReBaFL §4.3, Eq. 18, 21 and 23).

A table of prototypes is a group of two tensors that travels as it is: ``means``, shape (C, d), and ``samples``, shape
(C,), how many samples each mean is over. A class of which nobody knows has 0 samples and a row of zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedstrata.base.errors import SpecError
from fedstrata.federation.messages import Params
from fedstrata.models.model import Model
from fedstrata.objectives.base import Batches

Table = dict[str, Tensor]
"""``means`` (C, d) and ``samples`` (C,), float32."""


def feature_size(model: Model) -> int:
    """d, the length of the features: what the head's first linear layer takes.

    Raises:
        SpecError: The head has no linear layer.
    """
    for layer in model.module.get_submodule(model.head_name).modules():
        if isinstance(layer, nn.Linear):
            return layer.in_features
    problem = f"the head {model.head_name!r} has no nn.Linear, so that the length of its features is unknown"
    raise SpecError("model.head", problem)


def no_prototypes(classes: int, size: int) -> Table:
    """A table that knows no class."""
    return {"means": torch.zeros(classes, size), "samples": torch.zeros(classes)}


@contextmanager
def evaluating(model: Model) -> Iterator[None]:
    """The module in evaluation mode for the block: no batch statistics, no dropout, and BatchNorm learns nothing."""
    training = model.module.training
    model.train_mode(False)
    try:
        yield
    finally:
        model.train_mode(training)


@torch.no_grad()
def class_means(model: Model, params: Params, batches: Batches, classes: int) -> Table:
    """Local prototypes (Eq. 21): features in evaluation mode, averaged by class.

    Args:
        model: With the buffers that belong to ``params``.
        params: Under which.
        batches: Calls to get the client's samples.
        classes: C.
    """
    device = next(iter(params.values())).device
    sums = torch.zeros(classes, feature_size(model), dtype=torch.float64, device=device)
    samples = torch.zeros(classes, device=device)
    with evaluating(model):
        for batch in batches():
            features = model.with_features(params, batch.x)[0].flatten(1)
            if features.shape[1] != sums.shape[1]:
                problem = (
                    f"gets {features.shape[1]} features and its first nn.Linear takes {sums.shape[1]}: prototypes "
                )
                problem += "need a head that begins with that layer (after nn.Flatten at most)"
                raise SpecError("model.head", problem, model.head_name)
            sums.index_add_(0, batch.y, features.double())
            samples += torch.bincount(batch.y, minlength=classes)
    return {"means": (sums / samples.clamp(min=1)[:, None]).float(), "samples": samples}


def merged(own: Table, theirs: Table) -> Table:
    """Eq. 18: a client's own prototype where it has one, else the federation's."""
    mine = own["samples"] > 0
    return {
        "means": torch.where(mine[:, None], own["means"], theirs["means"]),
        "samples": torch.where(mine, own["samples"], theirs["samples"]),
    }


def of_enough(table: Table, least: int) -> Table:
    """Without the classes of which there are fewer samples.

    >>> of_enough({"means": torch.tensor([[1.0], [5.0]]), "samples": torch.tensor([3.0, 1.0])}, 2)
    {'means': tensor([[1.],
            [0.]]), 'samples': tensor([3., 0.])}
    """
    enough = table["samples"] >= least
    return {
        "means": torch.where(enough[:, None], table["means"], 0.0),
        "samples": torch.where(enough, table["samples"], 0.0),
    }


def averaged(before: Table, tables: Iterable[Table]) -> Table:
    """Eq. 23: the mean by samples; a class that nobody reported keeps its last prototype.

    Args:
        before: The federation's.
        tables: Those of the clients that returned.

    >>> one = {"means": torch.tensor([[1.0], [0.0]]), "samples": torch.tensor([3.0, 0.0])}
    >>> two = {"means": torch.tensor([[5.0], [0.0]]), "samples": torch.tensor([1.0, 0.0])}
    >>> averaged({"means": torch.tensor([[9.0], [7.0]]), "samples": torch.tensor([1.0, 1.0])}, [one, two])["means"]
    tensor([[2.],
            [7.]])
    """
    sums, samples = torch.zeros_like(before["means"], dtype=torch.float64), torch.zeros_like(before["samples"])
    for table in tables:
        counts = table["samples"].clamp(min=0)
        sums += counts[:, None] * table["means"].double()
        samples += counts
    new = {"means": (sums / samples.clamp(min=1)[:, None]).float(), "samples": samples}
    return merged(new, before)
