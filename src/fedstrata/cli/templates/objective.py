"""An objective, which is the loss that a client minimises. Try it:

fedstrata run --set method.objective={module}:Smoothed
"""

import torch.nn.functional as F
from pydantic import Field

import fedstrata as fs


class Smoothed(fs.Objective):
    """Cross-entropy with smoothed labels.

    Args:
        smoothing: The part of the target class's probability that is spread equally over all classes.
    """

    smoothing: float = Field(default=0.1, ge=0, lt=1)  # a setting; set it with --set method.objective.smoothing=0.2

    def loss(self, model, params, batch, context):
        """Return the mean loss over a batch.

        The loss must depend only on the arguments. The context also has context.start (the global parameters) and
        context.counts (the client's number of samples of each class).
        """
        return F.cross_entropy(model(params, batch.x), batch.y, label_smoothing=self.smoothing)
