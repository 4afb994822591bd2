"""Ask one client at a time during an enrolment, and use the clients' public keys to check replies."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

from fedstrata.base.errors import ClientsFailedError, QuorumError, ReplyRefusedError
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import ClientId, Request
from fedstrata.federation.reply_checks import Check
from fedstrata.stratify.masking.ckks import COMPARING, COUNTING, Sealer, sealer
from fedstrata.stratify.masking.messages import CountReply, Enlisted, PublicKeys, SealedLabels


def ask_one(federation: Federation, client: ClientId, request: Request, *, check: Check | None = None) -> Any:
    """Send a request to one client, and return its reply. If the client fails, record an event, and return None."""
    try:
        return federation.ask([client], request, check=check).get(client)
    except ClientsFailedError as error:
        # ``ask`` raises this error if all clients fail, and this call asks only one client.
        federation.log.failed.add(client)
        federation.note("failed", [client], str(error))
        return None


def ask_until(
    federation: Federation,
    clients: Iterable[ClientId],
    request: Request,
    purpose: str,
    *,
    check: Check | None = None,
) -> tuple[ClientId, Any]:
    """Send a request to one client after another until a client replies, and return this client and its reply.

    Raises:
        QuorumError: No client replied. The error message says why the last client failed.
    """
    for client in clients:
        reply = ask_one(federation, client, request, check=check)
        if reply is not None:
            return client, reply
    reasons = [event["reason"] for event in federation.events if event["kind"] in ("failed", "refused")]
    last = f". The last client failed: {reasons[-1]}" if reasons else ""
    raise QuorumError(f"no client could {purpose}{last}")


class Public:
    """The clients' public keys, with which the server checks, adds and compares ciphertexts.

    Args:
        keys: The public keys that a client sent in reply to ``OpenKeys``.
    """

    def __init__(self, keys: PublicKeys) -> None:
        self.keys = keys

    @cached_property
    def counting(self) -> Sealer:
        """The public key for encrypting and adding counts."""
        return sealer(self.keys.counting, COUNTING)

    @cached_property
    def comparing(self) -> Sealer:
        """The public key for encrypting and comparing labels."""
        return sealer(self.keys.comparing, COMPARING)

    def check_key(self, key: str) -> None:
        """Raise ``ReplyRefusedError`` if a reply was not encrypted with these keys.

        Args:
            key: The fingerprint in the reply.
        """
        if key != self.keys.key:
            raise ReplyRefusedError(
                f"the reply was encrypted with the keys {key!r}, but other clients used the keys {self.keys.key!r}"
            )

    def check_counts(self, reply: CountReply) -> None:
        """Raise ``ReplyRefusedError`` if the counts were not encrypted with these keys."""
        self.check_key(reply.key)
        for data in reply.pages:
            self.counting.load(data, length=COUNTING.slots)

    def check_labels(self, reply: SealedLabels | Enlisted) -> None:
        """Raise ``ReplyRefusedError`` if the labels were not encrypted with these keys."""
        self.check_key(reply.key)
        for data in reply.sheets if isinstance(reply, SealedLabels) else reply.pages.values():
            self.comparing.load(data, length=COMPARING.slots)
