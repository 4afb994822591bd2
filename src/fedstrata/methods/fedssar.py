"""FedSSAR (Lu et al. 2023): stratified sampling by the clients' parameters, with a proximal term."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from fedstrata.methods.base import Recipe
from fedstrata.objectives.base import Objective
from fedstrata.objectives.fedprox import Proximal
from fedstrata.sampling.base import ClientSampler
from fedstrata.sampling.fedssar import FedSSARSampler


class FedSSAR(Recipe):
    """OPTICS clusters of the clients' parameters, each sampled by its size; F_k(w) + (α/2) ‖w − w_t‖²; mean by size.

    Args:
        alpha: α, the strength of the proximal term.
        min_samples: OPTICS: clients that make a neighbourhood dense.
        xi: OPTICS: the relative drop of reachability at which a cluster begins.
        features: Cluster the last ``parameters`` (the paper) or the last ``updates``.
        coordinates: The length of the sketch that is kept of a client's parameters; 0 for all of them.
        optics_max: Above so many clients a random subset is clustered.
    """

    paper: ClassVar[str] = "Lu et al. 2023, Federated learning based on stratified sampling and regularization"

    alpha: NonNegativeFloat = 0.01
    min_samples: int = Field(default=2, ge=2)
    xi: float = Field(default=0.1, gt=0, lt=1)
    features: Literal["parameters", "updates"] = "parameters"
    coordinates: int = Field(default=2048, ge=0)
    optics_max: PositiveInt = 2000

    def default_client_sampler(self) -> ClientSampler:
        """Clusters of similar clients."""
        return FedSSARSampler(
            min_samples=self.min_samples,
            xi=self.xi,
            features=self.features,
            coordinates=self.coordinates,
            optics_max=self.optics_max,
        )

    def default_objective(self) -> Objective:
        """Cross-entropy with the proximal term."""
        return Proximal(mu=self.alpha)
