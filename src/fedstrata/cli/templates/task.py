"""A task: what a model learns. This one predicts a quantile, such as how long 9 of 10 patients stay at most. Try it;
here, the numbers are the digits 0 to 9:

fedstrata run --set task={module}:Quantile --set task.level=0.9 --set partition=iid --set training.lr=0.01
"""

import torch
from pydantic import Field

import fedstrata as fs


class Quantile(fs.Regression):
    """The prediction of a quantile of each target; metrics and predictions are those of a regression.

    Args:
        level: The share of the targets that should lie below the prediction.
    """

    level: float = Field(default=0.5, gt=0, lt=1)  # a setting: --set task.level=0.9

    def losses(self, outputs, targets):
        """Return the loss of each sample and its weight, both (B,). A batch's loss is Σ losses / Σ weights."""
        above = targets - self.predictions(outputs)["values"]
        losses = torch.maximum(self.level * above, (self.level - 1) * above).mean(dim=1)
        return losses, torch.ones_like(losses)
