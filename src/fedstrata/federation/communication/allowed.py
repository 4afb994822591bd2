"""The requests that a job may send to its clients if models or updates are encoded."""

from __future__ import annotations

from dataclasses import replace

from fedstrata.federation.allowed import Allowed, Bound, by_round
from fedstrata.federation.communication.codecs import Communication, PowerSGD, Uncompressed, WithMemory
from fedstrata.federation.communication.messages import Coefficients, Encoded
from fedstrata.federation.messages import ModelRequest


def encoded(allowed: list[Allowed], communication: Communication) -> list[Allowed]:
    """Return a list of allowed requests in which each request with a model is wrapped in an ``Encoded`` request.

    Args:
        allowed: The allowed requests as methods and samplers declare them, without encodings.
        communication: The codecs.
    """
    if communication.plain:
        return allowed
    up, down = communication.up, communication.down
    start = up.start if isinstance(up, WithMemory) else 1
    in_two, whole = isinstance(up, PowerSGD), isinstance(down, Uncompressed)
    where = {
        "plain": by_round(f"only before round {start}", lambda round: round < start),
        "basis": Bound("none, or PowerSGD's matrices" if in_two else "none", lambda basis, _: in_two or not len(basis)),
        "delivery": Bound("none" if whole else "a model", lambda delivery, _: (delivery is None) == whole),
    }

    def envelope(inside: Allowed) -> Allowed:
        rule = replace(inside.rule, order=Encoded.rule.order, forms=Encoded.rule.forms)
        return replace(inside, request=Encoded, where=where, rule=rule, inside=inside)

    travelling = [envelope(each) if issubclass(each.request, ModelRequest) else each for each in allowed]
    none = ModelRequest.changes
    changes = [each for each in allowed if getattr(each.request, "changes", none) is not none]
    if not in_two or not changes:
        return travelling
    times = [each.times for each in changes]
    rule = replace(Coefficients.rule, together=any(each.rule.together for each in changes))
    second = Allowed(Coefficients, times=None if None in times else sum(each or 0 for each in times), rule=rule)
    return [*travelling, second]
