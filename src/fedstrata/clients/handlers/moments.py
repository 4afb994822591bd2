"""The request, the reply and the handler with which CCVR collects the moments of each class's features."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedstrata.base.errors import ReplyRefusedError
from fedstrata.base.records import record
from fedstrata.clients.client import Client
from fedstrata.clients.handlers.fit import starting_point
from fedstrata.clients.handling import handles
from fedstrata.clients.training.local import LocalData
from fedstrata.federation.messages import ModelRequest, Reply, RequestRule, Weights
from fedstrata.federation.reply_checks import require_shape


@record("MomentsReply")
class MomentsReply(Reply):
    """The moments of each class's features, as sums over the client's samples.

    Args:
        samples: The number n_k(c) of samples of each class c, shape (C,), float32.
        first: The sum Σ z of the features z of each class, shape (C, d), float32.
        second: The sum Σ z zᵀ of the outer products of the features z of each class, shape (C, d, d), float32.
    """

    samples: Tensor
    first: Tensor
    second: Tensor

    def require(self, classes: int, size: int) -> None:
        """Raise an error if a tensor has the wrong shape, or if a sample count is negative or not an integer.

        Args:
            classes: The number of classes C.
            size: The length d of a feature vector.

        Raises:
            ReplyRefusedError: A tensor has the wrong shape, or a sample count is wrong.
        """
        require_shape(self.samples, (classes,), torch.float32, "samples")
        require_shape(self.first, (classes, size), torch.float32, "first")
        require_shape(self.second, (classes, size, size), torch.float32, "second")
        if (self.samples < 0).any() or (self.samples != self.samples.round()).any():
            raise ReplyRefusedError("a class has a number of samples that is negative or not an integer")


@record("Moments")
class Moments(ModelRequest):
    """A request for the moments of each class's features, computed with the model in ``weights`` (CCVR).

    Args:
        round: The round, counted from 1.
        weights: The model.
    """

    reply_type: ClassVar[type[Reply]] = MomentsReply
    rule = RequestRule(
        "the number of its samples of each class, the sum of their features, and the sum of their outer products",
        discloses=frozenset({"labels", "sizes"}),
    )

    round: int
    weights: Weights


@handles(Moments)
@torch.no_grad()
def report_moments(client: Client, request: Moments) -> MomentsReply:
    """Return the moments of each class's features in evaluation mode. If a class has too few samples, return 0."""
    client.authorize_release(len(client))
    data, weights = LocalData(client, np.arange(len(client))), starting_point(client, request)
    classes, size = client.context.config.outputs, client.model.feature_size
    samples = torch.zeros(classes, dtype=torch.float64)
    first, second = samples.new_zeros(classes, size), samples.new_zeros(classes, size, size)
    with client.model.loaded(weights.params, weights.buffers) as params:
        for batch in data.in_order():
            features = client.model.with_features(params, batch.x)[0].flatten(1).double()
            for label in np.unique(batch.y.numpy()).tolist():
                z = features[batch.y == label]
                samples[label] += len(z)
                first[label] += z.sum(dim=0)
                second[label] += z.T @ z
    few = samples < client.context.privacy.min_samples
    for sums in (samples, first, second):
        sums[few] = 0
    return MomentsReply(samples.float(), first.float(), second.float())
