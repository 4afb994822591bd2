"""Messages with encoded models and updates: requests that wrap another request, and replies with encoded updates.

PowerSGD needs two sums of tensors over the clients, and therefore two requests in one exchange. The request ``Encoded``
asks each client for its term of the first sum, and ``Coefficients`` asks for its term of the second sum.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from fedstrata.base.errors import ReplyRefusedError
from fedstrata.base.records import Message, record
from fedstrata.federation.messages import ModelRequest, Order, Params, Reply, Request, RequestRule


@record("ModelDelivery")
class ModelDelivery(Message):
    """The delivery of a model to a client: the whole model, or the changes that the client missed.

    Args:
        version: Version of the model, counted from 0.
        digest: Digest of this version. The digest of a whole model is computed from its parameters. Every later digest
            is computed from the previous digest and the encoded change.
        base: The version to which the changes apply; −1 for a whole model.
        changes: The changes from each version to the next, encoded and packed into bytes.
        params: The parameters of the whole model; empty if the client needs only changes, or has the model already.
    """

    version: int
    digest: bytes
    base: int
    changes: list[Tensor]
    params: Params


@record("EncodedReply")
class EncodedReply(Reply):
    """A reply with an encoded model update.

    Args:
        reply: The inner reply, with its update removed; None if ``payload`` is a term of PowerSGD's first sum.
        payload: The encoded update, or the client's term of PowerSGD's first or second sum, packed into bytes.
    """

    reply: Reply | None
    payload: Tensor


class Sums(Order):
    """A check that the ids of exchanges ascend, and that each exchange's second sum comes after its first sum."""

    def __init__(self) -> None:
        self._last = self._pending = 0

    def refusal(self, request: Any) -> str:
        """Return why a request is refused: its exchange is not new, or it requests a second sum before the first."""
        if isinstance(request, Encoded) and request.exchange <= self._last:
            return f"exchange {request.exchange} came after exchange {self._last}, but ids must ascend"
        if isinstance(request, Coefficients) and request.exchange != self._pending:
            return f"exchange {request.exchange} has no first sum, which must come before the second sum"
        return ""

    def asked(self, request: Any) -> None:
        """Store the id of the exchange, and whether its second sum may be requested next."""
        if isinstance(request, Encoded):
            self._last, self._pending = request.exchange, request.exchange if len(request.basis) else 0
        else:
            self._pending = 0


def repeated_forms(request: Encoded) -> list[Request]:
    """Return the variants in which an encoded request may be repeated after a failed exchange.

    The id of the exchange may differ. In one variant, the delivery contains only the version and the digest, for a
    client that already has the model.
    """
    same = replace(request, exchange=0)
    if (delivery := request.delivery) is None:
        return [same]
    held = replace(delivery, base=delivery.version, changes=[], params={})
    return [same, replace(same, delivery=held)]


@record("Encoded")
class Encoded(Request):
    """A request that contains another request. The inner request's model, the reply's update, or both are encoded.

    Args:
        request: The inner request. It contains the model's parameters only if ``delivery`` is None.
        round: The round, counted from 1.
        exchange: Id of the exchange in this run. Ids start at 1 and ascend.
        delivery: The encoded model; None if the inner request contains the model.
        plain: Whether the update is sent without encoding, even if the spec sets a codec.
        basis: The matrices Q of PowerSGD, packed into bytes. Clients multiply their updates by Q for the first sum. If
            ``basis`` is empty, the reply contains the whole encoded update.
    """

    reply_type: ClassVar[type[Reply]] = EncodedReply
    rule = RequestRule("the encoded reply to the inner request", order=Sums, forms=repeated_forms)

    request: ModelRequest
    round: int
    exchange: int
    delivery: ModelDelivery | None
    plain: bool
    basis: Tensor


@record("Coefficients")
class Coefficients(Request):
    """A request for what a client adds to PowerSGD's second sum: the product of its update and the matrices P.

    Args:
        exchange: Id of the exchange; the first and the second sum have the same id.
        frame: The matrices P of the first sum, with orthonormalised columns, packed into bytes.
    """

    reply_type: ClassVar[type[Reply]] = EncodedReply
    rule = RequestRule("the second part of an encoded change", order=Sums)

    exchange: int
    frame: Tensor

    def check(self, reply: EncodedReply) -> None:
        """Raise an error if ``reply.reply``, the client's reply to the inner request, is missing."""
        if reply.reply is None:
            raise ReplyRefusedError("the client answered PowerSGD's second request, but not the method's request")
