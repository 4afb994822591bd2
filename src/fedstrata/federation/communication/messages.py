"""What travels where models or updates are encoded: a question inside another, and its answer in parts."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from fedstrata.base.errors import ReplyRefusedError
from fedstrata.base.records import Message, record
from fedstrata.federation.messages import ModelRequest, Params, Reply, Request


@record("ModelDelivery")
class ModelDelivery(Message):
    """A model, whole or as what a client missed of it.

    Args:
        version: How often the model that clients have was renewed.
        digest: Names this version: of the whole model at first, then of the last digest and what came after it.
        base: The version that the changes build on; −1 for a whole model.
        changes: From one version to the next, encoded and packed.
        params: The whole model; empty where there are changes.
    """

    version: int
    digest: bytes
    base: int
    changes: list[Tensor]
    params: Params


@record("EncodedReply")
class EncodedReply(Reply):
    """An answer in parts.

    Args:
        reply: The answer without its change; None where that comes with a second sum.
        payload: The change, encoded and packed, or its part of a first sum.
    """

    reply: Reply | None
    payload: Tensor


@record("Encoded")
class Encoded(Request):
    """A question whose model, or the change that its answer tells of, travels encoded.

    Args:
        request: The question; its parameters are empty where there is a ``delivery``.
        round: The round, counted from 1.
        exchange: Numbers the exchanges of a run.
        delivery: How the model comes; None where the question has it.
        plain: Whether the change comes as it is, whatever the codec.
        basis: Q of PowerSGD, packed; empty where the change comes in one exchange.
    """

    reply_type: ClassVar[type[Reply]] = EncodedReply

    request: ModelRequest
    round: int
    exchange: int
    delivery: ModelDelivery | None
    plain: bool
    basis: Tensor


@record("Coefficients")
class Coefficients(Request):
    """The second sum of an exchange: what is my part of your change along these directions?

    Args:
        exchange: That of the first sum.
        frame: P of PowerSGD, packed; its columns are orthonormal.
    """

    reply_type: ClassVar[type[Reply]] = EncodedReply

    exchange: int
    frame: Tensor

    def check(self, reply: EncodedReply) -> None:
        """An answer to the question of the first sum."""
        if reply.reply is None:
            raise ReplyRefusedError("the second sum lacks the answer")
