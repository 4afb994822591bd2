"""A task, which defines what a model learns. This task predicts a quantile, such as the number of days after which 9 of
10 patients have left the hospital. Try it with the digits 0 to 9 as targets:

fedstrata run --set task={module}:Quantile --set task.level=0.9 --set partition=iid --set training.lr=0.01
"""

import torch
from pydantic import Field

import fedstrata as fs


class Quantile(fs.Regression):
    """Predict a quantile of the target. The metrics and predictions are the same as for regression.

    Args:
        level: The fraction of the targets that should lie below the prediction.
    """

    level: float = Field(default=0.5, gt=0, lt=1)  # a setting; set it with --set task.level=0.9

    def losses(self, outputs, targets):
        """Return the losses and weights of all samples, both of shape (B,). A batch's loss is Σ losses / Σ weights."""
        above = targets - self.predictions(outputs)["values"]
        losses = torch.maximum(self.level * above, (self.level - 1) * above).mean(dim=1)
        return losses, torch.ones_like(losses)
