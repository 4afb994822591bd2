"""Power-of-choice (Cho et al. 2020)."""

from __future__ import annotations

from fedstrata.aggregation.base import Mean
from fedstrata.methods.base import Recipe, setting_of
from fedstrata.sampling import power_of_choice


class PowerOfChoice(Recipe):
    """FedAvg with those of d candidates for whom the global model is worst; their plain mean."""

    paper = "Cho et al. 2020, Client Selection in Federated Learning (arXiv:2010.01243)"

    client_sampler = power_of_choice.PowerOfChoice()
    candidates: int | None = setting_of("client_sampler")

    # All alike: size decided who is a candidate.
    aggregator = Mean()
