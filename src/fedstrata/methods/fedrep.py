"""The method FedRep (Collins et al. 2021)."""

from __future__ import annotations

from pydantic import PositiveInt
from typing_extensions import override

from fedstrata.aggregation.base import Mean
from fedstrata.methods.recipe import Parts, Recipe
from fedstrata.objectives.base import Objective
from fedstrata.objectives.fedbabu import HeadOnly
from fedstrata.objectives.personal import HeadThenBody


class FedRep(Recipe):
    """FedAvg that averages only the body; each client first trains its own head, and then the body.

    With ``evaluation.fine_tune = 0``, each client's model is evaluated with its most recently trained head. With
    ``evaluation.fine_tune = E`` > 0 (as in the paper), each client trains its head on the new body for E epochs before
    the evaluation. The global model keeps the initial head.
    """

    paper = "Collins et al. 2021, Exploiting Shared Representations for Personalized Federated Learning (ICML)"

    head_epochs: PositiveInt = 10

    @override
    def parts(self) -> Parts:
        # Use the plain mean of the bodies (all layers except the head), as in Algorithm 1. In the authors' program, the
        # weight of a client's body is the client's number of samples.
        return {"objective": HeadThenBody(head_epochs=self.head_epochs), "aggregator": Mean()}

    def personal_objective(self) -> Objective:
        """Return the objective that trains only the head, as in the paper."""
        return HeadOnly()
