"""Secure sums at real sites: the model of a simulation, and nothing but sums at the server."""

from __future__ import annotations

import json
import random
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cryptography")

from secure_methods import METHOD_CASES
from secure_sites import Deployment, Malicious, peers, spec, without
from secure_world import authority
from site_engine import make_site_engine

import fedstrata as fs
from fedstrata.base import records
from fedstrata.base.errors import SpecError
from fedstrata.base.jsonl import read_jsonl
from fedstrata.cli import main
from fedstrata.engines.local import LocalEngine
from fedstrata.federation.messages import Fit, Weights
from fedstrata.federation.secure import protocol
from fedstrata.federation.secure.certificates import fingerprint
from fedstrata.federation.secure.member import question_of
from fedstrata.federation.secure.protocol import Opened, Propose, RevealAll, RevealSet, Roster
from fedstrata.federation.secure.requests import Masked, MaskedReply, SiteStep, Step, StepReply
from fedstrata.federation.secure.site import Site
from fedstrata.runs.accountant import Accountant
from fedstrata.runs.preparation import prepare
from fedstrata.sites.disclosure import declaration_of
from fedstrata.sites.engine import NVFlareEngine
from fedstrata.sites.policy import FILE, Policy
from fedstrata.sites.privacy_budget import FILE as SPENT
from fedstrata.sites.rehearsal import rehearse_file
from fedstrata.sites.secure_site import Answered, Credentials, trust_of
from fedstrata.sites.sums import Sums
from fedstrata.sites.wire import Ask, Failed, Refused, Save, SiteLostError

pytestmark = pytest.mark.slow


def same(one: fs.History, other: fs.History) -> bool:
    return one.params.keys() == other.params.keys() and all(
        torch.equal(one.params[name], other.params[name]) for name in one.params
    )


def step(body: Any) -> Any:
    """Return the message of the protocol in the body of a message to a site; None for another body."""
    request = body.requests[0] if isinstance(body, Ask) else None
    return request.message if isinstance(request, SiteStep) else request


@pytest.mark.parametrize("sites", [3, 4])
def test_a_run_over_sites_has_the_model_of_a_simulation(sites: int, tmp_path: Path) -> None:
    made = spec(sites)
    history = Deployment(made, tmp_path).run()
    expected = fs.run(made)
    assert same(history, expected)
    for one, other in zip(history, expected, strict=True):
        for name in ("clients_trained", "clients_returned", "train_loss", "samples", "accuracy"):
            assert one[name] == other[name]


FEW = ("scaffold", "rebafl", "fednova", "fedrep")
"""Methods in quick tests: their clients have states or send messages, or the server needs other sums."""


@pytest.mark.parametrize(
    "method",
    [
        name if name in FEW else pytest.param(name, marks=pytest.mark.long)
        for name in METHOD_CASES
        if name not in ("fedavg", "fedsampling")
    ],
)
def test_other_methods_over_sites_have_the_model_of_a_simulation(method: str, tmp_path: Path) -> None:
    sections: dict[str, Any] = {"method": method, "training": {"momentum": 0.0, "optimizer_state": "reset"}}
    if method == "fedavg-ft":  # the server fine-tunes on samples of its own
        sections["method"] = {"name": method, "per_class": 5}
        sections["partition"] = {"name": "classes", "clients": 4, "per_client": 3, "size": 45}
    made = spec(4, **sections)
    assert same(Deployment(made, tmp_path).run(), fs.run(made))


def test_sites_sum_only_replies_to_training() -> None:
    made = spec(4, method={"name": "fedsampling", "reuse": False})
    with pytest.raises(fs.SpecError, match=r"privacy\.sums = 'secure': secure sums do not support the reply to"):
        declaration_of(made, clients=4, own_data=False)


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


def test_a_site_that_answers_too_late_joins_the_next_roster(tmp_path: Path) -> None:
    """Its own state becomes that of the sum without it."""
    made = spec(4, rounds=4)
    deployment = Deployment(made, tmp_path)

    def late(site: str, body: Any) -> None:
        message = step(body)
        if site == "d" and isinstance(message, Masked) and message.round == 2:
            raise SiteLostError("it did not answer within 120 s")

    deployment.after = late
    history = deployment.run()
    assert [record["clients_trained"] for record in history] == [4, 3, 4, 4]
    assert [record["exchanges"] for record in history] == [3, 3, 4, 2]  # site d is asked for keys before the roster
    assert same(history, without(3, 2, made, tmp_path, back=3))


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
        reason = "Secure sum 1 has failed, because only 2 of 3 required sites have sent their vectors."
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
    assert "this request was answered before" in events[0]["reason"]
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
    with pytest.raises(protocol.RefusedError, match="this request was answered before"):
        other.add(b"1" * 32)
    other.add(b"2" * 32)
    assert one.read() == {b"1" * 32, b"2" * 32}


def test_a_hash_that_a_crash_cut_off_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "job"
    path.write_bytes(b"1" * 32 + b"2" * 7)
    answered = Answered(path)
    assert answered.read() == {b"1" * 32}
    answered.add(b"3" * 32)
    assert path.read_bytes() == b"1" * 32 + b"3" * 32


def plain_question(server: Malicious) -> Any:
    return server.ask("a", server.fit())


def no_masks(server: Malicious) -> Any:
    return server.ask("a", Masked(server.fit(), None))


def no_beginning(server: Malicious) -> Any:
    return server.ask("a", Masked(server.fit(), Opened(0, ["a", "b", "c", "d"])))


def simulated_step(server: Malicious) -> Any:
    return server.ask("a", Step(None))


def no_message(server: Malicious) -> Any:
    return server.step("a", protocol.Vote(b""))


def another_roster(server: Malicious) -> Any:
    server.sum()
    return server.ask("a", Masked(server.fit(2), replace(server.begins["a"], roster=bytes(32), exchange=1)))


def the_exchange_again(server: Malicious) -> Any:
    server.sum()
    return server.ask("a", Masked(server.fit(2), replace(server.begins["a"], delivery=None)))


def the_round_again(server: Malicious) -> Any:
    server.sum()
    return server.ask("a", Masked(server.fit(), replace(server.begins["a"], delivery=None, exchange=1)))


def another_model_for_one_site(server: Malicious) -> Any:
    """The statement of this site is about another question, so the others do not reveal their shares."""
    exchange = server.server.begin(question_of(server.fit()), server.ring.length)
    assert exchange is not None
    other = Weights({name: w + 1 for name, w in server.weights.params.items()}, {})
    present = {}
    for name, begin in exchange.outgoing.items():
        reply = server.ask(name, Masked(server.fit(weights=other if name == "d" else None), begin))
        present[name] = reply.present
    return server.step("a", RevealAll(0, present))


def two_votes(server: Malicious) -> Any:
    exchange = server.sum()
    (message,) = {id(m): m for m in exchange.outgoing.values()}.values()
    assert isinstance(server.step("a", message), protocol.Shares)
    present = {name: each for name, each in message.present.items() if name != "d"}  # type: ignore[attr-defined]
    return server.step("a", Propose(0, present))


def a_small_set(server: Malicious) -> Any:
    message = server.sum().outgoing["a"]
    return server.step("a", Propose(0, {name: message.present[name] for name in "ab"}))  # type: ignore[attr-defined]


def shares_without_votes(server: Malicious) -> Any:
    exchange = server.sum(absent="d")
    vote = server.step("a", exchange.outgoing["a"])
    assert isinstance(vote, protocol.Vote)
    return server.step("a", RevealSet(0, {"a": vote.signature}))


def many_messages(server: Malicious) -> Any:
    for _ in range(3):
        assert isinstance(server.step("a", None), protocol.Package)
    return server.step("a", None)


ATTACKS: dict[Callable[[Malicious], Any], str] = {
    plain_question: "does not declare the request Fit",
    no_masks: "Masked.begin = None does not match the declaration",
    no_beginning: "FedstrataError. Read the log of site a.",
    simulated_step: "does not declare the request Step",
    no_message: "KeyError. Read the log of site a.",
    another_roster: "the roster is unknown or is not the newest",
    the_exchange_again: "the keys of secure sum 0 were used before",
    the_round_again: "'repeat': Masked of Fit arrived again, but may arrive at most 1 time(s) in a round",
    another_model_for_one_site: "'d' has not signed that it sent its vector in this exchange",
    two_votes: "the site has already voted in this exchange",
    a_small_set: "the proposed set has too few sites",
    shares_without_votes: "too few sites have voted for the same set",
    many_messages: "'repeat': SiteStep arrived again, but may arrive at most 4 time(s) in a round",
}


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_a_site_refuses_a_malicious_server(attack: Callable[[Malicious], Any], tmp_path: Path) -> None:
    outcome = attack(Malicious(Deployment(spec(4), tmp_path)))
    assert isinstance(outcome, Failed | Refused), outcome
    assert ATTACKS[attack] in outcome.reason


def test_a_site_wants_as_many_parties_as_the_spec(tmp_path: Path) -> None:
    server = Malicious(Deployment(spec(4, privacy={"parties": 4}), tmp_path))
    outcome = server.step("a", server.sum(absent="d").outgoing["a"])
    assert "fewer than 4 sites have enough samples" in outcome.reason


def test_a_second_start_gives_no_second_sum(tmp_path: Path) -> None:
    deployment = Deployment(spec(4), tmp_path)
    assert Malicious(deployment).sum().stage == "revealing"
    again = Malicious(deployment)
    exchange = again.server.begin(question_of(again.fit()), again.ring.length)
    assert exchange is not None
    outcome = again.ask("a", Masked(again.fit(), exchange.outgoing["a"]))
    assert "this request was answered before" in outcome.reason


def any_step(server: Malicious, round: int, chance: random.Random, seen: dict[int, dict[str, Any]]) -> Any:
    """Draw a message of the protocol in a round, made of what the server has seen."""
    exchange = chance.choice([round - 1] * 8 + [round - 2, 63, -1])
    replies = seen.get(exchange, {})
    present = {name: reply.present for name, reply in replies.items() if chance.random() < 0.9}
    opened = Opened(exchange, sorted(present))
    steps = [RevealAll(exchange, present), Propose(exchange, present), RevealSet(exchange, seen.get(-2, {}))]
    return chance.choice([*steps * 4, opened, server.server.roster, None] if round > 6 else [*steps * 4, opened])


# With these seeds, a site that may vote twice breaks its promise.
@pytest.mark.parametrize("seed", [3, 6, 7])
def test_sites_keep_their_promises_whatever_a_server_sends(seed: int, tmp_path: Path) -> None:
    """A site masks a question once, and never reveals shares of both seeds of a site. No message makes it crash."""
    chance, server = random.Random(seed), Malicious(Deployment(spec(4, rounds=8), tmp_path))
    server.sum()
    assert server.server.roster is not None
    seen: dict[int, dict[str, Any]] = {}
    masked, revealed, answers = set[tuple[str, int]](), dict[Any, set[str]](), Counter[str]()
    begin = protocol.Begin(server.server.roster.hash(server.server.job), 0, None)
    for number in range(280):
        round, site = 2 + number // 40, chance.choice(server.deployment.names)
        request: Any = SiteStep(any_step(server, round, chance, seen), round)
        if number % 40 < 4 or chance.random() < 0.1:
            site = server.deployment.names[number % 4]
            request = Masked(server.fit(round), replace(begin, exchange=chance.choice([round - 1] * 9 + [0])))
        reply = server.ask(site, request)
        assert "Read the log" not in getattr(reply, "reason", ""), reply
        answers[type(getattr(reply, "message", reply)).__name__] += 1
        if isinstance(reply, MaskedReply):
            assert (site, request.round) not in masked
            masked.add((site, request.round))
            seen.setdefault(request.begin.exchange, {})[site] = reply
        elif isinstance(reply, StepReply) and isinstance(reply.message, protocol.Vote):
            seen.setdefault(-2, {})[site] = reply.message.signature
        elif isinstance(reply, StepReply) and isinstance(reply.message, protocol.Shares):
            for kind, shares in vars(reply.message).items():
                for owner in shares:
                    revealed.setdefault((site, request.message.exchange, owner), set()).add(kind)
    assert all(len(kinds) == 1 for kinds in revealed.values())
    assert {"MaskedReply", "Vote", "Shares", "Failed"} <= answers.keys(), answers


def test_news_of_another_set_changes_no_state(tmp_path: Path) -> None:
    server = Malicious(Deployment(spec(4), tmp_path))
    exchange = server.sum()
    while exchange.stage != "opened":
        exchange.receive({name: server.step(name, message) for name, message in exchange.outgoing.items()})
    before = state_of(server.deployment, "a")
    assert server.call("a", Save(1), Opened(0, ["a", "b", "c"])) is not None
    assert state_of(server.deployment, "a") == before == {}
    server.call("a", Save(1), *[exchange.outgoing["a"]] * 2)  # the news may come twice
    assert state_of(server.deployment, "a") != {}
    assert len(server.deployment.entries("a", "Opened")) == 1


def test_a_site_that_wants_secure_sums_refuses_a_plain_job(tmp_path: Path) -> None:
    deployment = Deployment(spec(4, "plain"), tmp_path, {"a": {"sums": "secure"}})
    history = deployment.run()
    assert [record["clients_trained"] for record in history] == [3, 3, 3]
    assert {entry.refused for entry in deployment.ledgers["a"].entries} == {"policy.sums"}


def test_a_site_sums_only_with_its_peers(tmp_path: Path) -> None:
    """A stranger's certificate is valid, but site a does not know it: the other sites sum without a."""
    deployment = Deployment(spec(4), tmp_path, {"a": {"peers": peers("b", "c")}, "b": {"peers": peers("a", "c", "d")}})
    history = deployment.run(tmp_path / "run")
    assert [record["clients_trained"] for record in history] == [3, 3, 3]
    reasons = [event.get("reason", "") for event in read_jsonl(tmp_path / "run" / "events.jsonl")]
    assert "the package of 'd' is wrong: its certificate is not on the list policy.peers" in reasons[0]
    assert [entry.refused for entry in deployment.entries("a", "SiteStep")] == ["secure-sums"]
    assert [record["exchanges"] for record in history] == [3, 3, 2]  # site a is asked for keys once more
    assert [record["clients_failed"] for record in history] == [1, 1, 1]
    assert len(deployment.entries("d", "Opened")) == 3


def test_too_few_peers_are_no_sum(tmp_path: Path) -> None:
    deployment = Deployment(spec(), tmp_path, {"a": {"peers": peers("b")}})
    history = deployment.run(tmp_path / "run")
    assert [record["clients_trained"] for record in history] == [0, 0, 0]
    events = [event for event in read_jsonl(tmp_path / "run" / "events.jsonl") if event["round"] == 1]
    assert [event["kind"] for event in events] == ["refused", "secure sum failed"]
    assert events[-1]["reason"] == "Only 2 sites have sent shares, but a sum needs 3."


def test_the_ledger_lists_rosters_sums_and_what_was_opened(tmp_path: Path) -> None:
    deployment = Deployment(spec(4), tmp_path)
    deployment.before = lambda site, body: (
        deployment.dead.add("d") if site == "d" and isinstance(step(body), Masked) and step(body).round == 2 else None
    )
    deployment.run()
    kinds = [entry.kind for entry in deployment.ledgers["b"].entries]
    first = ["Roster", "Masked of Fit", "RevealAll"]
    second = ["Opened", "Masked of Fit", "Propose", "RevealSet"]
    assert kinds == [*first, *second, "Opened", *first]
    roster, question, opened = (deployment.entries("b", kind) for kind in ("Roster", "Masked of Fit", "Opened"))
    assert [entry.members for entry in roster] == [["a", "b", "c", "d"], ["a", "b", "c"]]
    assert [entry.exchange for entry in question] == [0, 1, 0]
    assert [entry.roster for entry in question] == [roster[0].roster, roster[0].roster, roster[1].roster]
    assert roster[0].roster != roster[1].roster == deployment.entries("c", "Roster")[1].roster
    assert [(entry.exchange, entry.members) for entry in opened] == [(0, ["a", "b", "c", "d"]), (1, ["a", "b", "c"])]
    assert [entry.members for entry in deployment.entries("b", "Propose")] == [["a", "b", "c"]]
    assert all(entry.samples > 0 and entry.bytes > 0 for entry in question)


def test_the_certificates_of_kits_sign_keys(federations: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other sites of the federation accept a site's keys, and sites of another federation refuse them."""
    credentials = Credentials.of_kit(federations / "fed" / "a")
    package = Site(b"job", credentials.identity, credentials.trust, exchanges=1).package()
    signed = protocol.job_key_statement(b"job", "a", package.job_key)
    defects = [
        trust_of(federations / name).defect("a", package.certificate, package.credential, signed)
        for name in ("fed/b", "fed/server", "other/a")
    ]
    assert defects == ["", "", "its certificate was not issued by the root certificate"]
    main(["check", str(federations / "fed" / "a")])
    assert f"ok       fingerprint: {fingerprint(package.certificate)}\n" in capsys.readouterr().out
    pem = federations / "fed" / "a" / "startup" / "client.crt"
    done = subprocess.run(
        ["openssl", "x509", "-in", pem, "-noout", "-fingerprint", "-sha256"], capture_output=True, text=True, check=True
    )
    assert Policy(peers=[done.stdout.strip().partition("=")[2]]).peers == [fingerprint(package.certificate)]


@pytest.mark.parametrize("peer", ["", "ab", "g" * 64, "a" * 63])
def test_a_wrong_fingerprint_is_refused_when_the_policy_is_read(tmp_path: Path, peer: str) -> None:
    (tmp_path / FILE).parent.mkdir()
    (tmp_path / FILE).write_text(f'parties = 4\npeers = ["{peer}"]')
    with pytest.raises(SpecError, match=r"peers.*line 2.*must be a SHA-256 hash \(64 hexadecimal digits\)"):
        Policy.read(tmp_path)
    assert Policy().peers is None
    (tmp_path / FILE).write_text(Policy(peers=peers("a"), sums="secure").to_toml())
    assert Policy.read(tmp_path) == Policy(peers=peers("a"), sums="secure")


def test_a_site_without_a_certificate_refuses_secure_sums(tmp_path: Path) -> None:
    deployment = Deployment(spec(4), tmp_path)
    deployment.site_servers["a"].credentials = None
    history = deployment.run(tmp_path / "run")
    assert [record["clients_trained"] for record in history] == [3, 3, 3]
    with pytest.raises(
        SpecError, match=r"privacy\.sums = 'secure': needs certificates, which this server does not have"
    ):
        make_site_engine(deployment.prepared.config, deployment, ["a", "b"], Sums(1.0), spec="", run="run")
    with pytest.raises(SpecError, match=r"privacy\.sums = 'secure': a secure sum needs sites with one client each"):
        make_site_engine(
            deployment.prepared.config, deployment, ["a", "a"], Sums(1.0), spec="", run="run", trust=authority().trust
        )


def test_a_rehearsal_has_the_model_of_a_simulation(tmp_path: Path) -> None:
    made = spec()
    sites = "".join(f"[site.{name}]\n" for name in "abc")
    (tmp_path / "sites.toml").write_text(f"policy = {{ min_samples = 1 }}\n{sites}")
    assert same(rehearse_file(made, tmp_path / "sites.toml", tmp_path / "run"), fs.run(made))


def own_data(tmp_path: Path) -> dict[str, Any]:
    """Write the files of sites a, b and c and the server's test samples, and return the section ``data`` of a spec."""
    generator = np.random.default_rng(1)
    for name, samples in {"a": 20, "b": 40, "c": 30, "test": 10}.items():
        x = generator.normal(size=(samples, 4)).astype(np.float32)
        y, part = (x.sum(axis=1) > 0).astype(np.int64), "test" if name == "test" else "train"
        np.savez(tmp_path / f"{name}.npz", **{f"x_{part}": x, f"y_{part}": y})
    sites = "".join(f"[site.{name}]\ndata = '{name}.npz'\n" for name in "abc")
    (tmp_path / "sites.toml").write_text(f"own_data = true\nserver.data = 'test.npz'\n{sites}")
    return {"name": "own.npz", "shape": [4], "classes": 2, "normalize": "standard"}


def test_sites_with_their_own_data_sum_like_plain_sums(tmp_path: Path) -> None:
    data, histories = own_data(tmp_path), []
    for sums, privacy in (("secure", {"largest": 40}), ("secure", {"largest": 30}), ("plain", {})):
        made = spec(3, sums, data=data, partition="natural", privacy=privacy)
        histories.append(rehearse_file(made, tmp_path / "sites.toml", tmp_path / f"run-{len(histories)}"))
    secure, without_b, plain = histories
    assert [record["clients_trained"] for record in secure] == [3, 3, 3]
    assert [record["clients_trained"] for record in without_b] == [0, 0, 0]  # site b does not answer, and t = 3
    for name, values in plain.params.items():
        assert torch.allclose(secure.params[name], values, atol=1e-6)


NOISE: dict[str, Any] = {"dp": {"clip": 1.0, "noise": 2.0}}


def test_the_server_leaves_epsilon_to_sites_whose_sizes_are_not_in_replies(tmp_path: Path) -> None:
    data = own_data(tmp_path)

    def run(**dp: float) -> fs.History:
        made = spec(3, data=data, partition="natural", privacy={"largest": 40, "dp": NOISE["dp"] | dp})
        return rehearse_file(made, tmp_path / "sites.toml", tmp_path / "run")

    with pytest.raises(SpecError, match=r"privacy\.dp\.budget = 8\.0: needs each site's number of samples"):
        run(budget=8.0)
    history = run()
    assert [record["clients_trained"] for record in history] == [3, 3, 3]
    assert [record["train_loss"] for record in history] == [None] * 3
    assert "epsilon" not in history[-1]


def test_sites_add_noise_before_they_mask_and_spend_their_own_budgets(tmp_path: Path) -> None:
    """In round 3, the budget of site c is spent: the other three sites sum without it."""
    data = {"name": "digits", "limit": 400, "shift": [128.0], "scale": [0.01]}
    made = spec(4, data=data, privacy=NOISE)
    sizes, dp = prepare(made).config.sizes, made.privacy.dp
    assert sizes is not None
    assert dp is not None
    two_rounds = Accountant(dp, made.training, sizes).largest(np.array([0, 0, 2, 0]))
    policies = {name: {"sums": "secure", "dp": 1.0, "budget": 1000.0} for name in "abcd"}
    policies["c"]["budget"] = 1.01 * two_rounds
    histories = []
    for again in range(2):
        deployment = Deployment(made, tmp_path / f"sites-{again}", policies)
        histories.append(deployment.run(tmp_path / f"run-{again}"))
        assert [record["clients_trained"] for record in histories[-1]] == [4, 4, 3]
        assert deployment.ledgers["c"].refused == ["policy.budget"]
        spent = {name: json.loads((deployment.folder / name / SPENT).read_text())["steps"] for name in "abcd"}
        steps = {name: [row[-1] for row in rows] for name, rows in spent.items()}
        assert steps == {"a": [9], "b": [9], "c": [6], "d": [9]}
    one, other = histories
    assert all((w != other.params[name]).all() for name, w in one.params.items()), "sites draw noise in secret"
