"""The context that all clients of one process share."""

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
    """The data set, the model and the settings, once for all clients of a process.

    Args:
        config: The settings that server and clients share.
        data: The data set; a client reads only its own samples.
        assignment: The samples of each client.
        objective: The objective that clients minimise.
        handlers: The functions that answer requests.
        privacy: The smallest number of samples that may contribute to an answer: that of the spec, or a larger one of
            the clients' site.
        prepared: The results of ``once``, by the function that made them.
        held: The samples that nobody trains on, such as each client's own test part.
        evaluation: The settings of evaluation, such as the metrics.
        communication: The codecs of models and updates.
        personal: The objective with which a client tunes the global model for itself.
        tells_values: Whether clients send the values of metrics on their own samples, besides the sums.
        keys: Keys that all clients share and the server does not have, for handlers that need them.
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
        """Return ``make(self)``, computed at the first call; it must not depend on a client."""
        if make not in self.prepared:
            self.prepared[make] = make(self)
        prepared: T = self.prepared[make]
        return prepared
