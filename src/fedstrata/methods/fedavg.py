"""FedAvg (McMahan et al. 2017)."""

from __future__ import annotations

from fedstrata.methods.base import Recipe


class FedAvg(Recipe):
    """Clients are drawn uniformly and train on all their data; their models are averaged, weighted by sample counts."""

    paper = "McMahan et al. 2017, Communication-Efficient Learning of Deep Networks (AISTATS)"
