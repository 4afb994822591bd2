"""What the server's side of enrolling shares: asking one client, and the clients' public keys."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

from fedstrata.base.errors import ClientsFailedError, QuorumError, ReplyRefusedError
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import ClientId, Request
from fedstrata.federation.reply_checks import Check
from fedstrata.stratify.masking.ckks import COMPARING, COUNTING, Sealer, sealer
from fedstrata.stratify.masking.messages import OpenKeys, PublicKeys


def ask_one(federation: Federation, client: ClientId, request: Request, *, check: Check | None = None) -> Any:
    """One client's reply, or None; why is an event."""
    try:
        return federation.ask([client], request, check=check).get(client)
    except ClientsFailedError as error:
        # It was the only one asked and the first of its kind: the others may still answer.
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
    """The first of the clients that answers, and its reply.

    Raises:
        QuorumError: Nobody does; with what the last one's failure was.
    """
    for client in clients:
        reply = ask_one(federation, client, request, check=check)
        if reply is not None:
            return client, reply
    reasons = [event["reason"] for event in federation.events if event["kind"] in ("failed", "refused")]
    last = f"; the last one: {reasons[-1]}" if reasons else ""
    raise QuorumError(f"no client could {purpose}{last}")


class Public:
    """The clients' public keys as the server holds them.

    Args:
        keys: What a client sent.
    """

    def __init__(self, keys: PublicKeys) -> None:
        self.keys = keys

    @classmethod
    def ask(cls, federation: Federation, clients: Iterable[ClientId], *, comparing: bool) -> Public:
        """Ask the first client that answers.

        Raises:
            QuorumError: Nobody does.
        """
        _, keys = ask_until(federation, clients, OpenKeys(comparing), "send keys")
        return cls(keys)

    @cached_property
    def counting(self) -> Sealer:
        """For counts."""
        return sealer(self.keys.counting, COUNTING)

    @cached_property
    def comparing(self) -> Sealer:
        """For comparisons."""
        return sealer(self.keys.comparing, COMPARING)

    def check_key(self, key: str) -> None:
        """Refuse what was made with other keys."""
        if key != self.keys.key:
            raise ReplyRefusedError(f"encrypted with the keys {key!r}, the others have {self.keys.key!r}")
