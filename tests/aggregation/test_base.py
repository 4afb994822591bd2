"""Aggregation weights: by hand, over those who returned, and unbiased or not by simulation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedstrata.aggregation.base import (
    Aggregator,
    HorvitzThompson,
    Mean,
    MeanBySize,
    StratumMean,
    mean_buffers,
    weighted_update,
)
from fedstrata.federation.messages import FitReply, Weights
from fedstrata.sampling.base import Selection
from fedstrata.sampling.stratified import draw

# Six invited of twenty: strata of 5, 12 and 3 clients; the second client was drawn twice.
INVITED = Selection(
    clients=np.array([1, 4, 7, 8, 11, 15]),
    draws=np.array([1, 2, 1, 1, 1, 1]),
    probability=np.array([0.5, 0.25, 0.1, 0.2, 0.05, 0.5]),
    stratum=np.array([0, 0, 1, 1, 1, 2]),
    stratum_sizes=np.array([5, 12, 3]),
)
EVERYBODY, SOME, ONE = [0, 1, 2, 3, 4, 5], [1, 3, 4], [2]


@pytest.mark.parametrize(
    ("aggregator", "returned", "samples", "expected"),
    [
        (MeanBySize(), EVERYBODY, [1, 2, 3, 4, 5, 6], np.array([1, 4, 3, 4, 5, 6]) / 23),
        (MeanBySize(), SOME, [2, 4, 5], np.array([4, 4, 5]) / 13),
        (MeanBySize(), ONE, [9], [1.0]),
        (MeanBySize(), SOME, [0, 0, 0], [0.0, 0.0, 0.0]),
        (Mean(), EVERYBODY, [1, 2, 3, 4, 5, 6], np.array([1, 2, 1, 1, 1, 1]) / 7),
        (Mean(), SOME, [2, 4, 0], [1 / 2, 1 / 4, 1 / 4]),
        # (N_h / N) · draws / m_h: m = 3, 3 and 1 of everybody; 2, 2 of N = 17 when the third stratum is away.
        (StratumMean(), EVERYBODY, [9] * 6, [5 / 60, 10 / 60, 0.2, 0.2, 0.2, 3 / 20]),
        (StratumMean(), SOME, [9] * 3, [5 / 17, 6 / 17, 6 / 17]),
        # draws / (N m_h p)
        (
            HorvitzThompson(),
            EVERYBODY,
            [9] * 6,
            [1 / (60 * 0.5), 2 / (60 * 0.25), 1 / (60 * 0.1), 1 / (60 * 0.2), 1 / (60 * 0.05), 1 / (20 * 0.5)],
        ),
        (HorvitzThompson(), SOME, [9] * 3, [2 / (17 * 2 * 0.25), 1 / (17 * 2 * 0.2), 1 / (17 * 2 * 0.05)]),
    ],
)
def test_weights_by_hand(aggregator, returned, samples, expected):
    found = aggregator.coefficients(INVITED, np.array(returned), np.array(samples))
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("aggregator", [MeanBySize(), StratumMean()])
def test_who_was_drawn_by_size_is_not_weighted_by_it_again(aggregator):
    """Strata of 30, 50 and 20 samples: 30/3, 2·30/3, 50/3 each, 20; whatever their own samples are."""
    by_size = replace(INVITED, stratum_samples=np.array([30, 50, 20]))
    found = aggregator.coefficients(by_size, np.array(EVERYBODY), np.array([1, 2, 3, 4, 5, 6]))
    np.testing.assert_allclose(found, [0.1, 0.2, 0.5 / 3, 0.5 / 3, 0.5 / 3, 0.2], rtol=1e-12)


def test_random_allocations_are_weighted_by_hand():
    """Strata of 5, 12 and 3 clients had chances of a draw of 1, 0.5 and 0.25; the third got none this time."""
    chance = np.array([1.0, 0.5, 0.25])
    invited = replace(
        INVITED, **{key: getattr(INVITED, key)[:5] for key in ("clients", "draws", "probability", "stratum")}
    )
    invited = replace(invited, stratum_chance=chance)
    # draws / (N m_h p chance), N = 20: a stratum without a draw is not away.
    expected = [1 / (60 * 0.5), 2 / (60 * 0.25), 1 / (30 * 0.1), 1 / (30 * 0.2), 1 / (30 * 0.05)]
    found = HorvitzThompson().coefficients(invited, np.arange(5), np.full(5, 9))
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    # (N_h / N) · draws / (m_h chance)
    found = StratumMean().coefficients(invited, np.arange(5), np.full(5, 9))
    np.testing.assert_allclose(found, [5 / 60, 10 / 60, 0.4, 0.4, 0.4], rtol=1e-12)
    # The second stratum was invited and nobody of it returned: N = 8.
    found = HorvitzThompson().coefficients(invited, np.array([1]), np.array([9]))
    np.testing.assert_allclose(found, [2 / (8 * 2 * 0.25)], rtol=1e-12)


@pytest.mark.parametrize("aggregator", [MeanBySize(), Mean(), StratumMean()])
@pytest.mark.parametrize("returned", [EVERYBODY, SOME, ONE, [5]])
def test_weights_add_up_to_one_over_those_who_returned(aggregator, returned):
    found = aggregator.coefficients(INVITED, np.array(returned), np.arange(3, 3 + len(returned)))
    assert found.sum() == pytest.approx(1)
    assert len(found) == len(returned)


def reply(w: float, samples: int, mean: float = 0.0, count: int = 0) -> FitReply:
    weights = Weights({"w": torch.tensor([w])}, {"mean": torch.tensor([mean]), "count": torch.tensor(count)})
    return FitReply(weights, samples, 1, samples, 0.0, {})


START = Weights({"w": torch.tensor([10.0])}, {"mean": torch.tensor([1.0]), "count": torch.tensor(5)})


def test_floats_are_averaged_and_counters_take_the_largest():
    replies = {4: reply(14.0, 1, mean=3.0, count=9), 11: reply(6.0, 3, mean=-1.0, count=6)}
    after, state = MeanBySize().combine(START, None, INVITED, replies)
    assert (after.params["w"].item(), after.buffers["mean"].item()) == pytest.approx((10 + 0.4 * 4 - 0.6 * 4, 0.6))
    assert torch.equal(after.buffers["count"], torch.tensor(9))
    assert state is None
    assert START.params["w"].item() == 10.0  # what came in is not changed


def test_buffers_are_averaged_with_normalised_weights():
    """Horvitz-Thompson's weights do not add up to one, and a running mean must still be a mean."""
    replies = {7: reply(0.0, 1, mean=2.0), 8: reply(0.0, 1, mean=4.0)}
    a = HorvitzThompson().coefficients(INVITED, np.array([2, 3]), np.ones(2))
    assert a.sum() != pytest.approx(1)
    after, _ = HorvitzThompson().combine(START, None, INVITED, replies)
    assert after.buffers["mean"].item() == pytest.approx((2 * a[0] + 4 * a[1]) / a.sum())


@pytest.mark.parametrize("replies", [{}, {4: reply(99.0, 0, mean=7.0, count=8)}], ids=["nobody", "nobody with data"])
def test_nothing_to_learn_from_leaves_the_model(replies):
    after, _ = MeanBySize().combine(START, None, INVITED, replies)
    assert after is START


def test_an_update_is_added_up_from_differences():
    params = {"w": torch.tensor([1.0, 2.0])}
    found = weighted_update(
        params, [{"w": torch.tensor([2.0, 2.0])}, {"w": torch.tensor([1.0, 6.0])}], np.array([2, -1])
    )
    assert found["w"].tolist() == [2.0, -4.0]
    assert mean_buffers({"m": torch.tensor(3.0)}, [{"m": torch.tensor(9.0)}], np.array([0.0]))["m"].item() == 3.0


class TestBias:
    """Three strata with unequal updates and unequal chances, and the mean of what the server would add."""

    DRAWS = 1_500
    STRATA = np.array([0] * 3 + [1] * 6 + [2] * 3)
    NORMS = np.array([1.0, 2.0, 4.0, 1.0, 1.0, 2.0, 3.0, 5.0, 8.0, 0.5, 0.5, 2.0])
    # Clients with large gradients have large updates, as they have in training.
    UPDATES = NORMS * np.array([1, -0.5, 2, 1, 1, 1, -1, 2, 1, 1, 3, 1])
    ALLOCATION = np.array([2, 3, 1])

    def totals(self, aggregator: Aggregator, *, replacement: bool) -> np.ndarray:
        generator = np.random.default_rng(0)
        sizes = np.bincount(self.STRATA)
        result = np.empty(self.DRAWS)
        for i in range(self.DRAWS):
            who = draw(np.arange(12), self.STRATA, sizes, self.ALLOCATION, self.NORMS, replacement, generator)
            a = aggregator.coefficients(who, np.arange(len(who.clients)), np.full(len(who.clients), 10))
            result[i] = a @ self.UPDATES[who.clients]
        return result

    @staticmethod
    def deviations(totals: np.ndarray, expected: float) -> float:
        return float((totals.mean() - expected) / (totals.std(ddof=1) / np.sqrt(len(totals))))

    @pytest.mark.slow
    def test_horvitz_thompson_is_unbiased(self):
        totals = self.totals(HorvitzThompson(), replacement=True)
        assert abs(self.deviations(totals, self.UPDATES.mean())) < 4
        assert totals.std() > 0.1  # it is the mean that agrees, not every draw

    @pytest.mark.slow
    def test_the_papers_weights_are_not(self):
        totals = self.totals(StratumMean(), replacement=True)
        assert self.deviations(totals, self.UPDATES.mean()) > 10
        # What it does converge to: Σ_h (N_h / N) Σ_k p_k u_k.
        p = self.NORMS / np.bincount(self.STRATA, weights=self.NORMS)[self.STRATA]
        share = np.bincount(self.STRATA)[self.STRATA] / 12
        assert abs(self.deviations(totals, float(share @ (p * self.UPDATES)))) < 4

    @pytest.mark.slow
    def test_without_replacement_the_papers_weights_are_biased_too(self):
        assert self.deviations(self.totals(StratumMean(), replacement=False), self.UPDATES.mean()) > 10

    @pytest.mark.slow
    @pytest.mark.parametrize("aggregator", [MeanBySize(), Mean(), StratumMean(), HorvitzThompson()])
    def test_uniform_draws_of_clients_alike_in_size_are_unbiased_with_any(self, aggregator):
        generator = np.random.default_rng(1)
        totals = np.empty(3000)
        for i in range(len(totals)):
            who = Selection.plain(generator.choice(12, size=4, replace=False), 12)
            totals[i] = aggregator.coefficients(who, np.arange(4), np.full(4, 10)) @ self.UPDATES[who.clients]
        assert abs(self.deviations(totals, self.UPDATES.mean())) < 4

    def test_everybody_gives_the_full_aggregate(self):
        sizes = np.arange(1, 13)
        found = MeanBySize().coefficients(Selection.plain(np.arange(12), 12), np.arange(12), sizes)
        assert found @ self.UPDATES == pytest.approx(np.average(self.UPDATES, weights=sizes))


def test_buffers_that_nobody_changed_stay_what_they_are():
    buffers = {"m": torch.tensor([1.0, 3.0, 0.1])}
    for clients in (3, 7, 11):
        a = np.full(clients, 1 / clients)
        assert torch.equal(mean_buffers(buffers, [buffers] * clients, a)["m"], buffers["m"])
