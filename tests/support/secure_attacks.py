"""Attacks of a server on secure sums, and sites without some of their checks.

Each attack tries to obtain the vector of one site, or a sum over too few sites. It uses what a server has: the messages
that it forwards and receives, its own keys, and the secrets of the colluding sites. It returns what it has obtained.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from secure_world import JOB, LENGTH, Authority, World, authority, identity, question, words

from fedstrata.federation.secure import protocol, shamir
from fedstrata.federation.secure.certificates import fingerprint
from fedstrata.federation.secure.primitives import agree, agreement_key, derive, public_key, seal, statement, unseal
from fedstrata.federation.secure.protocol import (
    Begin,
    Delivery,
    In,
    MaskedVector,
    Package,
    Propose,
    RevealAll,
    RevealSet,
    Roster,
    Seed,
    Shares,
)
from fedstrata.federation.secure.ring import Words
from fedstrata.federation.secure.server import Server
from fedstrata.federation.secure.site import Site

BOUND = {"exchange in context", "question in context", "members in context", "roster in boxes"}
"""What signatures and keys are bound to; without one of these, they do not depend on it."""


class Careless(Site):
    """A site without some of its checks (``off``), or without some of the bounds in ``BOUND``."""

    off: Collection[str] = ()

    def _require(self, check: str, holds: bool, problem: str) -> None:
        if check not in self.off:
            super()._require(check, holds, problem)

    def _context(self, members: list[str], number: int, question: bytes) -> bytes:
        return super()._context(
            [] if "members in context" in self.off else members,
            0 if "exchange in context" in self.off else number,
            b"" if "question in context" in self.off else question,
        )

    def _box(self, roster: bytes, *others: Any, **sends: bool) -> tuple[bytes, bytes, bytes]:
        return super()._box(b"" if "roster in boxes" in self.off else roster, *others, **sends)


class _All(set[str]):
    """All checks: a colluding site has none. Only the bounds of the honest sites are in the set itself."""

    def __contains__(self, check: object) -> bool:
        return check not in BOUND or super().__contains__(check)


class StoppedError(Exception):
    """A site refused a message that the attack needs."""


def world_of(names: str, colluders: str, off: Collection[str], **settings: Any) -> World:
    """Return sites of which the honest ones lack the checks ``off``, and the colluding ones lack all checks."""
    made = World(names, Careless, **settings)
    for name, site in made.sites.items():
        assert isinstance(site, Careless)
        site.off = _All(BOUND & set(off)) if name in colluders else off
    return made


@dataclass
class Attacker:
    """A server that keeps what it receives, together with the colluding sites.

    Args:
        world: The sites.
        colluders: The names of the colluding sites.
    """

    world: World
    colluders: str = ""
    shares: dict[tuple[int, Seed, str], dict[int, int]] = field(default_factory=dict)
    seeds: dict[tuple[int, Seed, str], bytes] = field(default_factory=dict)

    @property
    def roster(self) -> Roster:
        """The roster of the server."""
        assert self.world.server.roster is not None
        return self.world.server.roster

    def ask(self, name: str, message: Any, number: int = 0) -> Any:
        """Send a message to a site, and keep the shares in its reply.

        Raises:
            StoppedError: The site refuses the message.
        """
        reply = self.world.answer(name, message, number)
        if reply is None:
            raise StoppedError(name)
        if isinstance(reply, Shares):
            self.keep(name, message.exchange, "self", reply.selfs)
            self.keep(name, message.exchange, "pair", reply.pairs)
        return reply

    def keep(self, holder: str, number: int, kind: Seed, shares: Mapping[str, bytes]) -> None:
        """Keep the shares that a site has revealed."""
        place = self.roster.names.index(holder) + 1
        for owner, share in shares.items():
            self.shares.setdefault((number, kind, owner), {})[place] = int.from_bytes(share)

    def collude(self, number: int) -> None:
        """Take what the colluding sites know in an exchange."""
        for name in self.colluders:
            joined = self.world.sites[name]._joined
            assert joined is not None
            for (kind, owner), share in joined.shares[number].items():
                self.keep(name, number, kind, {owner: share})
            for kind, seed in joined.own.seeds[number].items():
                self.seeds[number, kind, name] = seed

    def seed(self, number: int, kind: Seed, owner: str) -> bytes | None:
        """Return a seed that a colluder has, or that enough shares give; None if there are too few shares."""
        if (number, kind, owner) in self.seeds:
            return self.seeds[number, kind, owner]
        shares = self.shares.get((number, kind, owner), {})
        if len(shares) < self.roster.threshold:
            return None
        chosen = list(shares)[: self.roster.threshold]
        return shamir.combine(chosen, [shares[place] for place in chosen]).to_bytes(17)[1:]

    def solve(self, number: int, kind: Seed, owner: str) -> None:
        """Keep a seed instead of all shares, because sites deal other shares of the same seeds in the next roster."""
        seed = self.seed(number, kind, owner)
        assert seed is not None
        self.seeds[number, kind, owner] = seed
        self.shares.clear()

    def unmasked(
        self,
        number: int,
        context: bytes,
        chosen: Iterable[str],
        members: Iterable[str],
        masked: Mapping[str, MaskedVector],
        packages: Mapping[str, Package] | None = None,
    ) -> Words | None:
        """Return the sum of the vectors of some sites; None if a seed that it takes is unknown.

        Args:
            number: The exchange.
            context: Its context.
            chosen: The sites whose vectors are summed.
            members: The sites with which these sites have masked their vectors.
            masked: The masked vectors.
            packages: The packages of the sites. Default: those of the roster.
        """
        packages = packages or {package.name: package for package in self.roster.packages}
        total = np.zeros(LENGTH, dtype=np.uint32)
        for name in chosen:
            if (own := self.seed(number, "self", name)) is None:
                return None
            total += words(masked[name]) - protocol.self_mask(context, name, own, LENGTH)
            for other in set(members) - set(chosen) - {name}:
                if (seed := self.seed(number, "pair", name)) is not None:
                    key = protocol.exchange_key(JOB, name, number, seed)
                    total -= protocol.pair_mask(context, key, name, packages[other], number, LENGTH)
                elif (seed := self.seed(number, "pair", other)) is not None:
                    key = protocol.exchange_key(JOB, other, number, seed)
                    total += protocol.pair_mask(context, key, other, packages[name], number, LENGTH)
                else:
                    return None
        return total

    def context(self, name: str) -> bytes:
        """Return the context of a site's last exchange, which a server can compute too."""
        current = self.world.sites[name]._current
        assert current is not None
        return current.context

    def join(self, packages: Mapping[str, Any] | None = None) -> None:
        """Form the roster of a new server, and let all sites deal shares.

        Args:
            packages: The sites' packages. Default: new ones.

        Raises:
            StoppedError: A site refuses the roster.
        """
        server = self.world.server
        server.enrol(packages or {name: site.package() for name, site in self.world.sites.items()})
        self.deal()

    def deal(self) -> None:
        """Let all sites deal shares."""
        deals = self.world.deals()
        if deals.keys() != self.world.sites.keys():
            raise StoppedError
        self.world.server.deliver(deals)

    def new_server(self) -> None:
        """Begin with a server without a roster. What the attacker knows stays."""
        self.world.server = Server(JOB, authority().trust, exchanges=2)

    def mask_all(self, number: int = 0, asks: int | None = None, names: Sequence[str] = ()) -> dict[str, MaskedVector]:
        """Begin an exchange about a question, by default that of the same number, and return the masked vectors."""
        exchange = self.world.server.begin(question(number), LENGTH)
        assert exchange is not None
        sent = {name: begin for name, begin in exchange.outgoing.items() if name in (names or self.world.sites)}
        masked = {name: self.ask(name, begin, number if asks is None else asks) for name, begin in sent.items()}
        for name in masked:
            self.world.server.delivered(name)
        self.collude(exchange.number)
        return masked

    def vote(self, number: int, chosen: str, present: Mapping[str, In], voters: str = "") -> dict[str, bytes]:
        """Let the sites of a set vote for it."""
        message = Propose(number, {name: present[name] for name in chosen})
        return {name: self.ask(name, message).signature for name in voters or chosen}

    def open_set(self, number: int, chosen: str, present: Mapping[str, In], voters: str = "") -> None:
        """Let the sites of a set vote for it, and reveal their shares."""
        votes = self.vote(number, chosen, present, voters)
        for name in votes:
            self.ask(name, RevealSet(number, votes))

    def open_all(self, number: int, present: Mapping[str, In], names: Iterable[str] = ()) -> None:
        """Let sites reveal their shares for the sum over all members."""
        for name in names or present:
            self.ask(name, RevealAll(number, dict(present)))


def statements(masked: Mapping[str, MaskedVector]) -> dict[str, In]:
    """Return the signed statements of the sites that sent masked vectors."""
    return {name: each.present for name, each in masked.items()}


Off = Collection[str]
Loot = tuple[Words | None, Words]
"""The vector that an attack has obtained (None for no vector), and the vector that it is after."""


@dataclass(frozen=True)
class Attack:
    """An attack.

    Args:
        run: A function of the checks that honest sites lack. It returns whether the attack obtains what it wants, and
            the sites after the attack.
        checks: The checks that protect against it. Each of them is enough.
    """

    run: Callable[[Off], tuple[bool, World]]
    checks: tuple[str, ...]


ATTACKS: dict[str, Attack] = {}


def attack(
    *checks: str, names: str = "abcd", colluders: str = "d", **settings: Any
) -> Callable[[Callable[[Attacker], Loot]], None]:
    """Declare an attack on sites, some of which collude."""

    def declare(function: Callable[[Attacker], Loot]) -> None:
        def run(off: Off) -> tuple[bool, World]:
            world = world_of(names, colluders, off, **settings)
            try:
                got, wanted = function(Attacker(world, colluders))
            except StoppedError:
                return False, world
            return got is not None and bool((got == wanted).all()), world

        ATTACKS[function.__name__] = Attack(run, checks)

    return declare


def first_exchange(attacker: Attacker) -> dict[str, MaskedVector]:
    """Let the sites join a roster, and answer the first question."""
    attacker.join()
    return attacker.mask_all()


def victim(attacker: Attacker, masked: Mapping[str, MaskedVector], context: bytes, number: int = 0) -> Words | None:
    """Return the vector of the site "a", if both its seeds are known."""
    return attacker.unmasked(number, context, "a", attacker.roster.names, masked)


# One vote per exchange: both secrets of a site are opened if sites vote twice.


@attack("vote")
def a_set_without_a_site_and_then_all(attacker: Attacker) -> Loot:
    masked = first_exchange(attacker)
    context, present = attacker.context("a"), statements(masked)
    attacker.open_set(0, "bcd", present)
    attacker.open_all(0, present, "bcd")
    return victim(attacker, masked, context), attacker.world.vectors["a"]


@attack("vote")
def all_and_then_a_set_without_a_site(attacker: Attacker) -> Loot:
    masked = first_exchange(attacker)
    context, present = attacker.context("a"), statements(masked)
    attacker.open_all(0, present, "bcd")
    attacker.open_set(0, "bcd", present)
    return victim(attacker, masked, context), attacker.world.vectors["a"]


@attack("vote")
def two_sets(attacker: Attacker) -> Loot:
    masked = first_exchange(attacker)
    context, present = attacker.context("a"), statements(masked)
    attacker.open_set(0, "bcd", present)
    attacker.open_set(0, "abcd", present)
    return victim(attacker, masked, context), attacker.world.vectors["a"]


@attack("threshold")
def a_threshold_that_two_disjoint_sets_of_voters_reach(attacker: Attacker) -> Loot:
    world = attacker.world
    roster = world.server.enrol({name: site.package() for name, site in world.sites.items()})
    assert roster is not None
    world.server.roster = replace(roster, threshold=2)
    world.server._hash = world.server.roster.hash(JOB)
    attacker.deal()
    masked = attacker.mask_all()
    context, present = attacker.context("a"), statements(masked)
    attacker.open_set(0, "bcd", present, voters="bd")
    attacker.open_set(0, "acd", present, voters="cd")
    return victim(attacker, masked, context), world.vectors["a"]


@attack("threshold", names="abcde", colluders="cde")
def the_usual_threshold_of_five_sites_although_three_may_collude(attacker: Attacker) -> Loot:
    """With t = 4 and three colluding sites, each of the two honest sites completes the votes for another set."""
    for site in attacker.world.sites.values():
        site.colluding = 3
    masked = first_exchange(attacker)
    context, present = attacker.context("a"), statements(masked)
    attacker.open_set(0, "bcde", present)
    attacker.open_set(0, "acde", present)
    return victim(attacker, masked, context), attacker.world.vectors["a"]


# Sets: which sites they have, and how many sites have signed them.


@attack("subset", "size", "votes", "parties")
def a_set_of_one_site(attacker: Attacker) -> Loot:
    masked = first_exchange(attacker)
    context, present = attacker.context("a"), statements(masked)
    message = Propose(0, {"a": present["a"]})
    votes = {name: attacker.ask(name, message).signature for name in "abc"}
    for name in votes:
        attacker.ask(name, RevealSet(0, votes))
    return victim(attacker, masked, context), attacker.world.vectors["a"]


LACKING = {"a": "cde", "b": "fgc", "c": "def", "d": "efg", "e": "fgc", "f": "gcd", "g": "cde"}
"""Sets that 7 of 10 sites vote for: each set lacks three sites. Each of c, …, g is lacking in at least four sets."""


def sum_of_two(attacker: Attacker, masked: Mapping[str, MaskedVector], context: bytes, number: int) -> Words | None:
    """Return the sum of the vectors of "a" and "b", if the seeds that it takes are known."""
    return attacker.unmasked(number, context, "ab", attacker.roster.names, masked)


def set_of(voter: str) -> str:
    """Return the set that one of seven sites votes for."""
    return "".join(name for name in "abcdefghij" if name not in LACKING[voter])


@attack("votes", names="abcdefghij", colluders="hij")
def a_different_set_for_each_site(attacker: Attacker) -> Loot:
    masked = first_exchange(attacker)
    context, present = attacker.context("a"), statements(masked)
    for name in LACKING:
        attacker.open_set(0, set_of(name), present, voters=name)
    vectors = attacker.world.vectors
    return sum_of_two(attacker, masked, context, 0), vectors["a"] + vectors["b"]


@attack("exchange in context", "question in context", names="abcdefghij", colluders="hij", exchanges=8, wire=False)
def votes_of_earlier_exchanges(attacker: Attacker) -> Loot:
    attacker.join()
    votes = {}
    for number, name in enumerate(LACKING):
        present = statements(attacker.mask_all(number))
        votes[name] = attacker.vote(number, set_of(name), present)
    masked = attacker.mask_all(7)
    context, present = attacker.context("a"), statements(masked)
    for name in LACKING:
        own = attacker.vote(7, set_of(name), present, voters=name)
        attacker.ask(name, RevealSet(7, votes[name] | own))
    vectors = attacker.world.vectors
    return sum_of_two(attacker, masked, context, 7), vectors["a"] + vectors["b"]


@attack("members", "members in context")
def different_members_for_two_sites(attacker: Attacker) -> Loot:
    attacker.join()
    world = attacker.world
    exchange = world.server.begin(question(), LENGTH)
    assert exchange is not None
    begins: dict[str, Any] = dict(exchange.outgoing)
    boxes = begins["a"].delivery.boxes
    begins["a"] = replace(begins["a"], delivery=Delivery(["a", "d"], {"d": boxes["d"]}))
    masked = {name: attacker.ask(name, begin) for name, begin in begins.items()}
    attacker.collude(0)
    context = attacker.context("a")
    attacker.open_all(0, statements(masked), "bcd")
    return attacker.unmasked(0, context, "a", "ad", masked), world.vectors["a"]


# Inputs: the same question again, other questions for others, and vectors of zeros.


@attack("question")
def two_exchanges_for_one_question(attacker: Attacker) -> Loot:
    first = first_exchange(attacker)
    attacker.open_all(0, statements(first))
    whole = attacker.unmasked(0, attacker.context("b"), "abcd", "abcd", first)
    second = attacker.mask_all(1, asks=0, names="bcd")
    attacker.open_set(1, "bcd", statements(second))
    part = attacker.unmasked(1, attacker.context("b"), "bcd", "abcd", second)
    assert whole is not None
    assert part is not None
    return whole - part, attacker.world.vectors["a"]


@attack("question")
def a_new_roster_after_a_failure(attacker: Attacker) -> Loot:
    world = attacker.world
    first = first_exchange(attacker)
    attacker.open_all(0, statements(first))
    whole = attacker.unmasked(0, attacker.context("b"), "abcd", "abcd", first)
    again = Attacker(world, attacker.colluders)
    again.new_server()
    again.join()
    second = again.mask_all(names="bcd")
    again.open_set(0, "bcd", statements(second))
    part = again.unmasked(0, again.context("b"), "bcd", "abcd", second)
    assert whole is not None
    assert part is not None
    return whole - part, world.vectors["a"]


@attack("question")
def a_new_roster_after_all_sites_have_restarted(attacker: Attacker) -> Loot:
    world = attacker.world
    first = first_exchange(attacker)
    attacker.open_all(0, statements(first))
    whole = attacker.unmasked(0, attacker.context("b"), "abcd", "abcd", first)
    for name, site in world.sites.items():
        again = Careless(JOB, site.identity, site.trust, exchanges=2, answered=site.answered)
        again.off = site.off  # type: ignore[attr-defined]
        world.sites[name] = again
    later = Attacker(world, attacker.colluders)
    later.new_server()
    later.join()
    second = later.mask_all(names="bcd")
    later.open_set(0, "bcd", statements(second))
    part = later.unmasked(0, later.context("b"), "bcd", "abcd", second)
    assert whole is not None
    assert part is not None
    return whole - part, world.vectors["a"]


@attack("continued")
def a_second_sum_without_a_site_of_the_first_sum(attacker: Attacker) -> Loot:
    first = first_exchange(attacker)
    attacker.open_all(0, statements(first))
    whole = attacker.unmasked(0, attacker.context("b"), "abcd", "abcd", first)
    attacker.world.continues.add(1)
    exchange = attacker.world.begin(1, only="abcd")
    second = {name: attacker.ask(name, exchange.outgoing[name], 1) for name in "bcd"}
    attacker.collude(1)
    attacker.open_set(1, "bcd", statements(second))
    part = attacker.unmasked(1, attacker.context("b"), "bcd", "abcd", second)
    assert whole is not None
    assert part is not None
    return whole - part, attacker.world.vectors["a"]


@attack("question in context")
def another_model_for_one_site(attacker: Attacker) -> Loot:
    """The other sites get a model whose update is zero (Pasquini et al. 2022)."""
    attacker.join()
    world = attacker.world
    for name in "bcd":
        world.vectors[name] = np.zeros(LENGTH, dtype=np.uint32)
    exchange = world.server.begin(question(), LENGTH)
    assert exchange is not None
    begins = exchange.outgoing
    masked = {name: attacker.ask(name, begin, 0 if name == "a" else 1) for name, begin in begins.items()}
    attacker.open_all(0, statements(masked))
    return attacker.unmasked(0, attacker.context("a"), "abcd", "abcd", masked), world.vectors["a"]


@attack("parties")
def vectors_of_zeros_except_one(attacker: Attacker) -> Loot:
    world = attacker.world
    for name in "bcd":
        world.vectors[name] = np.zeros(LENGTH, dtype=np.uint32)
    world.enough |= {"b": False, "c": False}
    masked = first_exchange(attacker)
    attacker.open_all(0, statements(masked))
    return attacker.unmasked(0, attacker.context("a"), "abcd", "abcd", masked), world.vectors["a"]


@attack("exchange in context", "question in context")
def statements_of_an_earlier_exchange(attacker: Attacker) -> Loot:
    world = attacker.world
    before = statements(first_exchange(attacker))
    for name in "bcd":
        world.vectors[name] = np.zeros(LENGTH, dtype=np.uint32)
    world.enough |= {"b": False, "c": False}
    masked = attacker.mask_all(1)
    present = statements(masked) | {name: before[name] for name in "bc"}
    attacker.open_all(1, present)
    return attacker.unmasked(1, attacker.context("a"), "abcd", "abcd", masked), world.vectors["a"]


# Seeds: used in two exchanges, they open what was masked before.


@attack("exchange")
def an_exchange_again(attacker: Attacker) -> Loot:
    masked = first_exchange(attacker)
    context = attacker.context("a")
    attacker.open_set(0, "bcd", statements(masked))
    again = {name: attacker.ask(name, Begin(attacker.roster.hash(JOB), 0, None), 1) for name in "abcd"}
    attacker.open_all(0, statements(again))
    return victim(attacker, masked, context), attacker.world.vectors["a"]


@attack("package")
def packages_again(attacker: Attacker) -> Loot:
    world = attacker.world
    masked = first_exchange(attacker)
    context, roster = attacker.context("a"), attacker.roster
    attacker.open_set(0, "bcd", statements(masked))
    attacker.solve(0, "pair", "a")
    attacker.new_server()
    attacker.join({package.name: package for package in roster.packages})
    again = attacker.mask_all(0, asks=1)
    attacker.open_all(0, statements(again))
    return victim(attacker, masked, context), world.vectors["a"]


@attack("roster in boxes", "in")
def packages_and_boxes_of_a_site_that_has_left(attacker: Attacker) -> Loot:
    world = attacker.world
    masked = first_exchange(attacker)
    context, old = attacker.context("a"), {package.name: package for package in attacker.roster.packages}
    boxes = world.server._boxes["a"]
    attacker.open_set(0, "bcd", statements(masked))
    attacker.solve(0, "pair", "a")
    attacker.new_server()
    world.server.enrol({name: old["a"] if name == "a" else world.sites[name].package() for name in "abcd"})
    world.server.deliver(world.deals(offline="a") | {"a": boxes})
    again = attacker.mask_all(1, names="bcd")
    attacker.open_all(0, statements(again) | {"a": In(True, bytes(64))}, "bcd")
    return attacker.unmasked(0, context, "a", "abcd", masked, old), world.vectors["a"]


# Keys: of others, or of sites that do not exist.


@attack("signature")
def keys_of_the_server_instead_of_those_of_the_other_sites(attacker: Attacker) -> Loot:
    world = attacker.world
    roster = world.server.enrol({name: site.package() for name, site in world.sites.items()})
    assert roster is not None
    own = roster.packages[0]
    keys = {package.name: agreement_key() for package in roster.packages[1:]}
    packages = [own, *(replace(package, box_key=public_key(keys[package.name])) for package in roster.packages[1:])]
    false = Roster(packages, roster.threshold)
    world.server.roster = false
    deals = world.deals(offline="bcd")
    if not deals:
        raise StoppedError
    boxes = deals["a"].boxes
    roster_hash, opened, sealed = false.hash(JOB), {}, {}
    for name, private in keys.items():
        secret = agree(private, own.box_key)
        public = statement("box", roster_hash, "a", name)
        opened[name] = unseal(derive(secret, roster_hash, public), boxes[name], public)
        public = statement("box", roster_hash, name, "a")
        content = b"".join(b"\0" + secrets.token_bytes(16) for _ in range(4))
        sealed[name] = seal(derive(secret, roster_hash, public), content, public)
    for name, content in opened.items():
        assert content is not None
        attacker.keep(name, 0, "self", {"a": content[:17]})
        attacker.keep(name, 0, "pair", {"a": content[17:34]})
    masked = {"a": attacker.ask("a", Begin(roster_hash, 0, Delivery([*"abcd"], sealed)))}
    packages_of = {package.name: package for package in packages}
    return attacker.unmasked(0, attacker.context("a"), "a", "abcd", masked, packages_of), world.vectors["a"]


class TrustsAll:
    """A server that accepts every certificate."""

    def defect(self, name: str, certificate: bytes, signature: bytes, signed: bytes) -> str:
        """Accept a signature."""
        return ""


def with_invented_sites(attacker: Attacker) -> Loot:
    """Subtract the vectors of all other sites, which belong to the server, from the sum."""
    world = attacker.world
    masked = first_exchange(attacker)
    attacker.open_all(0, statements(masked))
    total = attacker.unmasked(0, attacker.context("a"), "ayz", "ayz", masked)
    assert total is not None
    return total - world.vectors["y"] - world.vectors["z"], world.vectors["a"]


@attack("peers", names="ayz", colluders="yz")
def sites_that_the_owner_of_the_root_key_has_invented(attacker: Attacker) -> Loot:
    attacker.world.sites["a"].peers = {fingerprint(identity(name).certificate) for name in "bc"}
    return with_invented_sites(attacker)


@attack("certificate", names="ayz", colluders="yz")
def sites_with_certificates_of_another_root(attacker: Attacker) -> Loot:
    world, other = attacker.world, Authority()
    for name in "yz":
        site = Careless(JOB, other.identity(name), authority().trust, exchanges=2)
        site.off = world.sites[name].off  # type: ignore[attr-defined]
        world.sites[name] = site

    world.server.trust = TrustsAll()
    return with_invented_sites(attacker)
