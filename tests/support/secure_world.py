"""Sites with certificates, a server, and messages between them that travel as bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any

import numpy as np
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import NameOID

from fedstrata.base import records
from fedstrata.federation.secure.certificates import Identity, IssuedBy
from fedstrata.federation.secure.protocol import (
    Begin,
    MaskedVector,
    Opened,
    Propose,
    RefusedError,
    RevealAll,
    RevealSet,
)
from fedstrata.federation.secure.ring import Words
from fedstrata.federation.secure.server import Exchange, Server, run
from fedstrata.federation.secure.site import Site

JOB = b"job".ljust(32, b"\0")
LENGTH = 5


def question(number: int = 0) -> bytes:
    """Return the hash of a question."""
    return number.to_bytes(32)


def vector(name: str, length: int = LENGTH) -> Words:
    """Return the vector of a site, which depends on its name."""
    return np.random.default_rng(list(name.encode())).integers(2**32, size=length, dtype=np.uint32)


class Authority:
    """A root certificate with its private key."""

    def __init__(self) -> None:
        self.key = Ed25519PrivateKey.generate()
        self.root = self.certificate("root", self.key)
        self.trust = IssuedBy(self.root)

    def certificate(
        self, name: str, key: Ed25519PrivateKey | RSAPrivateKey, days: tuple[int, int] = (-1, 1)
    ) -> x509.Certificate:
        """Issue a certificate that is valid between two days, counted from today."""
        begin, end = (datetime.now(UTC) + timedelta(days=day) for day in days)
        subject, issuer = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, each)]) for each in (name, "root"))
        builder = x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number(), begin, end)
        return builder.sign(self.key, None if isinstance(self.key, Ed25519PrivateKey) else SHA256())

    def identity(self, name: str) -> Identity:
        """Issue a certificate, and return it with a new private key."""
        key = Ed25519PrivateKey.generate()
        return Identity.of(self.certificate(name, key), key)


@cache
def authority() -> Authority:
    """Return the authority of most tests."""
    return Authority()


@cache
def identity(name: str) -> Identity:
    """Return the identity of a site, which is the same in all tests."""
    return authority().identity(name)


class World:
    """A server and its sites. Messages are encoded and decoded on their way.

    Args:
        names: The names of the sites.
        make: The class of the sites.
        exchanges: Number of exchanges per roster.
        wire: Whether messages travel as bytes, as they do between machines.
        settings: Further arguments of ``Site``.
    """

    def __init__(
        self,
        names: Iterable[str],
        make: Callable[..., Site] = Site,
        *,
        exchanges: int = 2,
        wire: bool = True,
        **settings: Any,
    ) -> None:
        trust, self.sent = authority().trust, sent if wire else lambda message: message
        self.sites = {name: make(JOB, identity(name), trust, exchanges=exchanges, **settings) for name in sorted(names)}
        shared = {key: value for key, value in settings.items() if key in ("parties", "confirm")}
        self.server = Server(JOB, trust, exchanges=exchanges, **shared)
        self.vectors = {name: vector(name) for name in self.sites}
        self.enough = dict.fromkeys(self.sites, True)
        self.continues: set[int] = set()
        """The numbers of the questions that continue the question before."""
        self.committed: set[str] = set()
        self.refusals: list[tuple[str, RefusedError]] = []

    def join(self, offline: Iterable[str] = ()) -> World:
        """Form the roster and let the sites deal shares."""
        assert self.server.enrol({name: site.package() for name, site in self.sites.items()}) is not None
        self.server.deliver(self.deals(offline))
        return self

    def deals(self, offline: Iterable[str] = ()) -> dict[str, Any]:
        """Return the sites' shares for each other."""
        roster, deals = self.sent(self.server.roster), {}
        for name, site in self.sites.items():
            if name not in set(offline):
                try:
                    deals[name] = self.sent(site.deal(roster))
                except RefusedError as error:
                    self.refusals.append((name, error))
        return deals

    def begin(self, number: int = 0, only: Iterable[str] | None = None) -> Exchange:
        """Begin an exchange about a question, which continues the previous one if ``only`` has its contributors."""
        exchange = self.server.begin(question(number), LENGTH, None if only is None else list(only))
        assert exchange is not None
        return exchange

    def run(self, number: int = 0) -> list[int] | None:
        """Return the sum of an exchange about a question in which all sites answer; None if it fails."""
        return plain(run(self.begin(number), lambda name, message: self.answer(name, message, number)))

    def answer(self, name: str, message: Any, number: int = 0) -> Any:
        """Let a site answer a message; None if it refuses to."""
        site, message = self.sites[name], self.sent(message)
        try:
            if isinstance(message, Begin):
                own, continues = (self.vectors[name], self.enough[name]), number in self.continues
                return self.sent(site.mask(message, question(number), *own, continues=continues))
            if isinstance(message, Opened):
                if site.opened(message):
                    self.committed.add(name)
                return None
            kinds = {RevealAll: site.reveal_all, Propose: site.propose, RevealSet: site.reveal_set}
            return self.sent(kinds[type(message)](message))
        except RefusedError as error:
            self.refusals.append((name, error))
            return None

    def sum_of(self, names: Iterable[str]) -> list[int]:
        """Return the sum of some sites' vectors modulo 2³²."""
        total = np.zeros(LENGTH, dtype=np.uint32)
        for name in names:
            total += self.vectors[name]
        return [int(word) for word in total]

    def step(self, exchange: Exchange, online: Sequence[str], number: int = 0, **changed: Any) -> None:
        """Let the sites that are online answer the messages of an exchange.

        Args:
            exchange: The exchange.
            online: The sites that answer.
            number: The number of the question.
            changed: Replies that replace those of some sites, or functions that change them.
        """
        replies: dict[str, Any] = {}
        for name, message in exchange.outgoing.items():
            if name in online:
                reply = self.answer(name, message, number)
                change: Any = changed.get(name, reply)
                reply = change(reply) if callable(change) else change
                if reply is not None:
                    replies[name] = reply
        exchange.receive(replies)


def sent(message: Any) -> Any:
    """Return a message after it has travelled as bytes."""
    return records.decode(records.encode(message))


def words(reply: MaskedVector) -> Words:
    """Return a masked vector."""
    return reply.vector.numpy().view(np.uint32)


def plain(total: Words | None) -> list[int] | None:
    """Return a vector of the ring as a list."""
    return None if total is None else [int(word) for word in total]
