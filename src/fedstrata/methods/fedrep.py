"""FedRep (Collins et al. 2021)."""

from __future__ import annotations

from pydantic import PositiveInt
from typing_extensions import override

from fedstrata.aggregation.base import Mean
from fedstrata.methods.base import Parts, Recipe
from fedstrata.objectives.base import Objective
from fedstrata.objectives.fedbabu import HeadOnly
from fedstrata.objectives.personal import HeadThenBody


class FedRep(Recipe):
    """FedAvg of only the body; each client first trains a head of its own, and then the body under this head.

    Set ``evaluation.fine_tune`` to measure each client's own model: to 0, or to the epochs in which the client trains
    its head on the new body, as in the paper. The global model has the initial head.
    """

    paper = "Collins et al. 2021, Exploiting Shared Representations for Personalized Federated Learning (ICML)"

    head_epochs: PositiveInt = 10

    @override
    def parts(self) -> Parts:
        # The plain mean is the server's update of Algorithm 1.
        return {"objective": HeadThenBody(head_epochs=self.head_epochs), "aggregator": Mean()}

    def personal_objective(self) -> Objective:
        """Return the objective that trains only the head, as in the paper."""
        return HeadOnly()
