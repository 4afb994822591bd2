"""Robust aggregators, which limit what false updates of a few clients can do to the global model.

They combine the updates w_k − w_t themselves, and not with weights that are known beforehand. Each client that replied
counts once, whatever number of samples it claims and however often it was drawn.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import numpy as np
import torch
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor

from fedstrata.aggregation.base import Aggregator
from fedstrata.base.arrays import Floats, Ints
from fedstrata.base.errors import SpecError
from fedstrata.base.records import Tree
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.messages import FitReply, Params, Weights
from fedstrata.federation.vectors import changes, split
from fedstrata.sampling.base import ClientSampler, Selection


class RobustAggregator(Aggregator):
    """Base class of the aggregators that combine whole updates and not weights.

    Floating-point buffers, such as BatchNorm's running statistics, are combined together with the parameters. The
    messages that an objective sends in addition are still averaged.
    """

    @property
    def least_replies(self) -> int:
        """The smallest number of replies from which the rule is defined."""
        return 1

    def check(self, config: FederationConfig, sampler: ClientSampler) -> None:
        """Raise ``SpecError`` if the clients, or those invited per round, are fewer than ``least_replies``."""
        invited = config.clients if sampler.name == "all" else config.training.invited(config.clients)
        if invited < self.least_replies:
            problem = f"needs at least {self.least_replies} replies, but a round invites {invited} clients. "
            raise SpecError(
                "method.aggregator", f"{problem}Invite more clients, or expect fewer false updates.", self.name
            )

    def shortage(self, replies: int) -> str:
        """Return why a round with this number of replies leaves the model unchanged; empty if it does not."""
        if 0 < replies < self.least_replies:
            return f"{self.name} needs at least {self.least_replies} replies, and {replies} clients answered"
        return ""

    def coefficients(self, selection: Selection, returned: Ints, samples: Ints) -> Floats:
        """Return equal weights: before the rule, each client counts once."""
        return np.full(len(returned), 1 / max(len(returned), 1))

    @abstractmethod
    def center(self, updates: Tensor) -> Tensor:
        """Return the combined update.

        Args:
            updates: The update of each client, shape (n, d), with n at least ``least_replies``.

        Returns:
            The combined update, shape (d,).
        """

    def combine(
        self, weights: Weights, state: Tree, selection: Selection, replies: Mapping[int, FitReply]
    ) -> tuple[Weights, Tree]:
        """Return the new global model and the server optimiser's new state; both are unchanged with too few replies."""
        if not replies or self.shortage(len(replies)):
            return weights, state
        models = [reply.weights for reply in replies.values()]
        floats = {name: buffer for name, buffer in weights.buffers.items() if buffer.is_floating_point()}
        before = _named(weights.params, floats)
        rows = [changes(before, _named(model.params, model.buffers)) for model in models]
        update = split(self.center(torch.stack(rows)), before)
        moved = {name: update.pop(f"buffers/{name}") for name in floats}
        update = {name.removeprefix("params/"): change for name, change in update.items()}
        params, state = self.server.apply(weights.params, update, state, selection.round, selection.rounds)
        buffers: Params = {}
        for name, buffer in weights.buffers.items():
            if name in floats:
                buffers[name] = buffer + moved[name]
            else:  # a counter: of an even number of values, the median is the smaller one in the middle
                buffers[name] = torch.stack([model.buffers[name] for model in models]).median(dim=0).values
        return Weights(params, buffers), state


def _named(params: Params, buffers: Params) -> Params:
    """Return parameters and buffers in one mapping, with different names."""
    return {f"params/{name}": w for name, w in params.items()} | {f"buffers/{name}": b for name, b in buffers.items()}


class Median(RobustAggregator):
    """The coordinate-wise median of the updates (Yin et al. 2018); of an even number, the mean of the middle two.

    It tolerates false updates from less than half of the clients. With label skew it ignores what only few clients
    know, so that it can be less accurate than a mean if no update is false.
    """

    def center(self, updates: Tensor) -> Tensor:
        """Return the median of each coordinate.

        >>> Median().center(torch.tensor([[1.0, 5.0], [2.0, -9.0], [300.0, 6.0], [3.0, 7.0]])).tolist()
        [2.5, 5.5]
        """
        return _trimmed_mean(updates, (len(updates) - 1) // 2)


class TrimmedMean(RobustAggregator):
    """The coordinate-wise mean without the f smallest and the f largest values (Yin et al. 2018).

    Args:
        attackers: Number f of replies in a round that may be false. With 0, it is the mean.
    """

    attackers: NonNegativeInt = 1

    @property
    def least_replies(self) -> int:
        """2 f + 1 replies, of which one is left in each coordinate."""
        return 2 * self.attackers + 1

    def center(self, updates: Tensor) -> Tensor:
        """Return the trimmed mean of each coordinate.

        >>> TrimmedMean(attackers=1).center(torch.tensor([[1.0], [2.0], [300.0], [3.0]])).tolist()
        [2.5]
        """
        return _trimmed_mean(updates, self.attackers)


def _trimmed_mean(rows: Tensor, each_end: int) -> Tensor:
    """Return the mean of each column without its ``each_end`` smallest and largest values."""
    ordered = rows.sort(dim=0).values if each_end else rows
    return ordered[each_end : len(rows) - each_end].mean(dim=0)


class Krum(RobustAggregator):
    """The update of the one client whose neighbours are closest (Krum, Blanchard et al. 2017).

    A client's score is the sum of the squared distances to its n − f − 2 nearest updates, of n replies. The update with
    the smallest score is used, and all others are ignored.

    Args:
        attackers: Number f of replies in a round that may be false; a round needs 2 f + 3 replies.
    """

    attackers: NonNegativeInt = 1

    @property
    def least_replies(self) -> int:
        """2 f + 3 replies, for which Blanchard et al. prove that Krum is robust."""
        return 2 * self.attackers + 3

    def center(self, updates: Tensor) -> Tensor:
        """Return the update with the smallest score; of several, the first.

        >>> Krum(attackers=0).center(torch.tensor([[1.0], [2.0], [2.5], [9.0]])).tolist()
        [2.0]
        """
        return updates[int(self.scores(updates).argmin())]

    def scores(self, updates: Tensor) -> Tensor:
        """Return the score of each update.

        Args:
            updates: The updates, shape (n, d).

        Returns:
            The scores in float64, shape (n,).
        """
        squared = torch.stack([(updates - row).double().square().sum(dim=1) for row in updates])
        # The smallest distance is that of an update to itself.
        return squared.sort(dim=1).values[:, 1 : len(updates) - self.attackers - 1].sum(dim=1)


class MultiKrum(Krum):
    """The mean of the updates with the smallest scores of Krum (Blanchard et al. 2017).

    Args:
        attackers: Number f of replies in a round that may be false; a round needs 2 f + 3 replies.
        chosen: Number m of updates in the mean, at most n − f of n replies. Default: n − f.
    """

    chosen: PositiveInt | None = None

    @property
    def least_replies(self) -> int:
        """2 f + 3 replies, and at least ``chosen`` that are not false."""
        return max(super().least_replies, (self.chosen or 0) + self.attackers)

    def center(self, updates: Tensor) -> Tensor:
        """Return the mean of the ``chosen`` updates with the smallest scores.

        >>> MultiKrum(attackers=0, chosen=2).center(torch.tensor([[1.0], [2.0], [2.5], [9.0]])).tolist()
        [2.25]
        """
        count = self.chosen or len(updates) - self.attackers
        best = self.scores(updates).argsort(stable=True)[:count]
        return updates[best.sort().values].mean(dim=0)


class GeometricMedian(RobustAggregator):
    """The point with the smallest sum of distances to the updates, approximately (RFA, Pillutla et al. 2022).

    Each step of the smoothed Weiszfeld algorithm sets v to a mean of the updates with weights 1 / max(ν, ‖v − update‖).
    The first v is 0, which is the global model.

    Args:
        steps: Number of steps.
        smoothing: Smallest distance ν, which limits the weight of an update that is close to v.
    """

    steps: PositiveInt = Field(default=3, le=1000)
    smoothing: PositiveFloat = 1e-6

    def center(self, updates: Tensor) -> Tensor:
        """Return v after the last step.

        >>> GeometricMedian(steps=50).center(torch.tensor([[1.0], [2.0], [300.0]])).round().tolist()
        [2.0]
        """
        v = torch.zeros_like(updates[0])
        for _ in range(self.steps):
            weights = 1 / _norms(updates - v).clamp(min=self.smoothing)
            v = ((weights / weights.sum()).to(updates.dtype)[:, None] * updates).sum(dim=0)
        return v


class CentredClipping(RobustAggregator):
    """The mean of the updates after each was shortened to a largest length (centred clipping, Karimireddy et al. 2021).

    Each step adds the mean of (update − v) · min(1, τ / ‖update − v‖) to v. In each round the first v is 0, which is
    the global model, and not the result of the round before, as in the paper. False updates can therefore move v by at
    most τ times their share per step.

    Args:
        radius: Largest length τ of a difference.
        steps: Number of steps in a round.
    """

    radius: PositiveFloat = 10.0
    steps: PositiveInt = Field(default=1, le=1000)

    def center(self, updates: Tensor) -> Tensor:
        """Return v after the last step.

        >>> CentredClipping(radius=1.0).center(torch.tensor([[0.5, 0.0], [0.0, 300.0]])).tolist()
        [0.25, 0.5]
        """
        v = torch.zeros_like(updates[0])
        for _ in range(self.steps):
            differences = updates - v
            factors = (self.radius / _norms(differences)).clamp(max=1)
            v = v + (factors.to(updates.dtype)[:, None] * differences).mean(dim=0)
        return v


def _norms(rows: Tensor) -> Tensor:
    """Return the length of each row in float64, so that the squares of large float32 numbers are finite, shape (n,)."""
    return rows.double().square().sum(dim=1).sqrt()
