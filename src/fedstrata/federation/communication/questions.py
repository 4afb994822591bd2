"""What is asked where models or updates travel encoded: the same questions, in envelopes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedstrata.federation.communication.codecs import Communication, PowerSGD, Uncompressed, WithMemory
from fedstrata.federation.communication.messages import Coefficients, Encoded
from fedstrata.federation.messages import ModelRequest, Request
from fedstrata.federation.questions import Bound, Questions, RequestRule, Rule, by_round


class Sums(Rule):
    """Exchanges ascend, and the second sum of one follows its first."""

    def __init__(self) -> None:
        self._last = self._pending = 0

    def refusal(self, request: Any) -> str:
        """An exchange that is over, or a second sum without a first one."""
        if isinstance(request, Encoded) and request.exchange <= self._last:
            return f"exchange {request.exchange} comes after {self._last}; accepted: larger numbers"
        if isinstance(request, Coefficients) and request.exchange != self._pending:
            return f"no first sum of exchange {request.exchange} waits for a second one"
        return ""

    def asked(self, request: Any) -> None:
        """Remember it."""
        if isinstance(request, Encoded):
            self._last, self._pending = request.exchange, request.exchange if len(request.basis) else 0
        else:
            self._pending = 0


def _forms(request: Encoded) -> list[Request]:
    """As what the same question may come again: whatever the number of its exchange.

    Who answered the first sum of an exchange that broke has the model, and is told no more than its name.
    """
    same = replace(request, exchange=0)
    if (delivery := request.delivery) is None:
        return [same]
    held = replace(delivery, base=delivery.version, changes=[], params={})
    return [same, replace(same, delivery=held)]


def encoded(questions: Questions, communication: Communication) -> Questions:
    """The questions as they travel by some codecs.

    Args:
        questions: As methods and samplers put them.
        communication: The codecs.
    """
    if communication.plain:
        return questions
    up, down = communication.up, communication.down
    start = up.start if isinstance(up, WithMemory) else 1
    in_two, whole = isinstance(up, PowerSGD), isinstance(down, Uncompressed)
    where = {
        "plain": by_round(f"only before round {start}", lambda round: round < start),
        "basis": Bound("none, or by PowerSGD's ranks" if in_two else "none", lambda basis, _: in_two or not len(basis)),
        "delivery": Bound("none" if whole else "a model", lambda found, _: (found is None) == whole),
    }
    found: list[RequestRule] = []
    for question in questions:
        if not issubclass(question.kind, ModelRequest):
            found.append(question)
            continue
        found.append(replace(question, kind=Encoded, inside=question, where=where, rule=Sums, forms=_forms))
    changes = [q for q in questions if issubclass(q.kind, ModelRequest) and q.kind.changes is not ModelRequest.changes]
    if in_two and changes:
        often = [question.times for question in changes]
        times = None if None in often else sum(each or 0 for each in often)
        description, together = "the second part of an encoded change", any(question.together for question in changes)
        found.append(RequestRule(Coefficients, description, times=times, rule=Sums, together=together))
    return tuple(found)
