"""Requests that carry the messages of the secure-sum protocol to clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedstrata.base.errors import ReplyRefusedError
from fedstrata.base.records import Message, record
from fedstrata.federation.messages import ClientId, Reply, Request, RequestRule
from fedstrata.federation.reply_checks import require_shape
from fedstrata.federation.secure.ring import Total, Words


@record("MaskedReply")
class MaskedReply(Reply):
    """A client's reply in a secure sum: a vector modulo 2³².

    Args:
        vector: The vector modulo 2³², stored in an int32 tensor. The vector is masked if ``present`` is not None.
        present: The client's signed statement (``protocol.In``); None without masks.
    """

    vector: Tensor
    present: Message | None = None


@record("Masked")
class Masked(Request):
    """A request for replies that the server sees only as a sum.

    Args:
        request: The request, which is the same for all clients.
        begin: The message that begins the exchange (``protocol.Begin``); None without masks.
    """

    reply_type: ClassVar[type[Reply]] = MaskedReply

    request: Request
    begin: Message | None = None

    @property
    def round(self) -> int:
        """The round of the inner request. Raise ``AttributeError`` if the inner request has no round."""
        return int(self.request.round)  # type: ignore[attr-defined]  # requests of a round have this field


@record("secure/StepReply")
class StepReply(Reply):
    """A message of the protocol from a client.

    Args:
        message: The message; None if the protocol does not need a reply.
    """

    message: Message | None


@record("secure/Step")
class Step(Request):
    """A message of the protocol to a client.

    Args:
        message: The message. The value None asks for the client's keys.
    """

    reply_type: ClassVar[type[Reply]] = StepReply

    message: Message | None


@record("secure/SiteStep")
class SiteStep(Step):
    """A message of the protocol to a site, in a deployment.

    Args:
        round: The round, counted from 1.
    """

    rule = RequestRule("its part of the protocol of secure sums: public keys, encrypted shares and signatures")

    round: int


@record("secure/Dealt")
class Dealt(Message):
    """A site's reply to a ``Roster``, in a deployment.

    Args:
        deal: The site's shares for the other sites (``protocol.Deal``).
        package: The site's public keys for its next roster (``protocol.Package``). The reply contains these keys so
            that the server does not have to request them separately.
    """

    deal: Message
    package: Message


FAILED = "secure sum failed"
"""The type of the event that is recorded if too few clients answered or the sum could not be unmasked."""


@dataclass(frozen=True)
class SecureSum:
    """The sum of several clients' replies.

    Args:
        total: The sum.
        clients: The clients whose replies are in the sum.
    """

    total: Total
    clients: list[ClientId]


def words_of(reply: MaskedReply) -> Words:
    """Return the vector in a reply as an array of unsigned integers."""
    return reply.vector.contiguous().numpy().view(np.uint32)


def reply_of(words: Words, present: Message | None = None) -> MaskedReply:
    """Return a reply with a vector and, if masks are used, the client's signed statement."""
    return MaskedReply(torch.from_numpy(words.view(np.int32)), present)


def check_vector(reply: MaskedReply, length: int) -> None:
    """Raise an error if a vector has the wrong shape or dtype.

    Raises:
        ReplyRefusedError: The shape or dtype is wrong.
    """
    require_shape(reply.vector, (length,), torch.int32, "the vector")
    if reply.vector.layout != torch.strided:
        raise ReplyRefusedError("the vector is sparse, but must be dense")
