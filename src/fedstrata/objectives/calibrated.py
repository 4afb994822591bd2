"""Compute cross-entropy on calibrated logits, to compensate for label skew.

The logit z of each class becomes scale · z + shift. FedRS (Li and Zhan 2021) defines the scale. FedLC (Zhang et al.
2022) and balanced softmax (Ren et al. 2020; Chen and Chao 2022) define the shift. PyTorch's cross-entropy of the new
logits equals the loss in the papers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat
from torch import Tensor
from typing_extensions import override

from fedstrata.federation.messages import FitReply, Params
from fedstrata.federation.secure.fit import Bounds, Count, Summands, Sums
from fedstrata.models.model import Model
from fedstrata.objectives.base import Batch, Context, Objective, PerSample

EXCLUDED = -1e9
"""The shift that excludes a class from the softmax. The shift is finite, because infinity could make gradients NaN.
"""


def log_prior(counts: Tensor, epsilon: float = 0.0) -> Tensor:
    """Return the logarithm of each class's smoothed prior (ReBaFL, Eq. 10), or ``EXCLUDED`` if the prior is 0.

    The prior is p̂(c) = (1 − ε) n(c) / n + ε / C for C classes.

    Args:
        counts: The number n(c) of samples of each class c, shape (C,). The sum of these numbers is n.
        epsilon: The smoothing ε in [0, 1]. With 0, the prior of a class is its share of the samples. With 1, the prior
            is uniform.

    Returns:
        The logarithm of the prior of each class, shape (C,).

    >>> log_prior(torch.tensor([3.0, 1.0, 0.0]), 0.4).exp()
    tensor([0.5833, 0.2833, 0.1333])
    """
    share = counts / counts.sum().clamp(min=torch.finfo(counts.dtype).tiny)
    prior = (1 - epsilon) * share + epsilon / len(counts)
    # Where the prior is 0, compute log 1 instead of log 0. The value is not used, but log 0 would make the gradient
    # NaN.
    return torch.where(prior > 0, torch.where(prior > 0, prior, 1.0).log(), EXCLUDED)


def idle_clients(replies: Sequence[FitReply]) -> dict[str, Any]:
    """Count the clients that learn nothing, because their softmax has only one class.

    The loss of such a client is constant, and its gradients are exactly 0. Clients that took no step are not counted.
    """
    trained = [reply for reply in replies if reply.trained]
    return {"idle_clients": sum(map(_idle, trained))} if trained else {}


def _idle(reply: FitReply) -> bool:
    return reply.trained and reply.loss == 0


class CountsIdle(Objective):
    """An objective with which the models of some clients may not change; see ``idle_clients``."""

    needs_replies = ""

    @property
    def counts_idle(self) -> bool:
        """Whether the objective counts clients that learn nothing."""
        return True

    def metrics(self, replies: Sequence[FitReply]) -> dict[str, Any]:
        """Return the number of clients that learn nothing; see ``idle_clients``."""
        return idle_clients(replies) if self.counts_idle else {}

    @override
    def summands(self, bounds: Bounds) -> Summands:
        return {"idle": Count(_idle, 1)} if self.counts_idle else {}

    @override
    def metrics_of_sums(self, sums: Sums) -> dict[str, Any]:
        return {"idle_clients": sums.count("idle")} if self.counts_idle and sums.count("seen") else {}


Missing = Literal["excluded", "one"]


class Calibrated(PerSample):
    """Cross-entropy of the logits ``scale * z + shift``. Subclasses compute scale and shift from class counts."""

    @abstractmethod
    def calibration(self, counts: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the scale (None means 1) and the shift (None means 0) of every class, each of shape (C,).

        Args:
            counts: The number n_k(c) of training samples of each class c at client k, shape (C,), float32.
        """

    def client_init(self, model: Model, context: Context) -> Context:
        """Compute the scale and the shift, which are constant during training, and put them into ``derived``."""
        scale, shift = self.calibration(context.counts)
        return context.deriving(scale=scale, shift=shift)

    def losses(self, model: Model, params: Params, batch: Batch, context: Context) -> Tensor:
        """Return the cross-entropy of every sample, −log softmax(scale · z + shift)[y], shape (B,)."""
        scale, shift = context.derived["scale"], context.derived["shift"]
        logits = model(params, batch.x)
        logits = logits if scale is None else logits * scale
        logits = logits if shift is None else logits + shift
        return F.cross_entropy(logits, batch.y, reduction="none")


class Restricted(Calibrated):
    """Restricted softmax: logits of classes that the client lacks are multiplied by α.

    Thus, local training changes the head's parameters less for classes that the client lacks.

    Args:
        alpha: Factor α for the logits of classes that the client lacks. With 1, training is as in FedAvg.
    """

    alpha: float = Field(default=0.5, ge=0, le=1)

    def calibration(self, counts: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the scale (α for classes that the client lacks, otherwise 1), and None as the shift."""
        return torch.where(counts > 0, 1.0, self.alpha), None


class LogitMargins(CountsIdle, Calibrated):
    """Cross-entropy of calibrated logits, with larger margins for classes that are rarer at the client.

    The logit z_c of class c becomes z_c − τ n_k(c)^(−1/4), where n_k(c) is the client's number of samples of class c.
    In this formula, the margin of a class that the client lacks is infinite. By default, classes with an infinite
    margin are excluded from the softmax, as in balanced softmax. A client with only one class then learns nothing
    (``idle_clients``).

    Args:
        tau: Factor τ that multiplies all margins. With 0, logits are unchanged.
        missing: How to treat classes that the client lacks: leave them out of the softmax (``excluded``), or assume one
            sample of each (``one``).
    """

    tau: NonNegativeFloat = 1.0
    missing: Missing = "excluded"

    def calibration(self, counts: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return None as the scale, and the negated margins as the shift."""
        margins = self.tau * counts.clamp(min=1) ** -0.25
        return None, torch.where(counts > 0, -margins, EXCLUDED) if self.missing == "excluded" else -margins


class Balanced(CountsIdle, Calibrated):
    """Balanced softmax: the logarithm of each class's prior is added to the class's logit (ReBaFL, Eq. 8).

    The prior of a class is its share of the client's samples. Classes with prior 0 are excluded from the softmax.
    Clients with only one class learn nothing, and are counted by the metric ``idle_clients``.
    """

    def calibration(self, counts: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return None as the scale, and the logarithm of the prior as the shift."""
        return None, log_prior(counts)
