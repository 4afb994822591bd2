"""Aggregation of the clients' models at the server.

Every aggregation here is linear in the clients' updates: w ← w_t + Σ_k a_k (w_k − w_t). An ``Aggregator`` gives
the a_k. A ``ServerOptimizer`` may then treat the combined update as a gradient.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from fedstrata.aggregation.optimizers import AnyServer, ServerOptimizer
from fedstrata.base.config import FromRegistry, Registry, Setting
from fedstrata.base.errors import SpecError
from fedstrata.base.records import Tree
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.messages import FitReply, Params, Weights
from fedstrata.sampling.base import ClientSampler, Selection, Uniform


class Aggregator(Setting):
    """Base class of the aggregators, which give every reply a weight a_k.

    Args:
        server: How the combined update is applied. By default it is added to the model.
    """

    handlers: ClassVar[tuple[Callable[..., Any], ...]] = ()
    """Client code for the aggregator's own requests; see ``fedstrata.clients.handling``."""

    needs_counts: ClassVar[bool] = False
    """Whether the weights depend on how many samples the clients used."""

    server: AnyServer = ServerOptimizer()

    def check(self, config: FederationConfig, sampler: ClientSampler) -> None:
        """Raise ``SpecError`` if the aggregation does not fit the sampler."""

    @abstractmethod
    def coefficients(
        self, selection: Selection, returned: NDArray[np.int64], samples: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return a_k of the clients that returned.

        Args:
            selection: The invited clients, and how they were drawn.
            returned: Positions in ``selection.clients`` of the clients that returned, ascending, shape (r,).
            samples: How many samples each returned client used, shape (r,).

        Returns:
            Shape (r,).
        """

    def weigh(
        self, selection: Selection, returned: NDArray[np.int64], replies: Sequence[FitReply]
    ) -> NDArray[np.float64]:
        """Return a_k of the clients that returned, from their whole replies; ``coefficients`` by default.

        Args:
            selection: The invited clients, and how they were drawn.
            returned: Positions in ``selection.clients`` of the clients that returned, ascending, shape (r,).
            replies: The replies of the clients that returned.

        Returns:
            Shape (r,).
        """
        return self.coefficients(selection, returned, np.array([reply.samples for reply in replies]))

    def combine(
        self, weights: Weights, state: Tree, selection: Selection, replies: Mapping[int, FitReply]
    ) -> tuple[Weights, Tree]:
        """Return the new global model and the server optimiser's state."""
        if not replies:
            return weights, state
        answers = list(replies.values())
        returned = np.searchsorted(selection.clients, np.fromiter(replies, dtype=np.int64))
        a = self.weigh(selection, returned, answers)
        if not a.any():
            return weights, state
        update = weighted_update(weights.params, [reply.weights.params for reply in answers], a)
        params, state = self.server.apply(weights.params, update, state)
        buffers = weights.buffers and mean_buffers(weights.buffers, [reply.weights.buffers for reply in answers], a)
        return Weights(params, buffers), state


def weighted_update(params: Params, models: Sequence[Params], a: NDArray[np.float64]) -> Params:
    """Return Σ_k a_k (w_k − w_t) by parameter, summed in client order."""
    update = {name: torch.zeros_like(w) for name, w in params.items()}
    before, sums = list(params.values()), list(update.values())
    for model, factor in zip(models, a.tolist(), strict=True):
        changes = torch._foreach_sub([model[name] for name in params], before)
        torch._foreach_add_(sums, changes, alpha=factor)
    return update


def mean_buffers(buffers: Params, others: Sequence[Params], a: NDArray[np.float64]) -> Params:
    """Average float buffers with the weights a_k / Σ a, and take the maximum of integer buffers (counters)."""
    total = float(a.sum())
    if total == 0:
        return buffers
    floats = {name: buffer for name, buffer in buffers.items() if buffer.is_floating_point()}
    # Average the changes, so that a buffer that no client changed keeps every bit.
    change = weighted_update(floats, others, a / total)
    result: Params = {}
    for name, buffer in buffers.items():
        if name in floats:
            result[name] = buffer + change[name]
        else:
            result[name] = torch.stack([other[name] for other in others]).amax(dim=0)
    return result


class MeanBySize(Aggregator):
    """a_k = n_k / Σ n over the clients that returned (FedAvg): all samples count equally.

    If clients were drawn in proportion to n_k, all draws count equally instead, because size would count twice.
    """

    needs_counts: ClassVar[bool] = True

    def coefficients(
        self, selection: Selection, returned: NDArray[np.int64], samples: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return weights in proportion to the samples used.

        >>> selection = Selection.plain(np.array([0, 4, 7]), 10)
        >>> MeanBySize().coefficients(selection, np.array([0, 2]), np.array([30, 10])).tolist()
        [0.75, 0.25]
        """
        if selection.stratum_samples is not None:
            return StratumMean().coefficients(selection, returned, samples)
        sizes = samples.astype(np.float64) * selection.draws[returned]
        result: NDArray[np.float64] = sizes / max(float(sizes.sum()), 1.0)
        return result


class Mean(Aggregator):
    """a_k = 1 / r over the r replies; a client drawn twice counts twice."""

    def coefficients(
        self, selection: Selection, returned: NDArray[np.int64], samples: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return weights in proportion to the draws."""
        draws = selection.draws[returned]
        result: NDArray[np.float64] = draws / draws.sum()
        return result


class StratumMean(Aggregator):
    """w = (1/N) Σ_h N_h (1/m_h) Σ_{k∈S_h} w_k (FedSTS and FedSTaS, the papers' Eq.).

    m_h counts the clients that returned. Strata from which no client returned are left out, and the weights of the
    other strata increase. If clients were drawn in proportion to their samples, N_h and N count samples instead of
    clients.

    With importance sampling inside the strata, this mean is biased, although the papers state otherwise: clients with
    large gradients are drawn more often, and their weights are not reduced. A second bias, also of the published code,
    is that strata without a draw under Neyman's allocation are left out. ``HorvitzThompson`` is unbiased.
    """

    def coefficients(
        self, selection: Selection, returned: NDArray[np.int64], samples: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return N_h / m_h, normalised.

        >>> stratum, stratum_sizes = np.array([0, 1, 1]), np.array([2, 6])
        >>> selection = Selection(np.array([1, 5, 6]), np.ones(3, int), np.ones(3), stratum, stratum_sizes)
        >>> StratumMean().coefficients(selection, np.array([0, 1, 2]), np.ones(3, int)).tolist()
        [0.25, 0.375, 0.375]
        """
        stratum, draws = selection.stratum[returned], selection.draws[returned]
        per_stratum = np.bincount(stratum, weights=draws, minlength=len(selection.stratum_sizes))
        sizes = selection.stratum_sizes if selection.stratum_samples is None else selection.stratum_samples
        share = sizes[stratum] / _population(selection, sizes, per_stratum)
        result: NDArray[np.float64] = share * draws / (per_stratum[stratum] * _chance(selection)[stratum])
        return result


class HorvitzThompson(Aggregator):
    """a_k = draws_k / (N m_h p_k): the unbiased weights for draws with replacement (Hansen and Hurwitz 1943).

    The weights apply to updates, not to parameters, because the a_k sum to one only on average.
    """

    def check(self, config: FederationConfig, sampler: ClientSampler) -> None:
        """Require draws with replacement, or uniform draws, for which the weights are 1/m."""
        if getattr(sampler, "allocation", None) == "neyman":
            problem = "leaves strata without a draw in every round, which no weight corrects. "
            problem += "Use 'neyman-random' (the default of horvitz-thompson) or another allocation"
            raise SpecError("method.allocation", problem, "neyman")
        if getattr(sampler, "replacement", None) is False and not isinstance(sampler, Uniform):
            problem = "horvitz-thompson needs draws with replacement. Set it to true (fedsts and fedstas do so with"
            problem += " method.aggregation = 'horvitz-thompson')"
            raise SpecError("method.client_sampler.replacement", problem, False)

    def coefficients(
        self, selection: Selection, returned: NDArray[np.int64], samples: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return 1 / (N m_h p_k) per draw; with dropouts, m_h counts the draws that returned."""
        stratum, draws = selection.stratum[returned], selection.draws[returned]
        per_stratum = np.bincount(stratum, weights=draws, minlength=len(selection.stratum_sizes))
        population = _population(selection, selection.stratum_sizes, per_stratum)
        p = selection.probability[returned] * _chance(selection)[stratum]
        result: NDArray[np.float64] = draws / (population * per_stratum[stratum] * p)
        return result


def _chance(selection: Selection) -> NDArray[np.float64]:
    """Return the probability that each stratum gets a draw, shape (H,)."""
    chance = selection.stratum_chance
    return np.ones(len(selection.stratum_sizes)) if chance is None else chance


def _population(selection: Selection, sizes: NDArray[np.int64], per_stratum: NDArray[Any]) -> int:
    """Return the total size of the strata, without strata whose invited clients all failed to return.

    A stratum that got no draw by chance counts, because ``_chance`` corrects for it over the rounds.
    """
    missing = per_stratum == 0
    if selection.stratum_chance is not None:
        invited = np.bincount(selection.stratum, minlength=len(sizes)) > 0
        missing &= invited
    return max(int(sizes[~missing].sum()), 1)


AGGREGATORS: Registry[Aggregator] = Registry(
    "aggregator",
    Aggregator,  # type: ignore[type-abstract]
    {
        "size": "fedstrata.aggregation.base:MeanBySize",
        "mean": "fedstrata.aggregation.base:Mean",
        "stratum": "fedstrata.aggregation.base:StratumMean",
        "horvitz-thompson": "fedstrata.aggregation.base:HorvitzThompson",
    },
)

AnyAggregator = Annotated[Aggregator, FromRegistry(AGGREGATORS)]
