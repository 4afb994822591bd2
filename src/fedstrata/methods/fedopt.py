"""FedAvgM (Hsu et al. 2019), and the adaptive methods of Reddi et al. (2021): FedAdagrad, FedAdam and FedYogi."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, PositiveFloat
from typing_extensions import override

from fedstrata.aggregation.base import MeanBySize
from fedstrata.aggregation.optimizers import BETAS, Beta, ServerOptimizer
from fedstrata.methods.recipe import Parts, Recipe

ADAPTIVE = "Reddi et al. 2021, Adaptive Federated Optimization (ICLR)"


class FedAvgM(Recipe):
    """FedAvg with momentum on the server.

    With the mean update Δ of the round, the server computes v ← β v + Δ and w ← w + η v.

    Args:
        beta: Momentum β of the server optimiser.
        server_lr: Learning rate of the server optimiser.
    """

    paper = (
        "Hsu et al. 2019, Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification"
    )

    beta: float = Field(default=0.9, ge=0, lt=1)
    server_lr: PositiveFloat = 1.0

    @override
    def parts(self) -> Parts:
        return {"aggregator": MeanBySize(server=ServerOptimizer(momentum=self.beta, lr=self.server_lr))}


class FedAdagrad(Recipe):
    """FedAvg with Adagrad on the server.

    The aggregator's server optimiser (``ServerOptimizer``) defines the step.

    Args:
        server_lr: Learning rate of the server optimiser.
        tau: Constant τ, which is added to the denominator of each server step.
    """

    paper = ADAPTIVE

    server_lr: PositiveFloat = 0.01
    tau: PositiveFloat = 1e-3

    @override
    def parts(self) -> Parts:
        return {"aggregator": MeanBySize(server=ServerOptimizer(optimizer="adagrad", lr=self.server_lr, eps=self.tau))}


class AdaptiveMoments(Recipe):
    """Base class of FedAdam and FedYogi, which compute the second moment v from Δ² in different ways.

    Args:
        server_lr: Learning rate of the server optimiser.
        betas: Decay rates β₁ (first moment) and β₂ (second moment) of the server optimiser.
        tau: Constant τ, which is added to the denominator of each server step.
    """

    paper = ADAPTIVE

    optimizer: ClassVar[Literal["adam", "yogi"]]

    server_lr: PositiveFloat = 0.01
    betas: tuple[Beta, Beta] = BETAS
    tau: PositiveFloat = 1e-3

    @override
    def parts(self) -> Parts:
        server = ServerOptimizer(optimizer=self.optimizer, lr=self.server_lr, betas=self.betas, eps=self.tau)
        return {"aggregator": MeanBySize(server=server)}


class FedAdam(AdaptiveMoments):
    """FedAvg with Adam on the server, without bias correction.

    The aggregator's server optimiser (``ServerOptimizer``) defines the step.
    """

    optimizer = "adam"


class FedYogi(AdaptiveMoments):
    """FedAvg with Yogi on the server: like FedAdam, but Yogi limits how much the second moment changes per round.

    The aggregator's server optimiser (``ServerOptimizer``) defines the step.
    """

    optimizer = "yogi"
