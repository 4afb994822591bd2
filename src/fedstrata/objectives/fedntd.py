"""FedNTD's not-true distillation (Lee et al. 2022)."""

from __future__ import annotations

import torch.nn.functional as F
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from fedstrata.base.errors import SpecError
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.messages import Params
from fedstrata.models.model import Model
from fedstrata.objectives.base import Batch, Context, PerSample
from fedstrata.objectives.calibrated import EXCLUDED
from fedstrata.objectives.distillation import Distilled, divergence


class NotTrue(PerSample, Distilled):
    """Cross-entropy plus a distillation loss over all classes except the true class, with the global model as teacher.

    The loss is cross-entropy + β τ² KL(p̃ ‖ q̃). The softmaxes p̃ (of the global model) and q̃ (of the trained model)
    are over all classes except the true class, with logits divided by τ. As in the authors' code, the factor τ² keeps
    the size of the gradient similar for all τ.

    Args:
        beta: Weight β of the distillation.
        temperature: Temperature τ of the softmax in the distillation.
    """

    beta: NonNegativeFloat = 1.0
    temperature: PositiveFloat = 1.0

    def check(self, config: FederationConfig) -> None:
        """Raise ``SpecError`` for fewer than 3 classes: without the true class, the softmax would be over one class."""
        if config.outputs < 3:
            problem = f"needs at least 3 classes, but the data have {config.outputs}. Use "
            raise SpecError(
                "method.objective", problem + "fedavg or fedprox, or data with 3 or more classes.", self.name
            )

    def losses(self, model: Model, params: Params, batch: Batch, context: Context) -> Tensor:
        """Return the cross-entropy plus β τ² times the divergence for every sample, shape (B,)."""
        logits = model(params, batch.x)
        plain = F.cross_entropy(logits, batch.y, reduction="none")
        if not self.beta:
            return plain
        true = F.one_hot(batch.y, logits.shape[1]).bool()
        teacher, student = (
            (z / self.temperature).masked_fill(true, EXCLUDED)
            for z in (self.teacher_logits(model, batch, context), logits)
        )
        return plain + self.beta * self.temperature**2 * divergence(teacher, student)
