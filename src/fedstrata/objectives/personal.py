"""Objectives of personal models: FedPer (Arivazhagan et al. 2019) and FedRep (Collins et al. 2021)."""

from __future__ import annotations

from pydantic import PositiveInt

from fedstrata.base.errors import SpecError
from fedstrata.federation.engine import FederationConfig
from fedstrata.models.model import Model
from fedstrata.objectives.base import CrossEntropy, Stage
from fedstrata.objectives.fedbabu import BodyOnly, HeadOnly


class PersonalLayers(CrossEntropy):
    """Cross-entropy of a model with personal layers, which each client keeps; the server averages the other layers.

    Clients send the values of the personal layers that they received, and their bytes are counted.

    Args:
        layers: Names of the modules whose parameters each client keeps, such as ``["head", "body.3"]``. With an empty
            list, all layers are averaged, as in FedAvg. Default: the head.
    """

    layers: tuple[str, ...] | None = None

    def check(self, config: FederationConfig) -> None:
        """Require that each name has parameters, and that some layer is left to average."""
        names = list(config.model.params())
        for layer in self.layers or ():
            if not any(_inside(name, layer) for name in names):
                known = ", ".join(dict.fromkeys(name.rpartition(".")[0] or name for name in names))
                raise SpecError("method.layers", f"{layer!r} has no trained parameters. Use {known}.", self.layers)
        if all(self.stays(name, config.model) for name in names):
            if self.layers is None:
                problem = "the model has only a head, which would stay at the clients. Use a deeper model."
                raise SpecError("model", problem, config.model.head_name)
            problem = "all layers of the model would stay at the clients. Leave a layer for the server to average."
            raise SpecError("method.layers", problem, self.layers)

    def stays(self, name: str, model: Model) -> bool:
        """Return True for parameters of the personal layers."""
        if self.layers is None:
            return name in model.head_names
        return any(_inside(name, layer) for layer in self.layers)


class HeadThenBody(BodyOnly):
    """Cross-entropy that trains first the client's own head, and then the body, which the server averages.

    The body is frozen while the head is trained, and the head is frozen while the body is trained. Each client keeps
    its head, and sends the head that it received.

    Args:
        head_epochs: Number of epochs in which the client trains its head. ``training`` gives the epochs of the body.
    """

    head_epochs: PositiveInt = 10

    def stays(self, name: str, model: Model) -> bool:
        """Return True for parameters of the head."""
        return name in model.head_names

    def first_stage(self) -> Stage | None:
        """Return the training of the head."""
        return Stage(HeadOnly(), self.head_epochs)


def _inside(name: str, layer: str) -> bool:
    """Return True if a parameter is the named one, or belongs to the named module."""
    return name == layer or name.startswith(f"{layer}.")
