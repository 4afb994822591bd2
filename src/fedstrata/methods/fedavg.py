"""FedAvg (McMahan et al. 2017)."""

from __future__ import annotations

from fedstrata.methods.base import Recipe


class FedAvg(Recipe):
    """Averaging of the models of uniformly drawn clients, which train on all their data; weights are sample counts."""

    paper = "McMahan et al. 2017, Communication-Efficient Learning of Deep Networks (AISTATS)"
