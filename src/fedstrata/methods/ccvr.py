"""CCVR (Luo et al. 2021): after training, the server calibrates the head on virtual features."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from pydantic import PositiveInt
from torch import Tensor
from typing_extensions import override

from fedstrata.base.errors import SpecError
from fedstrata.base.records import record
from fedstrata.clients.handlers.moments import Moments, MomentsReply, report_moments
from fedstrata.federation.allowed import Agreed, Allowed, joined
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import Params, Weights
from fedstrata.methods.head_tuning import HeadTuning
from fedstrata.methods.recipe import Recipe, RecipeState


@record("CCVRState")
class CCVRState(RecipeState):
    """The state of the method CCVR between rounds.

    Args:
        calibrated: The parameters of the calibrated head; empty after a round without calibration.
    """

    calibrated: Params


class CCVR(Recipe, HeadTuning):
    """FedAvg whose server retrains the head after the last round, on features drawn from one Gaussian per class.

    All clients send the moments of their features z: for each class c, the number of samples n_k(c), Σ z and Σ z zᵀ.
    From the sums over clients, the server computes the mean μ_c and the covariance Σ_c of the features of class c. The
    server draws ``per_class`` virtual features from each normal distribution N(μ_c, Σ_c), and trains the head on these
    features. The other layers do not change, and later rounds start from the uncalibrated model. If no client has
    samples of a class, this class has no virtual features.

    Args:
        per_class: Number of features drawn from each class's Gaussian.
        every: Number of rounds from one calibration to the next. Default: calibration only after the last round.
        steps: Number of gradient steps per calibration of the head.
        lr: Learning rate of the calibration.
    """

    paper = "Luo et al. 2021, No Fear of Heterogeneity: Classifier Calibration for FL with Non-IID Data (NeurIPS)"

    handlers = (report_moments,)
    needs_replies = "asks each client for the moments of its features"

    per_class: PositiveInt = 100
    every: PositiveInt | None = None

    def check(self, config: FederationConfig) -> None:
        """Raise ``SpecError`` if there are no classes or no suitable head, or if class counts must stay private."""
        super().check(config)
        self.require_head(config, "method")
        _ = config.model.feature_size  # raises SpecError if the head has no nn.Linear
        if self.data_sampler.private:
            problem = (
                "keeps the clients' numbers of samples private, but CCVR needs these numbers. "
                "Use another data sampler, or another method."
            )
            raise SpecError("method.data_sampler", problem, self.data_sampler.name)

    def calibrates(self, round: int, rounds: int) -> bool:
        """Return True if the server calibrates the head after round number ``round`` of ``rounds``, counted from 1."""
        return round == rounds or (self.every is not None and round % self.every == 0)

    @override
    def allowed(self, agreed: Agreed) -> list[Allowed] | None:
        rounds = agreed.training.rounds
        last = range(rounds, rounds + 1)
        calibrated = last if self.every is None else lambda round: self.calibrates(round, rounds)
        calibration = Allowed(Moments, rounds=calibrated)
        return joined(super().allowed(agreed), [calibration])

    @override
    def init(self, federation: Federation, weights: Weights) -> CCVRState:
        return CCVRState(**vars(super().init(federation, weights)), calibrated={})

    @override
    def run_round(self, federation: Federation, state: RecipeState) -> tuple[RecipeState, dict[str, Any]]:
        state, metrics = super().run_round(federation, state)
        config, head = federation.config, Params()
        if self.calibrates(federation.round, config.training.rounds):
            weights = super().evaluated(config, state)
            head, loss = self.calibrated_head(federation, weights)
            metrics["server_loss"] = loss
        return CCVRState(**vars(state), calibrated=head), metrics

    @override
    def evaluated(self, config: FederationConfig, state: Any) -> Weights:
        weights = super().evaluated(config, state)
        return Weights({**weights.params, **state.calibrated}, weights.buffers)

    def calibrated_head(self, federation: Federation, weights: Weights) -> tuple[Params, float | None]:
        """Return the calibrated head, and the loss before the last step. Without replies, return ``{}`` and None."""
        config = federation.config
        classes, size = config.outputs, config.model.feature_size
        replies = federation.ask(
            federation.candidates().tolist(),
            Moments(federation.round, weights),
            # The computation of features needs only the forward pass, which costs about a third of a training step.
            work=lambda samples: samples / 3,
            check=lambda reply: reply.require(classes, size),
        )
        normals = normals_of(list(replies.values()))
        if not normals:
            return {}, None
        generator = federation.rng("virtual-features")
        features = [drawn(mean, covariance, self.per_class, generator) for mean, covariance in normals.values()]
        y = torch.tensor(list(normals)).repeat_interleave(self.per_class)
        with config.model.loaded(weights.params, weights.buffers):
            head, loss = self.trained_head(config, weights, torch.cat(features), y)
        return head, loss


def normals_of(replies: list[MomentsReply]) -> dict[int, tuple[Tensor, Tensor]]:
    """Return the mean and the covariance of each class's features, over the samples of all clients.

    For N feature vectors z of a class, the mean is μ = (1/N) Σ z, and the covariance is (Σ z zᵀ − N μ μᵀ) / (N − 1).
    With a single sample, the covariance is 0.

    Args:
        replies: The replies of the clients.

    Returns:
        A mapping from each class to its mean, shape (d,), and its covariance, shape (d, d), both float64.
    """
    normals: dict[int, tuple[Tensor, Tensor]] = {}
    for label in range(len(replies[0].samples)) if replies else ():
        n = sum(float(reply.samples[label]) for reply in replies)
        if n > 0:
            mean = torch.stack([reply.first[label].double() for reply in replies]).sum(dim=0) / n
            second = torch.stack([reply.second[label].double() for reply in replies]).sum(dim=0)
            normals[label] = mean, (second - n * torch.outer(mean, mean)) / max(n - 1, 1)
    return normals


def drawn(mean: Tensor, covariance: Tensor, number: int, generator: np.random.Generator) -> Tensor:
    """Draw ``number`` vectors from a normal distribution, shape (number, d), float32.

    Negative eigenvalues of the covariance, which rounding can cause, are replaced by 0.
    """
    values, vectors = torch.linalg.eigh((covariance + covariance.T) / 2)
    noise = torch.from_numpy(generator.standard_normal((number, len(mean))))
    result: Tensor = (mean + noise @ (vectors * values.clamp(min=0).sqrt()).T).float()
    return result
