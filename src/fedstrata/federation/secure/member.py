"""Take part in secure sums as a client, in a deployment or in a simulation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fedstrata.base import records
from fedstrata.base.records import Message, Tree
from fedstrata.federation.messages import ClientId, Request
from fedstrata.federation.secure import protocol
from fedstrata.federation.secure.certificates import Identity
from fedstrata.federation.secure.primitives import digest, public_key, signing_key, valid
from fedstrata.federation.secure.site import Site


def job_of(seed: int) -> bytes:
    """Return the hash that identifies the job in a simulation."""
    return digest("simulation", seed)


class KeyIsCertificate:
    """Rules for simulations, in which a certificate is only a public key."""

    def defect(self, name: str, certificate: bytes, signature: bytes, signed: bytes) -> str:
        """Return the reason why a signature is not accepted; an empty string if the signature is accepted."""
        return "" if valid(certificate, signature, signed) else "the signature of its key is wrong"


@dataclass
class Member:
    """A client that takes part in secure sums.

    The client's new state takes effect when the server has unmasked the sum.

    Args:
        site: The state machine of the protocol.
        pending: The client's new state while a sum is computed; None between two sums.
    """

    site: Site
    pending: dict[str, Tree] | None = field(default=None)

    @classmethod
    def simulated(cls, number: ClientId, seed: int, parties: int) -> Member:
        """Return a member without a certificate, for a simulation."""
        key = signing_key()
        identity = Identity(str(number), public_key(key), key.sign)
        return cls(Site(job_of(seed), identity, KeyIsCertificate(), parties=parties, exchanges=1))

    def answer(self, message: Message | None) -> Message | None:
        """Return the reply to a message of the protocol. The message must not begin an exchange."""
        site = self.site
        if message is None:
            return site.package()
        answers: dict[type[Message], Callable[[Any], Message]] = {
            protocol.Roster: site.deal,
            protocol.RevealAll: site.reveal_all,
            protocol.Propose: site.propose,
            protocol.RevealSet: site.reveal_set,
        }
        return answers[type(message)](message)


def question_of(request: Request) -> bytes:
    """Return the hash of a request, including the model in the request."""
    return digest("question", records.encode(request))
