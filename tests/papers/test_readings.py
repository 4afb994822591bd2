"""Figures that follow from the rules alone, against what can be worked out by hand."""

from __future__ import annotations

import math
import re
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch

import fedstrata as fs
from fedstrata.aggregation.base import HorvitzThompson, StratumMean
from fedstrata.papers import calculations
from fedstrata.papers import readings as module
from fedstrata.papers.calculations import (
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
)
from fedstrata.papers.judging import claims
from fedstrata.papers.readings import readings
from fedstrata.sampling.client_sizes import estimated_total, randomised_size, truth_probability

pytestmark = pytest.mark.xdist_group("readings")  # they take seconds to compute, once per process


def test_fedssar_is_unbiased_where_shares_are_whole_and_only_there():
    assert fedssar_bias([50, 30, 20]) == pytest.approx(0)
    # Eight, one and one of ten places where 9, 0.5 and 0.5 are due.
    off = math.sqrt(0.1**2 + 2 * 0.05**2) / math.sqrt(0.9**2 + 2 * 0.05**2)
    assert fedssar_bias([90, 5, 5]) == pytest.approx(off)


def test_strata_without_a_draw_bias_the_mean():
    allocation, bias = neyman_bias([10, 10, 10], [1.0, 1.0, 0.0], 6)
    assert allocation == [3, 3, 0]
    # (1/2, 1/2, 0) for (1/3, 1/3, 1/3).
    assert bias == pytest.approx(math.sqrt(2 / 36 + 1 / 9) / math.sqrt(1 / 3))


def test_estimates_have_the_mean_and_the_deviation_of_the_randomised_response():
    sizes, bound, epsilon = np.array([600] * 10), 100, 3.0
    found = size_estimates(sizes, bound, epsilon)
    alpha = truth_probability(epsilon, bound)
    square = alpha * 99**2 + (1 - alpha) * np.mean(np.arange(1, 100) ** 2)
    variance = 10 * (square - (alpha * 99 + (1 - alpha) * 50) ** 2) / alpha**2
    assert found.mean() == pytest.approx(990, abs=4 * math.sqrt(variance / len(found)))
    assert found.std() == pytest.approx(math.sqrt(variance), rel=0.02)


@pytest.mark.slow
def test_estimates_are_those_that_runs_make():
    sizes, bound, epsilon = [5, 60, 600], 100, 3.0
    alpha, generator = truth_probability(epsilon, bound), np.random.default_rng(1)
    made = [
        estimated_total([randomised_size(size, bound, alpha, generator) for size in sizes], bound, alpha)
        for _ in range(4000)
    ]
    found = np.maximum(size_estimates(np.array(sizes), bound, epsilon), 1.0)
    assert np.mean(made) == pytest.approx(found.mean(), abs=4 * found.std() / math.sqrt(len(made)))
    assert np.mean(np.array(made) == 1) == pytest.approx((found == 1).mean(), abs=0.03)


def test_a_long_gradient_is_drawn_more_often_and_weighs_no_less():
    # 1 with probability 1/4, 3 with 3/4.
    assert mean_of_one_draw(np.array([1.0, 3.0]), StratumMean()) == pytest.approx(2.5)
    assert mean_of_one_draw(np.array([1.0, 3.0]), HorvitzThompson()) == pytest.approx(2.0)


def test_the_private_probability_tends_to_the_wanted_one_only_where_no_size_is_clipped():
    # n_k = 60 stays below M = 100. At m clients ñ = 60 m ± σ √m, with σ the deviation of one answer over α, and
    # p̃ − p is about p σ / (60 √m).
    alpha = truth_probability(3.0, 100)
    square = alpha * 60**2 + (1 - alpha) * np.mean(np.arange(1, 100) ** 2)
    sigma = math.sqrt(square - (alpha * 60 + (1 - alpha) * 50) ** 2) / alpha
    assert keep_errors(60, 10_000, 100, 3.0) == pytest.approx(0.1 * sigma / (60 * 100), rel=0.15)
    # 600 are told as 99: p̃ tends to 0.1 · 600 / 99.
    assert keep_errors(600, 10_000, 100, 3.0) == pytest.approx(60 / 99 - 0.1, abs=0.005)


@pytest.mark.long
@pytest.mark.slow
def test_labels_vary_between_batches_as_in_random_draws():
    # Shares of (1, 0) and (0, 1) where (1/2, 1/2) is due, and none where every batch has both.
    assert label_variance(np.array([0, 0, 1, 1, 0]), 2) == pytest.approx((2 * 0.4**2 + 2 * 0.6**2) / 2)
    assert label_variance(np.array([0, 1, 1, 0]), 2) == 0
    # A shuffled order: (1 − 1/C) / B, less what comes from drawing without replacement.
    values = readings()["stratify-variance"].values
    assert values["schedule"] == pytest.approx(0.9 / 64 * (1 - 63 / 59_999), rel=0.02)
    assert values["random"] == 0.9 / 64


def test_a_small_holder_is_used_up_while_a_large_one_is_not():
    large, small = uses_a_sample([900, 100], 500)
    assert (large, small) == (0.44, 1.0)  # 400 of 900, 100 of 100
    assert uses_a_sample([900, 100], 1000) == [1.0, 1.0]


@pytest.mark.slow
def test_prototypes_take_two_forward_passes():
    # Products of an image's forward pass: two convolutions of 5×5, 28×28 and 14×14 pixels, then 1568 → 128 → 10.
    first, second, hidden, head = 25 * 784 * 16, 25 * 16 * 196 * 32, 1568 * 128, 128 * 10
    forward = 2 * (first + second + hidden + head)
    # Backward as much for the weights and for the inputs, but none for those of the first layer.
    epoch = 100 * (3 * forward - 2 * first)
    once = training_operations("fedavg", 1)
    assert training_operations("fedavg", 2) - once == epoch
    # The augmented loss trains the head alone: forward, and backward for its weights.
    augmented = 100 * 2 * 2 * head
    assert training_operations("rebafl", 1) - once == 2 * 100 * forward + augmented
    values = readings()["rebafl-operations"].values
    assert values["5"] == pytest.approx((5 * (epoch + augmented) + 200 * forward) / (5 * epoch))


@pytest.mark.slow
def test_the_largest_eigenvalue_of_the_hessian_is_that_of_the_whole_matrix():
    """The digits of scikit-learn, softmax regression at zero: the Hessian is (I/C − 11ᵀ/C²) ⊗ mean of x xᵀ."""
    prepared = fs.prepare(fs.Experiment.from_table({"data": "digits", "model": {"name": "mlp", "hidden": []}}))
    x = prepared.data.inputs(torch.arange(prepared.data.train_size)).flatten(1)
    inputs = torch.cat([x, torch.ones(len(x), 1)], dim=1)
    expected = float(torch.linalg.eigvalsh(inputs.T @ inputs / len(inputs))[-1]) / 10
    weights = {name: torch.zeros_like(value) for name, value in prepared.config.model.params().items()}
    assert largest_curvature(prepared, weights) == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
def test_strata_of_equal_gradients_leave_no_variance_but_a_bias():
    """Without noise, each stratum has one gradient, so that only Neyman's ties decide which strata are drawn.

    With random starts, k-means can merge two groups, and the processor's rounding decides which.
    """
    found = sampled_variance(noise=1e-4, scale=1.0, draws=50, start="k-means++")
    assert found["ratio"] < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [1, 5])
def test_a_chunk_is_transferred_at_most_once_for_each_label(chunk_size):
    spec = fs.Experiment.from_table(
        {"data": "digits", "partition": {"name": "iid", "clients": 3}, "method": "stratify"}
    )
    (count,) = transfers(spec, [chunk_size])
    # A client without an unused sample of the label is visited in vain.
    assert 1 <= count < 1.1 if chunk_size == 1 else 1 / 5 < count < 1


def test_few_more_bytes_are_as_few_as_few_more_operations():
    assert {each.about["most"] for each in claims() if "most" in each.about} == {module.FEW_MORE}


@pytest.mark.slow
def test_every_reading_says_what_the_review_of_the_rules_found():
    found = readings()
    assert found["ldp"].values["ratio"] == pytest.approx(math.exp(3.0))
    assert found["ldp-samples"].values["keep"] == pytest.approx(0.20, abs=0.01)
    # With one draw from a cluster of n_c clients, a weight is 1/10 with probability 1/n_c: (1/100) (1/n_c) (1 − 1/n_c).
    assert found["fedssar-variance"].values == pytest.approx(
        {"drawn": 0.09 / 100, "small": 0.16 / 100, "large": (14 / 225) / 100, "formula": 0.9 / 1000}, rel=0.01
    )
    # A weight is 1/m with probability m/N where nobody is drawn twice, whatever the strata: (1/m²) (m/N) (1 − m/N).
    assert found["fedssar-less-variance"].values == pytest.approx(
        {"strata": 9.0e-4, "plain": 9.0e-4, "returning": 9.9e-4}, rel=0.02
    )
    assert [round(value, 1) for value in found["fedssar-bias"].values.values()] == [13.6, 12.7, 20.9]
    assert all(each.figure and each.description for each in found.values())


DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.slow
def test_figures_in_the_text_of_the_documentation_are_the_computed_ones():
    found = readings()
    private = found["ldp-samples"].values["keep"]
    text = " ".join((DOCS / "results" / "fedstas.md").read_text(encoding="utf-8").split())
    assert f"kept with a mean probability of {private:.2f}, but the intended probability is 0.10" in text
    differs = files("fedstrata.papers").joinpath("fedstas", "differs.md").read_text(encoding="utf-8")
    differs = " ".join(differs.split())
    assert f"a total ε of {found['ldp'].values['spent']:.1f} on average in 99 rounds" in differs
    assert f"p̃ tends to {0.1 * 600 / 99 / 0.1:.2f} p" in differs


@pytest.mark.parametrize(
    "claim", [each for each in claims() if each.kind == "page"], ids=lambda claim: claim.statement[:40]
)
def test_what_other_pages_have_measured_is_on_them(claim):
    evidence = claim.about["evidence"]
    pages = " ".join(
        (DOCS / "results" / page).read_text(encoding="utf-8") for page in re.findall(r"\]\(([\w./-]+\.md)", evidence)
    )
    assert pages
    for figure in re.findall(r"\d+(?:\.\d+)?", re.sub(r"\]\([^)]*\)", "", evidence)):
        assert figure in pages, figure


@pytest.mark.slow
def test_verdicts_follow_from_the_figures(monkeypatch):
    assert {name: each.verdict for name, each in readings().items()} == {
        "stratify-weights": "partly",
        "stratify-variance": "partly",
        "neyman-zero": "contradicted",
        "importance-bias": "contradicted",
        "fedsts-variance": "confirmed",
        "ldp": "confirmed",
        "ldp-samples": "contradicted",
        "ldp-limit": "partly",
        "fedssar-bias": "partly",
        "fedssar-variance": "partly",
        "fedssar-less-variance": "partly",
        "fedssar-condition": "contradicted",
        "stratify-transfers": "confirmed",
        "rebafl-operations": "partly",
    }
    # With other rules they are others: everybody tells the truth, one draw for each stratum first, weights by p_k, …
    monkeypatch.setattr(module, "truth_probability", lambda epsilon, bound: 1.0)
    assert module._limit().verdict == "partly"  # sizes are clipped all the same
    monkeypatch.setattr(
        calculations, "allocated", lambda rule, places, counts, deviations: (np.ones_like(counts), None)
    )
    assert module._neyman().verdict == "confirmed"
    monkeypatch.setattr(module, "largest_curvature", lambda prepared, params: 3e-4)
    assert module._condition().verdict == "confirmed"
    monkeypatch.setattr(module, "transfers", lambda spec, chunk_sizes: [1.0, 0.8, 0.6])
    assert module._transfers().verdict == "contradicted"
    monkeypatch.setattr(module, "StratumMean", HorvitzThompson)
    assert module._importance().verdict == "confirmed"
    monkeypatch.setattr(module, "uses_a_sample", lambda counts, cap, seed: [0.5, 0.5])
    assert module._uses().verdict == "confirmed"
    monkeypatch.setattr(module, "cluster_variances", lambda sizes: np.full(len(sizes), 9e-4))
    assert module._weight_variance().verdict == "confirmed"
    monkeypatch.setattr(module, "fedssar_bias", lambda sizes: 0.0)
    assert module._clusters().verdict == "confirmed"
    for each in (module, calculations):
        monkeypatch.setattr(each, "size_estimates", lambda sizes, bound, epsilon, draws=1: sizes.sum() * np.ones(draws))
    assert (module._limit().verdict, module._private_samples().verdict) == ("confirmed", "confirmed")
    monkeypatch.setattr(module, "training_operations", lambda method, epochs: 100 * epochs + (method == "rebafl"))
    assert module._prototype_operations().verdict == "confirmed"
    monkeypatch.setattr(module, "schedule", lambda counts, generator: np.tile(np.arange(10), 640))
    assert module._label_variance().verdict == "confirmed"
