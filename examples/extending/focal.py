"""An objective with the focal loss. In a spec: method.objective = "focal:Focal"."""

import torch.nn.functional as F
from pydantic import NonNegativeFloat

import fedstrata as fs


class Focal(fs.Objective):
    """Cross-entropy with smaller weights for samples that are classified well (Lin et al. 2017, Eq. 4).

    Args:
        gamma: Exponent γ of the weight. With 0, all samples have the weight 1.
    """

    gamma: NonNegativeFloat = 2.0

    def loss(self, model, params, batch, context):
        """Return the mean of (1 − p)^γ · (−log p) over the batch. p is the probability of the true class."""
        surprise = F.cross_entropy(model(params, batch.x), batch.y, reduction="none")
        return ((1 - (-surprise).exp()) ** self.gamma * surprise).mean()
