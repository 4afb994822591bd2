"""An objective: focal loss. method.objective = "focal:Focal"."""

import torch.nn.functional as F
from pydantic import NonNegativeFloat

import fedstrata as fs


class Focal(fs.Objective):
    """Cross-entropy that counts well classified samples less (Lin et al. 2017, Eq. 4).

    Args:
        gamma: How much less; 0 is cross-entropy.
    """

    gamma: NonNegativeFloat = 2.0

    def loss(self, model, params, batch, context):
        """The mean of (1 − p)^γ · (−log p) over the batch, p being the probability of the right class."""
        surprise = F.cross_entropy(model(params, batch.x), batch.y, reduction="none")
        return ((1 - (-surprise).exp()) ** self.gamma * surprise).mean()
