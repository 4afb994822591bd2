"""Power-of-choice (Cho et al. 2020)."""

from __future__ import annotations

from typing import ClassVar

from pydantic import PositiveInt

from fedstrata.aggregation.base import Aggregator, Mean
from fedstrata.methods.base import Recipe
from fedstrata.sampling.base import ClientSampler
from fedstrata.sampling.power_of_choice import PowerOfChoice as Sampler


class PowerOfChoice(Recipe):
    """FedAvg with those of d candidates for whom the global model is worst; their plain mean.

    Args:
        candidates: d; twice the clients of a round (or all, where there are fewer) unless given.
    """

    paper: ClassVar[str] = "Cho et al. 2020, Client Selection in Federated Learning (arXiv:2010.01243)"

    candidates: PositiveInt | None = None

    def default_client_sampler(self) -> ClientSampler:
        """The worst of the candidates."""
        return Sampler(candidates=self.candidates)

    def default_aggregator(self) -> Aggregator:
        """All alike: size decided who is a candidate."""
        return Mean()
