"""Noise of clients at real sites: by hand, the law of the noise in a sum, hostile servers, and real data."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from quick import others_long
from scipy import stats
from waiting import free_port, until

pytest.importorskip("cryptography")

from secure_sites import Deployment, Malicious, spec

import fedstrata as fs
from fedstrata.base.rng import rng
from fedstrata.cli import main
from fedstrata.clients import client as client_module
from fedstrata.clients.handlers.masked import forms
from fedstrata.data.sources import Data
from fedstrata.federation.messages import Fit, Weights
from fedstrata.federation.secure import ring as ring_module
from fedstrata.federation.secure.member import question_of
from fedstrata.federation.secure.noisy import UPDATE, clipped
from fedstrata.federation.secure.protocol import RevealAll, Shares
from fedstrata.federation.secure.requests import Masked, MaskedReply, words_of
from fedstrata.federation.secure.ring import Ring, Words, rounding, skellam
from fedstrata.federation.secure.server import Server
from fedstrata.federation.secure.site import Site
from fedstrata.methods.private import noisy_form
from fedstrata.sites import secure_sums as sums_module
from fedstrata.sites.disclosure import declaration_of, hash_of
from fedstrata.sites.federation import Sites, policy_of
from fedstrata.sites.guard import Guard
from fedstrata.sites.ledger import PLACE, check
from fedstrata.sites.local_deployment import Processes
from fedstrata.sites.policy import FILE, Policy
from fedstrata.sites.provision import ADMIN, provision
from fedstrata.sites.rehearsal import rehearse_file
from fedstrata.sites.secure_site import Answered
from fedstrata.sites.site_server import SERVER
from fedstrata.sites.wire import Ask, Begin, BegunWithKeys, Failed, Refused

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings(r"ignore:privacy\.clients")]

DP: dict[str, Any] = {"clip": 0.5, "noise": 0.2, "noise_from": "sites", "colluding": 1}


def noisy(sites: int = 4, **changes: Any) -> fs.Experiment:
    """Return a spec with noise from the sites, of which one may collude."""
    dp = {**DP, **changes.pop("dp", {})}
    changes.setdefault("method", {"name": "fedavg", "aggregator": "mean"})
    return spec(sites, privacy={"clients": dp, **changes.pop("privacy", {})}, **changes)


def share_of(deployment: Deployment, site: str) -> float:
    """Return the noise of a site's answers, as a multiple of ``clip``."""
    return float(deployment.site_servers[site]._running().context.cached(forms)[Fit].ring.noise)


@pytest.fixture
def unmasked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Words]]:
    """Return a list to which each site appends its vectors before it masks them."""
    seen: list[tuple[str, Words]] = []
    mask = Site.mask

    def listen(site: Site, begin: Any, question: bytes, vector: Words, *arguments: Any, **options: Any) -> Any:
        seen.append((site.name, vector.copy()))
        return mask(site, begin, question, vector, *arguments, **options)

    monkeypatch.setattr(Site, "mask", listen)
    return seen


def test_a_round_by_hand(unmasked: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If the secrets of all sites are the seed, vectors and models are those of a simulation, bit for bit."""
    made = noisy(dp={"clip": 0.08})
    monkeypatch.setattr(client_module, "secrets", SimpleNamespace(randbits=lambda bits: made.seed))
    deployment = Deployment(made, tmp_path)
    history = deployment.run()

    replies: dict[int, Any] = {}
    plain = spec(4, "plain", method={"name": "fedavg", "aggregator": "mean"}, rounds=1)
    with fs.Simulation(fs.prepare(plain), listener=lambda round, answers: replies.update(answers)) as simulation:
        before = simulation.state.weights.params
        simulation.step()
    ring = noisy_form(made.method, deployment.prepared.config).ring  # type: ignore[arg-type]
    share, norms = 0.2 / math.sqrt(3 - 1), []
    assert ring.noise == pytest.approx(share)
    for client, (name, vector) in enumerate(sorted(unmasked[:4], key=lambda each: each[0])):
        after = replies[client].weights.params
        update = torch.cat([(after[key] - w).reshape(-1) for key, w in before.items()]).double().numpy()
        norms.append(np.linalg.norm(update))
        words = ring.encode({UPDATE: clipped(update, 0.08)}, {}, rounding(5, 1, client, 0))
        noise = skellam(rng(5, "noise share", 1, client), len(update), (share * ring.scale) ** 2)
        words[:-1] += noise.astype(np.uint32)
        assert (name, vector.tolist()) == (deployment.names[client], words.tolist())

    assert min(norms) < 0.08 < max(norms)
    expected = fs.run(made)
    assert [record["clients_trained"] for record in history] == [4, 4, 4]
    assert all(torch.equal(history.params[key], w) for key, w in expected.params.items())
    assert [record["epsilon"] for record in history] == [record["epsilon"] for record in expected]


def test_the_noise_of_sites_does_not_follow_from_the_seed(unmasked: Any, tmp_path: Path) -> None:
    made = noisy(3, dp={"clip": 1e-3}, training={"lr": 1e-30})
    for folder in "ab":
        Deployment(made, tmp_path / folder).run()
    rows = [vector[:-1].view(np.int32).astype(float) for _, vector in unmasked]
    assert len(rows) == 2 * 3 * 3
    correlations = np.corrcoef(rows) - np.eye(len(rows))
    assert np.abs(correlations).max() < 6 / math.sqrt(len(rows[0]))
    seeded = skellam(rng(made.seed, "noise share", 1, 0), len(rows[0]), float(np.var(rows[0])))
    assert abs(np.corrcoef(rows[0], seeded)[0, 1]) < 6 / math.sqrt(len(seeded))


@pytest.mark.parametrize(
    ("absent", "colluding"), others_long([("", 0), ("e", 0), ("", 2), ("e", 2)], [("", 0), ("e", 2)])
)
def test_the_noise_of_an_opened_sum(
    absent: str, colluding: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of 5 sites, t = 4 must answer. Updates are zero, so a sum consists of the noise of the sites in it.

    The p-values are those of chi-squared tests: the noise is secret, so the test fails once in a million runs.
    """
    monkeypatch.setattr(ring_module, "LARGEST_MEAN", 8.0)
    totals: list[Any] = []
    decode = Ring.decode

    def listen(ring: Ring, total: Words, sites: int) -> Any:
        totals.append((ring, total[:-1].view(np.int32).copy(), sites))
        return decode(ring, total, sites)

    monkeypatch.setattr(Ring, "decode", listen)
    model, training = {"name": "mlp", "hidden": [64]}, {"lr": 1e-30, "local_steps": 1}
    made = noisy(5, dp={"noise": 1.0, "colluding": colluding}, model=model, training=training, rounds=4)
    deployment = Deployment(made, tmp_path)
    deployment.before = lambda site, body: (
        deployment.dead.update(absent) if isinstance(body, Ask) and isinstance(body.requests[0], Masked) else None
    )
    history = deployment.run()
    answers = 5 - len(absent)
    assert [record["clients_trained"] for record in history] == [answers] * 4
    assert [sites for _, _, sites in totals] == [answers] * 4
    drawn, scale = np.concatenate([total for _, total, _ in totals]), totals[0][0].scale
    shares = answers * (1.0 / math.sqrt(4 - colluding) * scale) ** 2
    assert shares >= scale**2 * answers / 4
    assert fits(drawn, shares) > 1e-6
    assert fits(drawn, shares * 1.15) < 1e-6
    assert fits(drawn, shares * 0.87) < 1e-6


def fits(drawn: np.ndarray, variance: float) -> float:
    """Return the p-value of a chi-squared test that numbers are Skellam variables with this variance."""
    expected, far = stats.skellam(variance / 2, variance / 2), int(2.5 * math.sqrt(variance))
    values = np.arange(1 - far, far)
    counts = [(drawn <= -far).sum(), *((drawn == value).sum() for value in values), (drawn >= far).sum()]
    chances = np.array([expected.cdf(-far), *expected.pmf(values), expected.sf(far - 1)])
    return float(stats.chisquare(counts, chances / chances.sum() * len(drawn)).pvalue)


# A hostile server. Each attack has a control in which only the checks against it are off.


def begun(deployment: Deployment, made: fs.Experiment, total: int = 4) -> Any:
    """Let a server begin another job at site a."""
    server = Malicious.__new__(Malicious)
    server.deployment = deployment
    return server.call("a", Begin("run", made.to_toml(), None, [0], total, 0))


CHANGES: dict[str, tuple[fs.Experiment, str]] = {
    "less noise": (noisy(dp={"noise": 0.01}), "policy.client_noise"),
    "a larger clip with the same noise": (noisy(dp={"clip": 5.0, "noise": 0.02}), "policy.client_noise"),
    "fewer colluding sites": (noisy(dp={"colluding": 0}), "policy.colluding"),
    "no noise": (spec(4), "policy.client_noise"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_site_accepts_only_the_noise_that_it_approved_or_requires(change: str, tmp_path: Path) -> None:
    made, (other, rule) = noisy(), CHANGES[change]
    approved = {"jobs": "approved", "approved": [hash_of(made)]}
    limits = {"client_noise": 0.2, "colluding": 1}
    for number, (policy, refusal) in enumerate([(approved, "policy.approved"), (limits, rule)]):
        deployment = Deployment(made, tmp_path / f"{number}", {"a": policy})
        assert isinstance(begun(deployment, made), BegunWithKeys)
        outcome = begun(deployment, other)
        assert isinstance(outcome, Refused)
        assert f"refused by the rule '{refusal}" in outcome.reason
    control, dp = Deployment(made, tmp_path / "control"), other.privacy.clients
    assert isinstance(begun(control, other), BegunWithKeys)
    assert share_of(control, "a") == pytest.approx(0 if dp is None else dp.noise / math.sqrt(3 - dp.colluding))


def test_a_kit_requires_the_noise_of_its_job() -> None:
    policy = policy_of(noisy(), Sites.model_validate({"site": {name: {} for name in "abcd"}}))
    assert (policy.sums, policy.client_noise, policy.colluding) == ("secure", 0.2, 1)
    assert Policy().client_noise == policy_of(spec(4), Sites.model_validate({"site": {"a": {}}})).client_noise == 0


def test_an_answer_with_noise_has_a_mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Malicious(Deployment(noisy(), tmp_path))
    assert "does not declare the request Fit" in server.ask("a", server.fit()).reason
    request = Masked(server.fit(), None)
    assert "Masked.begin = None does not match the declaration" in server.ask("a", request).reason
    monkeypatch.setattr(Guard, "check", lambda *arguments, **options: None)
    assert isinstance(server.ask("a", request), Failed)
    run = server.deployment.site_servers["a"]._running()
    run.engine.context = replace(run.context, member=None)
    reply = server.ask("a", request)
    assert isinstance(reply, MaskedReply)
    values = words_of(reply)[:-1].view(np.int32)
    assert np.std(values) < 2 * server.ring.noise * server.ring.scale  # a mask would be much larger


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Return a function after whose call no site remembers which questions it has answered."""

    def forget() -> None:
        monkeypatch.setattr(Answered, "add", lambda self, question: None)
        monkeypatch.setattr(Answered, "read", lambda self: set())

    return forget


def ask_first(server: Malicious, weights: Weights | None = None) -> Any:
    """Ask site a the question of the first round."""
    question = server.fit(weights=weights)
    exchange = server.server.begin(question_of(question), server.ring.length)
    assert exchange is not None
    return server.ask("a", Masked(question, exchange.outgoing["a"]))


def test_a_site_never_answers_a_question_again_with_other_noise(
    tmp_path: Path, unmasked: Any, forgetful: Callable[[], None]
) -> None:
    """Otherwise, the mean of several answers would have less noise."""
    deployment = Deployment(noisy(), tmp_path)
    assert isinstance(ask_first(Malicious(deployment)), MaskedReply)
    deployment.start("a")
    assert "this request was answered before" in ask_first(Malicious(deployment)).reason
    forgetful()
    assert isinstance(ask_first(Malicious(deployment)), MaskedReply)
    (_, first), *_, (_, last) = unmasked
    assert (first != last).mean() > 0.9


@pytest.mark.parametrize("limit", ["participations", "rounds"])
def test_a_site_answers_only_as_often_as_epsilon_allows(
    limit: str, tmp_path: Path, forgetful: Callable[[], None]
) -> None:
    """A server that begins the job again with other models gets no more answers than an honest server."""
    made = noisy(dp={"participations": 2}) if limit == "participations" else noisy(rounds=2)
    deployment, outcomes = Deployment(made, tmp_path), []
    server = Malicious(deployment)
    for number in range(4):
        if number == 3:
            forgetful()
        deployment.start("a")
        server = Malicious(deployment)
        other = Weights({name: w + number for name, w in server.weights.params.items()}, {})
        outcomes.append(ask_first(server, other))
    assert [type(each) for each in outcomes] == [MaskedReply, MaskedReply, Failed, MaskedReply]
    assert "the site has already sent 2 replies, the maximum per job" in outcomes[2].reason


def own_data(folder: Path, sites: int = 4) -> dict[str, Any]:
    """Write digits to the files of sites and of the server, and return the section ``data`` of a spec."""
    data = Data("digits").load(0, None)
    x, y = data.x_train.numpy().reshape(data.train_size, -1), data.y_train.numpy()
    folder.mkdir(parents=True, exist_ok=True)
    for client in range(sites):
        np.savez(folder / f"{'abcd'[client]}.npz", x_train=x[client::sites], y_train=y[client::sites])
    x, y = data.x_test.numpy().reshape(len(data.y_test), -1), data.y_test.numpy()
    np.savez(folder / "test.npz", x_test=x, y_test=y)
    return {"name": "own.npz", "shape": [x.shape[1]], "classes": 10, "normalize": "none"}


def test_a_server_cannot_lower_shares_with_invented_clients(tmp_path: Path) -> None:
    """With own data, only the server knows the number n of clients, and a larger n gives each site a smaller share.

    The site then also wants that more sites take part in a sum. With the right n = 4, the share would be σ / √2.
    """
    everybody = {"name": "fedavg", "aggregator": "mean", "client_sampler": "all"}
    made = noisy(data=own_data(tmp_path), partition="natural", method=everybody)
    server = Malicious(Deployment(made, tmp_path, own=4), total=30)
    assert share_of(server.deployment, "a") == pytest.approx(0.2 / math.sqrt(21 - 1))
    message = server.sum().outgoing["a"]
    assert isinstance(message, RevealAll)
    assert "fewer than 21 sites have enough samples" in server.step("a", message).reason
    member = server.deployment.site_servers["a"]._running().context.member
    assert member is not None
    assert member.site.parties == 21
    member.site.parties = 3
    assert isinstance(server.step("a", message), Shares)


@pytest.mark.parametrize("colluding", [3, 0])
def test_a_smaller_roster_has_a_larger_threshold(
    colluding: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of 6 sites, 3 may collude. A roster of 5 sites then needs t = 5, and sites refuse the usual threshold, t = 4."""
    deployment = Deployment(noisy(6, dp={"colluding": 3}), tmp_path)
    deployment.dead.add("f")
    server = partial(Server, colluding=colluding)
    monkeypatch.setattr(sums_module, "Server", lambda *arguments, parties, **_: server(*arguments, parties=parties))
    history = deployment.run()
    assert [record["clients_trained"] for record in history] == [5 if colluding else 0] * 3
    if not colluding:
        assert deployment.ledgers["a"].refused == ["secure-sums"] * 3


# Ledgers, lists of requests, and real data


def test_the_ledger_names_the_noise(tmp_path: Path) -> None:
    deployment = Deployment(noisy(), tmp_path)
    deployment.run()
    noises = {entry.kind: entry.noise for entry in deployment.ledgers["a"].entries}
    assert noises.pop("Masked of Fit") == pytest.approx(0.2 / math.sqrt(2))
    assert set(noises.values()) == {None}
    without_noise = Deployment(spec(4), tmp_path / "none")
    without_noise.run()
    assert {entry.noise for entry in without_noise.ledgers["a"].entries} == {None}


def test_the_list_of_requests_names_the_noise() -> None:
    lines = list(declaration_of(noisy(dp={"participations": 2})).lines())
    assert lines[-2:] == [
        "A masked reply has only the update, scaled down to the norm 0.5, with a share of noise.",
        "The noise of a sum is at least 0.2 × 0.5. A site sends at most 2 replies.",
    ]


def test_real_sites_refuse_noise_of_the_server(tmp_path: Path) -> None:
    from_server: dict[str, Any] = {"privacy": {"sums": "plain"}, "dp": {"noise_from": "server", "colluding": 0}}
    outcome = begun(Deployment(noisy(), tmp_path), noisy(**from_server))
    assert "the rule 'policy.client_noise': the server computes its noise from the spec's seed" in outcome.reason
    data = own_data(tmp_path)
    (tmp_path / "sites.toml").write_text(f"own_data = true\nserver.data = 'test.npz'\n{sections('abcd')}")
    made = noisy(data=data, partition="natural", **from_server)
    with pytest.raises(fs.SpecError, match=r"noise_from = 'server': is only for .* Use noise_from = 'sites'"):
        rehearse_file(made, tmp_path / "sites.toml", tmp_path / "run")


def sections(names: str) -> str:
    return "".join(f"[site.{name}]\ndata = '{name}.npz'\n" for name in names)


REAL: dict[str, Any] = {
    "partition": "natural",
    "model": {"name": "mlp", "hidden": []},
    "rounds": 15,
    "training": {"local_steps": 20, "lr": 0.05, "optimizer_state": "reset", "momentum": 0.0},
    "dp": {"noise": 0.05},
}


def test_sites_with_their_own_data_learn_with_noise(tmp_path: Path) -> None:
    made = noisy(data=own_data(tmp_path), **REAL)
    (tmp_path / "sites.toml").write_text(f"own_data = true\nserver.data = 'test.npz'\n{sections('abcd')}")
    history = rehearse_file(made, tmp_path / "sites.toml", tmp_path / "run")
    assert [record["clients_trained"] for record in history] == [4] * 15
    assert history.final_accuracy > 0.8
    epsilons = [record["epsilon"] for record in history]
    assert epsilons == sorted(set(epsilons))


@pytest.mark.long
@pytest.mark.xdist_group("servers")
@pytest.mark.filterwarnings("ignore:ssl_context is deprecated:DeprecationWarning")
def test_a_deployment_learns_with_noise_from_its_sites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("nvflare")
    made, fed = noisy(data=own_data(tmp_path), **REAL), tmp_path / "fed"
    sites = {"own_data": True, "server": {"port": free_port(), "data": "test.npz"}, "policy": {"min_samples": 1}}
    sites |= {"site": {name: {"data": f"{name}.npz"} for name in "abcd"}}
    provision(made, Sites.model_validate(sites), fed, base_dir=tmp_path)
    assert Policy.read(fed / "a").client_noise == 0.05
    with Processes(fed) as processes:
        for name in (SERVER, *"abcd"):
            processes.start(name)
        until("the server to start", lambda: "Server started" in (fed / SERVER / "console.txt").read_text())
        command = [sys.executable, "-m", "fedstrata", "submit", str(fed / ADMIN), "--out", str(fed / "result")]
        subprocess.run(command, check=True, timeout=480)
    history = fs.History.load(fed / "result")
    assert [record["clients_trained"] for record in history] == [4] * 15
    assert history.final_accuracy > 0.8
    assert history[-1]["privacy"]["noise"] == "the operating system of each site"
    assert "up to 1 clients" in history[-1]["privacy"]["against"]
    for name in "abcd":
        assert main(["ledger", str(fed / name), "--verify", "--told", str(fed / "result")]) == 0
        assert main(["ledger", str(fed / name)]) == 0
        assert "with noise of at least 0.0354 × privacy.clients.clip" in capsys.readouterr().out
        noises = [each.get("noise") for each in check(fed / name / PLACE).entries if each["kind"] == "Masked of Fit"]
        assert noises == [pytest.approx(0.05 / math.sqrt(2))] * 15
    assert json.loads((fed / "result" / "metrics.jsonl").read_text().splitlines()[-1])["epsilon"] > 0
    assert (fed / "a" / FILE).exists()
