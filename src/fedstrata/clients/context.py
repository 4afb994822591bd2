"""What all clients of one process share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fedstrata.data.dataset import Dataset
from fedstrata.federation.engine import FederationConfig
from fedstrata.objectives.base import Objective
from fedstrata.partitions.base import Assignment
from fedstrata.stratify.masking.key_store import KeyRing

T = TypeVar("T")


@dataclass(frozen=True)
class ClientContext:
    """What all clients of one process share: data in memory once, the model, the settings.

    Args:
        config: What server and clients agreed on.
        data: The data set; a client sees only its own indices of it.
        assignment: Which samples belong to whom.
        objective: What clients minimise.
        prepared: What was made ready once for all clients of the process, by what made it; see ``once``.
        keys: The keys that all clients share and the server does not have.
    """

    config: FederationConfig
    data: Dataset
    assignment: Assignment
    objective: Objective
    prepared: dict[Callable[[ClientContext], Any], Any] = field(default_factory=dict, compare=False, repr=False)
    keys: KeyRing = field(default_factory=KeyRing.of_site, compare=False, repr=False)

    def once(self, make: Callable[[ClientContext], T]) -> T:
        """What ``make`` makes of this world, made when first asked for; nothing of a client's own."""
        if make not in self.prepared:
            self.prepared[make] = make(self)
        made: T = self.prepared[make]
        return made
