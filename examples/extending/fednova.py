"""The method FedNova. In a spec: method = "fednova:FedNova"."""

import numpy as np

import fedstrata as fs


class Normalised(fs.MeanBySize):
    """Divides the update of each client by its number of steps, and multiplies it by the mean number of steps."""

    def weigh(self, selection, returned, replies):
        """Return a_k = p_k τ_eff / τ_k with p_k = n_k / Σ n and τ_eff = Σ p_k τ_k (Eq. 6). Client k took τ_k steps."""
        p = super().weigh(selection, returned, replies)
        steps = np.maximum([reply.steps for reply in replies], 1)
        return p * (p @ steps) / steps


class FedNova(fs.Recipe):
    """FedAvg in which clients that take more steps do not have more influence on the model."""

    paper = "Wang et al. 2020, Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization"

    def parts(self):
        """Return the part that differs from FedAvg: the aggregator."""
        return {"aggregator": Normalised()}
