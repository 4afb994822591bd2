"""A method: clients with a high training loss count more. method = "by_loss:ByLoss"."""

import numpy as np

import fedstrata as fs


class LossTimesSize(fs.MeanBySize):
    """FedAvg's weights, multiplied by a power of each client's training loss."""

    power: float = 1.0

    def weigh(self, selection, returned, replies):
        """Return a_k = n_k loss_k^power, divided by their sum."""
        losses = np.array([reply.loss for reply in replies])
        a = super().weigh(selection, returned, replies) * losses**self.power
        return a / max(a.sum(), 1e-12)


class ByLoss(fs.Recipe):
    """FedAvg that gives clients with a high training loss a larger weight."""

    power: float = 1.0

    def parts(self):
        """Return the choices that differ from FedAvg's."""
        return {"aggregator": LossTimesSize(power=self.power)}
