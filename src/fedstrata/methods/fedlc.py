"""FedLC (Zhang et al. 2022)."""

from __future__ import annotations

from fedstrata.methods.base import Recipe, setting_of
from fedstrata.objectives.calibrated import LogitMargins, Missing


class FedLC(Recipe):
    """FedAvg with logits calibrated by the client's class counts, z_c − τ n_k(c)^(−1/4)."""

    paper = "Zhang et al. 2022, Federated Learning with Label Distribution Skew via Logits Calibration"

    objective = LogitMargins()
    tau: float = setting_of("objective")
    missing: Missing = setting_of("objective")
