"""What holds for every request of a class; the class declares it as ``Request.rule``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from fedstrata.federation.messages import Request

Phase = Literal["enrolment", "round", "evaluation"]
"""Before the first round; in a round; after a round, to measure a model."""
PHASES: tuple[Phase, ...] = ("enrolment", "round", "evaluation")

Fact = Literal["labels", "sizes"]
"""What a reply may disclose in the clear: which labels a client holds, and how many samples."""


class Order:
    """Decides from a client's earlier requests in a phase whether it may answer the next one.

    There is one instance per client and phase, which all request classes with the same order share.
    """

    def refusal(self, request: Any) -> str:
        """Return why a request may not be answered now; empty if it may."""
        return ""

    def asked(self, request: Any) -> None:
        """Note a request that is about to be answered."""

    def answered(self, request: Any, reply: Any) -> None:
        """Note the reply to a request."""


@dataclass(frozen=True)
class RequestRule:
    """What holds for every request of a class, whatever the spec.

    Args:
        description: What leaves the site with the reply: the rest of a sentence that begins with "It sends".
        phase: When the request comes.
        order: The order in which requests may come; any order by default.
        after: The request before the first round that a client must have answered, if the job asks it at all.
        relay: Whether the request comes with a travelling model.
        together: Whether clients may answer as a group, whose sums the server forms. If a group breaks, the same
            request may come again.
        forms: The forms in which the same request may come again, its first form first; by default only as it is.
        merges: Whether replies over fewer samples than ``privacy.min_samples`` are merged if that holds them back.
        discloses: What the reply discloses in the clear.
        epsilon: The ε of local differential privacy that a reply costs; None for none.
    """

    description: str
    phase: Phase = "round"
    order: type[Order] | None = None
    after: type[Request] | None = None
    relay: bool = False
    together: bool = False
    forms: Callable[[Any], Sequence[Request]] | None = field(default=None, compare=False)
    merges: bool = False
    discloses: frozenset[Fact] = frozenset()
    epsilon: float | None = None
