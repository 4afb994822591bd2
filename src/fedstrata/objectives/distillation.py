"""Distillation objectives, which compare a client's logits with the logits of the global model (the teacher)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedstrata.federation.messages import Extra, Weights
from fedstrata.models.model import Model, evaluating
from fedstrata.objectives.base import Batch, Batches, Context, Objective


class Distilled(Objective):
    """Base class of objectives whose teacher is the global model w_t in evaluation mode."""

    def client_prepare(self, model: Model, weights: Weights, batches: Batches, received: Extra) -> Extra:
        """Add the received buffers to the server's message.

        The teacher needs these buffers, because training changes the model's buffers.
        """
        return {**received, "buffers": weights.buffers}

    def client_init(self, model: Model, context: Context) -> Context:
        """Put the teacher's parameters and buffers into ``derived``."""
        return context.deriving(teacher={**context.start, **context.received["buffers"]})

    def teacher_logits(self, model: Model, batch: Batch, context: Context) -> Tensor:
        """Return the logits that the teacher computes for a batch, shape (B, C), without gradients."""
        with torch.no_grad(), evaluating(model):
            return model(context.derived["teacher"], batch.x)


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """Return the Kullback–Leibler divergence of the student from the teacher for every sample, shape (B,).

    The divergence is Σ_c p_c log(p_c / q_c), with the teacher's p = softmax(z_t) and the student's q = softmax(z).

    Args:
        teacher: The teacher's logits z_t, shape (B, C).
        student: The logits z of the student (the model in training), shape (B, C).

    >>> divergence(torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 1.0]]).log())  # ½ log(½ / ¾) + ½ log(½ / ¼)
    tensor([0.1438])
    """
    q, p = F.log_softmax(student, dim=1), F.log_softmax(teacher, dim=1)
    return F.kl_div(q, p, reduction="none", log_target=True).sum(dim=1)
