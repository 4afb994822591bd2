"""FedLC (Zhang et al. 2022)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import NonNegativeFloat

from fedstrata.methods.base import Recipe
from fedstrata.objectives.base import Objective
from fedstrata.objectives.calibrated import LogitMargins


class FedLC(Recipe):
    """FedAvg with logits calibrated by the client's class counts, z_c − τ n_k(c)^(−1/4).

    Args:
        tau: τ, the strength.
        missing: The margin of a class without a sample: ``excluded`` from the softmax (the formula's limit), or that
            of a class with ``one`` sample.
    """

    paper: ClassVar[str] = "Zhang et al. 2022, Federated Learning with Label Distribution Skew via Logits Calibration"

    tau: NonNegativeFloat = 1.0
    missing: Literal["excluded", "one"] = "excluded"

    def default_objective(self) -> Objective:
        """Calibrated logits."""
        return LogitMargins(tau=self.tau, missing=self.missing)
