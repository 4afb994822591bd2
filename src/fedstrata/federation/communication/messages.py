"""Messages with encoded models and updates: a request inside another one, and a reply in parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from fedstrata.base.errors import ReplyRefusedError
from fedstrata.base.records import Message, record
from fedstrata.federation.messages import ModelRequest, Order, Params, Reply, Request, RequestRule


@record("ModelDelivery")
class ModelDelivery(Message):
    """A model: whole, or as the changes that a client missed.

    Args:
        version: Number of the model's version.
        digest: Digest of this version: of the whole model at first, then of the previous digest and the change.
        base: The version to which the changes apply; −1 for a whole model.
        changes: The changes from each version to the next, encoded and packed.
        params: The whole model; empty if there are changes.
    """

    version: int
    digest: bytes
    base: int
    changes: list[Tensor]
    params: Params


@record("EncodedReply")
class EncodedReply(Reply):
    """A reply in parts.

    Args:
        reply: The reply without its change; None in the answer to a first sum.
        payload: The change, encoded and packed, or the client's part of a first sum.
    """

    reply: Reply | None
    payload: Tensor


class Sums(Order):
    """The numbers of exchanges ascend, and the second sum of an exchange follows its first sum."""

    def __init__(self) -> None:
        self._last = self._pending = 0

    def refusal(self, request: Any) -> str:
        """Refuse an exchange that is over, and a second sum without a first one."""
        if isinstance(request, Encoded) and request.exchange <= self._last:
            return f"exchange {request.exchange} comes after {self._last}; accepted: larger numbers"
        if isinstance(request, Coefficients) and request.exchange != self._pending:
            return f"no first sum of exchange {request.exchange} waits for a second one"
        return ""

    def asked(self, request: Any) -> None:
        """Note the exchange, and whether a second sum follows."""
        if isinstance(request, Encoded):
            self._last, self._pending = request.exchange, request.exchange if len(request.basis) else 0
        else:
            self._pending = 0


def repeated_forms(request: Encoded) -> list[Request]:
    """Return the forms in which an encoded request may come again after a broken exchange.

    The number of the exchange may differ. A client that answered the first sum has the model already: the model may
    then come as the name of its version.
    """
    same = replace(request, exchange=0)
    if (delivery := request.delivery) is None:
        return [same]
    held = replace(delivery, base=delivery.version, changes=[], params={})
    return [same, replace(same, delivery=held)]


@record("Encoded")
class Encoded(Request):
    """A request whose model, or whose reply's change, travels encoded.

    Args:
        request: The inner request; its parameters are empty if there is a ``delivery``.
        round: The round, counted from 1.
        exchange: Number of the exchange in this run.
        delivery: The encoded model; None if the inner request contains the model.
        plain: Whether the change travels unencoded, whatever the codec.
        basis: Q of PowerSGD, packed; empty if the change travels in one exchange.
    """

    reply_type: ClassVar[type[Reply]] = EncodedReply
    rule = RequestRule("the reply to the request inside, encoded", order=Sums, forms=repeated_forms)

    request: ModelRequest
    round: int
    exchange: int
    delivery: ModelDelivery | None
    plain: bool
    basis: Tensor


@record("Coefficients")
class Coefficients(Request):
    """A request for the second sum of a PowerSGD exchange: the coefficients of the change in the frame P.

    Args:
        exchange: Number of the exchange, as in the first sum.
        frame: P of PowerSGD, packed; its columns are orthonormal.
    """

    reply_type: ClassVar[type[Reply]] = EncodedReply
    rule = RequestRule("the second part of an encoded change", order=Sums)

    exchange: int
    frame: Tensor

    def check(self, reply: EncodedReply) -> None:
        """Refuse a reply without the answer to the inner request."""
        if reply.reply is None:
            raise ReplyRefusedError("the second sum lacks the answer")
