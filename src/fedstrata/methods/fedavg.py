"""FedAvg (McMahan et al. 2017)."""

from __future__ import annotations

from fedstrata.methods.base import Recipe


class FedAvg(Recipe):
    """Uniform clients, all their data, cross-entropy, and the mean by size over the clients that returned."""

    paper = "McMahan et al. 2017, Communication-Efficient Learning of Deep Networks (AISTATS)"
