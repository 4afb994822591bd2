"""Readings: numbers that follow from a paper's formulas or algorithms, such as biases, weights and privacy budgets.

Readings are computed in seconds, without training a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch.utils.flop_counter import FlopCounterMode

from fedstrata.aggregation.base import Aggregator, StratumMean
from fedstrata.experiments.run import run
from fedstrata.sampling.allocation import neyman
from fedstrata.sampling.client_sizes import truth_probability
from fedstrata.sampling.fedssar import shares
from fedstrata.sampling.stratified import draw
from fedstrata.stratify.schedule import frequencies, schedule
from fedstrata.stratify.selection import select_batch

Ints = NDArray[np.int64]
Supported = Literal["confirmed", "partly", "contradicted"]
DRAWS = 200_000
FEW_MORE = 1.05
"""The largest ratio to the baseline's number that still counts as "few more" bytes or operations."""
EXACT, DRAWN = 0.01, 0.05
"""The largest relative error of a correct number: ``EXACT`` for exact numbers, ``DRAWN`` for means of random draws."""


@dataclass(frozen=True)
class Reading:
    """A result that follows from a paper's formulas or algorithms, without training a model.

    Args:
        name: The name of the reading, by which claims refer to it.
        description: The beginning of a sentence about what is computed.
        figure: The result, as text that completes the sentence.
        values: A mapping from the name of each number in the result to the number.
        verdict: Whether the result supports the paper's statement.
    """

    name: str
    description: str
    figure: str
    values: Mapping[str, float]
    verdict: Supported


def verdict(right: Sequence[bool]) -> Supported:
    """Return the verdict over several cases. A case is True if the paper's claim holds in this case.

    >>> verdict([True, True]), verdict([True, False]), verdict([False])
    ('confirmed', 'partly', 'contradicted')
    """
    return "confirmed" if all(right) else "partly" if any(right) else "contradicted"


def fedssar_bias(sizes: list[int], places: int = 10) -> float:
    """Return the bias of FedSSAR's mean update, relative to the length of the mean update over all N clients.

    We assume that the clients of a cluster have equal updates, that updates of different clusters are orthogonal,
    and that all updates have the same length. A cluster with N_h of N clients gets m_h of m draws. The cluster's weight
    in the mean is m_h / m, but should be N_h / N.

    Args:
        sizes: N_h, the number of clients in each cluster; at most m clusters.
        places: m, the number of draws.

    >>> round(fedssar_bias([50, 30, 20]), 3), round(fedssar_bias([90, 5, 5]), 3)
    (0.0, 0.136)
    """
    counts = np.array(sizes, dtype=np.int64)
    weights = shares(places, counts, counts, np.random.default_rng(0)) / places
    return _relative_error(weights, counts)


def _relative_error(weights: NDArray[Any], counts: Ints) -> float:
    """Return ‖w − s‖ / ‖s‖, where w are the weights of groups of clients, and s are their shares of all clients."""
    wanted = counts / counts.sum()
    return float(np.linalg.norm(weights - wanted) / np.linalg.norm(wanted))


def neyman_bias(sizes: list[int], deviations: list[float], places: int) -> tuple[list[int], float]:
    """Return Neyman's allocation of draws to strata, and the relative bias of FedSTS's mean update.

    Some strata may get no draws. FedSTS's mean is then biased, because it leaves these strata out and increases the
    weights of the other strata. As in ``fedssar_bias``, updates of different strata are orthogonal and of equal length.

    Args:
        sizes: N_h, the number of clients in each stratum.
        deviations: S_h, how much the clients in each stratum differ; see ``fedstrata.sampling.allocation.spread``.
        places: m, the number of draws.

    >>> neyman_bias([10, 10], [1.0, 1.0], 4)
    ([2, 2], 0.0)
    """
    counts = np.array(sizes, dtype=np.int64)
    allocation = neyman(places, counts, np.array(deviations), least=0)
    clients = np.arange(counts.sum())
    strata = np.repeat(np.arange(len(counts)), counts)
    alike = np.ones(len(clients))
    chosen = draw(clients, strata, counts, allocation, alike, False, np.random.default_rng(0))
    everybody = np.arange(len(chosen.clients))
    weights = StratumMean().coefficients(chosen, everybody, np.ones_like(everybody))
    of_strata = np.bincount(chosen.stratum, weights=weights, minlength=len(counts))
    return allocation.tolist(), _relative_error(of_strata, counts)


def mean_of_one_draw(lengths: NDArray[np.float64], aggregator: Aggregator) -> float:
    """Return the expected length of the aggregated update if one client is drawn from one stratum.

    All updates have the same direction. As in FedSTS, the probability of drawing a client is proportional to the length
    of its gradient. Here, this length equals the length of the client's update.

    Args:
        lengths: The length of every client's update, shape (N,).
        aggregator: The aggregator that is applied to the drawn update.
    """
    n = len(lengths)
    clients, strata = np.arange(n), np.zeros(n, dtype=np.int64)
    # All clients are drawn only to obtain the probability with which a single draw chooses each client.
    all_drawn = draw(clients, strata, np.array([n]), np.array([n]), lengths, False, np.random.default_rng(0))
    total = 0.0
    for k in range(n):
        one = {key: getattr(all_drawn, key)[[k]] for key in ("clients", "draws", "probability", "stratum")}
        weight = aggregator.coefficients(replace(all_drawn, **one), np.array([0]), np.array([1]))
        total += float(all_drawn.probability[k] * weight[0] * lengths[k])
    return total


def size_estimates(sizes: Ints, bound: int, epsilon: float, draws: int = DRAWS) -> NDArray[np.float64]:
    """Return a server's simulated estimates ñ of the total number of samples, computed from randomised reports.

    The estimates, shape (draws,), are not yet clipped to at least 1.

    Args:
        sizes: n_k, the number of samples of each participant, shape (m,).
        bound: The bound M. Participants report numbers from 1 to M − 1.
        epsilon: ε, the privacy budget of a report.
        draws: The number of estimates.
    """
    alpha = truth_probability(epsilon, bound)
    generator = np.random.default_rng(0)
    shape = (draws, len(sizes))
    clipped = np.clip(sizes, 1, bound - 1)
    answers = np.where(generator.random(shape) < alpha, clipped, generator.integers(1, bound, size=shape))
    estimates: NDArray[np.float64] = (answers.sum(axis=1) - (1 - alpha) * bound * len(sizes) / 2) / alpha
    return estimates


def keep_errors(size: int, participants: int, bound: int, epsilon: float, fraction: float = 0.1) -> float:
    """Return the root mean square of p̃ − p, the error of the probability of keeping a sample (FedSTaS, Lemma 2.2).

    Of all n samples, n* = q n are wanted, so the exact probability is p = q. Under privacy, the server knows only an
    estimate ñ of n, and clients use p̃ = min(1, n*/ñ).

    Args:
        size: n_k, the number of samples of every participant.
        participants: m, the number of participants.
        bound: The bound M. Participants report numbers from 1 to M − 1.
        epsilon: ε, the privacy budget of a report.
        fraction: q, the fraction of samples to keep.

    >>> keep_errors(50, 10, 100, 50.0) < 1e-9  # with this ε, nearly all reports are the true sizes
    True
    """
    estimates = size_estimates(np.full(participants, size), bound, epsilon, max(DRAWS // participants, 200))
    keep = np.minimum(1.0, fraction * participants * size / np.maximum(estimates, 1.0))
    return float(np.sqrt(((keep - fraction) ** 2).mean()))


def label_variance(labels: Ints, batch: int) -> float:
    """Return the part of the variance of a batch's mean gradient that is due to the labels in the batch.

    We assume that gradients of different labels are orthogonal and have length 1. The variance is then the mean of ‖b −
    s‖² over the batches, where b are the label fractions in the batch, and s the label fractions in all samples.

    Args:
        labels: The labels of the samples, in the order of training, shape (L,).
        batch: The number of samples in a batch; a smaller last batch is ignored.

    >>> label_variance(np.array([0, 1, 0, 1]), 2), label_variance(np.array([0, 0, 1, 1]), 2)
    (0.0, 0.5)
    """
    classes = int(labels.max()) + 1
    whole = labels[: len(labels) // batch * batch].reshape(-1, batch)
    parts = np.stack([(whole == label).mean(axis=1) for label in range(classes)], axis=1)
    off = parts - np.bincount(labels, minlength=classes) / len(labels)
    return float((off**2).sum(axis=1).mean())


def uses_a_sample(counts: list[int], cap: int, batch: int = 10, seed: int = 0) -> list[float]:
    """Return the mean number of uses of a sample per epoch, for each client, with Stratify's uniform selection.

    All samples have one label. A client can be drawn until all its samples have been used in the epoch.

    Args:
        counts: The number of samples at each client.
        cap: The largest number of samples with this label that an epoch uses (the limit of the frequency f_l).
        batch: The number of positions in a batch.
        seed: The seed of the draws.

    >>> uses_a_sample([500, 500], 1000)
    [1.0, 1.0]
    """
    generator = np.random.default_rng(seed)
    held = np.array(counts, dtype=np.int64)
    unused = held.copy()
    wanted = int(frequencies(np.array([held.sum()]), "capped", cap)[0])
    while wanted > 0 and unused.any():
        positions = np.zeros(min(batch, wanted, int(unused.sum())), dtype=np.int64)
        chosen = select_batch(positions, {0: np.flatnonzero(unused)}, None, generator)
        # The draw of a client without unused samples does not count, and is repeated in a later batch.
        used = np.minimum(np.bincount(chosen, minlength=len(held)), unused)
        unused -= used
        wanted -= int(used.sum())
    return [round(float(use), 2) for use in (held - unused) / held]


def training_operations(method: str, epochs: int, samples: int = 100) -> int:
    """Return the number of floating-point operations in a run with one client and one round.

    Nearly all operations are in training. Only matrix products and convolutions count, in forward and backward passes.
    A multiplication and an addition count as two operations. The model is the one that ReBaFL uses for images of 28×28
    pixels.

    Args:
        method: The name of the method.
        epochs: E, the number of local epochs.
        samples: n_k, the client's number of samples.
    """
    images = np.zeros((samples, 28, 28, 1), dtype=np.uint8)
    labels = np.arange(samples) % 10
    spec = {
        "partition": {"name": "iid", "clients": 1},
        "method": {"name": method},
        "model": {"name": "cnn"},
        "training": {"rounds": 1, "clients_per_round": 1, "local_epochs": epochs, "batch_size": 50, "workers": 1},
    }
    with FlopCounterMode(display=False) as counter:
        run(spec, data=(images, labels, images[:1], labels[:1]))
    return int(counter.get_total_flops())


def weight_variances(clients: int = 100, places: int = 10, draws: int = 4000) -> dict[str, float]:
    """Return the variance of a client's weight in the mean update, averaged over all clients.

    Args:
        clients: N, the number of clients.
        places: m, the number of clients that are drawn; it divides N.
        draws: The number of simulated draws for each way of drawing.

    Returns:
        The variance for each way of drawing: ``strata`` draws one client from each of m equal clusters; ``plain`` draws
        m of all clients without replacement, as FedAvg does; ``returning`` draws m of all clients with replacement.
    """
    generator = np.random.default_rng(0)
    groups = np.arange(clients).reshape(places, -1)
    kinds: dict[str, Callable[[], Ints]] = {
        "strata": lambda: np.array([generator.choice(group) for group in groups]),
        "plain": lambda: generator.choice(clients, places, replace=False),
        "returning": lambda: generator.choice(clients, places),
    }
    variances = {}
    for kind, draw_once in kinds.items():
        weights = np.stack([np.bincount(draw_once(), minlength=clients) for _ in range(draws)]) / places
        variances[kind] = float(weights.var(axis=0).mean())
    return variances


def cluster_variances(sizes: Sequence[int], draws: int = 4000) -> NDArray[np.float64]:
    """Return the variance of a client's weight in the mean update, for each cluster, shape (m,).

    One client is drawn from each of the m clusters. Each of these clients has the weight 1/m.

    Args:
        sizes: The number of clients in each cluster.
        draws: The number of simulated draws.
    """
    generator = np.random.default_rng(0)
    variances = []
    for size in sizes:
        chosen = generator.integers(size, size=draws)[:, None] == np.arange(size)
        variances.append((chosen / len(sizes)).var(axis=0).mean())
    return np.array(variances)


Made = tuple[str, Mapping[str, float], Sequence[bool]]
"""The result of a reading as text, its numbers, and whether the paper's statement holds in each case."""

_MAKERS: list[Callable[[], Reading]] = []
"""The functions that compute the readings, in the order in which the page shows them."""


def _reading(name: str, description: str) -> Callable[[Callable[[], Made]], Callable[[], Reading]]:
    """Return a decorator for a function that computes a reading. The decorator adds the function to ``_MAKERS``."""

    def add(compute: Callable[[], Made]) -> Callable[[], Reading]:
        def make() -> Reading:
            text, values, right = compute()
            return Reading(name, description, text, values, verdict(right))

        _MAKERS.append(make)
        return make

    return add


@_reading(
    "stratify-weights",
    "With uniform selection and a cap of 500 samples per label, the mean number of uses of a sample per epoch is",
)
def _uses() -> Made:
    uses = np.mean([uses_a_sample([900, 100], 500, seed=seed) for seed in range(20)], axis=0)
    even = np.mean([uses_a_sample([500, 500], 500, seed=seed) for seed in range(20)], axis=0)
    text = (
        f"{uses[0]:.2f} for a client with 900 samples of a label, and {uses[1]:.2f} for a client with 100 samples. "
        f"For two clients with 500 samples each, the numbers are {even[0]:.2f} and {even[1]:.2f}"
    )
    values = {"large": float(uses[0]), "small": float(uses[1])}
    return text, values, [abs(large / small - 1) <= DRAWN for large, small in (uses, even)]


@_reading(
    "stratify-variance",
    "We assume ten equally frequent labels with orthogonal gradients. The variance that labels cause in the gradient "
    "of 64 samples is",
)
def _label_variance() -> Made:
    batch, classes, samples = 64, 10, 6000
    generator = np.random.default_rng(0)
    counts = np.full(classes, samples)
    orders = [schedule(frequencies(counts), generator) for _ in range(20)]
    scheduled = float(np.mean([label_variance(order, batch) for order in orders]))
    # The variable ``random`` is for random draws from all samples, and ``alone`` is for a client with only one label.
    random, alone = (1 - 1 / classes) / batch, 1 - 1 / classes
    text = (
        f"{scheduled:.4f} with the schedule, {random:.4f} with random draws from all samples, and {alone:.1f} for "
        "a client with only one label"
    )
    values = {"schedule": scheduled, "random": random, "client": alone}
    return text, values, [scheduled <= (1 - DRAWN) * other for other in (random, alone)]


@_reading("neyman-zero", "An example has ten strata of ten clients, orthogonal updates and ten draws. In this example,")
def _neyman() -> Made:
    deviations = [0.02, 0.03, 1.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]
    allocation, bias = neyman_bias([10] * 10, deviations, 10)
    text = (
        f"{allocation.count(0)} strata get no draw, so the error of the mean update is {100 * bias:.0f} % of its length"
    )
    return text, {"bias": 100 * bias}, [bias <= EXACT]


@_reading(
    "importance-bias",
    "In a stratum of ten clients whose updates have the lengths 1, 2, … 10,",
)
def _importance() -> Made:
    updates = np.arange(1.0, 11.0)
    mean, drawn = float(updates.mean()), mean_of_one_draw(updates, StratumMean())
    text = (
        f"the mean update is {100 * (drawn / mean - 1):.0f} % too long: its length is {drawn:.1f} instead of {mean:.1f}"
    )
    return text, {"drawn": drawn, "mean": mean}, [abs(drawn / mean - 1) <= EXACT]


@_reading("ldp", "With ε = 3 and M = 100, the largest likelihood ratio of a report is")
def _privacy() -> Made:
    epsilon, bound = 3.0, 100
    alpha = truth_probability(epsilon, bound)
    other = (1 - alpha) / (bound - 1)
    ratio = (alpha + other) / other
    spent = 99 * 10 / 100 * epsilon
    text = (
        f"{ratio:.3f}, which is e^ε. In 99 rounds with 10 of 100 clients each, the average client spends a total ε of "
        f"{spent:.1f}"
    )
    return text, {"ratio": ratio, "spent": spent}, [ratio <= math.exp(epsilon) * (1 + 1e-9)]


@_reading("ldp-samples", "With ε = 3, M = 100 and ten clients of 600 samples each,")
def _private_samples() -> Made:
    estimates = size_estimates(np.full(10, 600), 100, 3.0)
    held = np.maximum(estimates, 1.0)
    keep = np.minimum(1.0, 0.1 * held.mean() / held)
    values = {
        "mean": float(held.mean()),
        "sd": float(held.std()),
        "keep": float(keep.mean()),
        "all": float((keep == 1).mean()),
    }
    text = (
        f"samples are kept with probability {values['keep']:.2f} instead of 0.10. In "
        f"{100 * values['all']:.1f} % of the rounds, all samples are kept"
    )
    return text, values, [abs(values["keep"] / 0.1 - 1) <= DRAWN]


@_reading(
    "ldp-limit",
    "Under privacy (ε = 3, M = 100), a sample is kept with probability p̃ instead of p = 0.1. The root mean square "
    "error of p̃ is",
)
def _limit() -> Made:
    bound, epsilon, wanted = 100, 3.0, 0.1
    counts, sizes = (10, 100, 1000, 10_000), (60, 600)
    errors = {size: [keep_errors(size, m, bound, epsilon, wanted) for m in counts] for size in sizes}
    clipped = wanted * 600 / (bound - 1)
    few, many = (errors[60][counts.index(m)] for m in (10, 10_000))
    text = (
        f"{few:.3f} with 10 clients of 60 samples, and {many:.3f} with 10,000 such clients. With 600 samples per "
        f"client, the errors are {errors[600][0]:.3f} and {errors[600][-1]:.3f}. Sizes are then clipped to "
        f"{bound - 1}, so p̃ tends to {clipped:.3f}"
    )
    values = {f"{size}, {m}": error for size, row in errors.items() for m, error in zip(counts, row, strict=True)}
    return text, values, [row[-1] <= DRAWN * wanted for row in errors.values()]


@_reading(
    "fedssar-bias",
    "We assume ten draws and orthogonal updates. The bias of the mean update, as a percentage of its length, is",
)
def _clusters() -> Made:
    biases = {str(sizes): 100 * fedssar_bias(sizes) for sizes in ([90, 5, 5], [34, 33, 33], [7, 5, 3, 2, 2, 1])}
    texts = [f"{value:.1f} % for clusters of {name} clients" for name, value in biases.items()]
    whole = 100 * fedssar_bias([50, 30, 20])
    text = (
        f"{texts[0]}, {texts[1]} and {texts[2]}. The bias is {whole:.0f} % for clusters of [50, 30, 20] clients, "
        "because each cluster's share of the ten draws is then a whole number"
    )
    return text, biases, [value <= 100 * EXACT for value in [*biases.values(), whole]]


@_reading(
    "fedssar-variance",
    "With one draw from each of 10 clusters of 100 clients in total, the variance of a client's weight is",
)
def _weight_variance() -> Made:
    n, m = 100, 10
    formula = (1 / (m * n)) * (1 - m / n)
    equal = float(cluster_variances([10] * 10).mean())
    unequal = cluster_variances([5] * 5 + [15] * 5)
    small, large = float(unequal[:5].mean()), float(unequal[5:].mean())
    text = (
        f"{formula:.2e} by the paper's Eq. 11. In simulations, it is {equal:.2e} if each cluster has 10 clients. If "
        f"five clusters have 5 clients and five have 15, it is {small:.2e} in a small cluster and {large:.2e} in a "
        "large one"
    )
    values = {"drawn": equal, "small": small, "large": large, "formula": formula}
    return text, values, [abs(variance / formula - 1) <= EXACT for variance in (equal, small, large)]


@_reading("fedssar-less-variance", "With 10 draws from 100 clients, the variance of a client's weight is")
def _less_variance() -> Made:
    variances = weight_variances()
    text = (
        f"{variances['strata']:.2e} with strata. Without strata, it is {variances['returning']:.2e} with replacement "
        f"(the paper's Eq. 10), and {variances['plain']:.2e} without replacement (FedAvg)"
    )
    return text, variances, [variances["strata"] <= (1 - DRAWN) * variances[other] for other in ("returning", "plain")]


@_reading(
    "rebafl-operations",
    "With ReBaFL, a client needs more floating-point operations per round than with FedAvg:",
)
def _prototype_operations() -> Made:
    once, twice = ({m: training_operations(m, epochs) for m in ("fedavg", "rebafl")} for epochs in (1, 2))
    epoch = {method: twice[method] - once[method] for method in once}
    # Operations outside training, such as evaluations, are the same for both methods, and cancel out.
    prototypes = (once["rebafl"] - epoch["rebafl"]) - (once["fedavg"] - epoch["fedavg"])
    values = {
        str(epochs): (epochs * epoch["rebafl"] + prototypes) / (epochs * epoch["fedavg"]) for epochs in (1, 5, 20)
    }
    text = (
        f"{values['5']:.2f} times as many with the paper's five local epochs, {values['1']:.2f} times as many with one "
        f"local epoch, and {values['20']:.2f} times as many with twenty local epochs"
    )
    return text, values, [value <= FEW_MORE for value in values.values()]


@cache
def readings() -> dict[str, Reading]:
    """Return a mapping from the name of each reading to the reading."""
    return {reading.name: reading for reading in (make() for make in _MAKERS)}
