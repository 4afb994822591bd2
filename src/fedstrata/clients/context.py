"""What all clients of one process share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from fedstrata.data.dataset import Dataset
from fedstrata.data.partitions.base import Assignment
from fedstrata.evaluation.holdouts import HeldOut
from fedstrata.evaluation.settings import Evaluation
from fedstrata.federation.communication.codecs import Communication
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.settings import Privacy
from fedstrata.objectives.base import CrossEntropy, Objective

if TYPE_CHECKING:
    from fedstrata.clients.handling import Handlers

T = TypeVar("T")


@dataclass(frozen=True)
class ClientContext:
    """What all clients of one process share: data in memory once, the model, the settings.

    Args:
        config: What server and clients agreed on.
        data: The data set; a client sees only its own indices of it.
        assignment: Which samples belong to whom.
        objective: What clients minimise.
        handlers: What clients know to answer.
        privacy: The fewest samples behind what these clients send: the spec's, or a larger minimum of their site's.
        prepared: What was made ready once for all clients of the process, by what made it; see ``once``.
        held: What nobody trains on, each client's own test part among it.
        evaluation: By what models are measured.
        communication: How models and updates travel.
        personal: What a client minimises when it tunes the global model for itself.
        tells_values: Whether clients tell how good a model is on their own samples, beside the sums that add up.
        keys: A slot for keys that all clients share and the server does not have, for handlers that need some.
    """

    config: FederationConfig
    data: Dataset
    assignment: Assignment
    objective: Objective
    handlers: Handlers
    held: HeldOut = field(default_factory=HeldOut)
    evaluation: Evaluation = field(default_factory=Evaluation)
    communication: Communication = field(default_factory=Communication)
    personal: Objective = field(default_factory=CrossEntropy)
    tells_values: bool = True
    privacy: Privacy = field(default_factory=Privacy)
    prepared: dict[Callable[[ClientContext], Any], Any] = field(default_factory=dict, compare=False, repr=False)
    keys: Any = field(default=None, compare=False, repr=False)

    def once(self, make: Callable[[ClientContext], T]) -> T:
        """What ``make`` makes of this context, made when first asked for; nothing of a client's own."""
        if make not in self.prepared:
            self.prepared[make] = make(self)
        made: T = self.prepared[make]
        return made
