"""Aggregation of the clients' models at the server.

Each aggregation combines the clients' updates with a weight a_k per client: w ← w_t + Σ_k a_k (w_k − w_t), where w_t is
the global model and w_k the model of client k. An ``Aggregator`` computes the a_k. A ``ServerOptimizer`` then applies
the combined update: it treats the update as a negative gradient.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from fedstrata.aggregation.optimizers import AnyServer, ServerOptimizer
from fedstrata.base.arrays import Floats, Ints
from fedstrata.base.config import FromRegistry, Registry, Setting
from fedstrata.base.errors import SpecError
from fedstrata.base.records import Tree
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.messages import FitReply, Params, Weights
from fedstrata.sampling.base import ClientSampler, Selection, Uniform


class Aggregator(Setting):
    """Base class of the aggregators, which compute the weight a_k of each client's update.

    Args:
        server: Optimiser that applies the combined update to the global model. Default: the update is added to the
            model.
    """

    handlers: ClassVar[tuple[Callable[..., Any], ...]] = ()
    """The functions that answer the aggregator's own requests at a client; see ``fedstrata.clients.handling``."""

    needs_counts: ClassVar[bool] = False
    """Whether the weights depend on how many samples the clients used."""

    server: AnyServer = ServerOptimizer()

    def check(self, config: FederationConfig, sampler: ClientSampler) -> None:
        """Raise ``SpecError`` if the aggregation does not fit the sampler."""

    @abstractmethod
    def coefficients(self, selection: Selection, returned: Ints, samples: Ints) -> Floats:
        """Return the weight a_k of each client that replied.

        Args:
            selection: The invited clients, and how they were drawn.
            returned: The clients that replied, as indices into ``selection.clients``, ascending, shape (r,).
            samples: How many samples (or tokens, or pixels) each of these clients used, shape (r,).

        Returns:
            The weights, shape (r,).
        """

    def shortage(self, replies: int) -> str:
        """Return why a round with this number of replies leaves the model unchanged; empty if it does not."""
        return ""

    def weigh(self, selection: Selection, returned: Ints, replies: Sequence[FitReply]) -> Floats:
        """Return the weight a_k of each reply. Subclasses that need more than sample counts override this method.

        Args:
            selection: The invited clients, and how they were drawn.
            returned: The clients that replied, as indices into ``selection.clients``, ascending, shape (r,).
            replies: The replies of these clients, in the same order.

        Returns:
            The weights, shape (r,).
        """
        return self.coefficients(selection, returned, np.array([reply.size for reply in replies]))

    def init(self, config: FederationConfig) -> Tree:
        """Return the state before the first round. Default: None, because the server optimiser has no state yet.

        A subclass that remembers clients between rounds overrides ``init`` and ``combine``. The state of all rounds is
        written to checkpoints, so it must be a tree of plain values, arrays and tensors (``fedstrata.base.records``).
        """
        return None

    def combine(
        self, weights: Weights, state: Tree, selection: Selection, replies: Mapping[int, FitReply]
    ) -> tuple[Weights, Tree]:
        """Return the new global model and the new state; both are unchanged without replies.

        The method is called in every round, also if no client replied. It must not change ``state`` in place.

        Args:
            weights: The global model of the round.
            state: The state after the previous round. Here, it is the state of the server optimiser.
            selection: The invited clients, and how they were drawn.
            replies: A mapping from client to the reply that the server uses, in ascending order of clients. All other
                invited clients were absent, late, failed, or sent a reply that was refused.
        """
        if not replies:
            return weights, state
        answers = list(replies.values())
        returned = np.searchsorted(selection.clients, np.fromiter(replies, dtype=np.int64))
        a = self.weigh(selection, returned, answers)
        if not a.any():
            return weights, state
        update = weighted_update(weights.params, [reply.weights.params for reply in answers], a)
        return self.step(weights, update, state, selection, answers, a)

    def step(
        self,
        weights: Weights,
        update: Params,
        state: Tree,
        selection: Selection,
        answers: Sequence[FitReply],
        a: Floats,
    ) -> tuple[Weights, Tree]:
        """Let the server optimiser apply an update to the parameters, and average the buffers of the replies.

        Args:
            weights: The global model of the round.
            update: The change of each parameter.
            state: The state of the server optimiser.
            selection: The invited clients; the optimiser reads the round from it.
            answers: The replies.
            a: The weight of each reply in the mean of the buffers, shape (r,).

        Returns:
            The new global model, and the new state of the server optimiser.
        """
        params, state = self.server.apply(weights.params, update, state, selection.round, selection.rounds)
        buffers = weights.buffers and mean_buffers(weights.buffers, [reply.weights.buffers for reply in answers], a)
        return Weights(params, buffers), state


def weighted_update(params: Params, models: Sequence[Params], a: Floats) -> Params:
    """Return Σ_k a_k (w_k − w_t) for each parameter, summed in the order of ``models``."""
    update = {name: torch.zeros_like(w) for name, w in params.items()}
    before, sums = list(params.values()), list(update.values())
    for model, factor in zip(models, a.tolist(), strict=True):
        changes = torch._foreach_sub([model[name] for name in params], before)
        torch._foreach_add_(sums, changes, alpha=factor)
    return update


def mean_buffers(buffers: Params, others: Sequence[Params], a: Floats) -> Params:
    """Average float buffers with the weights a_k / Σ a; of integer buffers (counters), take the largest value."""
    total = float(a.sum())
    if total == 0:
        return buffers
    floats = {name: buffer for name, buffer in buffers.items() if buffer.is_floating_point()}
    # Average the changes of the buffers. If the buffers themselves were averaged, rounding would alter those that no
    # client changed.
    change = weighted_update(floats, others, a / total)
    result: Params = {}
    for name, buffer in buffers.items():
        if name in floats:
            result[name] = buffer + change[name]
        else:
            result[name] = torch.stack([other[name] for other in others]).amax(dim=0)
    return result


class MeanBySize(Aggregator):
    """Weights a_k = n_k / Σ n (FedAvg), where client k used n_k samples in the round.

    The sum is over the clients that replied. If clients were drawn in proportion to their size, every draw has the same
    weight instead, because size would otherwise count twice.
    """

    needs_counts: ClassVar[bool] = True

    def coefficients(self, selection: Selection, returned: Ints, samples: Ints) -> Floats:
        """Return weights in proportion to the number of samples that the clients used.

        >>> selection = Selection.plain(np.array([0, 4, 7]), 10)
        >>> MeanBySize().coefficients(selection, np.array([0, 2]), np.array([30, 10])).tolist()
        [0.75, 0.25]
        """
        if selection.stratum_samples is not None:
            return StratumMean().coefficients(selection, returned, samples)
        sizes = samples.astype(np.float64) * selection.draws[returned]
        result: Floats = sizes / max(float(sizes.sum()), 1.0)
        return result


class Mean(Aggregator):
    """Equal weights a_k = 1 / r for r replies; a client that was drawn twice counts twice."""

    def coefficients(self, selection: Selection, returned: Ints, samples: Ints) -> Floats:
        """Return weights in proportion to the number of draws of each client."""
        draws = selection.draws[returned]
        result: Floats = draws / draws.sum()
        return result


class StratumMean(Aggregator):
    """The mean of the models of each stratum h, weighted by the stratum's size (FedSTS and FedSTaS).

    The model is w = (1/N) Σ_h N_h (1/m_h) Σ_{k∈S_h} w_k. N_h is the number of clients in stratum h, N that of all
    clients, and S_h are the m_h clients of the stratum that replied. Strata without a reply are left out, and the
    weights of the other strata increase. If clients were drawn in proportion to their samples, N_h and N count samples
    instead of clients.

    The papers call this mean unbiased, but it has two biases. With importance sampling inside the strata, clients with
    large gradients are drawn more often, and their weights are not reduced. Strata to which Neyman's allocation gives
    no draw are left out (in the published code, too). ``HorvitzThompson`` is unbiased.
    """

    def coefficients(self, selection: Selection, returned: Ints, samples: Ints) -> Floats:
        """Return N_h / m_h for each client, divided by their sum.

        >>> stratum, stratum_sizes = np.array([0, 1, 1]), np.array([2, 6])
        >>> selection = Selection(np.array([1, 5, 6]), np.ones(3, int), np.ones(3), stratum, stratum_sizes)
        >>> StratumMean().coefficients(selection, np.array([0, 1, 2]), np.ones(3, int)).tolist()
        [0.25, 0.375, 0.375]
        """
        stratum, draws = selection.stratum[returned], selection.draws[returned]
        per_stratum = np.bincount(stratum, weights=draws, minlength=len(selection.stratum_sizes))
        sizes = selection.stratum_sizes if selection.stratum_samples is None else selection.stratum_samples
        share = sizes[stratum] / _population(selection, sizes, per_stratum)
        result: Floats = share * draws / (per_stratum[stratum] * _chance(selection)[stratum])
        return result


class HorvitzThompson(Aggregator):
    """Weights a_k = draws_k / (N m_h p_k), which are unbiased for draws with replacement (Hansen and Hurwitz 1943).

    N is the number of clients, m_h the number of draws from the client's stratum h, p_k the probability that a draw
    from the stratum picks client k, and draws_k how often client k was drawn. For draws without replacement, m_h p_k is
    the inclusion probability π_k of the client, and a_k = 1 / (N π_k) (Horvitz and Thompson 1952). The a_k sum to one
    only on average, so they multiply updates and not whole models.
    """

    def check(self, config: FederationConfig, sampler: ClientSampler) -> None:
        """Require known probabilities: draws with replacement, systematic draws, or uniform draws."""
        if getattr(sampler, "allocation", None) == "neyman":
            problem = "can leave a stratum without a draw in every round, which weights cannot correct. "
            problem += "Use 'neyman-random' (the default of horvitz-thompson), or another allocation."
            raise SpecError("method.allocation", problem, "neyman")
        known = isinstance(sampler, Uniform) or getattr(sampler, "draws", None) == "systematic"
        if getattr(sampler, "replacement", None) is False and not known:
            problem = (
                "the aggregator horvitz-thompson requires draws with replacement. Set it to true; with fedsts and "
            )
            problem += "fedstas, set method.aggregation = 'horvitz-thompson' or 'inclusion' instead."
            raise SpecError("method.client_sampler.replacement", problem, False)

    def coefficients(self, selection: Selection, returned: Ints, samples: Ints) -> Floats:
        """Return draws_k / (N m_h p_k), where m_h counts only the draws of clients that replied."""
        stratum, draws = selection.stratum[returned], selection.draws[returned]
        per_stratum = np.bincount(stratum, weights=draws, minlength=len(selection.stratum_sizes))
        population = _population(selection, selection.stratum_sizes, per_stratum)
        p = selection.probability[returned] * _chance(selection)[stratum]
        result: Floats = draws / (population * per_stratum[stratum] * p)
        return result


def _chance(selection: Selection) -> Floats:
    """Return the probability that a stratum gets at least one draw, for each of the H strata, shape (H,)."""
    chance = selection.stratum_chance
    return np.ones(len(selection.stratum_sizes)) if chance is None else chance


def _population(selection: Selection, sizes: Ints, per_stratum: NDArray[Any]) -> int:
    """Return the total size of the strata, without invited strata from which no client replied.

    Strata that had no draw are left out too. There is one exception: if the numbers of draws are random
    (``stratum_chance``), these strata count, because ``_chance`` corrects the weights for strata without a draw.
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
        "median": "fedstrata.aggregation.robust:Median",
        "trimmed-mean": "fedstrata.aggregation.robust:TrimmedMean",
        "krum": "fedstrata.aggregation.robust:Krum",
        "multi-krum": "fedstrata.aggregation.robust:MultiKrum",
        "geometric-median": "fedstrata.aggregation.robust:GeometricMedian",
        "centred-clipping": "fedstrata.aggregation.robust:CentredClipping",
        "fedau": "fedstrata.aggregation.memory:Intervals",
        "mifa": "fedstrata.aggregation.memory:LastUpdates",
        "fedvarp": "fedstrata.aggregation.memory:VarianceReduced",
    },
)

AnyAggregator = Annotated[Aggregator, FromRegistry(AGGREGATORS)]
