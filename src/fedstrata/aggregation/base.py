"""How the server combines what came back.

Every aggregation here is linear in the clients' updates: w ← w_t + Σ_k a_k (w_k − w_t). An ``Aggregator`` says what
the a_k are; a ``ServerOptimizer`` may then treat the combined update as a gradient.
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
    """A weight a_k for every reply.

    Args:
        server: How the combined update is applied; as it is by default.
    """

    handlers: ClassVar[tuple[Callable[..., Any], ...]] = ()
    """How clients answer requests of its own; see ``fedstrata.clients.handling``."""

    needs_counts: ClassVar[bool] = False
    """Whether the weights depend on how many samples the clients used."""

    server: AnyServer = ServerOptimizer()

    def check(self, config: FederationConfig, sampler: ClientSampler) -> None:
        """Raise ``SpecError`` where the aggregation does not fit the sampler."""

    @abstractmethod
    def coefficients(
        self, selection: Selection, returned: NDArray[np.int64], samples: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """a_k of those who returned.

        Args:
            selection: Who was invited, and how they were drawn.
            returned: Places in ``selection.clients`` of those who returned, ascending, shape (r,).
            samples: How many samples each of them used, shape (r,).

        Returns:
            Shape (r,).
        """

    def weigh(
        self, selection: Selection, returned: NDArray[np.int64], replies: Sequence[FitReply]
    ) -> NDArray[np.float64]:
        """a_k of those who returned, by all that they sent; ``coefficients`` unless overridden.

        Args:
            selection: Who was invited, and how they were drawn.
            returned: Places in ``selection.clients`` of those who returned, ascending, shape (r,).
            replies: What each of them sent.

        Returns:
            Shape (r,).
        """
        return self.coefficients(selection, returned, np.array([reply.samples for reply in replies]))

    def combine(
        self, weights: Weights, state: Tree, selection: Selection, replies: Mapping[int, FitReply]
    ) -> tuple[Weights, Tree]:
        """The new global model, and the server optimiser's state."""
        if not replies:
            return weights, state
        answers = list(replies.values())
        returned = np.searchsorted(selection.clients, np.fromiter(replies, dtype=np.int64))
        a = self.weigh(selection, returned, answers)
        if not a.any():
            return weights, state
        update = weighted_update(weights.params, [reply.weights.params for reply in answers], a)
        params, state = self.server.apply(weights.params, update, state)
        return Weights(params, mean_buffers(weights.buffers, [reply.weights.buffers for reply in answers], a)), state


def weighted_update(params: Params, models: Sequence[Params], a: NDArray[np.float64]) -> Params:
    """Σ_k a_k (w_k − w_t), by parameter, added up in client order."""
    update = {name: torch.zeros_like(w) for name, w in params.items()}
    for model, factor in zip(models, a.tolist(), strict=True):
        for name, w in params.items():
            update[name].add_(model[name] - w, alpha=factor)
    return update


def mean_buffers(buffers: Params, others: Sequence[Params], a: NDArray[np.float64]) -> Params:
    """Buffers after aggregation: floats averaged with the weights a_k / Σ a, integers (counters) at their largest."""
    total = float(a.sum())
    if total == 0:
        return buffers
    floats = {name: buffer for name, buffer in buffers.items() if buffer.is_floating_point()}
    # As changes, so that what nobody changed stays what it is to the last bit.
    change = weighted_update(floats, others, a / total)
    result: Params = {}
    for name, buffer in buffers.items():
        if name in floats:
            result[name] = buffer + change[name]
        else:
            result[name] = torch.stack([other[name] for other in others]).amax(dim=0)
    return result


class MeanBySize(Aggregator):
    """a_k = n_k / Σ n over those who returned (FedAvg): every sample counts alike.

    Where clients were drawn in proportion to n_k already, every draw counts alike instead, or size would count twice.
    """

    needs_counts: ClassVar[bool] = True

    def coefficients(
        self, selection: Selection, returned: NDArray[np.int64], samples: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """In proportion to the samples used.

        >>> who = Selection.plain(np.array([0, 4, 7]), 10)
        >>> MeanBySize().coefficients(who, np.array([0, 2]), np.array([30, 10])).tolist()
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
        """In proportion to the draws."""
        draws = selection.draws[returned]
        result: NDArray[np.float64] = draws / draws.sum()
        return result


class StratumMean(Aggregator):
    """w = (1/N) Σ_h N_h (1/m_h) Σ_{k∈S_h} w_k (FedSTS and FedSTaS, the papers' Eq.).

    With importance sampling inside the strata this is biased, although the papers say otherwise: clients with large
    gradients are drawn more often and not weighted down. ``HorvitzThompson`` is unbiased. m_h counts those who
    returned; strata of which nobody did are left out and the others weighted up, and so are strata that Neyman's
    allocation gives no draw: a second bias, of the published code too. Where clients were drawn in proportion to their
    samples, a stratum counts for its samples and not for its clients.
    """

    def coefficients(
        self, selection: Selection, returned: NDArray[np.int64], samples: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """N_h / m_h, normalised.

        >>> who = Selection(np.array([1, 5, 6]), np.ones(3, int), np.ones(3), np.array([0, 1, 1]), np.array([2, 6]))
        >>> StratumMean().coefficients(who, np.array([0, 1, 2]), np.ones(3, int)).tolist()
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

    On the updates, not on the parameters, since the a_k add up to one in the mean only.
    """

    def check(self, config: FederationConfig, sampler: ClientSampler) -> None:
        """The weights hold for draws with replacement, and for uniform ones without: 1/m each."""
        if getattr(sampler, "allocation", None) == "neyman":
            problem = "leaves strata without a draw in every round, which no weight repairs; horvitz-thompson takes"
            raise SpecError("method.allocation", f"{problem} 'neyman-random' (its default) or one for each", "neyman")
        if getattr(sampler, "replacement", None) is False and not isinstance(sampler, Uniform):
            raise SpecError(
                "method.client_sampler.replacement",
                "horvitz-thompson needs draws with replacement; set it to true "
                "(method.aggregation = 'horvitz-thompson' of fedsts and fedstas does)",
                False,
            )

    def coefficients(
        self, selection: Selection, returned: NDArray[np.int64], samples: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """1 / (N m_h p_k) a draw; under dropout m_h counts the draws that returned."""
        stratum, draws = selection.stratum[returned], selection.draws[returned]
        per_stratum = np.bincount(stratum, weights=draws, minlength=len(selection.stratum_sizes))
        population = _population(selection, selection.stratum_sizes, per_stratum)
        p = selection.probability[returned] * _chance(selection)[stratum]
        result: NDArray[np.float64] = draws / (population * per_stratum[stratum] * p)
        return result


def _chance(selection: Selection) -> NDArray[np.float64]:
    """How likely each stratum was to get any draw, shape (H,)."""
    chance = selection.stratum_chance
    return np.ones(len(selection.stratum_sizes)) if chance is None else chance


def _population(selection: Selection, sizes: NDArray[np.int64], per_stratum: NDArray[Any]) -> int:
    """What the strata hold together, without those of which nobody returned.

    A stratum that got no draw by chance counts: the others stand for it in other rounds.
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
