"""The server's side of secure sums: it forms a roster, collects masked vectors, and opens (unmasks) their sum."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

import numpy as np
import torch

from fedstrata.base import records
from fedstrata.base.errors import WireError
from fedstrata.base.records import Message
from fedstrata.federation.secure import protocol, shamir
from fedstrata.federation.secure.certificates import Trust
from fedstrata.federation.secure.primitives import SEED_BYTES, public_key, valid
from fedstrata.federation.secure.protocol import (
    Begin,
    Confirm,
    Deal,
    Delivery,
    In,
    MaskedVector,
    Opened,
    Package,
    Propose,
    RevealAll,
    RevealSet,
    Roster,
    Seed,
    Shares,
    Vote,
)
from fedstrata.federation.secure.ring import Words

MOST_TRIES = 1000
"""The maximum number of attempts to reconstruct a seed from different sets of t shares, if some shares are wrong."""

Stage = Literal["masking", "revealing", "voting", "opening", "opened", "failed"]


@dataclass(frozen=True)
class Event:
    """A problem in a secure sum.

    Args:
        kind: The kind of the problem. ``refused``: the server does not use a site's message. ``wrong share``: shares of
            a seed are inconsistent, so the seed's owner or a site that sent a share is faulty. ``failed``: the sum or
            the roster has failed.
        sites: The names of the sites.
        reason: The reason as a sentence.
    """

    kind: Literal["refused", "wrong share", "failed"]
    sites: tuple[str, ...]
    reason: str


class Server:
    """The server's side of secure sums with one roster (group of sites).

    Pass to each method only messages that arrived in time. Messages may contain any values: a faulty message counts as
    missing, and ``events`` contains the reason.

    Args:
        job: The job's hash.
        trust: The certificates that the server accepts.
        parties: Minimum number of sites with enough samples in a sum. Sites do not unmask sums over fewer sites.
        colluding: See ``Site``.
        confirm: See ``Site``.
        exchanges: Number of exchanges for which each package must have keys.
    """

    def __init__(
        self,
        job: bytes,
        trust: Trust,
        *,
        parties: int = protocol.FEWEST,
        colluding: int = 0,
        confirm: Confirm = "needed",
        exchanges: int = protocol.MOST_EXCHANGES,
    ) -> None:
        self.job, self.trust, self.parties, self.confirm, self.exchanges = job, trust, parties, confirm, exchanges
        self.colluding = colluding
        self.events: list[Event] = []
        self.roster: Roster | None = None
        self.members: list[str] = []
        """The sites whose vectors are added up; empty before ``deliver`` is called."""
        self._hash = b""
        self._boxes: dict[str, Deal] = {}
        self._delivered: set[str] = set()
        self._used = 0

    def enrol(self, packages: Mapping[str, Any]) -> Roster | None:
        """Return a roster of all sites with a valid package; None if too few packages are valid.

        Args:
            packages: The ``Package`` of each site.
        """
        usable: list[Package] = []
        for name, package in sorted(packages.items()):
            if defect := self._defect(name, package):
                self._note("refused", [name], f"{name}: {defect}.")
            else:
                usable.append(package)
        if twice := protocol.repeated(usable):
            self._note("refused", sorted(twice), "These sites use the same key, so at least one site has copied a key.")
        usable = [package for package in usable if package.name not in twice][: protocol.MOST_SITES]
        if len(usable) < max(protocol.FEWEST, self.parties):
            self._note("failed", [], f"Only {len(usable)} sites have sent valid keys, but a sum needs {self._fewest}.")
            return None
        self.roster = Roster(usable, protocol.default_threshold(len(usable), self.colluding))
        self._hash = self.roster.hash(self.job)
        return self.roster

    def deliver(self, deals: Mapping[str, Any]) -> bool:
        """Determine the members of the roster's sums: the sites that have sent shares to all other sites.

        Args:
            deals: The ``Deal`` of each site.

        Returns:
            Whether there are enough members for a sum.
        """
        assert self.roster is not None
        names = set(self.roster.names)
        for name, deal in sorted(deals.items()):
            defect = _type_defect(deal, Deal)
            if not defect and deal.boxes.keys() != names - {name}:
                defect = "it has not sent encrypted shares for every other site"
            if defect:
                self._note("refused", [name], f"{name}: {defect}.")
            else:
                self._boxes[name] = deal
        self.members = sorted(self._boxes)
        if len(self.members) < max(self.roster.threshold, self._fewest):
            self._note("failed", [], f"Only {len(self.members)} sites have sent shares, but a sum needs {self._least}.")
            return False
        return True

    def begin(self, question: bytes, length: int, only: Sequence[str] | None = None) -> Exchange | None:
        """Begin the next exchange and return it; None if the roster has no keys left.

        Args:
            question: The hash of the request, including the model that the sites obtain by decoding.
            length: Number of elements of each site's vector.
            only: The contributors of the previous sum, if this sum must have the same contributors.
        """
        assert self.roster is not None
        if self._used == self.exchanges:
            return None
        if only is not None:
            only = sorted(only)
            question = protocol.continued(question, only)
        exchange = Exchange(self, self.roster, self._hash, self._used, question, length, only)
        for name in self.members:
            delivery = None
            if name not in self._delivered:
                boxes = {other: self._boxes[other].boxes[name] for other in self.members if other != name}
                delivery = Delivery(self.members, boxes)
            exchange.outgoing[name] = Begin(self._hash, self._used, delivery)
        self._used += 1
        return exchange

    def delivered(self, name: str) -> None:
        """Record that a site has received the encrypted shares of the other sites."""
        self._delivered.add(name)

    @property
    def left(self) -> int:
        """Number of exchanges for which the roster still has unused keys."""
        return self.exchanges - self._used

    @property
    def _fewest(self) -> int:
        return max(protocol.FEWEST, self.parties)

    @property
    def _least(self) -> int:
        assert self.roster is not None
        return max(self._fewest, self.roster.threshold)

    def _note(self, kind: Literal["refused", "wrong share", "failed"], sites: Sequence[str], reason: str) -> None:
        self.events.append(Event(kind, tuple(sites), reason))

    def _defect(self, name: str, sent: Any) -> str:
        if defect := _type_defect(sent, Package):
            return defect
        package: Package = sent
        if package.name != name:
            return "its package has the name of another site"
        if defect := package.form_defect():
            return defect
        if package.exchanges != self.exchanges:
            return f"its package has keys for {package.exchanges} exchanges instead of {self.exchanges}"
        signed = protocol.job_key_statement(self.job, name, package.job_key)
        return package.signature_defect(self.job) or self.trust.defect(
            name, package.certificate, package.credential, signed
        )


class Exchange:
    """One secure sum, from the request to the unmasked sum.

    Send the messages in ``outgoing``, and pass the replies to ``receive``, until ``stage`` is "opened" or "failed".
    Afterwards, send the remaining messages in ``outgoing``, to which sites do not reply.

    Args:
        server: The server, which collects the events.
        roster: The roster.
        roster_hash: The roster's hash.
        number: The index of the exchange in the roster.
        question: The hash of the request.
        length: Number of elements of each site's vector.
        only: The sites that must all contribute; None if any t sites are enough.
    """

    def __init__(
        self,
        server: Server,
        roster: Roster,
        roster_hash: bytes,
        number: int,
        question: bytes,
        length: int,
        only: Sequence[str] | None = None,
    ) -> None:
        self.number, self.length, self._only = number, length, only
        self.stage: Stage = "masking"
        self.outgoing: dict[str, Message] = {}
        """The next message to each site."""
        self.total: Words | None = None
        """The unmasked sum of the vectors; None until the server has unmasked it."""
        self.contributors: list[str] = []
        """The sites whose vectors are in the sum: the set U."""
        self._server, self._roster = server, roster
        self._members = server.members
        self._context = protocol.context(server.job, roster_hash, self._members, number, question)
        self._place = {name: place for place, name in enumerate(roster.names, start=1)}
        self._package = {package.name: package for package in roster.packages}
        self._present: dict[str, In] = {}
        self._masked: dict[str, Words] = {}
        self._suspects: set[str] = set()

    def receive(self, replies: Mapping[str, Any]) -> None:
        """Continue the exchange with the replies to the messages in ``outgoing``.

        Args:
            replies: The reply of each site. Sites that did not answer, or refused to answer, are missing.
        """
        asked = {name: replies[name] for name in self.outgoing if name in replies}
        self.outgoing = {}
        if self.stage == "masking":
            self._collect_vectors(asked)
        elif self.stage == "revealing":
            self._open(asked)
        elif self.stage == "voting":
            self._collect_votes(asked)
        elif self.stage == "opening":
            self._open(asked)
        else:
            raise ValueError(f"replies are not expected in the stage {self.stage!r} of the exchange")

    def _collect_vectors(self, replies: Mapping[str, Any]) -> None:
        for name, reply in replies.items():
            if defect := self._vector_defect(name, reply):
                self._refuse(name, defect)
            else:
                self._server.delivered(name)
                self._present[name] = reply.present
                self._masked[name] = reply.vector.contiguous().numpy().view(np.uint32)
        self.contributors = sorted(self._masked)
        enough = sum(each.enough for each in self._present.values())
        if len(self.contributors) < self._roster.threshold:
            self._fail(
                f"only {len(self.contributors)} of {self._roster.threshold} required sites have sent their vectors"
            )
        elif enough < self._server.parties:
            self._fail(f"fewer than {self._server.parties} sites have enough samples")
        elif self._only not in (None, self.contributors):
            self._fail("a contributor to the previous sum is missing")
        elif self.contributors == self._members and self._server.confirm == "needed":
            self._ask("revealing", self.contributors, RevealAll(self.number, self._present))
        else:
            self._ask("voting", self.contributors, Propose(self.number, self._present))

    def _vector_defect(self, name: str, reply: Any) -> str:
        if defect := _type_defect(reply, MaskedVector):
            return defect
        vector = reply.vector
        form = (vector.shape, vector.dtype, vector.device.type, vector.layout)
        if form != ((self.length,), torch.int32, "cpu", torch.strided):
            shape = f"{tuple(vector.shape)} {vector.dtype}"
            return f"its vector is {shape}, but must be ({self.length},) torch.int32"
        signed = protocol.present_statement(self._context, name, reply.present.enough)
        if not valid(self._package[name].job_key, reply.present.signature, signed):
            return "the signature of its vector is wrong"
        return ""

    def _collect_votes(self, replies: Mapping[str, Any]) -> None:
        signed = protocol.vote_statement(self._context, self.contributors)
        votes = {}
        for name, reply in replies.items():
            if defect := _type_defect(reply, Vote):
                self._refuse(name, defect)
            elif not valid(self._package[name].job_key, reply.signature, signed):
                self._refuse(name, "the signature of its vote is wrong")
            else:
                votes[name] = reply.signature
        if len(votes) < self._roster.threshold:
            self._fail(f"only {len(votes)} of {self._roster.threshold} required sites have voted")
        else:
            self._ask("opening", sorted(votes), RevealSet(self.number, votes))

    def _open(self, replies: Mapping[str, Any]) -> None:
        lost = sorted(set(self._members) - set(self.contributors))
        shares: dict[str, Shares] = {}
        for name, reply in replies.items():
            if defect := _type_defect(reply, Shares):
                self._refuse(name, defect)
            elif not _usable(reply, self.contributors, lost):
                self._refuse(name, "it has sent other shares than the requested shares")
            else:
                shares[name] = reply
        if len(shares) < self._roster.threshold:
            self._fail(f"only {len(shares)} of {self._roster.threshold} required sites have sent shares")
            return
        total = np.zeros(self.length, dtype=np.uint32)
        for name in self.contributors:
            seed = self._seed("self", name, {holder: each.selfs[name] for holder, each in shares.items()})
            if seed is None:
                return
            total += self._masked[name] - protocol.self_mask(self._context, name, seed, self.length)
        for name in lost:
            seed = self._seed("pair", name, {holder: each.pairs[name] for holder, each in shares.items()})
            if seed is None:
                return
            key = protocol.exchange_key(self._server.job, name, self.number, seed)
            for other in self.contributors:
                # Add the mask that the lost site would have added. The site ``other`` has already added the negative of
                # this mask.
                total += protocol.pair_mask(self._context, key, name, self._package[other], self.number, self.length)
        self.total, self.stage = total, "opened"
        self.outgoing = dict.fromkeys(self._members, Opened(self.number, self.contributors))

    def _seed(self, kind: Seed, owner: str, shares: Mapping[str, bytes]) -> bytes | None:
        """Reconstruct and return a site's seed from shares.

        If this is impossible, return None, and mark the exchange as failed.
        """
        package, threshold = self._package[owner], self._roster.threshold
        numbers = {holder: int.from_bytes(share) for holder, share in shares.items()}

        def matches(secret: int) -> bytes | None:
            if secret >= 1 << (8 * SEED_BYTES):
                return None
            seed = secret.to_bytes(SEED_BYTES)
            if protocol.commitment(self._server.job, owner, kind, self.number, seed) != package.commitment(
                kind, self.number
            ):
                return None
            if kind == "pair":
                key = protocol.exchange_key(self._server.job, owner, self.number, seed)
                if public_key(key) != package.key(self.number):
                    return None
            return seed

        # Holders whose shares were wrong before come last, so that the first set of shares usually gives the right
        # secret.
        holders = sorted(numbers, key=lambda name: (name in self._suspects, name))
        for tried, chosen in enumerate(_sets(holders, threshold)):
            secret = self._at(numbers, chosen, 0)
            if (seed := matches(secret)) is not None:
                if tried:
                    self._suspect(owner, numbers, chosen)
                return seed
        self._server._note("wrong share", [owner], f"No set of {threshold} shares gives the seed of {owner}.")
        self._fail(f"a seed of {owner} cannot be reconstructed")
        return None

    def _suspect(self, owner: str, numbers: Mapping[str, int], right: Sequence[str]) -> None:
        """Record the sites whose shares do not fit the shares of the other sites."""
        wrong = [
            name
            for name, number in sorted(numbers.items())
            if name not in right and self._at(numbers, right, self._place[name]) != number
        ]
        self._suspects.update(wrong)
        reason = f"These sites sent wrong shares of the seed of {owner}. The sites or {owner} are faulty."
        self._server._note("wrong share", wrong, reason)

    def _at(self, numbers: Mapping[str, int], chosen: Sequence[str], place: int) -> int:
        return shamir.combine([self._place[name] for name in chosen], [numbers[name] for name in chosen], at=place)

    def _ask(self, stage: Stage, names: Sequence[str], message: Message) -> None:
        self.stage, self.outgoing = stage, dict.fromkeys(names, message)

    def _refuse(self, name: str, defect: str) -> None:
        self._server._note("refused", [name], f"{name} in secure sum {self.number}: {defect}.")

    def _fail(self, problem: str) -> None:
        self.stage, self.outgoing = "failed", {}
        self._server._note("failed", [], f"Secure sum {self.number} has failed, because {problem}.")


def _type_defect(reply: Any, kind: type[Message]) -> str:
    """Return the reason why a reply is not a message of the expected type; an empty string if the type is correct."""
    if not isinstance(reply, kind):
        return f"it has sent a {type(reply).__name__} instead of a {kind.__name__}"
    try:
        records.require_types(reply)
    except WireError as error:
        return f"its message has a wrong type: {error}"
    return ""


def _usable(reply: Shares, contributors: Sequence[str], lost: Sequence[str]) -> bool:
    """Return True if a reply has one share in the valid range for each requested seed."""
    if reply.selfs.keys() != set(contributors) or reply.pairs.keys() != set(lost):
        return False
    each = [*reply.selfs.values(), *reply.pairs.values()]
    return all(len(share) == shamir.SHARE_BYTES and int.from_bytes(share) < shamir.PRIME for share in each)


def _sets(holders: Sequence[str], size: int) -> Iterator[tuple[str, ...]]:
    """Yield the sets of holders whose shares the server tries: all sets if there are few, otherwise random sets."""
    if math.comb(len(holders), size) <= MOST_TRIES:
        yield from combinations(holders, size)
        return
    yield tuple(holders[:size])
    # Draw the sets at random. The first sets in lexicographic order would all contain the same holder, whose share may
    # be wrong.
    generator = random.Random(0)
    for _ in range(MOST_TRIES - 1):
        yield tuple(generator.sample(holders, size))


Answer = Callable[[str, Message], Message | None]
"""A function that sends a message to a site and returns the reply; None if the site did not answer."""


def run(exchange: Exchange, answer: Answer) -> Words | None:
    """Exchange messages until the sum is unmasked or has failed. Return the sum; None if it has failed.

    Args:
        exchange: The exchange.
        answer: A function that sends one message to a site and returns the reply.
    """
    while exchange.stage not in ("opened", "failed"):
        replies = {name: answer(name, message) for name, message in exchange.outgoing.items()}
        exchange.receive({name: reply for name, reply in replies.items() if reply is not None})
    for name, message in exchange.outgoing.items():
        answer(name, message)
    return exchange.total
