"""The requests that a job may send to its clients if the server sees only sums of replies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fedstrata.base.errors import SpecError
from fedstrata.federation.allowed import Allowed, Bound
from fedstrata.federation.communication.messages import Coefficients
from fedstrata.federation.messages import ModelRequest
from fedstrata.federation.secure.requests import Masked, SiteStep

STEPS = 4
"""The maximum number of protocol messages that a site receives per sum, in addition to the request."""


def masked(allowed: Iterable[Allowed], parties: int) -> list[Allowed]:
    """Wrap each request, except ``single`` requests, in a ``Masked`` request, and add the protocol's own requests.

    Args:
        allowed: The requests without masks, as methods and samplers declare them.
        parties: Minimum number of sites in a sum.

    Raises:
        SpecError: The replies to a request cannot be added up in a secure sum.
    """
    begins = Bound("the beginning of an exchange", lambda begin, _: begin is not None)
    single, envelopes = [], []
    for inside in allowed:
        if inside.single:
            single.append(inside)
            continue
        if not issubclass(inside.innermost.request, ModelRequest | Coefficients):
            problem = f"secure sums do not support the reply to {inside.label}"
            problem += ". Use another method, or set privacy.sums = 'plain'."
            raise SpecError("privacy.sums", problem, "secure")
        description = f"{inside.rule.description}, masked so that the server reads only the sum over {parties} or more"
        rule = replace(inside.rule, description=f"{description} sites", discloses=frozenset())
        rule = replace(rule, order=None, together=False)
        envelopes.append(replace(inside, request=Masked, where={"begin": begins}, rule=rule, inside=inside))
    times = [each.times for each in envelopes]
    steps = None if None in times else STEPS * sum(each or 0 for each in times)
    return [*single, *envelopes, Allowed(SiteStep, times=steps)]
