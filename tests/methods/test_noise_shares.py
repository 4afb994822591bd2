"""Rounds in which clients add the noise of ``privacy.clients``: by hand, with masks, dropouts, and after a kill."""

from __future__ import annotations

import json
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedstrata as fs
from fedstrata.base.errors import SpecError
from fedstrata.base.rng import rng
from fedstrata.federation.secure.noisy import clipped
from fedstrata.federation.secure.ring import skellam
from fedstrata.methods.private import noisy_form
from fedstrata.runs.client_accountant import MEMORY

pytest.importorskip("cryptography")
pytestmark = pytest.mark.filterwarnings(r"ignore:privacy\.clients")

TABLE: dict[str, Any] = {
    "data": {"name": "digits", "limit": 400},
    "partition": {"name": "dirichlet", "alpha": 1.0, "clients": 12, "min_size": 2},
    "model": {"name": "mlp", "hidden": [8]},
    "method": {"name": "fedavg", "aggregator": "mean"},
    "training": {"rounds": 3, "clients_per_round": 6, "local_epochs": 1, "lr": 0.5, "workers": 1},
    "privacy": {"sums": "secure", "clients": {"clip": 0.5, "noise": 0.2, "noise_from": "sites"}},
}


def spec(**changes: Any) -> fs.Experiment:
    """A spec in which the given keys of each section are changed or added."""
    table = {name: {**TABLE.get(name, {}), **section} for name, section in changes.items()}
    return fs.Experiment.from_table({**TABLE, **table})


def dp(**changes: Any) -> dict[str, Any]:
    return {"clients": {**TABLE["privacy"]["clients"], **changes}}


def row(params: dict[str, torch.Tensor]) -> np.ndarray:
    return torch.cat([w.reshape(-1) for w in params.values()]).double().numpy()


def steps(made: fs.Experiment, listener: Any = None) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
    """The records of a run, and the models before the first and after each round, as vectors."""
    with fs.Simulation(fs.prepare(made), listener=listener) as simulation:
        records, models = [], [row(simulation.state.weights.params)]
        for record in simulation:
            records.append(record)
            models.append(row(simulation.state.weights.params))
    return records, models


@pytest.mark.slow
def test_a_round_by_hand():
    """The same clients train as without privacy. One of six clients is offline. A share is σ² / (5 − 1)."""
    replies: dict[int, Any] = {}
    table = {**TABLE, "seed": 3, "availability": {"name": "bernoulli", "p": 0.9}}
    table["training"] = {**TABLE["training"], "rounds": 1}
    table["method"] = {"name": "fedavg", "aggregator": {"name": "mean", "server": {"lr": 0.5}}}
    plain = fs.Experiment.from_table({**table, "privacy": {}})
    _, (before, _) = steps(plain, lambda round, answers: replies.update(answers))
    made = fs.Experiment.from_table({**table, "privacy": {"sums": "secure", **dp(colluding=1)}})
    (record,), (_, after) = steps(made)
    moved = [row(reply.weights.params) - before for reply in replies.values()]
    assert any(np.linalg.norm(each) > 0.5 for each in moved)
    prepared = fs.prepare(made)
    scale = noisy_form(prepared.spec.method, prepared.config).ring.scale
    variance = (0.2 * scale) ** 2 / 4
    noise = sum(skellam(rng(3, "noise share", 1, client), len(before), variance) for client in replies)
    total = sum(clipped(each, 0.5) for each in moved) + noise * (0.5 / scale)
    np.testing.assert_allclose(after, before + 0.5 * total / 6, atol=1e-6)
    assert len(replies) == record["clients_trained"] == 5
    assert (record["samples"], record["train_loss"]) == (0, None)
    assert "scaled" not in record
    assert "clipped" not in record


@pytest.mark.slow
def test_without_clipping_and_noise_the_run_is_fedavg_with_equal_weights():
    _, plain = steps(spec(privacy={"clients": None, "sums": "plain"}))
    _, noisy = steps(spec(privacy=dp(clip=50.0, noise=1e-9)))
    np.testing.assert_allclose(noisy[-1], plain[-1], atol=1e-5)


def test_the_noise_of_the_model_has_the_expected_deviation():
    """The updates are cut to a tiny part of the noise. A round adds the sum of six shares σ² / 5, divided by 6."""
    _, models = steps(spec(privacy=dp(clip=0.01, noise=100.0)))
    changes = [other - one for one, other in pairwise(models)]
    for change in changes:
        deviation = 100.0 * 0.01 * np.sqrt(6 / 5) / 6
        assert np.std(change) == pytest.approx(deviation, rel=4 / np.sqrt(2 * len(change)))
    for one, other in combinations(changes, 2):
        assert abs(np.corrcoef(one, other)[0, 1]) < 4 / np.sqrt(len(one))


def test_parameters_that_clients_do_not_train_stay_as_they_are():
    with fs.Simulation(fs.prepare(spec(method={"name": "fedbabu"}))) as simulation:
        before = simulation.state.weights.params
        simulation.step()
        after = simulation.state.weights.params
    same = [torch.equal(w, before[name]) for name, w in after.items()]
    assert any(same)
    assert not all(same)


OFFLINE = {"name": "bernoulli", "p": 0.8}
NINE = {"rounds": 8, "clients_per_round": 9}
"""Of nine clients in a round, seven must answer."""


def written(made: fs.Experiment, folder: Path, **how: Any) -> list[Any]:
    """The model, the records without times and checksums, and the events of a run."""
    fs.run(made, out=folder, **how)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    records = [{key: value for key, value in line.items() if key not in ("seconds", "checksum")} for line in lines]
    return [(folder / "model.safetensors").read_bytes(), records, (folder / "events.jsonl").read_bytes()]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "moon"])
def test_masks_change_no_byte(method: str, tmp_path: Path):
    results = []
    for masks in (False, True):
        made = spec(
            method={"name": method},
            availability=OFFLINE,
            training={**NINE, "optimizer_state": "keep", "momentum": 0.5},
            privacy={**dp(colluding=2), "simulate_masks": masks},
        )
        results.append(written(made, tmp_path / str(masks)))
    assert results[0] == results[1]
    trained = [record["clients_trained"] for record in results[0][1]]
    assert {0, 7, 8} <= set(trained)


@pytest.mark.slow
def test_a_sum_of_too_few_clients_fails_and_still_spends_epsilon():
    """Seven of nine clients must answer in every round, although six clients without noise would be enough."""
    records, models = steps(spec(availability=OFFLINE, training=NINE))
    online = [9 - record["clients_dropped"] for record in records]
    assert {6, 7, 8} <= set(online)
    for count, record, one, other in zip(online, records, models[:-1], models[1:], strict=True):
        assert record["clients_trained"] == (count if count >= 7 else 0)
        assert np.array_equal(one, other) == (count < 7)
    epsilons = [record["epsilon"] for record in records]
    assert epsilons == sorted(epsilons)


@pytest.mark.slow
def test_clients_are_invited_at_most_as_often_as_the_limit():
    with fs.Simulation(fs.prepare(spec(training={"rounds": 20}, privacy=dp(participations=3)))) as simulation:
        records = list(simulation)
        assert "took part in" in simulation.stopped
        assert max(simulation.memory[MEMORY]) == 3
    assert 4 <= len(records) <= 6
    everybody = fs.run(spec(training={"rounds": 3}, method={"client_sampler": "all"}))
    assert records[-1]["epsilon"] == pytest.approx(everybody[-1]["epsilon"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("masks", [False, True])
def test_a_killed_run_resumes_to_the_same_bytes(masks: bool, tmp_path: Path):
    made = spec(
        availability=OFFLINE,
        training=NINE,
        privacy={**dp(participations=7), "simulate_masks": masks},
        evaluation={"every": 0, "checkpoint_every": 2},
    )
    whole = written(made, tmp_path / "whole")

    def stop(record: Any) -> None:
        if record["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fs.run(made, out=tmp_path / "part", callbacks=[stop])
    assert written(made, tmp_path / "part", resume=True) == whole


@pytest.mark.slow
def test_worker_processes_give_the_same_bytes():
    one, two = (fs.run(spec(training={"workers": workers})) for workers in (1, 2))
    assert all(torch.equal(two.params[name], w) for name, w in one.params.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"privacy": {"sums": "plain"}}, r"privacy\.clients\.noise_from = 'sites': the server would see individual"),
        ({"privacy": {"range": 2.0}}, r"privacy\.range = 2\.0: has no effect with clients\.noise_from"),
        ({"privacy": {"largest": 50}}, r"privacy\.largest = 50: has no effect"),
        (
            {"privacy": {"sums": "plain", "clients": {"clip": 1.0, "noise": 1.0, "colluding": 2}}},
            r"privacy\.clients\.colluding = 2: has an effect only with noise_from = 'sites'",
        ),
        ({"privacy": dp(noise_from="server")}, r"privacy\.sums = 'secure': the server must clip each update"),
        ({"privacy": dp(colluding=4)}, r"privacy\.clients\.colluding = 4: .* as few as 5 clients.* at most 3"),
        ({"privacy": dp(budget=0.1)}, r"privacy\.clients\.budget = 0\.1: the first round would spend ε = 35"),
        ({"communication": {"up": "qsgd"}}, r"communication\.up = 'qsgd': is not possible with secure sums"),
        ({"method": {"name": "scaffold"}}, r"method\.objective = 'scaffold': lets clients send more than an update"),
        ({"method": {"name": "feddyn"}}, r"method\.objective = 'feddyn': uses the updates of individual clients"),
        ({"method": {"name": "power-of-choice"}}, r"method\.client_sampler = 'power-of-choice'"),
        ({"method": {"aggregator": "median"}}, r"method\.aggregator = 'median'"),
        ({"method": {"aggregator": "fednova"}}, r"method\.aggregator = 'fednova': does not give all clients the same"),
        ({"method": {"client_sampler": "poisson"}}, r"method\.client_sampler = 'poisson': invites a random number"),
        ({"training": {"clients_per_round": 2}}, r"training\.clients_per_round = 2: a secure sum needs 3 to 64"),
        ({"partition": {"clients": 100}, "training": {"clients_per_round": 65}}, r"needs 3 to 64 clients"),
    ],
)
def test_refused_settings(changes: dict[str, Any], message: str):
    with pytest.raises(SpecError, match=message):
        fs.prepare(spec(**changes))


def test_stratify_is_refused():
    with pytest.raises(SpecError, match=r"method\.name = 'stratify': asks clients for more than one update"):
        fs.prepare(fs.Experiment.from_table({**TABLE, "method": "stratify"}))


@pytest.mark.long
@pytest.mark.slow
def test_digits_are_learned_by_many_clients():
    history = fs.run(
        spec(
            data={"name": "digits", "limit": 1797},
            partition={"alpha": 100.0, "clients": 100},
            training={"rounds": 60, "clients_per_round": 20, "local_epochs": 5},
            model={"name": "mlp", "hidden": []},
            privacy=dp(noise=1.0, participations=14),
            evaluation={"every": 60},
        )
    )
    assert history.final_accuracy > 0.85
    assert history[-1]["epsilon"] < 25
