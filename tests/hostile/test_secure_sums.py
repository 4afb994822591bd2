"""Secure sums against dropouts, a hostile server and hostile sites."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from quick import others_long

pytest.importorskip("cryptography")

from hypothesis import given, settings
from hypothesis import strategies as st
from secure_attacks import ATTACKS, Careless
from secure_world import JOB, LENGTH, World, authority, identity, plain, question

from fedstrata.base.errors import ReplyRefusedError
from fedstrata.federation.secure import protocol
from fedstrata.federation.secure.protocol import (
    Deal,
    In,
    MaskedVector,
    Propose,
    RefusedError,
    RevealAll,
    RevealSet,
    Shares,
    Vote,
    default_threshold,
)
from fedstrata.federation.secure.ring import Part, Ring, add, rounding
from fedstrata.federation.secure.server import Event, Exchange, Server
from fedstrata.federation.secure.site import Site

# Dropouts

MOMENTS = ("before it deals shares", "before its vector", "before its vote", "before its shares", "before the end")
"""The messages of a site: a site that is lost before one of them has sent all earlier ones."""
Losses = dict[str, int]
"""For each site that is lost, the place in ``MOMENTS`` after which it is silent."""


def losses(names: str, most: int) -> Iterator[Losses]:
    """Return all ways to lose up to ``most`` sites."""
    for number in range(most + 1):
        for lost in combinations(names, number):
            for moments in product(range(len(MOMENTS)), repeat=number):
                yield dict(zip(lost, moments, strict=True))


def expected(names: str, lost: Losses) -> list[str] | None:
    """Return the sites whose vectors are in the sum; None without a sum."""
    threshold = default_threshold(len(names))
    alive = {moment: [name for name in names if lost.get(name, 9) > moment] for moment in range(len(MOMENTS))}
    members, contributors, voters, revealing = (alive[moment] for moment in range(4))
    if contributors == members:
        revealing = voters  # the shares are the vote
    enough = all(len(names) >= threshold for names in (members, contributors, voters, revealing))
    return contributors if enough else None


def check_losses(world: World, lost: Losses, number: int) -> None:
    """Let sites drop out of an exchange, and check its result."""
    names = "".join(world.sites)
    committed, events = set(world.committed), len(world.server.events)
    exchange = world.begin(number)
    for moment in range(1, 4):
        if exchange.stage in ("opened", "failed"):
            break
        world.step(exchange, [name for name in exchange.outgoing if lost.get(name, 9) > moment], number)
    wanted = expected(names, lost)
    if wanted is None:
        assert (exchange.stage, exchange.total) == ("failed", None)
        assert [event.kind for event in world.server.events[events:]] == ["failed"]
        assert world.committed == committed
    else:
        assert plain(exchange.total) == world.sum_of(wanted)
        assert exchange.contributors == wanted
        assert len(world.server.events) == events
        for name, message in exchange.outgoing.items():
            if name not in lost:
                world.answer(name, message, number)
        assert world.committed == {name for name in wanted if name not in lost}
    world.committed.clear()
    assert world.refusals == []


def check_all(names: str, patterns: list[Losses]) -> None:
    """Check patterns of losses. Those with the same members are exchanges of one roster, so that the run goes on."""
    by_members: dict[str, list[Losses]] = {}
    for lost in patterns:
        by_members.setdefault("".join(name for name in names if lost.get(name) == 0), []).append(lost)
    for offline, group in by_members.items():
        for first in range(0, len(group), 60):
            part = group[first : first + 60]
            world = World(names, exchanges=len(part) + 1, wire=False).join(offline)
            if len(names) - len(offline) < default_threshold(len(names)):
                assert [event.kind for event in world.server.events] == ["failed"]
                assert expected(names, part[0]) is None
                break
            for number, lost in enumerate(part):
                check_losses(world, lost, number)
            members = "".join(world.server.members)
            assert world.run(len(part)) == world.sum_of(members)


@pytest.mark.slow
@pytest.mark.parametrize("names", ["abc", "abcd", pytest.param("abcde", marks=pytest.mark.long)])
def test_every_pattern_of_dropouts(names: str) -> None:
    """Up to n − t sites may be lost, each before any of its messages. One more gives an event instead of a sum."""
    most = len(names) - default_threshold(len(names))
    patterns = list(losses(names, most + 1))
    assert all(expected(names, lost) is not None for lost in patterns if len(lost) <= most)
    assert sum(expected(names, lost) is None for lost in patterns) >= len(patterns) // 4
    check_all(names, patterns)


@pytest.mark.long
def test_random_patterns_of_dropouts_of_ten_sites() -> None:
    names, draws = "abcdefghij", random.Random(0)
    patterns = []
    for number in range(60):
        lost = draws.sample(names, 1 + number % 4)
        patterns.append({name: draws.randrange(1, len(MOMENTS)) for name in lost})
    assert {expected(names, lost) is None for lost in patterns} == {True, False}
    check_all(names, patterns)


@pytest.mark.slow
def test_a_site_that_restarts_is_lost_until_the_next_roster() -> None:
    world = World("abcd").join()
    world.run()
    world.sites["a"] = Site(JOB, identity("a"), authority().trust, exchanges=2)
    assert world.run(1) == world.sum_of("bcd")
    assert {(name, error.check) for name, error in world.refusals} == {("a", "roster"), ("a", "exchange")}
    world.server = Server(JOB, authority().trust, exchanges=2)
    world.join()
    assert world.run(2) == world.sum_of("abcd")


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["revealing", "voting", "opening"])
def test_the_loss_of_one_survivor_does_not_void_the_sum(stage: str) -> None:
    """Another framework lost the sum if a site that had answered the first message was silent later."""
    world = World("abcdefg").join()
    exchange = world.begin()
    world.step(exchange, "abcdefg" if stage == "revealing" else "abcdef")
    while exchange.stage != "opened":
        world.step(exchange, "bcdefg" if exchange.stage == stage else "abcdefg")
    assert plain(exchange.total) == world.sum_of("abcdefg" if stage == "revealing" else "abcdef")


# A hostile server

SEEN_BY = {"exchange in context": "in votes", "question in context": "in votes", "members in context": "in",
           "roster in boxes": "box in"}  # fmt: skip
"""The checks that find out if a message is about something else."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_obtains_nothing_while_one_of_its_checks_is_on(name: str) -> None:
    checks = ATTACKS[name].checks
    for off in (subset for size in range(len(checks)) for subset in combinations(checks, size)):
        obtained, world = ATTACKS[name].run(off)
        assert not obtained, f"without the checks {off}"
        expected = {check for each in checks for check in SEEN_BY.get(each, each).split()}
        assert {error.check for _, error in world.refusals} <= expected
        assert world.refusals


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_the_control_without_these_checks_obtains_it(name: str) -> None:
    obtained, world = ATTACKS[name].run(ATTACKS[name].checks)
    assert obtained
    assert world.refusals == []


@pytest.mark.slow
def test_without_the_check_of_statements_another_model_for_one_site_gives_garbage() -> None:
    """The masks depend on the question too, so they do not cancel."""
    world = World("abcd", Careless).join()
    for name in "bcd":
        world.vectors[name] = np.zeros(LENGTH, dtype=np.uint32)
    for site in world.sites.values():
        site.off = {"in"}  # type: ignore[attr-defined]
    exchange = world.begin()
    masked = {name: world.answer(name, begin, 0 if name == "a" else 1) for name, begin in exchange.outgoing.items()}
    exchange._vector_defect = lambda name, reply: ""  # type: ignore[method-assign]
    exchange.receive(masked)
    while exchange.stage != "opened":
        world.step(exchange, "abcd")
    assert exchange.total is not None
    assert (exchange.total != world.vectors["a"]).all()
    assert (exchange.total != 0).all()


@pytest.mark.slow
def test_two_questions_with_sets_that_differ_by_one_site_reveal_its_vector() -> None:
    """This attack remains possible and is documented: a site cannot see that its answers to two questions are equal."""
    world = World("abcd").join()
    whole = world.run(0)
    exchange = world.begin(1)
    while exchange.stage != "opened":
        world.step(exchange, "bcd", 1)
    assert whole is not None
    difference = [(one - other) % 2**32 for one, other in zip(whole, plain(exchange.total) or [], strict=True)]
    assert difference == plain(world.vectors["a"])


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["", "a"])
def test_a_question_that_continues_another_has_the_same_contributors(lost: str) -> None:
    world = World("abcde").join()
    world.continues.add(1)
    exchange = world.begin(0)
    first = [name for name in "abcde" if name != lost]
    while exchange.stage != "opened":
        world.step(exchange, first, 0)
    exchange = world.begin(1, only=first)
    while exchange.stage != "opened":
        world.step(exchange, first, 1)
    assert plain(exchange.total) == world.sum_of(first)
    assert world.refusals == []


@pytest.mark.slow
def test_a_sum_that_has_lost_a_site_of_the_sum_before_fails() -> None:
    world = World("abcde").join()
    world.continues.add(1)
    assert world.run(0) == world.sum_of("abcde")
    exchange = world.begin(1, only="abcde")
    world.step(exchange, "abcd", 1)
    assert exchange.stage == "failed"
    reason = "Secure sum 1 has failed, because a contributor to the previous sum is missing."
    assert world.server.events[-1].reason == reason


def test_sites_that_voted_for_different_sets_do_not_continue_together() -> None:
    """The question's hash depends on the set for which a site voted, so masks and signatures do not fit together."""
    world = World("abcd").join()
    exchange = world.begin(0)
    present = {name: world.answer(name, begin).present for name, begin in exchange.outgoing.items()}
    for name in "abcd":
        chosen = "abcd" if name in "ab" else "bcd"
        assert world.answer(name, Propose(0, {each: present[each] for each in chosen})) is not None
    for name in "abcd":
        world.server.delivered(name)
    world.continues.add(1)
    exchange = world.begin(1, only="abcd")
    world.step(exchange, "abcd", 1)
    assert exchange.stage == "failed"
    refused = [event.sites for event in world.server.events if event.kind == "refused"]
    assert refused == [("c",), ("d",)]


def test_nothing_can_be_continued_before_a_vote() -> None:
    """A vote for an earlier sum than the previous one does not count."""
    world = World("abcd", exchanges=4).join()
    world.continues |= {0, 3}
    assert world.answer("a", world.begin(0, only="abcd").outgoing["a"]) is None
    assert world.run(1) == world.sum_of("abcd")
    assert world.answer("a", world.begin(2).outgoing["a"], 2) is not None
    assert world.answer("a", world.begin(3, only="abcd").outgoing["a"], 3) is None
    assert [error.check for _, error in world.refusals] == ["continued"] * 2


@pytest.mark.slow
def test_no_site_reveals_both_secrets_of_a_site() -> None:
    """In another framework, the sets of living and lost sites could overlap."""
    for size in range(4, 7):
        for chosen in combinations("abcdef", size):
            world = World("abcdef", exchanges=1, wire=False).join()
            exchange = world.begin()
            world.step(exchange, chosen)
            if size < default_threshold(6):
                assert exchange.stage == "failed"
                continue
            while exchange.stage != "opened":
                shares = [world.answer(name, message) for name, message in exchange.outgoing.items()]
                exchange.receive(dict(zip(exchange.outgoing, shares, strict=True)))
            for each in shares:
                assert not each.selfs.keys() & each.pairs.keys()
                assert each.selfs.keys() == set(chosen)
                assert each.pairs.keys() == set("abcdef") - set(chosen)


Send = Callable[[World, Any], Any]
"""Sends a message to the site "a", made from the right one."""
BAD = "\ud800"
"""A text that UTF-8 cannot encode."""


def bad_roster(change: Callable[[protocol.Roster], protocol.Roster]) -> Send:
    return lambda world, roster: world.sites["a"].deal(change(roster))


def bad_begin(**changes: Any) -> Send:
    return lambda world, begin: world.sites["a"].mask(replace(begin, **changes), question(), world.vectors["a"], True)


ROSTERS: dict[str, Send] = {
    "no packages": bad_roster(lambda roster: replace(roster, packages=[])),
    "itself only": bad_roster(lambda roster: replace(roster, packages=roster.packages[:1])),
    "itself twice": bad_roster(lambda roster: replace(roster, packages=[roster.packages[0], *roster.packages])),
    "another order": bad_roster(lambda roster: replace(roster, packages=roster.packages[::-1])),
    "a strange name": bad_roster(
        lambda roster: replace(roster, packages=[*roster.packages[:3], replace(roster.packages[3], name=BAD)])
    ),
    "a large threshold": bad_roster(lambda roster: replace(roster, threshold=10**30)),
    "a negative threshold": bad_roster(lambda roster: replace(roster, threshold=-3)),
}
BEGINS: dict[str, Send] = {
    "a negative exchange": bad_begin(exchange=-1),
    "a large exchange": bad_begin(exchange=10**30),
    "no roster": bad_begin(roster=b""),
    "no boxes": bad_begin(delivery=None),
    "no members": bad_begin(delivery=protocol.Delivery([], {})),
    "strange members": bad_begin(delivery=protocol.Delivery(["a", "b", "c", BAD], {})),
    "members twice": bad_begin(delivery=protocol.Delivery(["a", "a", "b", "c"], {})),
    "members without the site": bad_begin(delivery=protocol.Delivery(["b", "c", "d"], {})),
    "members without boxes": bad_begin(delivery=protocol.Delivery(["a", "b", "c"], {"b": b""})),
}
IN = In(True, bytes(64))
LATER: dict[str, Send] = {
    "another exchange": lambda world, present: world.sites["a"].reveal_all(RevealAll(1, present)),
    "no statements": lambda world, present: world.sites["a"].reveal_all(RevealAll(0, {})),
    "strange statements": lambda world, present: world.sites["a"].reveal_all(RevealAll(0, present | {BAD: IN})),
    "statements of nothing": lambda world, present: world.sites["a"].reveal_all(
        RevealAll(0, dict.fromkeys("abcd", In(True, b"")))
    ),
    "no set": lambda world, present: world.sites["a"].propose(Propose(0, {})),
    "a strange set": lambda world, present: world.sites["a"].propose(Propose(0, present | {BAD: IN})),
    "shares without a vote": lambda world, present: world.sites["a"].reveal_set(RevealSet(0, {BAD: b""})),
    "the end of another exchange": lambda world, present: world.sites["a"].opened(protocol.Opened(1, [])),
}


@pytest.mark.parametrize("what", [*ROSTERS, *BEGINS, *LATER])
def test_a_site_refuses_strange_messages_and_goes_on(what: str) -> None:
    world = World("abcd")
    roster = world.server.enrol({name: site.package() for name, site in world.sites.items()})
    if what in ROSTERS:
        with pytest.raises(RefusedError):
            ROSTERS[what](world, roster)
    world.server.deliver(world.deals())
    exchange = world.begin()
    if what in BEGINS:
        with pytest.raises(RefusedError):
            BEGINS[what](world, exchange.outgoing["a"])
    world.step(exchange, "abcd")
    if what in LATER:
        with pytest.raises(RefusedError):
            LATER[what](world, exchange._present)
    continues(world, exchange, "abcd")
    assert plain(exchange.total) == world.sum_of("abcd")
    assert world.refusals == []


def test_a_site_without_a_package_or_a_roster_refuses_every_message() -> None:
    site = Site(JOB, identity("a"), authority().trust, exchanges=2)
    messages: list[Callable[[], Any]] = [
        lambda: site.deal(protocol.Roster([], 3)),
        lambda: site.mask(protocol.Begin(b"", 0, None), question(), np.zeros(1, dtype=np.uint32), True),
        lambda: site.reveal_all(RevealAll(0, {})),
        lambda: site.propose(Propose(0, {})),
        lambda: site.reveal_set(RevealSet(0, {})),
        lambda: site.opened(protocol.Opened(0, [])),
    ]
    for message in messages:
        with pytest.raises(RefusedError):
            message()


# The votes: a model of all states, and the real site beside it

Members = frozenset[str]
ALL: Members = frozenset()
"""Stands for the vote for all members, at which a site reveals shares at once."""


@dataclass(frozen=True)
class Votes:
    """What one honest site has voted for, and for which sets it has revealed shares."""

    voted: frozenset[Members] = frozenset()
    revealed: frozenset[Members] = frozenset()


@dataclass(frozen=True)
class Rules:
    """The sites of a roster, and the rules of the honest ones."""

    honest: str
    colluding: str
    threshold: int
    one_vote: bool = True

    @property
    def members(self) -> Members:
        return frozenset(self.honest + self.colluding)

    def sets(self, site: str) -> list[Members]:
        """Return the sets for which a site may vote."""
        everybody = sorted(self.members)
        sizes = range(self.threshold, len(everybody) + 1)
        return [frozenset(chosen) for size in sizes for chosen in combinations(everybody, size) if site in chosen]

    def next(self, state: dict[str, Votes]) -> Iterator[tuple[str, Votes]]:
        """Return each step that the server and the colluding sites can make an honest site take."""
        for site, votes in state.items():
            if not votes.voted or not self.one_vote:
                yield site, Votes(votes.voted | {ALL}, votes.revealed | {ALL})
                for chosen in self.sets(site):
                    yield site, replace(votes, voted=votes.voted | {chosen})
            for chosen in votes.voted - votes.revealed:
                voters = sum(chosen in other.voted for other in state.values()) + len(chosen & set(self.colluding))
                if voters >= self.threshold:
                    yield site, replace(votes, revealed=votes.revealed | {chosen})

    def known(self, state: dict[str, Votes], site: str, kind: str) -> bool:
        """Return whether the server and the colluding sites know a seed of an honest site."""

        def reveals(chosen: Members) -> bool:
            return (chosen == ALL or site in chosen) == (kind == "self")

        return sum(any(map(reveals, each.revealed)) for each in state.values()) + len(self.colluding) >= self.threshold

    def opened(self, state: dict[str, Votes]) -> list[Members]:
        """Return the sets of honest sites whose sum, and not only a larger one, can be computed.

        Two honest sites must both be in the sum or not, unless a pair seed of one of them is known.
        """
        alone = {site for site in self.honest if self.known(state, site, "pair")}
        readable = {site for site in self.honest if self.known(state, site, "self")}
        sums = [frozenset({site}) for site in sorted(alone & readable)]
        rest = frozenset(self.honest) - alone
        return [*sums, rest] if rest and rest <= readable else sums


def violation(rules: Rules) -> tuple[str, set[Members]]:
    """Return how some sequence of messages opens two sets or too small a sum, and all sets that were opened.

    The text is empty if no sequence does. At least two honest sites must be in a sum.
    """
    start = (dict.fromkeys(rules.honest, Votes()), frozenset[Members]())
    fewest = max(2, rules.threshold - len(rules.colluding))
    pending, seen, reached = [start], {(tuple(start[0].values()), start[1])}, set[Members]()
    while pending:
        state, before = pending.pop()
        opened = before | set(rules.opened(state))
        reached |= opened
        if len(opened) > 1:
            return "two sets", reached
        if any(len(each) < fewest for each in opened):
            return "a small set", reached
        for site, votes in rules.next(state):
            new = state | {site: votes}
            key = tuple(new.values()), opened
            if key not in seen:
                seen.add(key)
                pending.append((new, opened))
    return "", reached


@pytest.mark.slow
@pytest.mark.parametrize(
    "rules",
    [
        Rules("abc", "d", 3),
        Rules("ab", "d", 3),  # a roster of four sites, of which an honest one has dealt no shares
        Rules("abc", "de", 4),
        Rules("abc", "def", 5),
        Rules("abcd", "e", 4),
    ],
)
def test_no_votes_open_two_sets_or_a_small_one(rules: Rules) -> None:
    """All sequences of votes, with as many colluding sites as the threshold tolerates, or fewer."""
    problem, reached = violation(rules)
    assert problem == ""
    assert frozenset(rules.honest) in reached
    assert len(reached) > 1 or len(rules.honest) < 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "rules",
    [
        Rules("abc", "d", 3, one_vote=False),
        Rules("abcd", "e", 3),  # 2t = n + m
        Rules("ab", "cd", 3),  # m = t − 1
    ],
)
def test_the_model_finds_a_violation_where_the_proof_does_not_hold(rules: Rules) -> None:
    assert violation(rules)[0] in ("two sets", "a small set")


@pytest.mark.slow
def test_a_site_votes_as_in_the_model() -> None:
    """All pairs of messages, each about every set. The first one reaches every state of a site."""
    world = World("abcd", wire=False).join()
    exchange = world.begin()
    masked = {name: world.answer(name, begin) for name, begin in exchange.outgoing.items()}
    present = {name: each.present for name, each in masked.items()}
    site = world.sites["a"]
    fresh = site._current
    assert fresh is not None
    sets = [frozenset(chosen) for size in range(1, 5) for chosen in combinations("abcd", size)]
    signed = {chosen: protocol.vote_statement(fresh.context, sorted(chosen)) for chosen in sets}
    votes = {chosen: {name: world.sites[name]._job_key.sign(signed[chosen]) for name in chosen} for chosen in sets}
    steps: list[tuple[str, Members]] = [("all", ALL), *product(("propose", "reveal"), sets)]

    def accepts(kind: str, chosen: Members) -> bool:
        try:
            if kind == "all":
                site.reveal_all(RevealAll(0, present))
            elif kind == "propose":
                site.propose(Propose(0, {name: present[name] for name in chosen}))
            else:
                site.reveal_set(RevealSet(0, votes[chosen]))
        except RefusedError:
            return False
        return True

    rules, accepted = Rules("abc", "d", 3), 0
    for first, second in product(steps, repeat=2):
        site._current = replace(fresh)
        state = Votes()
        for kind, chosen in (first, second):
            # In this test, all members of a set have signed it, if the site itself has voted for it.
            others = {name: Votes(frozenset({chosen}) if name in chosen else frozenset()) for name in "bc"}
            allowed = [each for name, each in rules.next({"a": state, **others}) if name == "a"]
            wanted = {
                "all": replace(state, voted=state.voted | {ALL}, revealed=state.revealed | {ALL}),
                "propose": replace(state, voted=state.voted | {chosen}),
                "reveal": replace(state, revealed=state.revealed | {chosen}),
            }[kind]
            again = kind == "reveal" and chosen in state.revealed
            assert accepts(kind, chosen) == ((wanted in allowed and wanted != state) or again), (first, second)
            if wanted in allowed:
                state, accepted = wanted, accepted + 1
    assert accepted > len(steps)


# Hostile sites

Change = Callable[[Any], Any]


def events_of(world: World) -> list[tuple[str, tuple[str, ...]]]:
    return [(event.kind, event.sites) for event in world.server.events]


def continues(world: World, exchange: Exchange, online: str) -> None:
    """Let the sites that are online finish an exchange."""
    while exchange.stage not in ("opened", "failed"):
        world.step(exchange, online)


WEAK = bytes(32)
JUNK: list[Any] = [None, 7, "text", b"bytes", {}, [], Vote(b""), Deal({}), Shares({}, {}), RevealAll(0, {})]
PACKAGES: dict[str, Change] = {
    "signature": lambda package: replace(package, signature=bytes(64)),
    "credential": lambda package: replace(package, credential=bytes(64)),
    "name": lambda package: replace(package, name="b"),
    "certificate": lambda package: replace(package, certificate=b"nonsense"),
    "job key": lambda package: replace(package, job_key=b"short"),
    "weak box key": lambda package: replace(package, box_key=WEAK),
    "weak key": lambda package: replace(package, keys=WEAK + package.keys[32:]),
    "too few keys": lambda package: replace(package, keys=package.keys[32:]),
    "no keys": lambda package: replace(package, keys=b"", self_commitments=b"", pair_commitments=b""),
    "other exchanges": lambda package: replace(
        package, **{name: getattr(package, name)[:32] for name in ("keys", "self_commitments", "pair_commitments")}
    ),
    "wrong type": lambda package: replace(package, keys=5),
}


RESIGNED = {"weak box key", "weak key", "too few keys", "no keys", "other exchanges"}
"""Faults that the site itself has signed."""


@pytest.mark.parametrize("what", [*PACKAGES, *range(len(JUNK))])
def test_a_site_with_a_faulty_package_is_left_out_of_the_roster(what: str | int) -> None:
    world = World("abcd")
    packages: dict[str, Any] = {name: site.package() for name, site in world.sites.items()}
    packages["a"] = JUNK[what] if isinstance(what, int) else PACKAGES[what](packages["a"])
    if what in RESIGNED:
        signature = world.sites["a"]._job_key.sign(packages["a"].signed(JOB))
        packages["a"] = replace(packages["a"], signature=signature)
    roster = world.server.enrol(packages)
    assert roster is not None
    assert roster.names == ["b", "c", "d"]
    assert events_of(world) == [("refused", ("a",))]
    world.server.deliver(world.deals(offline="a"))
    assert world.run() == world.sum_of("bcd")


def test_sites_refuse_a_faulty_package_that_the_server_accepts() -> None:
    for what in ("signature", "credential", "certificate", "weak key", "other exchanges", "job key"):
        world = World("abcd")
        roster = world.server.enrol({name: site.package() for name, site in world.sites.items()})
        assert roster is not None
        packages = [PACKAGES[what](package) if package.name == "a" else package for package in roster.packages]
        world.server.roster = replace(roster, packages=packages)
        assert world.deals(offline="a") == {}
        assert {error.check for _, error in world.refusals} <= {"signature", "certificate", "form"}


@pytest.mark.parametrize("kind", ["keys", "self_commitments", "pair_commitments", "box_key"])
def test_sites_with_a_key_in_common_are_left_out(kind: str) -> None:
    world = World("abcde")
    packages = {name: site.package() for name, site in world.sites.items()}
    copied = replace(packages["b"], **{kind: getattr(packages["a"], kind)})
    signature = world.sites["b"]._job_key.sign(copied.signed(JOB))
    packages["b"] = replace(copied, signature=signature)
    roster = world.server.enrol(packages)
    assert roster is not None
    assert roster.names == ["c", "d", "e"]
    assert events_of(world) == [("refused", ("a", "b"))]
    world.server.roster = replace(roster, packages=list(packages.values()), threshold=4)
    assert world.deals(offline="b") == {}
    assert {error.check for _, error in world.refusals} == {"repeated"}


@pytest.mark.parametrize(("sites", "threshold"), [(2, 2), (5, 3), (5, 6), (4, 2)])
def test_sites_refuse_a_threshold_that_tolerates_too_few_colluders(sites: int, threshold: int) -> None:
    world = World("abcde"[:sites])
    packages = [site.package() for site in world.sites.values()]
    world.server.roster = protocol.Roster(packages, threshold)
    assert world.deals() == {}
    assert {error.check for _, error in world.refusals} == {"threshold"}


def test_too_few_sites_give_an_event_and_no_roster() -> None:
    world = World("ab")
    assert world.server.enrol({name: site.package() for name, site in world.sites.items()}) is None
    assert events_of(world) == [("failed", ())]


@pytest.mark.parametrize("junk", [*JUNK, Deal({"b": b"", "c": b""}), Deal(dict.fromkeys("abcd", b""))])
def test_a_site_without_a_box_for_everybody_is_not_a_member(junk: Any) -> None:
    world = World("abcd")
    world.server.enrol({name: site.package() for name, site in world.sites.items()})
    world.server.deliver(world.deals() | {"a": junk})
    assert world.server.members == ["b", "c", "d"]
    assert events_of(world) == [("refused", ("a",))]
    assert world.run() == world.sum_of("bcd")


@pytest.mark.parametrize("box", [b"", b"nonsense", bytes(400)])
def test_boxes_that_do_not_open_give_an_event(box: bytes) -> None:
    world = World("abcd")
    world.server.enrol({name: site.package() for name, site in world.sites.items()})
    deals = world.deals()
    deals["a"] = Deal(dict.fromkeys("bcd", box))
    world.server.deliver(deals)
    exchange = world.begin()
    continues(world, exchange, "abcd")
    assert (exchange.stage, exchange.total) == ("failed", None)
    assert {(name, error.check) for name, error in world.refusals} == {(name, "box") for name in "bcd"}
    assert "the encrypted shares from 'a'" in str(world.refusals[0][1])


def masked_changes() -> dict[str, Change]:
    """Return changes that make a site's masked vector faulty."""
    return {
        "signature": lambda reply: replace(reply, present=replace(reply.present, signature=bytes(64))),
        "enough": lambda reply: replace(reply, present=replace(reply.present, enough=not reply.present.enough)),
        "length": lambda reply: replace(reply, vector=reply.vector[1:]),
        "shape": lambda reply: replace(reply, vector=reply.vector[None]),
        "dtype": lambda reply: replace(reply, vector=reply.vector.long()),
        "type": lambda reply: replace(reply, present=5),
        "vector": lambda reply: MaskedVector([1, 2], reply.present),  # type: ignore[arg-type]
    }


@pytest.mark.parametrize("what", [*masked_changes(), *range(len(JUNK))])
def test_a_site_with_a_faulty_vector_counts_as_lost(what: str | int) -> None:
    world = World("abcd").join()
    exchange = world.begin()
    change: Any = masked_changes()[what] if isinstance(what, str) else (lambda reply: JUNK[what])
    world.step(exchange, "abcd", a=change)
    continues(world, exchange, "bcd")
    assert plain(exchange.total) == world.sum_of("bcd")
    assert events_of(world) == ([] if what == 0 else [("refused", ("a",))])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "what"),
    others_long(
        product(["revealing", "voting", "opening"], range(1, len(JUNK))),
        [
            *(("revealing", what) for what in range(1, len(JUNK))),
            *product(["voting", "opening"], [1, 2]),
        ],
    ),
)
def test_any_other_message_instead_of_a_vote_or_shares_counts_as_lost(stage: str, what: int) -> None:
    world = World("abcdefg").join()  # two may be lost
    exchange = world.begin()
    world.step(exchange, "abcdefg" if stage == "revealing" else "abcdef")
    while exchange.stage not in ("opened", "failed"):
        change: dict[str, Any] = {"a": lambda reply: JUNK[what]} if exchange.stage == stage else {}
        world.step(exchange, "abcdef", **change)
    assert plain(exchange.total) == world.sum_of("abcdefg" if stage == "revealing" else "abcdef")
    assert ("refused", ("a",)) in events_of(world)


def test_a_vote_with_a_wrong_signature_does_not_count() -> None:
    world = World("abcd").join()
    exchange = world.begin()
    world.step(exchange, "abc")
    world.step(exchange, "abc", a=Vote(bytes(64)))
    assert (exchange.stage, exchange.total) == ("failed", None)
    assert events_of(world) == [("refused", ("a",)), ("failed", ())]


def flipped(share: bytes) -> bytes:
    """Return another possible share."""
    return b"\0" + hashlib.sha256(share).digest()[:16]


def lying(reply: Shares) -> Shares:
    """Return shares of which all are wrong."""
    return Shares(*({owner: flipped(share) for owner, share in each.items()} for each in (reply.selfs, reply.pairs)))


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["", "g"])
@pytest.mark.parametrize("liars", ["", "a", "g", "ab", "abc"])
def test_wrong_shares_are_found_out_while_enough_right_ones_are_left(lost: str, liars: str) -> None:
    world = World("abcdefg").join()
    online = "abcdefg".replace(lost, "") if lost else "abcdefg"
    exchange = world.begin()
    while exchange.stage not in ("opened", "failed"):
        opening = exchange.stage in ("revealing", "opening")
        world.step(exchange, online, **(dict.fromkeys(liars, lying) if opening else {}))
    present = [name for name in liars if name in online]
    if len(online) - len(present) >= 5:
        assert plain(exchange.total) == world.sum_of(online)
        assert {name for kind, names in events_of(world) for name in names} <= set(liars)
    else:
        assert (exchange.stage, exchange.total) == ("failed", None)
        assert [kind for kind, _ in events_of(world)] == ["wrong share", "failed"]


@pytest.mark.slow
def test_a_site_that_lies_is_named_and_asked_last() -> None:
    world = World("abcdefg").join()
    exchange = world.begin()
    world.step(exchange, "abcdefg")
    world.step(exchange, "abcdefg", a=lying)
    assert plain(exchange.total) == world.sum_of("abcdefg")
    assert events_of(world) == [("wrong share", ("a",))]  # once, and not for each of the seven seeds


@pytest.mark.slow
@pytest.mark.parametrize(("liars", "found"), [("a", True), ("abc", True), ("abcdefg", False)])
def test_wrong_shares_of_twenty_sites_take_few_tries(liars: str, found: bool) -> None:
    """With the sets in lexicographic order, a thousand tries would not be enough for one liar."""
    names = "abcdefghijklmnopqrst"
    world = World(names, exchanges=1, wire=False).join()
    exchange = world.begin()
    world.step(exchange, names)
    world.step(exchange, names, **dict.fromkeys(liars, lying))
    assert (plain(exchange.total) == world.sum_of(names)) == found
    assert exchange.stage == ("opened" if found else "failed")


FAULTS: dict[str, Change] = {
    "silence": lambda reply: None,
    "junk": lambda reply: RevealAll(0, {}),
    "lies": lambda reply: lying(reply) if isinstance(reply, Shares) else reply,
    "a false signature": lambda reply: replace(reply, signature=bytes(64)) if isinstance(reply, Vote) else reply,
    "a false statement": lambda reply: (
        replace(reply, present=replace(reply.present, signature=bytes(64)))
        if isinstance(reply, MaskedVector)
        else reply
    ),
}


@pytest.mark.long
@settings(max_examples=60)
@given(st.lists(st.dictionaries(st.sampled_from("abcdefg"), st.sampled_from([*FAULTS]), max_size=4), max_size=3))
def test_any_faults_give_the_right_sum_or_an_event(faults: list[dict[str, str]]) -> None:
    """Each message of the protocol may meet other faulty sites. Two of seven may be faulty altogether."""
    world = World("abcdefg", exchanges=1, wire=False).join()
    exchange = world.begin()
    for stage in range(4):
        if exchange.stage in ("opened", "failed"):
            break
        now = faults[stage] if stage < len(faults) else {}
        world.step(exchange, "abcdefg", **{name: FAULTS[fault] for name, fault in now.items()})
    kinds = [event.kind for event in world.server.events]
    if exchange.stage == "opened":
        assert plain(exchange.total) == world.sum_of(exchange.contributors)
        assert len(exchange.contributors) >= 5
        assert "failed" not in kinds
    else:
        assert exchange.total is None
        assert kinds[-1] == "failed"
    if len({name for now in faults for name in now}) <= 2:
        assert exchange.stage == "opened"


class FalseDealer(Site):
    """A site that deals wrong shares to some sites, or commits to other seeds than its own."""

    victims = ""
    commits = False

    def package(self) -> protocol.Package:
        made = super().package()
        if self.commits:
            made = replace(made, self_commitments=made.pair_commitments, pair_commitments=made.self_commitments)
            made = replace(made, signature=self._job_key.sign(made.signed(self.job)))
            assert self._own is not None
            self._own.package = made
        return made

    def _box(
        self, roster: bytes, other: protocol.Package, content: bytes, *, sends: bool
    ) -> tuple[bytes, bytes, bytes]:
        if sends and other.name in self.victims:
            content = b"".join(flipped(content[begin : begin + 17]) for begin in range(0, len(content), 17))
        return super()._box(roster, other, content, sends=sends)


def false_dealer(names: str, **settings: Any) -> World:
    world = World(names)
    world.sites["a"] = FalseDealer(JOB, identity("a"), authority().trust, exchanges=2)
    for name, value in settings.items():
        setattr(world.sites["a"], name, value)
    return world.join()


@pytest.mark.slow
@pytest.mark.parametrize("online", ["abcdefg", "bcdefg"])
@pytest.mark.parametrize("victims", ["b", "bc", "bcd", "bcdefg"])
def test_wrong_shares_in_boxes_give_the_sum_or_an_event(victims: str, online: str) -> None:
    world = false_dealer("abcdefg", victims=victims)
    exchange = world.begin()
    world.step(exchange, online)
    continues(world, exchange, online)
    right = [name for name in online if name not in victims]
    if len(right) >= 5:
        assert plain(exchange.total) == world.sum_of(online)
        assert {kind for kind, _ in events_of(world)} == {"wrong share"}
    else:
        assert (exchange.stage, exchange.total) == ("failed", None)
        assert events_of(world)[0] == ("wrong share", ("a",))


@pytest.mark.parametrize("online", ["abcd", "bcd"])
def test_commitments_to_other_seeds_give_an_event(online: str) -> None:
    world = false_dealer("abcd", commits=True)
    exchange = world.begin()
    world.step(exchange, online)
    continues(world, exchange, online)
    assert (exchange.stage, exchange.total) == ("failed", None)
    assert events_of(world) == [("wrong share", ("a",)), ("failed", ())]


def test_a_false_vector_spoils_the_sum_unless_it_is_out_of_range() -> None:
    """This is documented: the server sees no single vector, so it can check only the range of the sum."""
    ring = Ring(4, {"update": Part(1, 1.0)}, {"samples": 100})
    honest = [ring.encode({"update": [0.5]}, {"samples": 10}, rounding(0, 1, client, 0)) for client in range(3)]
    false = ring.encode({"update": [-1.0]}, {"samples": 0}, rounding(0, 1, 3, 0))
    assert ring.decode(add([*honest, false]), 4).parts["update"][0] == pytest.approx(0.5)
    false[1] = 2**31
    with pytest.raises(ReplyRefusedError, match="the sum of samples is out of range, so a site sent an invalid vector"):
        ring.decode(add([*honest, false]), 4)


def test_large_values_are_not_clipped_in_silence() -> None:
    """Another framework clipped each coordinate at 8."""
    ring = Ring(3, {"update": Part(2, 100.0)})
    total = ring.decode(ring.encode({"update": [90.0, 1.0]}, {}, rounding(0, 1, 0, 0)), 1)
    np.testing.assert_allclose(total.parts["update"], [90, 1], atol=1e-6)
    assert total.scaled == 0
    total = ring.decode(ring.encode({"update": [900.0, 10.0]}, {}, rounding(0, 1, 0, 0)), 1)
    np.testing.assert_allclose(total.parts["update"], [100, 10 / 9], atol=1e-6)
    assert total.scaled == 1


def test_sites_with_too_few_samples_do_not_count_as_parties() -> None:
    world = World("abcd").join()
    world.enough |= {"a": False, "b": False}
    exchange = world.begin()
    world.step(exchange, "abcd")
    assert (exchange.stage, exchange.total) == ("failed", None)
    assert events_of(world) == [("failed", ())]
    world.enough["a"] = True
    assert world.run(1) == world.sum_of("abcd")


def test_the_news_of_another_set_than_the_vote_is_refused() -> None:
    world = World("abcd").join()
    exchange = world.begin()
    while exchange.stage != "opened":
        world.step(exchange, "abc")
    assert world.answer("a", protocol.Opened(0, ["b", "c", "d"])) is None
    assert world.answer("a", protocol.Opened(0, ["a", "b", "c"])) is None
    assert world.committed == {"a"}
    assert [error.check for _, error in world.refusals] == ["opened"]


def test_the_secrets_of_past_exchanges_are_deleted() -> None:
    world = World("abc").join()
    for number in range(2):
        world.run(number)
        for site in world.sites.values():
            joined = site._joined
            assert joined is not None
            assert [bool(shares) for shares in joined.shares] == [each > number for each in range(2)]
            assert [bool(seeds) for seeds in joined.own.seeds] == [each > number for each in range(2)]


def test_events_are_sentences() -> None:
    assert Event("failed", (), "It failed.").reason.endswith(".")
    world = World("abcd").join()
    exchange = world.begin()
    world.step(exchange, "abcd", a=Vote(b""))
    world.step(exchange, "bc")
    reasons = [event.reason for event in world.server.events]
    assert reasons == [
        "a in secure sum 0: it has sent a Vote instead of a MaskedVector.",
        "Secure sum 0 has failed, because only 2 of 3 required sites have voted.",
    ]


def test_a_statement_of_a_site_that_has_sent_no_vector_is_refused() -> None:
    world = World("abcd").join()
    exchange = world.begin()
    world.step(exchange, "bcd")
    message = next(iter(exchange.outgoing.values()))
    assert isinstance(message, Propose)
    forged = message.present | {"a": In(True, message.present["b"].signature)}
    assert world.answer("b", RevealAll(0, forged)) is None
    assert [error.check for _, error in world.refusals] == ["in"]
