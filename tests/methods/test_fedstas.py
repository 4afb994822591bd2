"""FedSTS and FedSTaS end to end: strata, requested samples, privacy, and a run that goes on where it was killed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fedstrata as fs
from fedstrata.base import records
from fedstrata.base.errors import SpecError

MODEL = {"name": "mlp", "hidden": [16]}


def spec(method: dict, *, clients: int = 24, rounds: int = 6, **training) -> fs.Experiment:
    return fs.Experiment(
        partition={"name": "dirichlet", "alpha": 0.3, "clients": clients},
        method=method,
        model=MODEL,
        training={"rounds": rounds, "clients_per_round": 6, "batch_size": 16, "local_epochs": 1, **training},
        evaluation={"every": 0, "checkpoint_every": 2},
    )


FEDSTAS = {"name": "fedstas", "strata": 4, "coordinates": 64, "fraction": 0.25}


@pytest.mark.slow
def test_a_round_on_digits(start):
    started = start(spec(FEDSTAS))
    for _ in range(2):
        metrics = started.step()
        sizes, allocation = metrics["strata_sizes"], metrics["strata_allocation"]
        assert sum(sizes) == 24
        assert sum(allocation) == 6
        assert all(0 <= m <= n for m, n in zip(allocation, sizes, strict=True))
        assert len(metrics["strata_deviation"]) == len(sizes) <= 4
        assert metrics["clients_invited"] == 24  # everybody sends a compressed gradient
        assert metrics["exchanges"] == 3  # compressed gradients, sizes, training
    assert started.state.clients.known.tolist() == list(range(24))
    assert started.state.clients.points.shape == (24, 64)


@pytest.mark.slow
def test_the_server_sees_squeezed_gradients_and_pays_for_them_alone(start):
    started = start(spec(FEDSTAS, clients_per_round=4))
    metrics = started.step()
    points = started.state.clients.points
    assert all(len(np.unique(point)) <= 9 for point in points)
    model = records.size(started.state.weights)
    # 24 replies of 64 codes in 32 bytes, 4 sizes, 4 models.
    assert 4 * model + 24 * 32 < metrics["bytes_up"] < 4 * (model + 1000) + 24 * (32 + 9 * 4 + 600)


@pytest.mark.slow
def test_clients_may_be_compared_by_their_centroids_alone(start):
    started = start(spec({**FEDSTAS, "centres": 5, "compared": "centroids"}))
    metrics = started.step()
    points = started.state.clients.points
    assert points.shape == (24, 5)
    assert (np.diff(points, axis=1) >= 0).all()
    restored = start(spec({**FEDSTAS, "centres": 5}))
    restored.step()
    # The centres of the restored gradient, none of which is lost.
    for point, gradient in zip(points, restored.state.clients.points, strict=True):
        assert set(np.unique(point).tolist()) == set(np.unique(gradient).tolist())
    assert sum(metrics["strata_allocation"]) == 6


def test_updates_have_no_centroids():
    with pytest.raises(SpecError, match=r"method\.compared.*gradients = 'asked'"):
        fs.prepare(spec({**FEDSTAS, "compared": "centroids", "refresh": "participants"}))


@pytest.mark.parametrize("name", ["fedsts", "fedstas"])
def test_the_start_of_k_means_is_in_a_spec_only_if_it_is_set(name):
    assert "start" not in spec({"name": name}).to_spec()["method"]
    written = spec({"name": name, "start": "random"}).to_spec()
    assert written["method"]["start"] == "random"
    assert fs.Experiment.from_table(written).method.choices()[0].start == "random"
    with pytest.raises(SpecError, match=r"method\.start = 'kmeans': must be 'k-means\+\+' or 'random'"):
        spec({"name": name, "start": "kmeans"})


@pytest.mark.slow
def test_about_the_requested_number_of_samples_is_used(start):
    started = start(spec({**FEDSTAS, "fraction": 0.3}))
    used, wanted, variance = 0, 0.0, 0.0
    for _ in range(12):
        metrics = started.step()
        # Without privacy the estimate is the participants' true number of samples.
        total, keep = metrics["estimated_samples"], metrics["keep"]
        assert keep == pytest.approx(min(1, metrics["requested_samples"] / total))
        used += metrics["samples"]
        wanted += keep * total
        variance += keep * (1 - keep) * total
    assert abs(used - wanted) < 4 * np.sqrt(variance)
    assert 0.2 < used / (12 * started.state.data.total / started.state.data.rounds) < 0.4


@pytest.mark.slow
def test_a_share_needs_no_exchange_for_sizes(start):
    started = start(spec({**FEDSTAS, "share": 0.5}))
    for _ in range(2):
        metrics = started.step()
        assert metrics["exchanges"] == 2  # compressed gradients, training
        assert metrics["keep"] == 0.5
        assert metrics["samples"] == 0  # no reply tells it
        assert metrics["expected_samples"] > 0


def test_requested_samples_by_hand(start, seven):
    clients = ((0, 1, 2, 3), (4, 5, 6))
    method = {"name": "fedavg", "data_sampler": {"name": "fedstas", "fraction": 0.5}}
    base = spec(method).model_copy(update={"partition": fs.Given(indices=clients)})
    one = base.model_copy(update={"training": fs.Training(clients_per_round=1, local_epochs=1)})
    started = start(one, seven)
    totals = []
    for _ in range(6):
        metrics = started.step()
        totals.append(metrics["estimated_samples"])
        assert totals[-1] in (3, 4)
        assert metrics["requested_samples"] == pytest.approx(0.5 * np.mean(totals))
        assert metrics["keep"] == pytest.approx(0.5 * np.mean(totals) / totals[-1])
    assert set(totals) == {3, 4}
    fixed = base.model_copy(
        update={
            "method": fs.FedAvg(data_sampler={"name": "fedstas", "samples": 100}),
            "training": fs.Training(clients_per_round=2, local_epochs=1),
        }
    )
    metrics = start(fixed, seven).step()
    assert (metrics["requested_samples"], metrics["keep"], metrics["samples"]) == (100, 1.0, 7)


@pytest.mark.slow
def test_private_sizes_estimate_the_total_and_clients_without_data_take_part(start):
    owners = [tuple(range(k * 60, (k + 1) * 60)) for k in range(19)] + [()]
    method = {"name": "fedstas", "strata": 2, "coordinates": 32, "fraction": 0.5, "epsilon": 4.0, "bound": 70}
    wanted = fs.Experiment(
        partition=fs.Given(indices=owners, min_size=0),
        method=method,
        model=MODEL,
        training={"clients_per_round": 20, "batch_size": 30, "local_epochs": 1},
    )
    started = start(wanted)
    found = []
    for _ in range(20):
        metrics = started.step()
        assert metrics["clients_failed"] == 0
        assert metrics["clients_returned"] == 20
        assert torch.isfinite(started.state.weights.params["head.weight"]).all()
        found.append(metrics["estimated_samples"])
    # The empty client answers as if it had one sample: 19 · 60 + 1.
    error = np.std(found, ddof=1) / np.sqrt(len(found))
    assert error > 1  # noise there is
    assert abs(np.mean(found) - 1141) < 4 * error


def test_a_bound_that_clips_is_said():
    method = {**FEDSTAS, "epsilon": 3.0, "bound": 40}
    with pytest.warns(UserWarning, match=r"bound = 40: the number of samples is clipped for \d+ of 24 clients"):
        fs.prepare(spec(method))
    fs.prepare(spec({**FEDSTAS, "bound": 40}))  # without privacy nothing is clipped
    fs.prepare(spec({**method, "bound": 2000}))


def test_fewer_clients_than_strata_is_said():
    rule = {"allocation": "neyman-at-least-one"}
    with pytest.warns(UserWarning, match="training.clients_per_round = 3: is lower than method.strata = 4"):
        fs.prepare(spec({**FEDSTAS, **rule}, clients_per_round=3))


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["neyman", "neyman-random", "neyman-at-least-one", "proportional"])
def test_every_rule_of_allocation_acts(start, rule):
    """With as many draws as strata: one for each, or not."""
    sampling = {"allocation": rule, "aggregation": "paper" if rule == "neyman" else "horvitz-thompson"}
    started = start(spec({**FEDSTAS, "strata": 6, **sampling}))
    found = [started.step()["strata_allocation"] for _ in range(4)]
    assert all(sum(each) == 6 for each in found)
    one_each = [min(each) > 0 for each in found if len(each) == 6]
    assert one_each, "k-means found fewer strata in every round"
    assert all(one_each) == (rule in ("neyman-at-least-one", "proportional"))


@pytest.mark.filterwarnings("ignore:training.clients_per_round")
@pytest.mark.parametrize("aggregation", ["horvitz-thompson", "inclusion"])
@pytest.mark.parametrize(("rule", "places"), [("neyman", 6), ("neyman-at-least-one", 3), ("proportional", 3)])
def test_what_leaves_strata_out_cannot_be_weighted(rule, places, aggregation):
    method = {**FEDSTAS, "strata": 4, "allocation": rule, "aggregation": aggregation}
    with pytest.raises(SpecError, match=f"^method.allocation = '{rule}': with {places} clients per round, some strata"):
        fs.prepare(spec(method, clients_per_round=places))


@pytest.mark.parametrize("rule", ["neyman-at-least-one", "proportional"])
def test_one_draw_for_each_stratum_can_be_weighted(rule):
    method = {**FEDSTAS, "strata": 4, "allocation": rule, "aggregation": "horvitz-thompson"}
    assert fs.prepare(spec(method, clients_per_round=4)).config.training.clients_per_round == 4


@pytest.mark.slow
def test_without_rounding_strata_are_of_the_whole_gradients(start):
    """255 values for fewer than 255 coordinates round nothing, so both runs have the same strata, draws and models."""
    exact, rounded = (start(spec({**FEDSTAS, "centres": centres, "coordinates": 32})) for centres in (0, 32))
    for _ in range(3):
        assert exact.step()["strata_allocation"] == rounded.step()["strata_allocation"]
    for name, weights in exact.state.weights.params.items():
        assert torch.equal(weights, rounded.state.weights.params[name])


def test_gradients_that_are_not_rounded_have_no_centroids():
    with pytest.raises(
        SpecError, match=r"^method.compared = 'centroids': gradients that are not rounded \(centres = 0"
    ):
        fs.prepare(spec({**FEDSTAS, "centres": 0, "compared": "centroids"}))


@pytest.mark.slow
def test_participants_renew_and_the_others_keep_their_last(start):
    started = start(
        spec({"name": "fedsts", "strata": 3, "coordinates": 32, "refresh": "participants", "gradients": "asked"})
    )
    started.step()
    assert len(started.state.clients.known) == len(started.state.clients.participants) == 6
    for number in range(2, 7):
        before = started.state.clients
        metrics = started.step()
        after = started.state.clients
        # As many newcomers as a round has places, until everybody is known.
        assert len(after.known) == min(24, 6 * number)
        newcomers = np.setdiff1d(after.known, before.known)
        assert metrics["clients_invited"] <= len(newcomers) + len(before.participants) + 6
        kept = np.setdiff1d(before.known, before.participants)
        old, new = np.searchsorted(before.known, kept), np.searchsorted(after.known, kept)
        assert (before.points[old] == after.points[new]).all()
        renewed = before.participants
        old, new = np.searchsorted(before.known, renewed), np.searchsorted(after.known, renewed)
        assert (before.points[old] != after.points[new]).any(axis=1).all()
        assert set(after.participants) <= set(after.known)
        assert len(after.participants) == 6
        assert records.encode(records.decode(records.encode(after))) == records.encode(after)
    assert len(kept) == 18


@pytest.mark.slow
def test_who_is_offline_keeps_an_old_gradient_and_is_no_candidate_when_announced(start):
    settings = spec({"name": "fedsts", "strata": 3, "coordinates": 32})
    started = start(settings.model_copy(update={"availability": fs.Bernoulli(p=0.5, announced=True)}))
    started.step()
    for _ in range(3):
        before = started.state.clients
        metrics = started.step()
        there = started.federation.candidates()
        assert metrics["clients_dropped"] == 0
        assert sum(metrics["strata_sizes"]) == len(there)
        away = np.setdiff1d(before.known, there)
        after = started.state.clients
        old, new = np.searchsorted(before.known, away), np.searchsorted(after.known, away)
        assert (before.points[old] == after.points[new]).all()


@pytest.mark.parametrize("times", [1, 3])
def test_every_client_projects_alike_and_size_does_not_matter(start, times):
    """Two clients with the same data, one of them several times over, send the gradient of the same mean loss."""
    data = fs.Data("digits").load()
    chosen = [*range(300)] * (1 + times)  # 900 samples do not fit into one pass
    x, y = data.x_train[chosen], data.y_train[chosen]
    twins = fs.from_arrays(x, y, data.x_test, data.y_test, class_names=data.class_names)
    wanted = spec({"name": "fedsts", "strata": 1, "coordinates": 32}, clients_per_round=1)
    wanted = wanted.model_copy(update={"partition": fs.Given(indices=(range(300), range(300, len(chosen))))})
    started = start(wanted, twins)
    started.step()
    first, second = started.state.clients.points
    np.testing.assert_allclose(first, second, rtol=0 if times == 1 else 1e-4)
    assert np.abs(first).max() > 0.01


def test_a_full_gradient_of_many_centres_is_what_the_client_computes(start, seven):
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    d = sum(p.numel() for p in module.parameters())
    wanted = spec({"name": "fedsts", "strata": 1, "coordinates": 0, "centres": d}, clients_per_round=1)
    wanted = wanted.model_copy(update={"partition": fs.Given(indices=((0, 1, 2), (3, 4, 5, 6)))})
    started = start(wanted, seven, module)
    # In evaluation mode: what one client's batch does to BatchNorm is no property of its data, nor is dropout.
    weights = {name: w.requires_grad_(True) for name, w in started.config.model.params().items()}
    loss = torch.nn.functional.cross_entropy(started.config.model(weights, seven.x_train[:3]), seven.y_train[:3])
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(weights.values()))])
    started.step()
    # As many values as coordinates lose nothing.
    np.testing.assert_allclose(started.state.clients.points[0], expected.numpy(), rtol=1e-5, atol=1e-7)


class UnpluggedError(Exception):
    """Pulls the plug."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        pytest.param({**FEDSTAS, "aggregation": "horvitz-thompson"}, marks=pytest.mark.long),
        {**FEDSTAS, "aggregation": "inclusion", "refresh": "participants", "gradients": "asked", "epsilon": 3.0},
        {**FEDSTAS, "epsilon": 3.0, "estimates": "pooled", "samples": 60, "reuse": True},
        pytest.param({**FEDSTAS, "share": 0.5}, marks=pytest.mark.long),
    ],
)
def test_a_run_that_was_stopped_ends_with_the_same_bytes(method, tmp_path):
    wanted = spec(method, rounds=5)
    whole = fs.run(wanted, out=tmp_path / "whole")

    def stop(record):
        if record["round"] == 3:
            raise UnpluggedError

    with pytest.raises(UnpluggedError):
        fs.run(wanted, out=tmp_path / "cut", callbacks=[stop])
    resumed = fs.run(wanted, out=tmp_path / "cut", resume=True)
    assert [record["round"] for record in resumed] == [1, 2, 3, 4, 5]
    cut, undisturbed = ((tmp_path / folder / "model.safetensors").read_bytes() for folder in ("cut", "whole"))
    assert cut == undisturbed
    same = [{k: v for k, v in record.items() if k != "seconds"} for record in whole]
    assert [{k: v for k, v in record.items() if k != "seconds"} for record in resumed] == same


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("aggregation", ["paper", "inclusion"])
def test_it_learns_digits(aggregation):
    wanted = spec({**FEDSTAS, "fraction": 0.5, "aggregation": aggregation}, rounds=25, lr=0.2, local_epochs=2)
    assert fs.run(wanted).final_accuracy > 0.7


@pytest.mark.slow
def test_fedstas_invites_only_those_who_answered_this_round():
    spec = fs.Experiment(
        method={"name": "fedstas", "fraction": 0.5},
        partition=fs.IID(clients=40),
        availability=fs.Bernoulli(p=0.5),
        training={"rounds": 4, "clients_per_round": 10},
    )
    for record in fs.run(spec):
        assert record["clients_trained"] == 10  # nobody who is away was given a place
