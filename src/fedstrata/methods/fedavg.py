"""The method FedAvg (McMahan et al. 2017)."""

from __future__ import annotations

from fedstrata.methods.recipe import Recipe


class FedAvg(Recipe):
    """Averages the models of randomly drawn clients. A model's weight is its client's number of samples."""

    paper = "McMahan et al. 2017, Communication-Efficient Learning of Deep Networks (AISTATS)"
