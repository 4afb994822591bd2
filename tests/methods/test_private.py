"""Rounds with differential privacy of clients: by hand, against FedAvg, between neighbours, and when a run ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import Field

import fedstrata as fs
from fedstrata.base.errors import SpecError
from fedstrata.base.rng import rng
from fedstrata.evaluation.summary import summary_lines
from fedstrata.federation.settings import ClientDP
from fedstrata.runs.client_accountant import MEMORY, ClientAccountant

pytestmark = pytest.mark.filterwarnings(r"ignore:privacy\.clients")

TABLE: dict[str, Any] = {
    "data": {"name": "digits", "limit": 400},
    "partition": {"name": "dirichlet", "alpha": 1.0, "clients": 6, "min_size": 2},
    "model": {"name": "mlp", "hidden": [8]},
    "method": {"name": "fedavg", "client_sampler": "uniform", "aggregator": "mean"},
    "training": {"rounds": 3, "clients_per_round": 3, "local_epochs": 1, "batch_size": 16, "lr": 0.3},
    "privacy": {"clients": {"clip": 0.5, "noise": 0.2}},
    "evaluation": {"every": 0},
}


def spec(**changes: Any) -> fs.Experiment:
    """A spec in which the given keys of each section are changed, added or, if they are None, removed."""
    table = {name: {**TABLE.get(name, {}), **section} for name, section in changes.items()}
    return fs.Experiment.from_table({**TABLE, **table})


def dp(**changes: Any) -> dict[str, Any]:
    return {"clients": {**TABLE["privacy"]["clients"], **changes}}


class Without(fs.Availability):
    """One client is never online.

    Args:
        client: The client.
    """

    client: int = Field(default=0, ge=0)

    def online(self, clients: np.ndarray, round: int, seed: int) -> np.ndarray:
        return clients != self.client


def steps(made: fs.Experiment, listener: Any = None) -> tuple[list[dict[str, Any]], list[dict[str, torch.Tensor]]]:
    """The records of a run, and the models before the first and after each round."""
    with fs.Simulation(fs.prepare(made), listener=listener) as simulation:
        models, records = [simulation.state.weights.params], []
        for record in simulation:
            records.append(record)
            models.append(simulation.state.weights.params)
    return records, models


def row(params: dict[str, torch.Tensor]) -> np.ndarray:
    return torch.cat([w.reshape(-1) for w in params.values()]).double().numpy()


def test_a_round_by_hand():
    answers: list[Any] = []
    made = spec(training={"rounds": 1}, method={"aggregator": {"name": "mean", "server": {"lr": 0.5}}})
    (record,), (before, after) = steps(made, lambda round, replies: answers.extend(replies.values()))
    moved = [row(reply.weights.params) - row(before) for reply in answers]
    norms = [float(np.linalg.norm(each)) for each in moved]
    assert len(answers) == 3
    assert record["clipped"] == sum(norm > 0.5 for norm in norms) > 0
    assert record["train_loss"] is None
    clipped = sum(each * min(1, 0.5 / norm) for each, norm in zip(moved, norms, strict=True))
    noise = 0.2 * 0.5 * rng(0, "client-noise", 1).standard_normal(len(moved[0]))
    np.testing.assert_allclose(row(after), row(before) + 0.5 * (clipped + noise) / 3, atol=1e-6)


@pytest.mark.slow
def test_without_clipping_and_noise_the_run_is_fedavg_with_equal_weights():
    plain = fs.run(spec(privacy={"clients": None}))
    private = fs.run(spec(privacy=dp(clip=1e6, noise=1e-14)))
    for name, w in plain.params.items():
        torch.testing.assert_close(private.params[name], w, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"method": {"name": "moon"}}, marks=pytest.mark.long),
        {"method": {"client_sampler": "poisson"}},
        pytest.param({"communication": {"up": "qsgd"}}, marks=pytest.mark.long),
        {"communication": {"up": {"name": "top-k", "fraction": 0.1}, "down": "bf16"}},
        {"training": {"optimizer": "adamw", "optimizer_state": "keep", "lr": 0.01}},
        {"attack": {"name": "label-flip", "clients": [1]}},
    ],
)
@pytest.mark.slow
def test_neighbours_differ_by_at_most_the_largest_norm(changes: dict[str, Any]):
    made = spec(**{**changes, "training": {**changes.get("training", {}), "rounds": 1, "clients_per_round": 5}})
    _, (_, whole) = steps(made)
    moved = []
    for client in range(6):
        _, (_, other) = steps(made.model_copy(update={"availability": Without(client=client)}))
        # The noise is the same in both runs. The sum is 5 times the update, because 5 clients are expected.
        moved.append(5 * float(np.linalg.norm(row(whole) - row(other))))
    assert max(moved) <= 0.5 * (1 + 1e-4)
    assert max(moved) > 0.4


@pytest.mark.slow
def test_invitations_of_others_do_not_depend_on_the_answers_of_a_client():
    made = spec(training={"rounds": 6}, privacy=dp(participations=4))
    away = made.model_copy(update={"availability": Without(client=2)})
    invitations = []
    for each in (made, away):
        with fs.Simulation(fs.prepare(each)) as simulation:
            invitations.append([sorted(simulation.federation.log.invited) for _ in simulation])
    assert invitations[0] == invitations[1]


@pytest.mark.slow
def test_a_round_without_clients_still_has_noise():
    made = spec(method={"client_sampler": "poisson"}, training={"rounds": 12, "clients_per_round": 1})
    records, models = steps(made)
    empty = [index for index, record in enumerate(records) if record["clients_invited"] == 0]
    assert empty
    for index in empty:
        noise = 0.1 * rng(0, "client-noise", index + 1).standard_normal(len(row(models[0])))
        np.testing.assert_allclose(row(models[index + 1]) - row(models[index]), noise, atol=1e-6)


@pytest.mark.slow
def test_parameters_that_clients_do_not_train_or_send_stay_as_they_are():
    for method in ("fedbabu", "fedper"):
        _, models = steps(spec(method={"name": method}))
        moved = {name for name, w in models[-1].items() if not torch.equal(w, models[0][name])}
        assert moved
        assert moved < models[0].keys()


@pytest.mark.slow
def test_every_record_states_what_epsilon_is_about():
    history = fs.run(spec(method={"client_sampler": "poisson"}))
    accountant = ClientAccountant(ClientDP(clip=0.5, noise=0.2), 6, 0.5)
    assert [record["epsilon"] for record in history] == [accountant.epsilon(k) for k in (1, 2, 3)]
    for record in history:
        assert record["privacy"]["unit"] == "client"
        assert record["privacy"]["sampling"] == "Poisson with rate 0.5"
        assert record["privacy"]["noise"] == "no privacy: seeded, so anyone who knows the seed can remove the noise"
    assert "per client; no privacy: seeded, so anyone who knows the seed" in dict(summary_lines(history))["privacy"]


@pytest.mark.parametrize(
    ("changes", "sampling"),
    [
        ({}, "not counted"),
        ({"method": {"client_sampler": "all"}}, "not counted"),
        ({"method": {"client_sampler": "poisson"}}, "Poisson with rate 0.5"),
        ({"method": {"client_sampler": "poisson"}, "privacy": dp(participations=3)}, "not counted"),
        ({"method": {"client_sampler": "poisson"}, "privacy": dp(noise=0.01)}, "not counted"),
        ({"method": {"client_sampler": "poisson"}, "availability": {"name": "bernoulli", "p": 0.9}}, "not counted"),
    ],
)
def test_sampling_lowers_epsilon_only_where_it_hides_who_takes_part(changes: dict[str, Any], sampling: str):
    records, _ = steps(spec(**{"training": {"rounds": 1}, **changes}))
    assert records[0]["privacy"]["sampling"] == sampling


@pytest.mark.slow
def test_a_run_ends_before_the_budget_is_exceeded():
    free = fs.run(spec(method={"client_sampler": "all"}))
    second = free[1]["epsilon"]
    limited = fs.run(spec(method={"client_sampler": "all"}, privacy=dp(budget=second)))
    assert len(limited) == 2
    assert limited[-1]["epsilon"] == second
    assert "privacy budget" in limited.stopped
    with pytest.raises(SpecError, match=r"budget = .*: the first round would spend ε ="):
        fs.prepare(spec(privacy=dp(budget=free[0]["epsilon"] * 0.99)))


def counts(made: fs.Experiment, path: Path | None = None) -> tuple[fs.History, list[int]]:
    """A run, and how often each client was invited."""
    invited: list[int] = [0] * 6
    with fs.Simulation(fs.prepare(made)) as simulation:
        for _ in simulation:
            for client in simulation.federation.log.invited:
                invited[client] += 1
        assert simulation.memory[MEMORY].tolist() == invited
    return fs.run(made, out=path), invited


@pytest.mark.slow
def test_a_client_at_the_limit_is_not_invited_and_the_run_ends():
    history, invited = counts(spec(training={"rounds": 9}, privacy=dp(participations=2)))
    assert max(invited) == 2
    assert "participations = 2" in history.stopped
    assert sum(invited) == 12
    assert len(history) < 9


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["uniform", "poisson"])
def test_a_killed_run_resumes_to_the_same_bytes_and_keeps_the_limit(sampler: str, tmp_path: Path):
    made = spec(
        method={"client_sampler": sampler},
        training={"rounds": 8},
        privacy=dp(participations=3),
        evaluation={"every": 0, "checkpoint_every": 2},
    )
    whole, invited = counts(made, tmp_path / "whole")
    assert max(invited) == 3
    for killed in (3, 4):
        with pytest.raises(KeyboardInterrupt):
            fs.run(made, out=tmp_path / f"part-{killed}", callbacks=[stop_after(killed)])
        resumed = fs.run(made, out=tmp_path / f"part-{killed}", resume=True)
        one, two = (tmp_path / name / "model.safetensors" for name in ("whole", f"part-{killed}"))
        assert one.read_bytes() == two.read_bytes()
        assert [r["clients_invited"] for r in resumed] == [r["clients_invited"] for r in whole]
        assert [r["epsilon"] for r in resumed] == [r["epsilon"] for r in whole]


def stop_after(round: int) -> Any:
    def stop(record: Any) -> None:
        if record["round"] == round:
            raise KeyboardInterrupt

    return stop


@pytest.mark.slow
def test_worker_processes_give_the_same_bytes():
    one, two = (fs.run(spec(training={"workers": workers})) for workers in (1, 2))
    assert all(torch.equal(two.params[name], w) for name, w in one.params.items())


@pytest.mark.long
@pytest.mark.slow
def test_digits_are_learned_by_many_clients_with_a_moderate_epsilon():
    history = fs.run(
        spec(
            data={"name": "digits", "limit": 1797},
            partition={"clients": 150, "alpha": 100.0},
            method={"client_sampler": "poisson"},
            training={"rounds": 40, "clients_per_round": 75, "lr": 0.5, "local_epochs": 3},
            privacy=dp(clip=1.0, noise=1.0, delta=1e-3),
            evaluation={"every": 40},
        )
    )
    assert history.final_accuracy > 0.6
