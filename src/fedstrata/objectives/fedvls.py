"""FedVLS's vacant-class distillation and logit suppression (Guo et al. 2025)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import NonNegativeFloat
from torch import Tensor

from fedstrata.federation.messages import Params
from fedstrata.models.model import Model
from fedstrata.objectives.base import Batch, Context
from fedstrata.objectives.calibrated import log_prior
from fedstrata.objectives.distillation import Distilled, divergence


def suppression(logits: Tensor, labels: Tensor, shares: Tensor) -> Tensor:
    """Return the logit suppression of a batch as a scalar.

    The suppression is Σ_c p(c) log( mean of e^{z_c} over the samples of other classes ).

    If all samples of the batch belong to class c, the term of class c is 0.

    Args:
        logits: The logits z, shape (B, C).
        labels: The labels, shape (B,).
        shares: The share p(c) of each class c among the client's samples, shape (C,).

    >>> z = torch.tensor([[5.0, 1.0], [2.0, 7.0], [4.0, 9.0]])
    >>> suppression(z, torch.tensor([0, 1, 1]), torch.tensor([0.25, 0.75]))  # ¼ log((e² + e⁴) / 2) + ¾ · 1
    tensor(1.6084)
    """
    other = ~F.one_hot(labels, logits.shape[1]).bool()
    counts = other.sum(dim=0)
    present = counts > 0
    sums = torch.logsumexp(logits.masked_fill(~other, -1e9)[:, present], dim=0)
    return (shares[present] * (sums - counts[present].log())).sum()


class Vacant(Distilled):
    """FedVLS's loss for clients that lack some classes (*vacant* classes).

    The loss is L_cal + β L_sup + λ L_dis.

    - L_cal is the cross-entropy of z_c + log p(c), where p(c) is the share of class c among the client's samples. L_cal
      is the loss of balanced softmax, which leaves out vacant classes.

    - L_sup = Σ_c p(c) log m_c is the loss of logit suppression, where m_c is the mean of e^{z_c} over the batch's
      samples of other classes. The suppression lowers a sample's logits for all classes except its own.

    - L_dis = KL(p̂ ‖ q̂) is the vacant-class distillation. The distillation compares two softmaxes over the vacant
      classes only: p̂ is computed from the global model's logits, and q̂ from the client's logits.

    L_dis is 0 if a client has at most one vacant class. Without dropout layers and BatchNorm, a client with one class
    learns nothing: the gradients of all three terms are zero at the global model. In the authors' code, the mean in
    L_sup includes samples of class c, and vacant classes have the prior 10⁻⁹ in L_cal.

    Args:
        distillation: Weight λ of the vacant-class distillation, whose teacher is the global model.
        suppression: Weight β of the penalty on logits of all classes except the true class.
    """

    distillation: NonNegativeFloat = 1.0
    suppression: NonNegativeFloat = 0.005

    def client_init(self, model: Model, context: Context) -> Context:
        """Put the teacher, the log prior, the class shares and the vacant classes into ``derived``."""
        counts = context.counts
        return (
            super()
            .client_init(model, context)
            .deriving(
                log_prior=log_prior(counts),
                shares=counts / counts.sum().clamp(min=1),
                vacant=torch.nonzero(counts == 0).flatten(),
            )
        )

    def loss(self, model: Model, params: Params, batch: Batch, context: Context) -> Tensor:
        """Return FedVLS's loss L_cal + β L_sup + λ L_dis of a batch as a scalar."""
        logits, derived = model(params, batch.x), context.derived
        loss = F.cross_entropy(logits + derived["log_prior"], batch.y)
        if self.suppression:
            loss = loss + self.suppression * suppression(logits, batch.y, derived["shares"])
        vacant: Tensor = derived["vacant"]
        if self.distillation and len(vacant) > 1:
            teacher = self.teacher_logits(model, batch, context)
            loss = loss + self.distillation * divergence(teacher[:, vacant], logits[:, vacant]).mean()
        return loss
