"""A method with larger weights for clients with a high loss. In a spec: method = "by_loss:ByLoss"."""

import numpy as np

import fedstrata as fs


class LossTimesSize(fs.MeanBySize):
    """FedAvg's averaging weights, multiplied by a power of each client's training loss."""

    power: float = 1.0

    def weigh(self, selection, returned, replies):
        """Return the averaging weights a_k, which are proportional to n_k loss_k^power."""
        losses = np.array([reply.loss for reply in replies])
        a = super().weigh(selection, returned, replies) * losses**self.power
        return a / max(a.sum(), 1e-12)


class ByLoss(fs.Recipe):
    """FedAvg with larger averaging weights for clients with a high training loss."""

    power: float = 1.0

    def parts(self):
        """Return the part that differs from FedAvg: the aggregator."""
        return {"aggregator": LossTimesSize(power=self.power)}
