"""DP-SGD at real sites: noise and draws that nobody can repeat, what is sent, and what a site refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from asked import Site, fit
from scipy.stats import norm
from site_engine import make_site_engine
from waiting import free_port, until

import fedstrata as fs
from fedstrata.base.jsonl import read_jsonl
from fedstrata.cli import main
from fedstrata.clients.client import Client
from fedstrata.clients.training.private import poisson_draws, secret_noise
from fedstrata.evaluation.messages import Evaluate
from fedstrata.federation.messages import FitReply
from fedstrata.federation.settings import Training
from fedstrata.runs.accountant import Accountant
from fedstrata.runs.dp_record import AT_SITES, SEEDED
from fedstrata.runs.run_folder import RUN
from fedstrata.runs.simulation import run_prepared
from fedstrata.sites.federation import Sites
from fedstrata.sites.local_deployment import Processes
from fedstrata.sites.policy import Policy
from fedstrata.sites.provision import ADMIN, provision
from fedstrata.sites.site_server import SERVER
from fedstrata.sites.sums import Sums

PRIVATE: dict[str, Any] = {
    "data": {"name": "digits", "limit": 60, "shift": [128.0], "scale": [0.01]},
    "privacy": {"dp": {"clip": 1.0, "noise": 2.0}},
    "training": {"batch_size": 8},
}
WITHIN = Policy(jobs="within-policy", min_samples=1, dp=1.0)


def epsilons_of(spec: fs.Experiment, samples: int) -> list[float]:
    """The ε of a client after each round, if it trains in every round."""
    dp = spec.privacy.dp
    assert dp is not None
    accountant = Accountant(dp, spec.training, np.array([samples]))
    return [accountant.largest(np.array([rounds])) for rounds in range(1, spec.training.rounds + 1)]


def trained(folder: Path, **settings: Any) -> FitReply:
    site = Site(folder, PRIVATE, **settings)
    site.begin()
    (reply,) = site.ask(fit(site, 1))
    assert isinstance(reply, FitReply)
    return reply


def test_noise_at_sites_is_standard_normal_and_never_the_same() -> None:
    numbers = secret_noise(torch.Size([400, 500])).flatten().numpy().astype(np.float64)
    n = len(numbers)
    # All bounds are six standard deviations of their estimate, or more.
    assert abs(numbers.mean()) < 6 / np.sqrt(n)
    assert abs(numbers.var() - 1) < 6 * np.sqrt(2 / n)
    steps = np.arange(1, n + 1) / n
    assert np.abs(norm.cdf(np.sort(numbers)) - steps).max() < 3 / np.sqrt(n), "Kolmogorov and Smirnov"
    # By chance, 0.015 of these numbers are equal on average, because float32 has few values.
    assert np.isin(secret_noise(torch.Size([1000])).numpy(), numbers[:1000]).sum() < 10


@pytest.mark.slow
def test_draws_at_sites_have_the_probability_of_the_accountant_and_are_never_the_same(tmp_path: Path) -> None:
    site = Site(tmp_path, PRIVATE)
    site.begin()
    context = site.site_server._running().context
    assert context.secret
    drawn = [list(poisson_draws(Client(0, context), Training(local_steps=4000, batch_size=5), 1, 20)) for _ in "ab"]
    counts = np.bincount(np.concatenate(drawn[0]), minlength=20) / 4000
    assert np.abs(counts - 0.25).max() < 6 * np.sqrt(0.25 * 0.75 / 4000)
    assert any(len(one) != len(other) for one, other in zip(*drawn, strict=True))


@pytest.mark.slow
def test_real_sites_never_repeat_an_update_but_simulated_sites_do(tmp_path: Path) -> None:
    real = [trained(tmp_path / name).weights.params for name in "ab"]
    differ = torch.cat([(one != other).flatten() for one, other in zip(*(each.values() for each in real), strict=True)])
    assert differ.float().mean() > 0.99
    simulated = trained(tmp_path / "c", simulated=True).weights.params
    table = {
        **Site(tmp_path / "d", PRIVATE).spec.to_spec(),
        "training": {"rounds": 1, "local_steps": 2, "batch_size": 8},
    }
    table["partition"] = {"name": "iid", "clients": 2}
    prepared = fs.prepare(fs.Experiment.from_table(table))
    with fs.Simulation(prepared) as simulation:
        simulation.federation.begin(1)
        site = Site(tmp_path / "e", PRIVATE, simulated=True)
        local = simulation.engine.ask({0: fit(site, 1)}, together=False)[0]
    assert isinstance(local, FitReply)
    assert all(torch.equal(simulated[name], w) for name, w in local.weights.params.items())


@pytest.mark.slow
def test_neither_the_loss_nor_the_number_of_drawn_samples_is_sent(tmp_path: Path) -> None:
    replies = [trained(tmp_path / str(number)) for number in range(3)]
    assert {(reply.samples, reply.steps, reply.seen, reply.loss) for reply in replies} == {(30, 2, 16, 0.0)}
    assert all(reply.message == {} for reply in replies)


@pytest.mark.slow
def test_random_layers_and_augmentations_at_sites_do_not_follow_from_the_seed(tmp_path: Path) -> None:
    # The noise is negligible, so a difference of two updates comes from the augmentation of full batches.
    table = {
        **PRIVATE,
        "data": {"name": "digits", "limit": 60, "augment": {"name": "crop-flip"}},
        "privacy": {"dp": {"clip": 1.0, "noise": 1e-9}},
        "training": {"batch_size": 100},
    }
    updates = []
    for name in "ab":
        site = Site(tmp_path / name, table)
        site.begin()
        updates.append(site.ask(fit(site, 1))[0].weights.params)
    assert max(float((one - updates[1][name]).abs().max()) for name, one in updates[0].items()) > 1e-4


def test_an_evaluation_needs_the_permission_of_a_site_that_requires_noise(tmp_path: Path) -> None:
    table = PRIVATE | {"evaluation": {"client_test": 0.2, "fine_tune": 1}}
    allowed = WITHIN.model_copy(update={"outside_dp": ["sizes", "evaluation"]})
    site = Site(tmp_path, table, policy=allowed)
    site.begin()
    question = Evaluate(3, site.weights, "test", True, 1, 0, 0)
    site.site_server._running().guard.policy = WITHIN
    (refused,) = site.ask(question)
    assert "refused by the rule 'policy.outside_dp': the results of evaluations" in refused.reason


@pytest.mark.slow
def test_a_round_beyond_the_budget_is_refused_also_after_a_restart(tmp_path: Path) -> None:
    site = Site(tmp_path, PRIVATE, policy=WITHIN.model_copy(update={"budget": 8.0}))
    site.begin()
    assert isinstance(*site.ask(fit(site, 1)), FitReply)
    assert site.site_server.budget is not None
    spent = site.site_server.budget.report()["epsilon"]
    site.policy = WITHIN.model_copy(update={"budget": 1.0001 * spent})
    site.save(1, site.counts(0))
    site.start()
    site.begin(1)
    (refused,) = site.ask(fit(site, 2))
    assert "refused by the rule 'policy.budget'" in refused.reason
    assert site.ledger.refused == ["policy.budget"]
    assert site.site_server.budget.report()["epsilon"] == spent


@pytest.mark.slow
@pytest.mark.parametrize("up", ["none", "qsgd", "powersgd"])
def test_a_run_whose_site_has_spent_its_budget_goes_on_with_events(tmp_path: Path, up: str) -> None:
    table = PRIVATE | {"communication": {"up": up}, "model": {"name": "mlp", "hidden": [8]}}
    site = Site(tmp_path / "site", table, policy=WITHIN)
    site.policy = WITHIN.model_copy(update={"budget": 1.01 * epsilons_of(site.spec, 30)[1]})
    site.start()

    class Transport:
        def is_reachable(self, site: str) -> bool:
            return True

        def send(self, name: str, data: bytes, patience: float, number: int) -> object:
            return site.site_server.call(SERVER, data)

    prepared, text = fs.prepare(site.spec), site.spec.to_toml()
    engine = make_site_engine(prepared.config, Transport(), ["a", "a"], Sums(60.0), spec=text, run="run")
    history = run_prepared(prepared, tmp_path / "out", engine)
    assert [record["clients_returned"] for record in history] == [2, 2, 0]
    reasons = [event["reason"] for event in read_jsonl(tmp_path / "out" / "events.jsonl") if event["kind"] == "refused"]
    assert len(reasons) == 2
    assert all("refused by the rule 'policy.budget'" in reason for reason in reasons)


def test_a_simulation_records_that_its_noise_protects_nobody(tmp_path: Path) -> None:
    table = {"partition": {"name": "iid", "clients": 2}, "model": "mlp", "training": {"rounds": 1, "local_steps": 1}}
    history = fs.run({**PRIVATE, **table}, out=tmp_path / "run")
    privacy = json.loads((tmp_path / "run" / RUN).read_text())["privacy"]
    assert (privacy["noise"], privacy["protection"]) == ("the seed of the spec", SEEDED)
    assert list(privacy["outside"]) == ["sizes"]
    assert fs.History.load(tmp_path / "run").privacy == history.privacy == SEEDED


@pytest.mark.long
@pytest.mark.xdist_group("servers")
def test_two_real_sites_train_with_noise_until_their_budgets_are_spent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("nvflare")
    columns = {"age": {"type": "number", "range": [0, 120]}}
    schema = {"label": "ill", "classes": ["no", "yes"], "test": 0.2, "columns": columns}
    table = {
        "data": {"name": "own.csv", "schema": schema},
        "partition": {"name": "natural"},
        "model": {"name": "mlp", "hidden": [4]},
        "training": {"rounds": 3, "local_steps": 3, "batch_size": 16},
        "privacy": {"dp": {"clip": 1.0, "noise": 1.0}},
    }
    generator = np.random.default_rng(0)
    for name in "ab":
        ages = generator.integers(20, 90, size=60)
        rows = [f"{age},{'yes' if age > 55 else 'no'}" for age in ages]
        (tmp_path / f"{name}.csv").write_text("\n".join(["age,ill", *rows]) + "\n")
    spec, fed = fs.Experiment.from_table(table), tmp_path / "fed"
    epsilons = epsilons_of(spec, 48)
    most = 1.01 * epsilons[1]
    policy = {"budget": most, "outside_dp": ["sizes", "normalization", "evaluation"]}
    sites = {"own_data": True, "server": {"port": free_port()}, "policy": policy}
    sites |= {"site": {name: {"data": f"{name}.csv"} for name in "ab"}}
    provision(spec, Sites.model_validate(sites), fed, base_dir=tmp_path)
    with Processes(fed) as processes:
        for name in (SERVER, "a", "b"):
            processes.start(name)
        until("the server to start", lambda: "Server started" in (fed / SERVER / "console.txt").read_text())
        result = fed / "result"
        command = [sys.executable, "-m", "fedstrata", "submit", str(fed / ADMIN), "--out", str(result)]
        subprocess.run(command, check=True, timeout=480)

    history = fs.History.load(result)
    assert [record["clients_returned"] for record in history] == [2, 2, 0]
    assert all(record["train_loss"] is None for record in history)
    assert history.privacy == AT_SITES
    privacy = json.loads((result / RUN).read_text())["privacy"]
    assert privacy["noise"] == "the operating system of each site"
    assert list(privacy["outside"]) == ["sizes", "normalization", "evaluation"]
    assert [record["epsilon"] for record in history[:2]] == epsilons[:2]
    reasons = [event["reason"] for event in read_jsonl(result / "events.jsonl") if event["kind"] == "refused"]
    assert len(reasons) == 2
    assert all("refused by the rule 'policy.budget'" in reason for reason in reasons)
    for name in "ab":
        assert main(["ledger", str(fed / name)]) == 0
        printed = capsys.readouterr().out
        assert f"of {most:g} (δ = 1e-05" in printed
        assert "in 6 steps (PLD)" in printed
        assert "1 refused" in printed
