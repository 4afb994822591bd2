"""Membership inference: measure whether an update reveals which samples the clients trained on.

The attacker has the update, the model with which training began, and two samples of the same class. A client
trained on one of the samples (the *member*). The other is a test sample. The attack computes the gradient of each
sample's loss. The attack guesses that the member is the sample whose gradient has the larger cosine with the negative
update. Without the update, guesses would be correct for half of the pairs.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.func import grad, vmap

from fedstrata.data.dataset import Dataset, Split
from fedstrata.federation.messages import Params, Weights
from fedstrata.models.model import Model

CHUNK = 64
"""The maximum number of samples whose gradients are in memory at the same time."""


def matched_pairs(
    members: NDArray[np.int64], data: Dataset, generator: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pair each member with a test sample of the same class. Each test sample is in at most one pair.

    Args:
        members: The indices of the members in the training set.
        data: The data set.
        generator: The random generator that draws the test samples.
    """
    mine, theirs = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    labels, tests = data.targets(members).numpy(), data.y_test.numpy()
    for label in np.unique(labels):
        inside, outside = members[labels == label], generator.permutation(np.flatnonzero(tests == label))
        pairs = min(len(inside), len(outside))
        mine.append(inside[:pairs])
        theirs.append(outside[:pairs])
    return np.concatenate(mine), np.concatenate(theirs)


def cosines(
    model: Model, weights: Weights, update: Params, data: Dataset, samples: NDArray[np.int64], split: Split = "train"
) -> Tensor:
    """Return, for each sample, the cosine between the gradient of its loss and the negative update, shape (n,).

    Args:
        model: The model.
        weights: The model with which training began.
        update: Each parameter's update.
        data: The data set.
        samples: The indices of the samples.
        split: The part of the data set to which the indices belong.
    """
    inputs, labels = data.inputs(torch.from_numpy(samples), split), data.targets(torch.from_numpy(samples), split)
    assert isinstance(inputs, Tensor)

    def loss(params: Params, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(params, x[None]), y[None])

    length = torch.stack([each.square().sum() for each in update.values()]).sum().sqrt().clamp(min=1e-30)
    parts = [torch.zeros(0)]
    with model.loaded(weights.params, weights.buffers) as loaded:
        params = {name: w.detach() for name, w in loaded.items()}
        for begin in range(0, len(labels), CHUNK):
            x, y = inputs[begin : begin + CHUNK], labels[begin : begin + CHUNK]
            gradients = vmap(grad(loss), in_dims=(None, 0, 0))(params, x, y)
            along = sum((g.flatten(1) @ update[name].flatten() for name, g in gradients.items()), torch.zeros(()))
            lengths = torch.stack([g.flatten(1).square().sum(1) for g in gradients.values()]).sum(0).sqrt()
            parts.append(-along / (lengths.clamp(min=1e-30) * length))
    return torch.cat(parts)


def right_pairs(
    model: Model,
    weights: Weights,
    update: Params,
    data: Dataset,
    members: NDArray[np.int64],
    generator: np.random.Generator,
) -> tuple[int, int]:
    """Return the number of pairs in which the attack identifies the member, and the number of all pairs.

    Args:
        model: The model.
        weights: The model with which training began.
        update: Each parameter's update.
        data: The data set.
        members: The indices of the members in the training set.
        generator: The random generator that draws the test samples.
    """
    mine, theirs = matched_pairs(members, data, generator)
    inside = cosines(model, weights, update, data, mine)
    outside = cosines(model, weights, update, data, theirs, "test")
    return int((inside > outside).sum()), len(mine)
