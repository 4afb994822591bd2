"""FedSSAR (Lu et al. 2023): stratified sampling by the clients' parameters, with a proximal term."""

from __future__ import annotations

from fedstrata.methods.base import Recipe, setting_of
from fedstrata.objectives.fedprox import Proximal
from fedstrata.sampling.fedssar import Features, FedSSARSampler


class FedSSAR(Recipe):
    """OPTICS clusters of the clients' parameters, each sampled by its size; F_k(w) + (α/2) ‖w − w_t‖²; mean by size.

    Args:
        alpha: α, the strength of the proximal term.
    """

    paper = "Lu et al. 2023, Federated learning based on stratified sampling and regularization"

    client_sampler = FedSSARSampler()
    min_samples: int = setting_of("client_sampler")
    xi: float = setting_of("client_sampler")
    features: Features = setting_of("client_sampler")
    coordinates: int = setting_of("client_sampler")
    optics_max: int = setting_of("client_sampler")

    objective = Proximal()
    alpha: float = setting_of("objective", "mu")
