"""The method FedLC (Zhang et al. 2022)."""

from __future__ import annotations

from pydantic import NonNegativeFloat
from typing_extensions import override

from fedstrata.methods.recipe import Parts, Recipe
from fedstrata.objectives.calibrated import LogitMargins, Missing


class FedLC(Recipe):
    """FedAvg with calibrated logits: a class that is rarer at a client gets a larger margin.

    The logit z_c of class c becomes z_c − τ n_k(c)^(−1/4), where n_k(c) is the number of samples of class c at client
    k.
    """

    paper = "Zhang et al. 2022, Federated Learning with Label Distribution Skew via Logits Calibration"

    tau: NonNegativeFloat = 1.0
    missing: Missing = "excluded"

    @override
    def parts(self) -> Parts:
        return {"objective": LogitMargins(tau=self.tau, missing=self.missing)}
