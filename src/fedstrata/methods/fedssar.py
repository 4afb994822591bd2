"""FedSSAR (Lu et al. 2023): clients with similar parameters form a stratum, and the loss has a proximal term."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt
from typing_extensions import override

from fedstrata.aggregation.base import HorvitzThompson
from fedstrata.methods.recipe import Parts, Recipe
from fedstrata.objectives.fedprox import Proximal
from fedstrata.sampling.fedssar import Features, FedSSARSampler


class FedSSAR(Recipe):
    """FedProx with stratified client sampling: clients with similar parameters form a stratum (OPTICS clustering).

    More clients are drawn from a larger stratum. Client k minimises F_k(w) + (α/2) ‖w − w_t‖², where F_k is its loss
    and w_t is the global model. The server averages the models with weights proportional to sample counts.

    Args:
        alpha: Strength of the proximal term, α.
        aggregation: Weights with which the clients' models are averaged. ``horvitz-thompson``: unbiased weights.
            Default: the paper's biased weights, which are proportional to sample counts.
    """

    paper = "Lu et al. 2023, Federated learning based on stratified sampling and regularization (Complex Intell. Syst.)"
    renamed: ClassVar[Mapping[str, str]] = {"alpha": "mu"}

    min_samples: int = Field(default=2, ge=2)
    xi: float = Field(default=0.1, gt=0, lt=1)
    features: Features = "parameters"
    coordinates: int = Field(default=2048, ge=0)
    optics_max: PositiveInt = 2000
    alpha: NonNegativeFloat = 0.01
    aggregation: Literal["horvitz-thompson"] | None = None

    @override
    def parts(self) -> Parts:
        sampler = FedSSARSampler(
            min_samples=self.min_samples,
            xi=self.xi,
            features=self.features,
            coordinates=self.coordinates,
            optics_max=self.optics_max,
        )
        parts: Parts = {"client_sampler": sampler, "objective": Proximal(mu=self.alpha)}
        return {**parts, "aggregator": HorvitzThompson()} if self.aggregation else parts
