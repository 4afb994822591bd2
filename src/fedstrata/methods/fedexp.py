"""FedExP (Jhunjhunwala et al. 2023)."""

from __future__ import annotations

from pydantic import PositiveFloat
from typing_extensions import override

from fedstrata.aggregation.scaled import Extrapolated
from fedstrata.methods.recipe import Parts, Recipe


class FedExP(Recipe):
    """FedAvg with a server step that is longer if the clients' updates point in different directions.

    The new model is w ← w_t + η Δ̄ with the step size η = max(1, Σ_k ‖Δ_k‖² / (2 m (‖Δ̄‖² + ε))). The update of client
    k is Δ_k, and the mean of the m updates is Δ̄. As in the paper, the model to evaluate and to save is the average of
    the last two iterates, because the iterates can oscillate. Training continues from the last iterate.

    Args:
        eps: Constant ε. See the aggregator ``fedexp``.
    """

    paper = "Jhunjhunwala et al. 2023, FedExP: Speeding Up Federated Averaging via Extrapolation (ICLR)"

    eps: PositiveFloat = 1e-3

    @override
    def parts(self) -> Parts:
        return {"aggregator": Extrapolated(eps=self.eps)}
