"""Models as pure functions of their parameters, a small zoo of them, and BatchNorm over the federation."""

from __future__ import annotations

from fedstrata.models.batchnorm import (
    FederatedBatchNorm1d,
    FederatedBatchNorm2d,
    GroupBrokenError,
    LocalGroup,
    ReduceGroup,
    federate_batchnorm,
    federated,
    has_batchnorm,
)
from fedstrata.models.model import Model, Params
from fedstrata.models.zoo import CNN, CNN64, MLP, MODELS, Custom, ModelSpec, Tabular, make_model

__all__ = [
    "CNN",
    "CNN64",
    "MLP",
    "MODELS",
    "Custom",
    "FederatedBatchNorm1d",
    "FederatedBatchNorm2d",
    "GroupBrokenError",
    "LocalGroup",
    "Model",
    "ModelSpec",
    "Params",
    "ReduceGroup",
    "Tabular",
    "federate_batchnorm",
    "federated",
    "has_batchnorm",
    "make_model",
]
