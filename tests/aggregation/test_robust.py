"""Robust aggregators: by hand, laws, the results of byzfl 0.0.11, and what few false updates can do."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import fedstrata as fs
from fedstrata.aggregation.base import AGGREGATORS, Mean, MeanBySize
from fedstrata.aggregation.robust import (
    CentredClipping,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    RobustAggregator,
    TrimmedMean,
)
from fedstrata.base.errors import SpecError
from fedstrata.federation.messages import FitReply, Weights
from fedstrata.runs.preparation import prepare
from fedstrata.sampling.base import Selection

ALL = [Median(), TrimmedMean(), Krum(), MultiKrum(), GeometricMedian(), CentredClipping()]
BYZFL = json.loads((Path(__file__).parent / "byzfl.json").read_text())["cases"]
"""Inputs and results of byzfl 0.0.11 (MIT) with NumPy, in float64; the file names the settings."""


def rows(*updates: list[float]) -> torch.Tensor:
    return torch.tensor(updates, dtype=torch.float32)


def drawn(n: int, d: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0.5, 1, (n, d)))


def reply(w: list[float], samples: int = 1, mean: float = 0.0, count: int = 0) -> FitReply:
    weights = Weights({"w": torch.tensor(w)}, {"mean": torch.tensor([mean]), "count": torch.tensor(count)})
    return FitReply(weights, samples, 1, samples, 0.0, {})


START = Weights({"w": torch.tensor([10.0, 0.0])}, {"mean": torch.tensor([1.0]), "count": torch.tensor(5)})


def combined(aggregator, replies):
    return aggregator.combine(START, None, Selection.plain(np.arange(9), 9), replies)


@pytest.mark.parametrize(
    ("aggregator", "updates", "expected"),
    [
        (Median(), rows([1, 9], [2, -5], [30, 0]), [2, 0]),
        (Median(), rows([1, 9], [2, -5], [30, 0], [4, 1]), [3, 0.5]),
        (Median(), rows([7, 8]), [7, 8]),
        (TrimmedMean(attackers=1), rows([1, 9], [2, -5], [30, 0], [4, 1], [6, 2]), [4, 1]),
        (TrimmedMean(attackers=2), rows([1, 9], [2, -5], [30, 0], [4, 1], [6, 2]), [4, 1]),
        # The scores are sums over the n − f − 2 = 2 nearest of 0, 1, 3, 4.5 and 90.
        (Krum(attackers=1), rows([0.0], [1.0], [3.0], [4.5], [90.0]), [1]),  # 10, 5, 2.25 + 4, 14.5, …
        (MultiKrum(attackers=1, chosen=2), rows([0.0], [1.0], [3.0], [4.5], [90.0]), [2]),
        (MultiKrum(attackers=1), rows([0.0], [1.0], [3.0], [4.5], [90.0]), [2.125]),
        # From 0, the weights are 1 and 1/3: (1 · 1 + 3 / 3) / (4 / 3).
        (GeometricMedian(steps=1), rows([1, 0], [3, 0]), [1.5, 0]),
        (GeometricMedian(steps=1, smoothing=3), rows([1, 0], [3, 0]), [2, 0]),
        (CentredClipping(radius=5), rows([6, 8], [1, 0], [0, 2]), [4 / 3, 2]),
        # The second step starts from (2, 0): the differences are −2 and 6, of which 4 is left.
        (CentredClipping(radius=4, steps=2), rows([0, 0], [8, 0]), [3, 0]),
    ],
)
def test_by_hand(aggregator, updates, expected):
    torch.testing.assert_close(aggregator.center(updates), torch.tensor(expected, dtype=torch.float32))


@pytest.mark.parametrize("case", BYZFL, ids=lambda case: f"n={len(case['updates'])},f={case['attackers']}")
def test_results_are_those_of_byzfl(case):
    """byzfl's scores of Krum use n − f − 1 neighbours instead of the paper's n − f − 2, that is, f − 1 here."""
    x, f = torch.tensor(case["updates"], dtype=torch.float64), case["attackers"]
    ours = {
        "median": Median(),
        "trimmed-mean": TrimmedMean(attackers=f),
        "krum": Krum(attackers=f - 1),
        "multi-krum": MultiKrum(attackers=f - 1, chosen=len(x) - f),
        "geometric-median": GeometricMedian(steps=5, smoothing=0.1),
        "centred-clipping": CentredClipping(radius=1.5, steps=3),
    }
    for name, aggregator in ours.items():
        expected = np.array(case["results"][name])
        np.testing.assert_allclose(aggregator.center(x).numpy(), expected, rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("aggregator", ALL, ids=lambda each: each.name)
def test_the_order_of_the_clients_does_not_matter(aggregator):
    x, order = drawn(7, 4), np.random.default_rng(1).permutation(7)
    torch.testing.assert_close(aggregator.center(x[order]), aggregator.center(x))


@pytest.mark.parametrize("aggregator", [Median(), TrimmedMean(), Krum(), MultiKrum(), GeometricMedian(steps=500)])
def test_a_shift_of_all_updates_shifts_the_result(aggregator):
    x, shift = drawn(7, 4), torch.tensor([5.0, -3.0, 0.0, 100.0], dtype=torch.float64)
    torch.testing.assert_close(aggregator.center(x + shift), aggregator.center(x) + shift, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("aggregator", ALL, ids=lambda each: each.name)
def test_equal_updates_are_the_result(aggregator):
    x = torch.tensor([0.25, -1.5, 3.0]).repeat(6, 1)
    torch.testing.assert_close(aggregator.center(x), x[0])


def test_nothing_trimmed_or_clipped_is_the_mean():
    x = drawn(7, 4)
    for aggregator in (
        TrimmedMean(attackers=0),
        CentredClipping(radius=1e6),
        MultiKrum(attackers=0),
        GeometricMedian(smoothing=1e6),
    ):
        torch.testing.assert_close(aggregator.center(x), x.mean(dim=0))
    replies = {k: reply([float(k), 2.0], samples=k + 1, mean=float(k)) for k in range(5)}
    ours, mean = (combined(each, replies)[0] for each in (TrimmedMean(attackers=0), Mean()))
    torch.testing.assert_close(ours.params, mean.params)
    torch.testing.assert_close(ours.buffers["mean"], mean.buffers["mean"])


def test_krum_chooses_one_of_its_inputs():
    x = drawn(9, 4)
    assert any(torch.equal(Krum(attackers=3).center(x), row) for row in x)


@pytest.mark.slow
def test_the_geometric_median_has_the_smallest_sum_of_distances():
    x = drawn(7, 3)
    best = GeometricMedian(steps=1000).center(x)
    directions = drawn(50, 3, seed=1) - 0.5

    def total(point):
        return (x - point).norm(dim=1).sum()

    assert all(total(best) <= total(best + 0.05 * direction) for direction in directions)


@pytest.mark.parametrize("aggregator", [Median(), TrimmedMean(attackers=2), Krum(attackers=2), MultiKrum(attackers=2)])
def test_two_false_updates_of_a_million_leave_the_result_among_the_honest_ones(aggregator):
    honest = drawn(6, 4)
    x = torch.cat([honest, torch.full((2, 4), 1e6, dtype=torch.float64)])
    result = aggregator.center(x)
    torch.testing.assert_close(result.clamp(honest.min(dim=0).values, honest.max(dim=0).values), result)


@pytest.mark.parametrize(
    ("aggregator", "limit"),
    [(GeometricMedian(steps=20), 2.0), (CentredClipping(radius=1.0), 1.0), (CentredClipping(radius=0.5, steps=3), 1.5)],
)
def test_two_false_updates_of_a_million_move_the_result_by_a_limited_length(aggregator, limit):
    honest = drawn(6, 4)
    x = torch.cat([honest, torch.full((2, 4), 1e6, dtype=torch.float64)])
    assert (aggregator.center(x) - aggregator.center(honest)).norm() < limit
    assert (x.mean(dim=0) - honest.mean(dim=0)).norm() > 1e5


def test_one_reply_of_a_million_breaks_fedavg_but_not_the_robust_aggregators():
    replies = {k: reply([10.0 + k, 1.0]) for k in range(6)} | {6: reply([1e6, -1e6], samples=500)}
    for aggregator in ALL:
        after, state = combined(aggregator, replies)
        assert after.params["w"].tolist() == [pytest.approx(15, abs=5), pytest.approx(0, abs=3)]
        assert state is None
    assert combined(MeanBySize(), replies)[0].params["w"][0] > 1e5
    assert START.params["w"].tolist() == [10.0, 0.0]


def test_sizes_that_clients_claim_do_not_count():
    few, many = ({0: reply([1.0, 0.0], n), 1: reply([3.0, 0.0]), 2: reply([5.0, 0.0])} for n in (1, 10**9))
    assert torch.equal(combined(Median(), few)[0].params["w"], combined(Median(), many)[0].params["w"])


def test_buffers_are_combined_as_parameters_and_counters_by_the_median():
    replies = {k: reply([1.0, 1.0], mean=m, count=c) for k, (m, c) in enumerate([(1.0, 7), (2.0, 8), (1e6, 10**9)])}
    after, _ = combined(Median(), replies)
    assert (after.buffers["mean"].item(), after.buffers["count"].item()) == (2.0, 8)


def test_a_server_optimiser_takes_its_step_with_the_combined_update():
    replies = {k: reply([10.0 + w, 0.0]) for k, w in enumerate([1.0, 2.0, 90.0])}
    aggregator = Median(server={"optimizer": "sgd", "lr": 0.5, "momentum": 0.9})
    after, state = combined(aggregator, replies)
    assert after.params["w"][0].item() == pytest.approx(11.0)
    assert state is not None


def test_parameters_keep_their_shapes_dtypes_and_order():
    before = Weights(
        {"a": torch.zeros(2, 3), "b": torch.zeros((), dtype=torch.float64), "c": torch.zeros(1).half()}, {}
    )
    models = [
        {name: w + k for name, w in reversed(before.params.items())}
        for k in (1, 2, 3)  # the order of a reply may differ
    ]
    replies = {k: FitReply(Weights(model, {}), 1, 1, 1, 0.0, {}) for k, model in enumerate(models)}
    after, _ = Median().combine(before, None, Selection.plain(np.arange(3), 3), replies)
    assert list(after.params) == ["a", "b", "c"]
    for name, w in after.params.items():
        assert torch.equal(w, torch.full_like(before.params[name], 2))


@pytest.mark.parametrize("aggregator", ALL, ids=lambda each: each.name)
def test_nobody_leaves_the_model(aggregator):
    assert combined(aggregator, {})[0] is START


def test_too_few_replies_leave_the_model():
    replies = {k: reply([99.0, 99.0]) for k in range(4)}
    after, state = combined(Krum(attackers=1), replies)
    assert (after, state) == (START, None)
    assert Krum(attackers=1).shortage(4) == "krum needs at least 5 replies, but only 4 clients replied"
    assert Krum(attackers=1).shortage(5) == Krum(attackers=1).shortage(0) == Median().shortage(1) == ""
    least = [each.least_replies for each in (TrimmedMean(attackers=2), Krum(attackers=2), MultiKrum(attackers=2))]
    assert least == [5, 7, 7]
    assert MultiKrum(attackers=1, chosen=8).least_replies == 9


def spec(aggregator, **sections) -> fs.Experiment:
    table = {
        "partition": {"name": "iid", "clients": 8},
        "data": {"name": "digits", "limit": 200},
        "method": {"name": "fedavg", "aggregator": aggregator},
        "training": {"rounds": 2, "local_epochs": 1, "clients_per_round": 6, "workers": 1},
        "evaluation": {"every": 0},
    }
    return fs.Experiment.from_table({**table, **sections})


@pytest.mark.parametrize(
    ("aggregator", "needed"),
    [
        ({"name": "krum", "attackers": 2}, 7),
        ({"name": "multi-krum", "chosen": 6}, 7),
        ({"name": "trimmed-mean", "attackers": 3}, 7),
    ],
)
def test_a_round_that_invites_too_few_clients_is_refused(aggregator, needed):
    with pytest.raises(
        SpecError, match=f"needs at least {needed} replies, but each round invites only 6 clients"
    ) as caught:
        prepare(spec(aggregator))
    assert caught.value.key == "method.aggregator"


def test_all_clients_are_invited_if_the_sampler_says_so():
    method = {"name": "fedavg", "client_sampler": "all", "aggregator": {"name": "krum", "attackers": 2}}
    prepare(spec("median", method=method))


@pytest.mark.parametrize("settings", [{"attackers": -1}, {"chosen": 0}, {"attackers": 0.5}])
def test_settings_have_bounds(settings):
    with pytest.raises(SpecError):
        spec({"name": "multi-krum", **settings})


def test_an_event_names_a_round_with_too_few_replies():
    away = {"name": "bernoulli", "p": 0.4}
    with fs.Simulation(prepare(spec("krum", availability=away))) as simulation:
        before = simulation.state.weights
        record = simulation.step()
        assert 0 < record["clients_trained"] < 5
        assert simulation.state.weights is before
        event = next(event for event in simulation.events if event["kind"] == "too few replies")
    assert event["reason"] == f"krum needs at least 5 replies, but only {record['clients_trained']} clients replied"
    assert len(event["clients"]) == record["clients_trained"]


def test_every_robust_aggregator_of_the_registry_is_tested_here():
    robust = {name for name in AGGREGATORS if issubclass(AGGREGATORS.find(name), RobustAggregator)}
    assert robust == {each.name for each in ALL}
