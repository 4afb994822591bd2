"""Secure sums at real sites: the model of a simulation, and nothing but sums at the server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cryptography")

from secure_sites import Deployment, peers, spec
from secure_world import authority, identity

import fedstrata as fs
from fedstrata.base import records
from fedstrata.base.errors import SpecError
from fedstrata.base.jsonl import read_jsonl
from fedstrata.cli import main
from fedstrata.engines.local import LocalEngine
from fedstrata.federation.availability_trace import Trace
from fedstrata.federation.messages import Fit
from fedstrata.federation.secure import protocol
from fedstrata.federation.secure.certificates import fingerprint
from fedstrata.federation.secure.protocol import Opened, Propose, RevealAll, RevealSet, Roster
from fedstrata.federation.secure.requests import Dealt, Masked, MaskedReply, SiteStep, StepReply
from fedstrata.federation.secure.simulated import question_of
from fedstrata.runs.preparation import prepare
from fedstrata.sites.engine import NVFlareEngine
from fedstrata.sites.ledger import Entry
from fedstrata.sites.policy import FILE, Policy
from fedstrata.sites.secure_site import Answered, Credentials, job_of, trust_of
from fedstrata.sites.site_server import SERVER
from fedstrata.sites.wire import Answers, Ask, Begin, BegunWithKeys, Envelope, Failed, Refused, Save


def same(one: fs.History, other: fs.History) -> bool:
    return one.params.keys() == other.params.keys() and all(
        torch.equal(one.params[name], other.params[name]) for name in one.params
    )


def step(body: Any) -> Any:
    """Return the message of the protocol in the body of a message to a site; None for another body."""
    request = body.requests[0] if isinstance(body, Ask) else None
    return request.message if isinstance(request, SiteStep) else request


def without(site: int, first: int, made: fs.Experiment, folder: Path) -> fs.History:
    """Return a simulation in which a client is offline from a round on."""
    rounds = made.training.rounds
    lines = [f"{c},1,{first - 1 if c == site else rounds}" for c in range(4) if c != site or first > 1]
    (folder / "trace.csv").write_text("\n".join(["client,first,last", *lines]))
    return fs.run(made.model_copy(update={"availability": Trace(file=str(folder / "trace.csv"))}))


@pytest.mark.parametrize("sites", [3, 4])
def test_a_run_over_sites_has_the_model_of_a_simulation(sites: int, tmp_path: Path) -> None:
    made = spec(sites)
    history = Deployment(made, tmp_path).run()
    expected = fs.run(made)
    assert same(history, expected)
    for one, other in zip(history, expected, strict=True):
        for name in ("clients_trained", "clients_returned", "train_loss", "samples", "accuracy"):
            assert one[name] == other[name]


def test_the_server_reads_no_vector_but_their_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server gets other numbers than in a simulation without masks, and computes the same model."""
    made, seen = spec(), dict[str, list[dict[int, np.ndarray]]]()
    for engine in (NVFlareEngine, LocalEngine):
        vectors, ask = seen.setdefault(engine.__name__, []), engine.ask

        def listen(self: Any, *arguments: Any, ask: Any = ask, vectors: Any = vectors, **options: Any) -> Any:
            replies = ask(self, *arguments, **options)
            words = {c: each.vector.numpy().view(np.uint32) for c, each in replies.items() if hasattr(each, "vector")}
            vectors += [words] if words and len(words) == 3 else []
            return replies

        with monkeypatch.context() as patch:
            patch.setattr(engine, "ask", listen)
            history = Deployment(made, tmp_path).run() if engine is NVFlareEngine else fs.run(made)
    assert len(seen["NVFlareEngine"]) == len(seen["LocalEngine"]) == len(history) == 3
    for masked, plain in zip(seen["NVFlareEngine"], seen["LocalEngine"], strict=True):
        for client, vector in plain.items():
            assert (masked[client] == vector).sum() <= 1  # of some hundred elements, one in 2³² is equal by chance
        assert (sum(masked.values()) != sum(plain.values())).any()  # self masks hide the sum, too


def test_a_sum_takes_one_message_more_than_a_plain_sum_and_a_roster_another_one(tmp_path: Path) -> None:
    """A dropout costs a second message more, and then a roster without the lost site."""
    for sums, exchanges in (("plain", [1, 1, 1, 1, 1]), ("secure", [3, 2, 3, 3, 2])):
        deployment = Deployment(spec(4, sums, rounds=5), tmp_path)

        def kill(site: str, body: Any, deployment: Deployment = deployment) -> None:
            message = step(body)
            if site == "d" and isinstance(message, Fit | Masked) and message.round == 3:
                deployment.dead.add("d")

        deployment.before = kill
        history = deployment.run()
        assert [record["clients_trained"] for record in history] == [4, 4, 3, 3, 3]
        assert [record["exchanges"] for record in history] == exchanges
        for name in "abc":
            assert sum(isinstance(body, Ask) for site, body in deployment.sent if site == name) == sum(exchanges)


@pytest.mark.slow
def test_a_roster_ends_after_64_sums(tmp_path: Path) -> None:
    deployment = Deployment(spec(rounds=66, training={"local_steps": 1}), tmp_path)
    history = deployment.run()
    assert [record["round"] for record in history if record["exchanges"] == 3] == [1, 65]
    assert {record["clients_trained"] for record in history} == {3}
    assert len(deployment.entries("a", "Roster")) == 2


KILLS: dict[str, tuple[Any, bool, int]] = {
    "at the roster": (Roster, False, 1),
    "after the roster": (Roster, True, 1),
    "at the question": (Masked, False, 2),
    "after the question": (Masked, True, 3),
    "at the shares": (RevealAll, False, 3),
    "after the shares": (RevealAll, True, 3),
}
"""When a site of four is killed: the message, whether before or after it, and the first round that misses it."""


@pytest.mark.parametrize("when", KILLS)
def test_a_run_goes_on_without_a_site_that_is_killed(when: str, tmp_path: Path) -> None:
    kind, answered, first = KILLS[when]
    made = spec(4, rounds=4)
    deployment = Deployment(made, tmp_path / "sites")

    def kill(site: str, body: Any) -> None:
        message = step(body)
        if site == "c" and isinstance(message, kind) and (kind is Roster or body.requests[0].round == 2):
            deployment.dead.add("c")

    # "After" a message means that the site answered, but that its answer was lost or that it died before the next one.
    if answered:
        deployment.after = kill_later(deployment, kill)
    else:
        deployment.before = kill
    history = deployment.run(tmp_path / "run")
    assert "c" in deployment.dead
    trained = [record["clients_trained"] for record in history]
    assert trained == [4 if round < first else 3 for round in range(1, 5)]
    assert same(history, without(2, first, made, tmp_path))
    assert not [event for event in read_jsonl(tmp_path / "run" / "events.jsonl") if "secure" in event["kind"]]


def kill_later(deployment: Deployment, kill: Callable[[str, Any], None]) -> Callable[[str, Any], None]:
    """Return a function that kills a site at the first message after the one at which ``kill`` would kill it."""

    def after(site: str, body: Any) -> None:
        before = set(deployment.dead)
        kill(site, body)
        if deployment.dead - before:
            deployment.dead.discard(site)
            deployment.before = lambda other, _: deployment.dead.add(site) if other == site else None

    return after


def test_a_dropout_more_than_allowed_ends_the_sum_without_changing_a_state(tmp_path: Path) -> None:
    deployment = Deployment(spec(4), tmp_path)

    def lose(site: str, body: Any) -> None:
        message = step(body)
        if site in "cd" and isinstance(message, Masked) and message.round == 2:
            deployment.dead.add(site)

    deployment.before = lose
    with fs.Simulation(deployment.prepared, deployment.engine) as simulation:
        simulation.step()
        deployment.engine.save(1)  # the sites hear that the first sum was opened
        before = {name: w.clone() for name, w in simulation.state.weights.params.items()}
        states = {site: records.encode(state_of(deployment, site)) for site in deployment.names}
        record = simulation.step()
        assert (record["clients_trained"], record["clients_failed"]) == (0, 2)
        assert all(torch.equal(w, before[name]) for name, w in simulation.state.weights.params.items())
        assert {site: records.encode(state_of(deployment, site)) for site in deployment.names} == states
        assert [event["kind"] for event in simulation.events] == ["failed", "failed", "secure sum failed"]
        reason = "Exchange 1 has no result, because only 2 sites have sent their vectors, not 3."
        assert simulation.events[-1]["reason"] == reason
        deployment.dead.clear()
        assert simulation.step()["clients_trained"] == 4
    assert records.encode(state_of(deployment, "a")) == states["a"]  # the news of the third sum has not come yet
    assert len(records.encode({})) < len(states["a"])  # the momentum of the first sum


def state_of(deployment: Deployment, site: str) -> Any:
    """Return the state of a site's client."""
    return dict(deployment.site_servers[site]._running().store.get(deployment.names.index(site)))


def test_a_state_follows_the_last_sum_that_was_opened(tmp_path: Path) -> None:
    """Without the news, the momentum of the second round would start from nothing."""
    made = spec(training={"momentum": 0.9})
    history = Deployment(made, tmp_path).run()
    reset = fs.run(made.model_copy(update={"training": made.training.model_copy(update={"optimizer_state": "reset"})}))
    assert same(history, fs.run(made))
    assert not same(history, reset)


def test_a_site_that_restarts_in_a_run_is_lost_to_its_roster(tmp_path: Path) -> None:
    """The server goes on with a new roster of the other sites, which serves the rest of the run."""
    made = spec(4, rounds=5)
    deployment = Deployment(made, tmp_path)
    deployment.before = lambda site, body: (
        deployment.start("c") if site == "c" and isinstance(step(body), Masked) and step(body).round == 2 else None
    )
    history = deployment.run(tmp_path / "run")
    assert [record["clients_trained"] for record in history] == [4, 3, 3, 3, 3]
    assert [len(entry.members) for entry in deployment.entries("a", "Roster")] == [4, 3]
    assert same(history, without(2, 2, made, tmp_path))


def test_sites_that_restart_never_mask_an_input_again(tmp_path: Path) -> None:
    """A server that begins the job again gets no second sum for the question of the first round."""
    made = spec()
    assert [record["clients_trained"] for record in Deployment(made, tmp_path).run()] == [3, 3, 3]
    again = Deployment(made, tmp_path)
    history = again.run(tmp_path / "run")
    assert [record["clients_trained"] for record in history] == [0, 3, 3]
    events = read_jsonl(tmp_path / "run" / "events.jsonl")
    assert [event["kind"] for event in events if event["round"] == 1] == ["refused"] * 3 + ["secure sum failed"]
    assert "this question was answered before" in events[0]["reason"]
    assert [entry.refused for entry in again.entries("a", "Masked of Fit")] == ["secure-sums", "", ""]
    # The first round is lost, so the model of the second round differs from that of the first run.
    assert not same(history, fs.run(made))


def test_a_resumed_run_goes_on_with_new_rosters(tmp_path: Path) -> None:
    made = spec(rounds=4)
    part = made.model_copy(update={"training": made.training.model_copy(update={"rounds": 2})})
    first = Deployment(made, tmp_path)
    first.prepared = prepare(part)
    first.run(tmp_path / "run")
    resumed = Deployment(made, tmp_path).run(tmp_path / "run", resume=True)
    assert same(resumed, fs.run(made))


def test_another_process_of_a_site_knows_the_questions(tmp_path: Path) -> None:
    path = tmp_path / "job"
    one, other = Answered(path), Answered(path)
    one.add(b"1" * 32)
    with pytest.raises(protocol.RefusedError, match="this question was answered before"):
        other.add(b"1" * 32)
    other.add(b"2" * 32)
    assert one.read() == {b"1" * 32, b"2" * 32}
