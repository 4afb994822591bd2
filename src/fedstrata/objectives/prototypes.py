"""Compute and combine tables of prototypes (ReBaFL §4.3, Eq. 18, 21 and 23).

A prototype is the mean feature vector of a class, over the samples of one client or of the whole federation. A table of
prototypes contains two tensors. The tensor ``means``, shape (C, d), contains the prototypes. The tensor ``samples``,
shape (C,), contains the number of samples from which each prototype was computed. A class without a prototype has 0
samples and a row of zeros in ``means``.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fedstrata.base.errors import SpecError
from fedstrata.federation.messages import Params
from fedstrata.models.model import Model, evaluating
from fedstrata.objectives.base import Batches

Table = dict[str, Tensor]
"""A table of prototypes: the keys ``means``, shape (C, d), and ``samples``, shape (C,), both float32."""


def no_prototypes(classes: int, size: int) -> Table:
    """Return a table of zeros, in which no class has a prototype. A prototype has the length ``size``."""
    return {"means": torch.zeros(classes, size), "samples": torch.zeros(classes)}


@torch.no_grad()
def class_means(model: Model, params: Params, batches: Batches, classes: int, least: int = 1) -> Table:
    """Return a client's prototypes, which are the mean feature vectors of each class in evaluation mode (Eq. 21).

    Args:
        model: The model, with the buffers that belong to ``params``.
        params: The parameters that compute features.
        batches: A function that iterates over the client's samples.
        classes: The number C of classes.
        least: The minimum number of samples per prototype. Classes with fewer samples are left out.
    """
    device = next(iter(params.values())).device
    sums = torch.zeros(classes, model.feature_size, dtype=torch.float64, device=device)
    samples = torch.zeros(classes, device=device)
    with evaluating(model):
        for batch in batches():
            features = model.with_features(params, batch.x)[0].flatten(1)
            if features.shape[1] != sums.shape[1]:
                given, taken = features.shape[1], sums.shape[1]
                problem = f"the head's input has {given} features, but the head's first nn.Linear takes {taken}. "
                problem += "Use a head that begins with nn.Linear, or with nn.Flatten and nn.Linear."
                raise SpecError("model.head", problem, model.head_name)
            sums.index_add_(0, batch.y, features.double())
            samples += torch.bincount(batch.y, minlength=classes)
    means, enough = (sums / samples.clamp(min=1)[:, None]).float(), samples >= least
    return {"means": torch.where(enough[:, None], means, 0.0), "samples": torch.where(enough, samples, 0.0)}


def merged(first: Table, second: Table) -> Table:
    """Return the first table; classes that lack a prototype get the prototype from the second table (Eq. 18)."""
    known = first["samples"] > 0
    return {
        "means": torch.where(known[:, None], first["means"], second["means"]),
        "samples": torch.where(known, first["samples"], second["samples"]),
    }


def updated(before: Table, new: Table, momentum: float) -> Table:
    """Return the federation's prototypes after a round: the new prototypes, or moving averages (not in the paper).

    A class that no client reported keeps its prototype from ``before``. A class without an earlier prototype gets the
    new prototype.

    Args:
        before: The federation's prototypes before the round.
        new: This round's prototypes, averaged over clients.
        momentum: Weight β of the prototypes in ``before``. The new prototypes have the weight 1 − β.

    >>> before = {"means": torch.tensor([[8.0], [0.0], [7.0]]), "samples": torch.tensor([1.0, 0.0, 1.0])}
    >>> new = {"means": torch.tensor([[4.0], [5.0], [0.0]]), "samples": torch.tensor([2.0, 3.0, 0.0])}
    >>> updated(before, new, 0.75)
    {'means': tensor([[7.],
            [5.],
            [7.]]), 'samples': tensor([2., 3., 1.])}
    """
    if momentum:
        # With this formula, rounding does not change a prototype that is equal in ``before`` and ``new``.
        blended = new["means"] + momentum * (before["means"] - new["means"])
        new = {**new, "means": torch.where(before["samples"][:, None] > 0, blended, new["means"])}
    return merged(new, before)


def averaged(before: Table, tables: Iterable[Table], momentum: float = 0.0) -> Table:
    """Return the mean of the clients' prototypes for each class, weighted by sample counts (Eq. 23).

    A class that no client reported keeps its prototype from ``before``.

    Args:
        before: The federation's prototypes before the round.
        tables: One table for each client that replied.
        momentum: Weight of the prototypes in ``before``; see ``updated``.

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
    return updated(before, new, momentum)
