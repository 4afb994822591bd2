"""Aggregate the clients' models on the server.

An aggregation combines the clients' updates with one weight a_k per client: w ← w_t + Σ_k a_k (w_k − w_t), where w_t is
the global model and w_k is the trained model of client k. An ``Aggregator`` computes the weights a_k. A
``ServerOptimizer`` then applies the combined update as a negative gradient.
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
from fedstrata.federation.secure.fit import EQUAL, Bounds, Summands, Sums
from fedstrata.sampling.base import ClientSampler, Selection, Uniform


class Aggregator(Setting):
    """Base class of the aggregators, which combine the clients' updates with one weight a_k per client.

    Args:
        server: Optimiser that applies the combined update to the global model. Default: plain addition.
    """

    handlers: ClassVar[tuple[Callable[..., Any], ...]] = ()
    """The functions with which clients answer the aggregator's own requests; see ``fedstrata.clients.handling``."""

    needs_counts: ClassVar[bool] = False
    """Whether the averaging weights depend on the number of samples that each client used."""

    needs_replies: ClassVar[str] = ""
    """Why individual replies are needed, as a verb phrase ("compares updates"); empty if sums over clients are enough.

    A class must declare this attribute if it overrides a method that reads replies.
    """

    own_starts: ClassVar[bool] = False
    """Whether clients start training from the models returned by ``starts``, instead of the global model."""

    server: AnyServer = ServerOptimizer()

    def check(self, config: FederationConfig, sampler: ClientSampler) -> None:
        """Raise ``SpecError`` if the aggregator does not work with the federation's settings or the client sampler."""

    @abstractmethod
    def coefficients(self, selection: Selection, returned: Ints, samples: Ints) -> Floats:
        """Return the averaging weight a_k of each client that replied.

        Args:
            selection: The invited clients, and how they were drawn.
            returned: The r clients that replied, as ascending indices into ``selection.clients``, shape (r,).
            samples: The number of samples, tokens or pixels on which each of these clients trained, shape (r,).

        Returns:
            The weights, shape (r,).
        """

    def shortage(self, replies: int) -> str:
        """Return an error message if there are too few replies to change the model; otherwise an empty string."""
        return ""

    def weigh(self, selection: Selection, returned: Ints, replies: Sequence[FitReply]) -> Floats:
        """Return the averaging weight a_k of each reply.

        Override this method if the weights depend on more than the numbers of samples.

        Args:
            selection: The invited clients, and how they were drawn.
            returned: The r clients that replied, as ascending indices into ``selection.clients``, shape (r,).
            replies: The replies of these r clients, in the same order.

        Returns:
            The weights, shape (r,).
        """
        return self.coefficients(selection, returned, np.array([reply.size for reply in replies]))

    def init(self, config: FederationConfig) -> Tree:
        """Return the state before the first round. Default: None, because the server optimiser has no state yet.

        A subclass that stores values between rounds must override ``init`` and ``combine``. Checkpoints contain the
        state, so it must be a tree of plain values, arrays and tensors (``fedstrata.base.records``).
        """
        return None

    def starts(self, weights: Weights, state: Tree, clients: Sequence[int]) -> dict[int, Weights]:
        """Return the model from which each client starts training; see ``own_starts``.

        Args:
            weights: The global model.
            state: The state after the previous round.
            clients: The invited clients.
        """
        return dict.fromkeys(clients, weights)

    def evaluated(self, weights: Weights, state: Tree) -> Weights:
        """Return the model to evaluate, and to save at the end of a run. Default: the global model."""
        return weights

    def combine(
        self, weights: Weights, state: Tree, selection: Selection, replies: Mapping[int, FitReply]
    ) -> tuple[Weights, Tree]:
        """Return the new global model and the new state. Without replies, the model and the state do not change.

        This method is called in every round, even if no client replied. Do not change ``state`` in place.

        Args:
            weights: The global model of the round.
            state: The state after the previous round. The base class stores only the state of the server optimiser.
            selection: The invited clients, and how they were drawn.
            replies: A mapping from each client to its reply, in ascending order of clients. An invited client is
                missing if it was absent or late, if it failed, or if the server refused its reply.
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
        """Apply an update to the parameters with the server optimiser, and average the buffers of the replies.

        Args:
            weights: The global model of the round.
            update: The change of each parameter.
            state: The state of the server optimiser.
            selection: The invited clients, and the round. The schedule of the learning rate depends on the round.
            answers: The replies.
            a: The weight of each reply when buffers are averaged, shape (r,).

        Returns:
            The new global model, and the new state of the server optimiser.
        """
        params, state = self.server.apply(weights.params, update, state, selection.round, selection.rounds)
        buffers = weights.buffers and mean_buffers(weights.buffers, [reply.weights.buffers for reply in answers], a)
        return Weights(params, buffers), state

    @property
    def share(self) -> str:
        """The weights in secure sums: in proportion to numbers of samples (``"samples"``), or equal for all clients."""
        return "samples" if self.needs_counts else EQUAL.name

    def summands(self, bounds: Bounds) -> Summands:
        """Return the parts of a reply that are summed over clients if ``privacy.sums`` is set."""
        weight = bounds.by_size if self.needs_counts else EQUAL
        return bounds.updates(weight) | bounds.buffers(weight) | (bounds.size() if self.needs_counts else {})

    def combine_sums(self, weights: Weights, state: Tree, selection: Selection, sums: Sums) -> tuple[Weights, Tree]:
        """Compute the same values as ``combine``, but only from sums over clients; see ``summands``."""
        if not sums.weight(self.share):
            return weights, state
        update = sums.updates(self.share, weights.params, sums.weight(self.share))
        return self.step_sums(weights, update, state, selection, sums)

    def step_sums(
        self, weights: Weights, update: Params, state: Tree, selection: Selection, sums: Sums
    ) -> tuple[Weights, Tree]:
        """Return the same values as ``step``, but compute the mean of the buffers from sums over clients.

        Integer buffers, such as counters, do not change, because the maximum over clients cannot be computed from a
        sum.
        """
        params, state = self.server.apply(weights.params, update, state, selection.round, selection.rounds)
        buffers = weights.buffers
        if "buffers" in sums.summands:
            changes = sums.of("buffers", sums.weight(self.share))
            buffers = buffers | {name: buffers[name] + change for name, change in changes.items()}
        return Weights(params, buffers), state


def weighted_update(params: Params, models: Sequence[Params], a: Floats) -> Params:
    """Return the combined update Σ_k a_k (w_k − w_t) of each parameter, summed in the order of ``models``."""
    update, factors = Params(), a.tolist()
    for name, before in params.items():
        update[name] = torch.zeros_like(before)
        for model, factor in zip(models, factors, strict=True):
            update[name].add_(model[name] - before, alpha=factor)
    return update


def squared_norm(tensors: Params) -> float:
    """Return the squared norm ‖v‖², where the vector v contains all numbers in the tensors."""
    return sum(float(tensor.square().sum(dtype=torch.float64)) for tensor in tensors.values())


def mean_buffers(buffers: Params, others: Sequence[Params], a: Floats) -> Params:
    """Average floating-point buffers with the weights a_k / Σ_j a_j; take the maximum of integer buffers (counters)."""
    total = float(a.sum())
    if total == 0:
        return buffers
    floats = {name: buffer for name, buffer in buffers.items() if buffer.is_floating_point()}
    # Average the changes of the buffers. If the buffers themselves were averaged, rounding would alter buffers that no
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
    """The mean of the clients' models, weighted by the number of samples that each client used (FedAvg).

    The weights of the clients that replied add up to 1. If the sampler drew clients in proportion to their numbers of
    samples, all draws have equal weights instead.
    """

    needs_counts: ClassVar[bool] = True
    needs_replies = ""

    def coefficients(self, selection: Selection, returned: Ints, samples: Ints) -> Floats:
        """Return weights proportional to the number of samples that each client used.

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
    """The mean of the clients' models, with equal weights. A client that was drawn twice has twice the weight."""

    needs_replies = ""

    def coefficients(self, selection: Selection, returned: Ints, samples: Ints) -> Floats:
        """Return weights proportional to each client's number of draws."""
        draws = selection.draws[returned]
        result: Floats = draws / draws.sum()
        return result


class StratumMean(Aggregator):
    """The mean model of each stratum, averaged over strata in proportion to their sizes (FedSTS, FedSTaS).

    The new model is w = (1/N) Σ_h N_h (1/m_h) Σ_{k∈S_h} w_k. N is the number of all clients, and N_h is the number of
    clients in stratum h. S_h is the set of the m_h clients of stratum h that replied. Strata without a reply have the
    weight 0, and the weights of the other strata increase accordingly. If clients were drawn in proportion to their
    numbers of samples, N_h and N are numbers of samples, not of clients.

    The papers call this average unbiased, but it has two biases. First, clients with large gradients are drawn more
    often, but do not get smaller weights. Second, strata without a drawn client have the weight 0, as in the published
    code. ``HorvitzThompson`` is unbiased.
    """

    needs_replies = "gives each client a weight that depends on its stratum"

    def coefficients(self, selection: Selection, returned: Ints, samples: Ints) -> Floats:
        """Return weights that are proportional to N_h / m_h and add up to 1.

        >>> stratum, stratum_sizes = np.array([0, 1, 1]), np.array([2, 6])
        >>> selection = Selection(np.array([1, 5, 6]), np.ones(3, int), np.ones(3), stratum, stratum_sizes)
        >>> StratumMean().coefficients(selection, np.array([0, 1, 2]), np.ones(3, int)).tolist()
        [0.25, 0.375, 0.375]
        """
        sizes = selection.stratum_sizes if selection.stratum_samples is None else selection.stratum_samples
        population, m, chance = _strata(selection, returned, sizes)
        share = sizes[selection.stratum[returned]] / population
        result: Floats = share * selection.draws[returned] / (m * chance)
        return result


class HorvitzThompson(Aggregator):
    """An unbiased estimate of the mean update of all clients, for draws of known probability (Horvitz, Thompson 1952).

    The weight of client k in stratum h is draws_k / (N m_h p_k). N is the number of clients, and client k was drawn
    draws_k times. There were m_h draws from stratum h, and each of these draws picked client k with probability p_k.
    For draws without replacement, the weight is 1 / (N π_k), where π_k is the probability that client k is drawn. The
    weights add up to 1 only on average, so they are applied to updates and not to whole models.
    """

    needs_replies = "gives each client a weight that depends on its probability of being drawn"

    def check(self, config: FederationConfig, sampler: ClientSampler) -> None:
        """Raise ``SpecError`` if probabilities of draws are unknown, or if clients of some strata might never be drawn.

        The probabilities are known for draws with replacement, systematic draws and uniform draws.
        """
        allocation, draws = getattr(sampler, "allocation", None), config.training.invited(config.clients)
        all_drawn = allocation in (None, "neyman-random") or (
            allocation != "neyman" and draws >= getattr(sampler, "strata", 0)
        )
        if not all_drawn:
            problem = (
                f"with {draws} clients per round, some strata may never be drawn. Weights cannot correct the resulting "
            )
            problem += "bias. Set method.allocation = 'neyman-random', the default of this aggregator."
            raise SpecError("method.allocation", problem, allocation)
        known = isinstance(sampler, Uniform) or getattr(sampler, "draws", None) == "systematic"
        if getattr(sampler, "replacement", None) is False and not known:
            problem = "the aggregator 'horvitz-thompson' requires that clients are drawn with replacement. Set "
            problem += "replacement = true. With fedsts or fedstas, set method.aggregation = 'horvitz-thompson' or "
            problem += "'inclusion' instead."
            raise SpecError("method.client_sampler.replacement", problem, False)

    def coefficients(self, selection: Selection, returned: Ints, samples: Ints) -> Floats:
        """Return the weights draws_k / (N m_h p_k), where m_h includes only the draws of clients that replied."""
        population, m, chance = _strata(selection, returned, selection.stratum_sizes)
        result: Floats = selection.draws[returned] / (population * m * (selection.probability[returned] * chance))
        return result


def _strata(selection: Selection, returned: Ints, sizes: Ints) -> tuple[int, NDArray[Any], Floats]:
    """Describe the strata of the r clients that replied.

    Args:
        selection: The invited clients, and how they were drawn.
        returned: The clients that replied, as indices into ``selection.clients``, shape (r,).
        sizes: The size of each stratum, shape (H,).

    Returns:
        The total size of the strata from which at least one client replied, and two arrays of shape (r,) about the
        stratum of each client that replied. The first array contains the number m_h of draws from the stratum. The
        second array contains the probability that the stratum gets at least one draw. If this probability can be below
        1, the total size also includes strata without an invited client, because the probability compensates for these
        strata.
    """
    stratum = selection.stratum[returned]
    m = np.bincount(stratum, weights=selection.draws[returned], minlength=len(sizes))
    missing, chance = m == 0, np.ones(len(returned))
    if selection.stratum_chance is not None:
        missing &= np.bincount(selection.stratum, minlength=len(sizes)) > 0
        chance = selection.stratum_chance[stratum]
    return max(int(sizes[~missing].sum()), 1), m[stratum], chance


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
        "fednova": "fedstrata.aggregation.scaled:Normalised",
        "fedexp": "fedstrata.aggregation.scaled:Extrapolated",
        "fedau": "fedstrata.aggregation.memory:Intervals",
        "mifa": "fedstrata.aggregation.memory:LastUpdates",
        "fedawe": "fedstrata.aggregation.memory:Echoes",
        "fedvarp": "fedstrata.aggregation.memory:VarianceReduced",
    },
)

AnyAggregator = Annotated[Aggregator, FromRegistry(AGGREGATORS)]
