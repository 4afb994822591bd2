"""Compute *readings*: numbers that follow from a paper's formulas or algorithms, such as biases and privacy budgets.

The calculations take only seconds, and do not train a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedstrata.aggregation.base import StratumMean
from fedstrata.papers.calculations import (
    cluster_variances,
    fedssar_bias,
    keep_errors,
    label_variance,
    largest_curvature,
    mean_of_one_draw,
    neyman_bias,
    sampled_variance,
    size_estimates,
    training_operations,
    transfers,
    uses_a_sample,
    weight_variances,
)
from fedstrata.runs.preparation import prepare
from fedstrata.sampling.client_sizes import truth_probability
from fedstrata.spec.experiment import Experiment
from fedstrata.stratify.schedule import frequencies, schedule

Ints = NDArray[np.int64]
Supported = Literal["confirmed", "partly", "contradicted"]
FEW_MORE = 1.05
"""A number of bytes or operations is "few more" if it is at most this multiple of the baseline's number."""
EXACT, DRAWN = 0.01, 0.05
"""Maximum relative error of a correct number: ``EXACT`` for exact numbers, ``DRAWN`` for means of random draws."""


@dataclass(frozen=True)
class Reading:
    """A result that follows from a paper's formulas or algorithms. No model is trained for it.

    Args:
        name: Name by which claims refer to the reading.
        description: Beginning of a sentence that says what is computed.
        figure: The result, as text that completes the sentence in ``description``.
        values: The numbers of the result, as a mapping from names to numbers.
        verdict: Whether the result supports the paper's statement.
    """

    name: str
    description: str
    figure: str
    values: Mapping[str, float]
    verdict: Supported


def verdict(right: Sequence[bool]) -> Supported:
    """Return the verdict on a claim. ``right`` says for each case whether the claim holds.

    >>> verdict([True, True]), verdict([True, False]), verdict([False])
    ('confirmed', 'partly', 'contradicted')
    """
    return "confirmed" if all(right) else "partly" if any(right) else "contradicted"


Made = tuple[str, Mapping[str, float], Sequence[bool]]
"""The result of a calculation: a text, its numbers, and a list with True for each case in which the statement holds."""

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
    "We assume uniform selection and a cap of 500 samples per label. On average, a sample is used",
)
def _uses() -> Made:
    uses = np.mean([uses_a_sample([900, 100], 500, seed=seed) for seed in range(20)], axis=0)
    even = np.mean([uses_a_sample([500, 500], 500, seed=seed) for seed in range(20)], axis=0)
    text = (
        f"{uses[0]:.2f} times per epoch at a client with 900 samples of a label, and {uses[1]:.2f} times at a client "
        f"with 100 samples. If both clients have 500 samples, a sample is used {even[0]:.2f} times on average at one "
        f"client, and {even[1]:.2f} times at the other"
    )
    values = {"large": float(uses[0]), "small": float(uses[1])}
    return text, values, [abs(large / small - 1) <= DRAWN for large, small in (uses, even)]


@_reading(
    "stratify-variance",
    "We assume ten equally frequent labels with orthogonal gradients. Part of the variance of the mean "
    "gradient of 64 samples comes from their labels. This part is",
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
        f"{scheduled:.4f} if the labels follow the schedule, {random:.4f} if the samples are random draws from all "
        f"samples, and {alone:.1f} if all 64 samples are from a client with only one label"
    )
    values = {"schedule": scheduled, "random": random, "client": alone}
    return text, values, [scheduled <= (1 - DRAWN) * other for other in (random, alone)]


@_reading(
    "neyman-zero", "We consider an example with ten strata of ten clients each, orthogonal updates and ten draws. Here,"
)
def _neyman() -> Made:
    deviations = [0.02, 0.03, 1.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]
    allocation, bias = neyman_bias([10] * 10, deviations, 10)
    text = (
        f"no client is drawn from {allocation.count(0)} of these strata, and the error of the mean update is "
        f"{100 * bias:.0f} % of the correct update's length"
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
        f"the average length of a drawn update is {drawn:.1f}. This is {100 * (drawn / mean - 1):.0f} % more than "
        f"the length of the mean update, {mean:.1f}"
    )
    return text, {"drawn": drawn, "mean": mean}, [abs(drawn / mean - 1) <= EXACT]


@_reading(
    "fedsts-variance",
    "In simulations, ten of 100 clients are drawn. The 100 clients form ten groups, and gradients in a group are "
    "similar. With the published sampling, the variance of the mean update is",
)
def _variance() -> Made:
    cases = {"clear": (0.3, 1.0), "weak": (0.5, 0.5)}
    simulated = {name: sampled_variance(*case) for name, case in cases.items()}
    ratios, biases = ([f"{100 * each[key]:.0f} %" for each in simulated.values()] for key in ("ratio", "bias"))
    text = (
        f"{ratios[0]} of the variance with uniform sampling if the groups are clearly separated, and {ratios[1]} if "
        f"they are weakly separated. However, the bias in these two cases is {' and '.join(biases)} of the mean "
        "update's length. The page [Samplers](samplers.md) shows results for MNIST"
    )
    values = {f"{name}, {key}": value for name, each in simulated.items() for key, value in each.items()}
    return text, values, [each["ratio"] <= 1 - DRAWN for each in simulated.values()]


@_reading("ldp", "With ε = 3 and M = 100, the largest likelihood ratio of a report is")
def _privacy() -> Made:
    epsilon, bound = 3.0, 100
    alpha = truth_probability(epsilon, bound)
    other = (1 - alpha) / (bound - 1)
    ratio = (alpha + other) / other
    spent = 99 * 10 / 100 * epsilon
    text = (
        f"{ratio:.3f}, which is e^ε. In 99 rounds with 10 of 100 clients each, a client takes part "
        f"{spent / epsilon:.1f} times on average, and spends a total ε of {spent:.1f}"
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
        f"a sample is kept with a mean probability of {values['keep']:.2f}, but the intended probability is 0.10. In "
        f"{100 * values['all']:.1f} % of the simulated rounds, all samples are kept"
    )
    return text, values, [abs(values["keep"] / 0.1 - 1) <= DRAWN]


@_reading(
    "ldp-limit",
    "With privacy (ε = 3, M = 100), a sample is kept with probability p̃. The intended probability is p = 0.1, and the "
    "root mean square error of p̃ is",
)
def _limit() -> Made:
    bound, epsilon, wanted = 100, 3.0, 0.1
    counts, sizes = (10, 100, 1000, 10_000), (60, 600)
    errors = {size: [keep_errors(size, m, bound, epsilon, wanted) for m in counts] for size in sizes}
    clipped = wanted * 600 / (bound - 1)
    few, many = (errors[60][counts.index(m)] for m in (10, 10_000))
    text = (
        f"{few:.3f} with 10 clients of 60 samples each, and {many:.3f} with 10,000 such clients. With 600 samples per "
        f"client, the error is {errors[600][0]:.3f} with 10 clients, and {errors[600][-1]:.3f} with 10,000 clients. "
        f"The reported number 600 is clipped to {bound - 1}. As the number of clients grows, p̃ therefore approaches "
        f"{clipped:.3f}"
    )
    values = {f"{size}, {m}": error for size, row in errors.items() for m, error in zip(counts, row, strict=True)}
    return text, values, [row[-1] <= DRAWN * wanted for row in errors.values()]


@_reading(
    "fedssar-bias",
    "We assume ten draws and orthogonal updates. Relative to the correct update's length, the bias of the mean "
    "update is",
)
def _clusters() -> Made:
    biases = {str(sizes): 100 * fedssar_bias(sizes) for sizes in ([90, 5, 5], [34, 33, 33], [7, 5, 3, 2, 2, 1])}
    texts = [f"{value:.1f} % for clusters of {name} clients" for name, value in biases.items()]
    whole = 100 * fedssar_bias([50, 30, 20])
    text = (
        f"{texts[0]}, {texts[1]} and {texts[2]}. The bias is {whole:.0f} % for clusters of [50, 30, 20] clients, "
        "because each cluster's share of the ten draws is then an integer"
    )
    return text, biases, [value <= 100 * EXACT for value in [*biases.values(), whole]]


@_reading(
    "fedssar-variance",
    "We divide 100 clients into 10 clusters, and draw one client per cluster. The variance of a client's weight is",
)
def _weight_variance() -> Made:
    n, m = 100, 10
    formula = (1 / (m * n)) * (1 - m / n)
    equal = float(cluster_variances([10] * 10).mean())
    unequal = cluster_variances([5] * 5 + [15] * 5)
    small, large = float(unequal[:5].mean()), float(unequal[5:].mean())
    text = (
        f"{formula:.2e} according to the paper's Eq. 11. In simulations, the variance is {equal:.2e} if each cluster "
        f"has 10 clients. With five clusters of 5 clients and five clusters of 15 clients, the variance is {small:.2e} "
        f"in a small cluster and {large:.2e} in a large cluster"
    )
    values = {"drawn": equal, "small": small, "large": large, "formula": formula}
    return text, values, [abs(variance / formula - 1) <= EXACT for variance in (equal, small, large)]


@_reading("fedssar-less-variance", "With 10 draws from 100 clients, the variance of a client's weight is")
def _less_variance() -> Made:
    variances = weight_variances()
    text = (
        f"{variances['strata']:.2e} with strata. Without strata, the variance is {variances['returning']:.2e} for "
        f"draws with replacement (the paper's Eq. 10), and {variances['plain']:.2e} for draws without replacement "
        "(FedAvg)"
    )
    return text, variances, [variances["strata"] <= (1 - DRAWN) * variances[other] for other in ("returning", "plain")]


@_reading(
    "fedssar-condition",
    "The theorems require ρ > 0. Even without noise and with L̄ = 0, the smoothness constant L of the loss must be",
)
def _condition() -> Made:
    alphas, places = (1.0, 0.5, 0.1, 0.05, 0.01, 0.005, 0.001), 10
    # ρ > 0 in Theorem 1: 1/α − L/α² − L/(2α²) > 0. Theorem 2 also subtracts √2/(√m α) and L/(m α²).
    factors = 2 / 3, (1 - (2 / places) ** 0.5) / (1.5 + 1 / places)
    prepared = prepare(Experiment.from_table({"data": "digits", "model": {"name": "mlp", "hidden": [200, 100]}}))
    least = largest_curvature(prepared, prepared.config.model.params())
    text = (
        f"below {factors[0]:.2f} α if all clients take part, or below {factors[1]:.2f} α with {places} clients per "
        f"round. The paper's largest α is {max(alphas):g}. For the paper's MLP on the digits of scikit-learn, L is at "
        f"least {least:.2f} before training"
    )
    values = {"all": factors[0], "some": factors[1], "least": least}
    return text, values, [least < factor * alpha for factor in factors for alpha in alphas]


@_reading(
    "stratify-transfers",
    "We used the digits of scikit-learn with ten clients, Dirichlet(0.5), uniform selection and three seeds. Chunks of "
    "five labels need",
)
def _transfers() -> Made:
    base = {"data": "digits", "partition": {"name": "dirichlet", "alpha": 0.5, "clients": 10}, "method": "stratify"}
    runs = [transfers(Experiment.from_table({**base, "seed": seed}), (1, 5, 50)) for seed in range(3)]
    one, five, fifty = np.mean(runs, axis=0)
    saved, more = 100 * (1 - five / one), 100 * (five - fifty) / one
    text = (
        f"{saved:.0f} % fewer model transfers than chunks of one label (in the paper: about 35 %). Chunks of 50 labels "
        f"save another {more:.0f} % (in the paper: a few percent)"
    )
    values = {"five": float(saved), "fifty": float(more)}
    return text, values, [abs(saved - 35) <= 5, 0 < more <= 5]


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
    """Compute all readings, and return a mapping from their names to the readings."""
    return {reading.name: reading for reading in (make() for make in _MAKERS)}
