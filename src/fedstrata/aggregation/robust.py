"""Aggregate robustly, so that false updates from a few clients have little influence on the global model.

All clients that replied have equal weights, regardless of their numbers of draws and their reported numbers of samples.
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
    """Base class of aggregators that compare individual updates.

    Floating-point buffers, such as BatchNorm's running statistics, are combined together with the parameters. The
    objective's messages to the server are not combined robustly, but averaged.
    """

    needs_replies = "compares individual updates"

    @property
    def least_replies(self) -> int:
        """The minimum number of replies for which the aggregation rule is defined."""
        return 1

    def check(self, config: FederationConfig, sampler: ClientSampler) -> None:
        """Raise ``SpecError`` if a round invites fewer clients than ``least_replies``."""
        invited = sampler.most_invited(config)
        if invited < self.least_replies:
            problem = f"needs at least {self.least_replies} replies, but each round invites only {invited} clients. "
            problem += "Increase training.clients_per_round, or reduce method.aggregator.attackers."
            raise SpecError("method.aggregator", problem, self.name)

    def shortage(self, replies: int) -> str:
        """Return an error message if there are too few replies to change the model; otherwise an empty string."""
        if 0 < replies < self.least_replies:
            return f"{self.name} needs at least {self.least_replies} replies, but only {replies} clients replied"
        return ""

    def coefficients(self, selection: Selection, returned: Ints, samples: Ints) -> Floats:
        """Return equal weights for all clients that replied."""
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
        """Return the new global model and the new state. If there are too few replies, neither changes."""
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
            else:  # an integer buffer (a counter); PyTorch's median is one of the values, so it is an integer too
                buffers[name] = torch.stack([model.buffers[name] for model in models]).median(dim=0).values
        return Weights(params, buffers), state


def _named(params: Params, buffers: Params) -> Params:
    """Return parameters and buffers in one mapping, with prefixes that make their names distinct."""
    return {f"params/{name}": w for name, w in params.items()} | {f"buffers/{name}": b for name, b in buffers.items()}


class Median(RobustAggregator):
    """The coordinate-wise median of the updates (Yin et al. 2018).

    For an even number of updates, the median is the mean of the two middle values. The median tolerates false updates
    from fewer than half of the clients. If clients have different labels, the median ignores what only a few clients
    have learnt, and can be less accurate than the mean.
    """

    def center(self, updates: Tensor) -> Tensor:
        """Return the median of each coordinate, shape (d,).

        >>> Median().center(torch.tensor([[1.0, 5.0], [2.0, -9.0], [300.0, 6.0], [3.0, 7.0]])).tolist()
        [2.5, 5.5]
        """
        return _trimmed_mean(updates, (len(updates) - 1) // 2)


class TrimmedMean(RobustAggregator):
    """The coordinate-wise mean of the updates, without the smallest and largest values (Yin et al. 2018).

    Args:
        attackers: Maximum number f of replies from attackers per round. In each coordinate, the f smallest and f
            largest values are left out.
    """

    attackers: NonNegativeInt = 1

    @property
    def least_replies(self) -> int:
        """The minimum number of replies, 2 f + 1, so that at least one value per coordinate is left."""
        return 2 * self.attackers + 1

    def center(self, updates: Tensor) -> Tensor:
        """Return the trimmed mean of each coordinate, shape (d,).

        >>> TrimmedMean(attackers=1).center(torch.tensor([[1.0], [2.0], [300.0], [3.0]])).tolist()
        [2.5]
        """
        return _trimmed_mean(updates, self.attackers)


def _trimmed_mean(rows: Tensor, each_end: int) -> Tensor:
    """Return the mean of each column, without the ``each_end`` smallest and ``each_end`` largest values."""
    ordered = rows.sort(dim=0).values if each_end else rows
    return ordered[each_end : len(rows) - each_end].mean(dim=0)


class Krum(RobustAggregator):
    """Krum: the single update with the smallest distances to its nearest neighbours (Blanchard et al. 2017).

    With n replies, the score of an update is the sum of its squared distances to its n − f − 2 nearest updates. Krum
    uses the update with the smallest score and ignores all other updates.

    Args:
        attackers: Maximum number f of replies from attackers per round. A round needs at least 2 f + 3 replies.
    """

    attackers: NonNegativeInt = 1

    @property
    def least_replies(self) -> int:
        """The minimum number of replies, 2 f + 3, for which Blanchard et al. prove that Krum is robust."""
        return 2 * self.attackers + 3

    def center(self, updates: Tensor) -> Tensor:
        """Return the update with the smallest score, or the first of several such updates.

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
        # Leave out the smallest distance, because it is the distance of an update from itself.
        return squared.sort(dim=1).values[:, 1 : len(updates) - self.attackers - 1].sum(dim=1)


class MultiKrum(Krum):
    """Multi-Krum: the mean of several updates with the smallest distances to their nearest neighbours.

    Args:
        attackers: Maximum number f of replies from attackers per round. A round needs at least 2 f + 3 replies.
        chosen: Number of updates to average. Maximum and default: n − f, where n is the number of replies, and f is
            ``attackers``.
    """

    chosen: PositiveInt | None = None

    @property
    def least_replies(self) -> int:
        """The minimum number of replies: the larger of 2 f + 3 and f + ``chosen``.

        Therefore, at least ``chosen`` replies are honest if f replies are from attackers.
        """
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
    """An approximate geometric median of the updates (RFA, Pillutla et al. 2022).

    Each step of the smoothed Weiszfeld algorithm sets v to a weighted mean of the updates. The weight of an update is 1
    / max(ν, ‖v − update‖). The algorithm starts with v = 0, which stands for the unchanged global model.

    Args:
        steps: Number of steps of the Weiszfeld algorithm.
        smoothing: Constant ν that limits the weights of updates. An update at the distance d from the current estimate
            has the weight 1 / max(ν, d).
    """

    steps: PositiveInt = Field(default=3, le=1000)
    smoothing: PositiveFloat = 1e-6

    def center(self, updates: Tensor) -> Tensor:
        """Return the combined update v after the last step, shape (d,).

        >>> GeometricMedian(steps=50).center(torch.tensor([[1.0], [2.0], [300.0]])).round().tolist()
        [2.0]
        """
        v = torch.zeros_like(updates[0])
        for _ in range(self.steps):
            weights = 1 / _norms(updates - v).clamp(min=self.smoothing)
            v = ((weights / weights.sum()).to(updates.dtype)[:, None] * updates).sum(dim=0)
        return v


class CentredClipping(RobustAggregator):
    """The mean of the updates, each clipped to a radius around the current estimate (Karimireddy et al. 2021).

    Each step adds the mean of (update − v) · min(1, τ / ‖update − v‖) to v. In one step, false updates therefore move v
    by at most τ times the fraction of clients that send false updates. Each round starts with v = 0, which stands for
    the unchanged global model. In the paper, each round starts with the result of the previous round.

    Args:
        radius: Clipping radius τ: maximum distance of an update from the current estimate of the mean.
        steps: Number of clipping steps per round.
    """

    radius: PositiveFloat = 10.0
    steps: PositiveInt = Field(default=1, le=1000)

    def center(self, updates: Tensor) -> Tensor:
        """Return the combined update v after the last step, shape (d,).

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
    """Return the norm of each row, shape (n,), in float64, because squares of large float32 numbers can overflow."""
    return rows.double().square().sum(dim=1).sqrt()
