"""A method: FedNova. method = "fednova:FedNova"."""

import numpy as np

import fedstrata as fs


class Normalised(fs.MeanBySize):
    """Every client's update divided by its number of steps, and multiplied by the mean number of them."""

    def weigh(self, selection, returned, replies):
        """a_k = p_k τ_eff / τ_k with p_k = n_k / Σ n and τ_eff = Σ p_k τ_k (Eq. 6, for plain SGD)."""
        p = super().weigh(selection, returned, replies)
        steps = np.maximum([reply.steps for reply in replies], 1)
        return p * (p @ steps) / steps


class FedNova(fs.Recipe):
    """FedAvg whose clients may take different numbers of steps without pulling the model their way."""

    paper = "Wang et al. 2020, Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization"

    def parts(self):
        """FedAvg's choices, except the aggregator."""
        return {"aggregator": Normalised()}
