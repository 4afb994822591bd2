"""Randomised sizes: the privacy that is promised, and an estimator that is unbiased until M clips."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

import fedstrata as fs
from fedstrata.base import records
from fedstrata.base.errors import SpecError
from fedstrata.clients.client import Client
from fedstrata.clients.handlers.sampling import report_size
from fedstrata.sampling.client_sizes import FedSTaSData, SizeReport, estimated_total, randomised_size, truth_probability
from fedstrata.sampling.fedsampling import FedSamplingData


def chances(size: int, bound: int, alpha: float) -> dict[int, float]:
    """P(r | n) as FedSTaS states it."""
    clipped = max(1, min(size, bound - 1))
    return {r: alpha * (r == clipped) + (1 - alpha) / (bound - 1) for r in range(1, bound)}


@pytest.mark.slow
@pytest.mark.parametrize(("epsilon", "bound"), list(itertools.product([0.1, 1.0, 3.0, 8.0], [2, 3, 10, 100])))
def test_the_largest_ratio_of_two_answers_is_e_to_the_epsilon(epsilon, bound):
    tables = [chances(n, bound, truth_probability(epsilon, bound)) for n in range(bound + 5)]
    worst = max(p[r] / q[r] for p, q in itertools.product(tables, tables) for r in p)
    # With M = 2 there is one answer only: nothing is told.
    assert worst == pytest.approx(math.exp(epsilon) if bound > 2 else 1.0, rel=1e-9)


@pytest.mark.parametrize(("epsilon", "alpha"), [(3.0, 0.1616), (1e-9, 0.0), (700.0, 1.0), (5000.0, 1.0)])
def test_the_chance_of_the_truth(epsilon, alpha):
    assert truth_probability(epsilon, 100) == pytest.approx(alpha, abs=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 1, 4, 7, 50])
def test_answers_have_the_promised_frequencies(size):
    bound, alpha, times = 8, 0.35, 20_000
    generator = np.random.default_rng(size)
    answers = np.bincount([randomised_size(size, bound, alpha, generator) for _ in range(times)], minlength=bound)
    assert len(answers) == bound  # never M or more
    assert answers[0] == 0  # nor 0, which would give an empty client away
    for r, p in chances(size, bound, alpha).items():
        assert abs(answers[r] / times - p) < 4.5 * math.sqrt(p * (1 - p) / times)


def estimates(sizes: np.ndarray, bound: int, alpha: float, times: int) -> np.ndarray:
    generator = np.random.default_rng(3)
    rounds = ([randomised_size(int(n), bound, alpha, generator) for n in sizes] for _ in range(times))
    return np.array([estimated_total(answers, bound, alpha) for answers in rounds])


@pytest.mark.slow
def test_the_estimate_is_unbiased_where_nothing_is_clipped():
    sizes = np.arange(40, 60)
    found = estimates(sizes, bound=60, alpha=0.5, times=1500)
    error = found.std(ddof=1) / math.sqrt(len(found))
    assert abs(found.mean() - sizes.sum()) < 4 * error
    assert error < 0.01 * sizes.sum()


@pytest.mark.slow
def test_clipping_biases_it_to_what_the_bound_leaves():
    sizes = np.arange(40, 60)
    found = estimates(sizes, bound=50, alpha=0.5, times=1500)
    error = found.std(ddof=1) / math.sqrt(len(found))
    assert found.mean() < sizes.sum() - 8 * error
    assert abs(found.mean() - np.minimum(sizes, 49).sum()) < 4 * error


@pytest.mark.slow
def test_a_mean_estimate_that_is_right_keeps_too_many_samples():
    """The figures of docs/methods/samplers-strata.md: ε = 3, M = 100, ten clients of 600 samples, a tenth wanted."""
    alpha = truth_probability(3.0, 100)
    found = estimates(np.full(10, 600), bound=100, alpha=alpha, times=4000)
    assert found.mean() == pytest.approx(1002, rel=0.05)
    assert found.std() == pytest.approx(587, rel=0.05)
    keep = np.minimum(1.0, 0.1 * found.mean() / found)
    assert keep.mean() == pytest.approx(0.20, abs=0.02)
    assert (keep == 1).mean() == pytest.approx(0.077, abs=0.02)
    # Held above 1 it is too large on average: 109.5 for a true total of 87.
    sizes = np.repeat([8, 9], [3, 7])
    assert sizes.sum() == 87
    held = estimates(sizes, bound=20, alpha=truth_probability(1.3, 20), times=6000)
    assert held.mean() == pytest.approx(109.5, rel=0.05)


def test_the_estimate_by_hand():
    # (12 + 30 + 3 − 0.75 · 40 · 3 / 2) / 0.25 = 0 → 1; with 80 more it is 320.
    assert estimated_total([12, 30, 3], bound=40, alpha=0.25) == 1.0
    assert estimated_total([12, 30, 83], bound=40, alpha=0.25) == pytest.approx(320.0)
    assert estimated_total([1, 1], bound=100, alpha=0.1) == 1.0  # far below zero, and still at least 1


def test_a_client_as_large_as_the_bound_is_clipped_and_one_smaller_is_not(tiny):
    """M = 8 reports 8 samples as 7."""
    settings = FedSTaSData(epsilon=1.0, bound=8)
    with pytest.warns(UserWarning, match=r"samples is clipped for 1 of 2 clients \(the largest client has 8 samples\)"):
        settings.check(tiny(sizes=[7, 8]).config)
    settings.check(tiny(sizes=[7, 7]).config)


def test_at_a_real_site_the_seed_does_not_take_the_noise_off(tiny):
    """Sites do not tell their sizes, and the server knows the experiment's seed."""
    federation = tiny(1, sizes=[40])
    known = federation.engine.context
    real = replace(known, config=replace(known.config, sizes=None), prepared={})

    def answers(context):
        asked = (SizeReport(round, 100, 0.1) for round in range(1, 41))
        return [report_size(Client(0, context), request).samples for request in asked]

    assert answers(known) == answers(known)
    first, second = answers(real), answers(real)
    assert first != second
    assert len(set(first)) > 10
    assert set(first) <= set(range(1, 101))


@pytest.mark.parametrize("choice", [FedSTaSData, FedSamplingData])
@pytest.mark.parametrize("bound", [2, 2**31 - 1])
def test_any_privacy_that_is_accepted_has_an_estimate(choice, bound):
    for epsilon in (1e-6, 1e18):
        settings = choice(epsilon=epsilon, bound=bound)
        alpha = truth_probability(settings.epsilon, settings.bound)
        assert alpha > 0
        assert math.isfinite(estimated_total([1, 2], bound, alpha))
    with pytest.raises(SpecError, match=r"epsilon = 5e-324: must be greater than or equal to 0.000001"):
        choice(epsilon=5e-324)


def test_a_share_is_kept_without_a_request(tiny):
    federation = tiny(3, sizes=[2, 3, 5])
    sampler = FedSTaSData(share=0.25)
    keep, _, metrics = sampler.keep(federation, sampler.init(federation), [0, 2])
    assert keep == sampler.fixed_share == 0.25
    assert metrics == {"keep": 0.25, "expected_samples": 1.75}
    assert not federation.log.invited
    assert sampler.private
    assert FedSTaSData().fixed_share is None
    assert not FedSTaSData().private


@pytest.mark.parametrize(
    ("key", "value"), [("samples", 10), ("epsilon", 3.0), ("estimates", "pooled"), ("reuse", False)]
)
def test_a_share_needs_no_settings_of_reports(key, value):
    with pytest.raises(SpecError, match=rf"^method\.{key} = .*: has no effect with 'share', .* Remove '{key}' or 'sha"):
        fs.Experiment(method={"name": "fedstas", "share": 0.5, key: value})


def test_pooled_estimates_by_hand(tiny):
    federation = tiny(2, sizes=[3, 4])
    rounds = ([0], [0, 1])

    def metrics_of(**settings):
        sampler = FedSTaSData(fraction=0.5, **settings)
        state, found = sampler.init(federation), []
        for round, clients in enumerate(rounds, 1):
            federation.begin(round)
            _, state, metrics = sampler.keep(federation, state, clients)
            found.append(tuple(metrics.values()))
        return found

    # Estimates 3 and 7, whose mean is 5: (estimate, requested samples, probability, expected samples).
    assert metrics_of() == [(3, 1.5, 0.5, 1.5), (7, 2.5, 2.5 / 7, 2.5)]
    assert metrics_of(estimates="round") == metrics_of()
    assert metrics_of(estimates="pooled") == [(3, 1.5, 0.5, 1.5), (5, 2.5, 0.5, 3.5)]
    assert metrics_of(estimates="pooled", samples=2) == [(3, 2, 2 / 3, 2), (5, 2, 0.4, pytest.approx(2.8))]


@pytest.mark.slow
def test_pooled_estimates_tend_to_the_true_total_and_keep_the_fraction_exactly(tiny):
    """Four clients of 8 samples, M = 100: single estimates are often below 1, and their mean is within 4 errors."""
    federation = tiny(4)
    by_fraction = FedSTaSData(fraction=0.3, epsilon=3.0, estimates="pooled")
    by_samples = FedSTaSData(samples=16, epsilon=3.0, estimates="pooled")
    state, other, sums = by_fraction.init(federation), by_samples.init(federation), [0.0]
    for round in range(1, 401):
        federation.begin(round)
        keep, state, _ = by_fraction.keep(federation, state, range(4))
        assert keep == 0.3
        federation.begin(round)
        keep, other, metrics = by_samples.keep(federation, other, range(4))
        sums.append(other.total)
    assert state == other
    single = np.diff(sums)
    assert (single < 1).mean() > 0.3
    assert abs(metrics["estimated_samples"] - 32) < 4 * single.std() / 20
    assert keep == min(1, 16 / metrics["estimated_samples"])
    errors = np.abs(np.cumsum(single) / np.arange(1, 401) - 32)
    assert errors[300:].mean() < errors[:30].mean() / 3


def test_reused_answers_by_hand(tiny):
    federation = tiny(3, sizes=[2, 3, 5])
    sampler = FedSTaSData(fraction=0.5, reuse=True)
    state, found = sampler.init(federation), []
    for round, (clients, asked) in enumerate([([2, 0], [0, 2]), ([0, 1], [1]), ([1, 2], [])], 1):
        federation.begin(round)
        keep, state, metrics = sampler.keep(federation, state, clients)
        assert sorted(federation.log.invited) == asked
        state = records.decode(records.encode(state))
        found.append((metrics["estimated_samples"], metrics["requested_samples"], keep))
    # Totals 7, 5 and 8, with the means 7, 6 and 20/3.
    assert found == [(7, 3.5, 0.5), (5, 3, 0.6), (8, pytest.approx(10 / 3), pytest.approx(5 / 12))]
    assert state.answered.answers.tolist() == [2, 3, 5]


def test_with_reuse_each_client_spends_epsilon_once(tiny):
    federation = tiny(4)
    once, each_round = (FedSTaSData(epsilon=2.0, bound=50, reuse=reuse) for reuse in (True, None))
    state, other, asked, estimates = once.init(federation), each_round.init(federation), [], []
    for round in range(1, 6):
        federation.begin(round)
        _, state, metrics = once.keep(federation, state, [0, 2] if round == 1 else range(4))
        asked += federation.log.invited
        federation.begin(round)
        _, other, again = each_round.keep(federation, other, range(4))
        assert len(federation.log.invited) == 4
        estimates.append((metrics["estimated_samples"], again["estimated_samples"]))
    assert sorted(asked) == [0, 1, 2, 3]
    assert len({same for same, _ in estimates[1:]}) == 1
    assert len({other for _, other in estimates}) > 1
