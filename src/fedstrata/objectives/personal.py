"""The objectives of FedPer, FedRep and Ditto, which train personalised models."""

from __future__ import annotations

from pydantic import NonNegativeFloat, PositiveInt

from fedstrata.base.errors import SpecError
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.messages import Params
from fedstrata.models.model import Model
from fedstrata.objectives.base import Context, CrossEntropy, Objective, Stage
from fedstrata.objectives.fedbabu import BodyOnly, HeadOnly


class PersonalLayers(CrossEntropy):
    """Cross-entropy. Each client keeps its personal layers, and the server averages all other layers.

    Clients send back the received values of the personal layers, and these bytes are counted as communication.

    Args:
        layers: Names of modules whose parameters each client keeps, such as ``["head", "body.3"]``. Default: the head.
    """

    layers: tuple[str, ...] | None = None

    def check(self, config: FederationConfig) -> None:
        """Raise ``SpecError`` if a module in ``layers`` has no parameters, or if no layer is left to average."""
        names = list(config.model.params())
        for layer in self.layers or ():
            if not any(_inside(name, layer) for name in names):
                known = ", ".join(dict.fromkeys(name.rpartition(".")[0] or name for name in names))
                problem = f"{layer!r} has no trained parameters. Use names from {known}."
                raise SpecError("method.layers", problem, self.layers)
        if all(self.stays(name, config.model) for name in names):
            if self.layers is None:
                problem = "the model has only a head, which would stay at the clients. Use a deeper model."
                raise SpecError("model", problem, config.model.head_name)
            problem = "all layers of the model would stay at the clients. Remove a name from this list."
            raise SpecError("method.layers", problem, self.layers)

    def stays(self, name: str, model: Model) -> bool:
        """Return True for parameters of the personal layers."""
        if self.layers is None:
            return name in model.head_names
        return any(_inside(name, layer) for layer in self.layers)


class HeadThenBody(BodyOnly):
    """Cross-entropy. Each client first trains its own head, and then the body, which the server averages.

    The body is frozen while the head is trained, and the head is frozen while the body is trained. Each client keeps
    its trained head, and sends back the head that it received.

    Args:
        head_epochs: Number of epochs for the head. The section ``training`` sets the epochs for the body.
    """

    head_epochs: PositiveInt = 10

    def stays(self, name: str, model: Model) -> bool:
        """Return True for parameters of the head."""
        return name in model.head_names

    def first_stage(self) -> Stage | None:
        """Return the stage in which the client trains its head."""
        return Stage(HeadOnly(), self.head_epochs)


class TowardsGlobal(Objective):
    """The loss of a personal model v: F_k(v) + (λ/2) ‖v − w_t‖², where F_k is the task's loss and w_t the global model.

    Args:
        strength: Strength λ of the second term.
    """

    strength: NonNegativeFloat

    def correction(self, params: Params, context: Context) -> Params | None:
        """Return λ (v − w_t), the gradient of the second term of the loss."""
        received = context.received["global"]
        return {name: self.strength * (v.detach() - received[name]) for name, v in params.items()}


class PersonalModel(CrossEntropy):
    """Cross-entropy. Each client also trains a personal model that is pulled towards the global model.

    The personal model v_k minimises F_k(v) + (λ/2) ‖v − w_t‖², where F_k is the client's loss and w_t is the global
    model. The personal model is trained in the same round, for as many epochs or steps as the global model. The global
    model does not depend on personal models. The authors' program alternates between steps of the two models, which
    use the same batches. In this implementation, a client first trains the global model, and then the personal model.

    Args:
        strength: Strength λ of the pull towards the global model.
    """

    strength: NonNegativeFloat = 0.1

    def personal_stage(self) -> Stage | None:
        """Return the stage in which the client trains its personal model."""
        return Stage(TowardsGlobal(strength=self.strength))


def _inside(name: str, layer: str) -> bool:
    """Return True if ``layer`` is the parameter ``name``, or a module that contains this parameter."""
    return name == layer or name.startswith(f"{layer}.")
