"""A hostile server of secure sums: before each honest message, it sends sites mutants of this message.

    python tests/sites/support/secure_fuzz.py --seeds 20     # prints the number of requests and of each kind of answer

The sites have the policy ``sums = "secure"``. A mutant that a site may answer is answered, so the checks are promises
that hold for a whole conversation, whatever the server sends.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections import Counter
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from secure_sites import Deployment, spec
from secure_world import authority
from verdicts import Asked, changed, field_names, parse, unparse

import fedstrata as fs
from fedstrata.base import records
from fedstrata.federation.messages import Fit, Weights
from fedstrata.federation.secure import protocol
from fedstrata.federation.secure.member import question_of
from fedstrata.federation.secure.protocol import Begin, Opened, Propose, RevealAll, RevealSet, Roster, Shares, Vote
from fedstrata.federation.secure.requests import Dealt, Masked, MaskedReply, SiteStep, StepReply
from fedstrata.federation.secure.server import Exchange, Server
from fedstrata.sites import wire
from fedstrata.sites.secure_site import job_of
from fedstrata.sites.site_server import SERVER

MUTANTS = 12
"""The largest number of mutants before each honest message."""

ROUNDS = 40


class Promises:
    """Checks that four sites keep their promises in a conversation.

    Args:
        job: The job's hash.
    """

    def __init__(self, job: bytes) -> None:
        self.job, self.answers = job, Counter[str]()
        self._masked, self._questions = set[tuple[str, int]](), set[tuple[str, bytes]]()
        self._revealed: dict[tuple[str, bytes, int, str], str] = {}
        self._votes: dict[tuple[str, bytes, int], list[str]] = {}
        self.rosters: dict[str, bytes] = {}
        """The hash of the roster in which each site last dealt its shares."""

    def check(self, site: str, data: bytes, answer: bytes) -> Any:
        """Check a site's answer to an encoded message, and return its outcome."""
        reply = records.decode(answer)
        outcome = reply.outcomes[0] if isinstance(reply, wire.Answers) and reply.outcomes else reply
        if isinstance(outcome, wire.Refused | wire.Failed):
            # A question about another model may fail in training. No other message may reach an unexpected error.
            assert "Read the log" not in outcome.reason or self._asked(data, Masked), outcome.reason
            self.answers["refused"] += 1
        elif isinstance(outcome, MaskedReply):
            self._check_vector(site, self._asked(data, Masked))
        elif isinstance(outcome, StepReply):
            self._check_step(site, self._asked(data, SiteStep), outcome.message)
        else:
            assert isinstance(outcome, wire.Answers | wire.Done), f"{type(outcome).__name__} is not a part of a sum"
            self.answers[type(outcome).__name__] += 1
        return outcome

    @staticmethod
    def _asked(data: bytes, kind: type[Any]) -> Any:
        """Return the request in a message if it has this kind; otherwise None."""
        body = wire.read(data, wire.Envelope).body
        request = body.requests[body.which[0]] if isinstance(body, wire.Ask) else None
        return request if isinstance(request, kind) else None

    def _check_vector(self, site: str, request: Masked) -> None:
        """A site masks once per round and per question, only for training, and only in its own roster."""
        assert isinstance(request.request, Fit)
        assert isinstance(request.begin, Begin)
        assert request.begin.roster == self.rosters[site]
        keys = (site, request.round), (site, question_of(request.request))
        assert keys[0] not in self._masked
        assert keys[1] not in self._questions
        self._masked.add(keys[0])
        self._questions.add(keys[1])
        self.answers["MaskedReply"] += 1

    def _check_step(self, site: str, request: SiteStep, message: Any) -> None:
        """A site votes once per exchange, for enough sites, and never reveals both secrets of a site."""
        step = request.message
        self.answers[type(message).__name__] += 1
        if isinstance(message, Dealt):
            assert isinstance(step, Roster)
            assert len(step.names) >= protocol.FEWEST
            self.rosters[site] = step.hash(self.job)
        elif isinstance(message, Vote):
            assert isinstance(step, Propose)
            self._vote(site, step.exchange, sorted(step.present))
        elif isinstance(message, Shares):
            assert isinstance(step, RevealAll | RevealSet)
            if isinstance(step, RevealAll):
                self._vote(site, step.exchange, sorted(step.present))
            assert sorted(message.selfs) == self._votes[site, self.rosters[site], step.exchange]
            for kind, owners in (("self", message.selfs), ("pair", message.pairs)):
                for owner in owners:
                    key = site, self.rosters[site], step.exchange, owner
                    assert self._revealed.setdefault(key, kind) == kind

    def _vote(self, site: str, exchange: int, members: list[str]) -> None:
        key = site, self.rosters[site], exchange
        assert key not in self._votes
        assert len(members) >= protocol.FEWEST, "all rosters of three or four sites have this threshold"
        self._votes[key] = members


class Conversation:
    """A conversation of a hostile server with four sites.

    Args:
        folder: The folder of the sites.
        seed: The seed of the mutants.
        rounds: The number of rounds. Each round has one sum.
    """

    def __init__(self, folder: Path, seed: int, rounds: int = ROUNDS) -> None:
        training = {"local_steps": 1, "momentum": 0.0, "optimizer_state": "reset"}
        made = spec(4, rounds=rounds, training=training)
        self.names = list("abcd")
        self.deployment = Deployment(made, folder, {name: {"sums": "secure"} for name in self.names})
        self.chance, self.numbers, self.round, self.rounds = random.Random(seed), count(1), 0, rounds
        self.text, config = made.to_toml(), self.deployment.prepared.config
        self.promises, self.sent = Promises(job_of(self.text)), Counter[str]()
        self.weights = Weights(config.model.params(), config.model.buffers())
        self.ring = fs.FedAvg().forms(config)[Fit].ring
        self.server: Server | None = None
        self.trees: list[Any] = []
        """The wire forms of earlier requests, which may be sent again."""
        self.packages: dict[str, Any] = {}
        self.spare = Counter[str]()
        """How many mutants each site may still use up in this round, and how many mutants may use up a question. A site
        answers a limited number of messages per round, so with more mutants the honest messages would be refused."""

    def run(self) -> None:
        """Begin a run, and have one sum per round."""
        for client, name in enumerate(self.names):
            self.packages[name] = self._begin(client, name).package
        for round in range(1, self.rounds + 1):
            self._sum(round)
        for client, name in enumerate(self.names):
            assert isinstance(self._begin(client, name), wire.BegunWithKeys), "no message has broken the site"

    def _begin(self, client: int, name: str) -> Any:
        begin = wire.Begin("run", self.text, None, [client], len(self.names), 0)
        return records.decode(self._call(name, records.encode(wire.Envelope([], begin))))

    def _call(self, site: str, data: bytes) -> bytes:
        return self.deployment.site_servers[site].call(SERVER, data)

    def _sum(self, round: int) -> None:
        self.round = round
        self.spare = Counter(
            dict.fromkeys(self.names, 1 if self.server is None else 2) | {"question": int(self.chance.random() < 0.3)}
        )
        exchange = self._exchange(round)
        if exchange is None:
            self.server = None
            return
        absent = self.chance.choice([*self.names, "", "", "", ""])
        asked = {name: Masked(self._fit(round), begin) for name, begin in exchange.outgoing.items() if name != absent}
        replies = {name: self._say(name, request) for name, request in asked.items()}
        exchange.receive(
            {n: protocol.MaskedVector(r.vector, r.present) for n, r in replies.items() if isinstance(r, MaskedReply)}
        )
        while exchange.stage not in ("opened", "failed"):
            exchange.receive(self._steps(exchange.outgoing, round))
        if exchange.stage == "failed" or absent:
            self.server = None
        for name, opened in exchange.outgoing.items():
            self._say(name, None, opened)

    def _exchange(self, round: int) -> Exchange | None:
        """Return the next exchange, perhaps of a new roster; None if the sites do not form a roster."""
        if self.server is None:
            self.server = Server(job_of(self.text), authority().trust)
            self.packages |= self._steps(dict.fromkeys(set(self.names) - self.packages.keys()), round)
            roster = self.server.enrol(self.packages)
            if roster is None:
                self.packages = {}
                return None
            dealt = self._steps(dict.fromkeys(self.names, roster), round)
            self.packages = {name: each.package for name, each in dealt.items() if isinstance(each, Dealt)}
            if not self.server.deliver({name: each.deal for name, each in dealt.items() if isinstance(each, Dealt)}):
                return None
        return self.server.begin(question_of(self._fit(round)), self.ring.length)

    def _fit(self, round: int) -> Fit:
        return Fit(round, self.weights, {}, 1.0)

    def _steps(self, messages: Mapping[str, Any], round: int) -> dict[str, Any]:
        outcomes = {name: self._say(name, SiteStep(message, round)) for name, message in messages.items()}
        return {name: each.message for name, each in outcomes.items() if isinstance(each, StepReply)}

    def _say(self, site: str, request: Any, *acks: Opened) -> Any:
        """Send mutants of a request and then the request itself, and return the outcome of the request."""
        pays = "question" if isinstance(request, Masked) else site
        for _ in range(MUTANTS):
            if self.spare[pays] and self._send(site, request, acks, mutate=True) is not None:
                self.spare[pays] -= 1
        return self._send(site, request, acks, mutate=False)

    def _send(self, site: str, request: Any, acks: tuple[Opened, ...], *, mutate: bool) -> Any:
        """Send a message or a mutant of it, and return the outcome; None if the site's guard refused the message."""
        body: Any = wire.Save(1)
        if request is not None:
            body = wire.Ask(next(self.numbers), [self.names.index(site)], [request], [0], "", [])
        data = records.encode(wire.Envelope(list(acks), body))
        data = self._mutant(data) if mutate else data
        kind = type(acks[0] if acks else getattr(request, "message", request)).__name__
        self.sent[kind.replace("NoneType", "request for keys")] += 1
        outcome = self.promises.check(site, data, self._call(site, data))
        at_once = isinstance(outcome, wire.Refused) or "refused by the rule" in getattr(outcome, "reason", "")
        return None if at_once else outcome

    def _mutant(self, data: bytes) -> bytes:
        """Return a changed message: mostly its inner part, sometimes an earlier request or the whole message."""
        tree, chance = parse(data, whole=True), self.chance
        body = tree["f"]["body"]["f"]
        if "requests" not in body:
            node, key = tree["f"], "acks"
        elif chance.random() < 0.15 and self.trees:
            node, key = body, "requests"
            body["requests"] = [chance.choice(self.trees)]
        else:
            self.trees.append(body["requests"][0])
            inner = body["requests"][0]["f"]
            place = chance.choice([*[name for name in ("message", "begin") if inner.get(name)] * 4, "", "round"])
            node, key = (inner, place) if place in inner else (body, "requests")
        fields = field_names([Asked(0, tree, None, False, False)])
        if chance.random() < 0.1:
            tree = changed(tree, chance, fields)
        elif key != "requests" or chance.random() < 0.5:
            node[key] = changed(node[key], chance, fields)
        return unparse(_bounded(tree, body.get("exchange", 0), self.round))


def _bounded(node: Any, exchange: int, round: int) -> Any:
    """Lower the numbers of exchanges and rounds. After a larger number, a site refuses all honest messages."""
    if isinstance(node, list):
        return [_bounded(item, exchange, round) for item in node]
    if not isinstance(node, dict):
        return node
    most = {"round": round} | ({"exchange": exchange} if node.get("$r") == "Ask" else {})
    fields = node.get("f")
    if isinstance(fields, dict):
        lower = {key: min(fields[key], most[key]) for key in most if type(fields.get(key)) in (int, float)}
        node = {**node, "f": fields | lower}
    return {key: _bounded(item, exchange, round) for key, item in node.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    sent, answers = Counter[str](), Counter[str]()
    for seed in range(parser.parse_args().seeds):
        with tempfile.TemporaryDirectory() as folder:
            conversation = Conversation(Path(folder), seed)
            conversation.run()
        sent, answers = sent + conversation.sent, answers + conversation.promises.answers
        print(f"{sent.total()} requests: {dict(sent)}\nanswers: {dict(answers)}", flush=True)


if __name__ == "__main__":
    main()
