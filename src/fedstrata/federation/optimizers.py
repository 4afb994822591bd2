"""The optimisers of local training, which a spec chooses with ``training.optimizer``."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, PositiveFloat

from fedstrata.base.config import FromRegistry, Registry, Setting, build, plain
from fedstrata.base.errors import SpecError
from fedstrata.base.loading import load_object

if TYPE_CHECKING:  # reading settings must not import PyTorch
    from torch import Tensor
    from torch.optim import Optimizer

Beta = Annotated[float, Field(ge=0, lt=1)]

ELSEWHERE = ("lr", "momentum", "weight_decay")
"""The optimiser arguments that are settings of ``training`` instead of keys of ``training.optimizer``."""


class LocalOptimizer(Setting):
    """Base class of the optimisers of local training."""

    is_sgd: ClassVar[bool] = False
    """Whether the optimiser is SGD, whose steps are implemented in ``fedstrata.clients.training.sgd``."""

    @property
    def label(self) -> str:
        """The name of the optimiser in a spec."""
        return self.name

    @abstractmethod
    def find(self) -> tuple[type[Optimizer], Mapping[str, Any]]:
        """Return PyTorch's optimiser class and its arguments, except the arguments in ``ELSEWHERE``."""

    def make(self, params: Sequence[Tensor], lr: float, momentum: float, weight_decay: float) -> Optimizer:
        """Return a new PyTorch optimiser.

        Args:
            params: The parameters, which the optimiser changes in place.
            lr: The learning rate.
            momentum: ``training.momentum``.
            weight_decay: ``training.weight_decay``.

        Raises:
            SpecError: The optimiser rejects an argument.
        """
        cls, arguments = self.find()
        accepted, given = inspect.signature(cls).parameters, {"lr": lr}
        for key, value in (("momentum", momentum), ("weight_decay", weight_decay)):
            if key in accepted:
                given[key] = value
            elif value:
                raise SpecError(
                    f"training.{key}",
                    f"is not an argument of {self.label}. Set the key to 0, or set training.optimizer = 'sgd'.",
                    value,
                )
        try:
            return cls(params, **given, **arguments)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise SpecError(
                "training.optimizer", f"does not accept these arguments: {error}. Correct them.", self.label
            ) from None


class SGD(LocalOptimizer):
    """SGD, with ``training.momentum`` and ``training.weight_decay``."""

    is_sgd = True

    def find(self) -> tuple[type[Optimizer], Mapping[str, Any]]:
        """Return PyTorch's class ``SGD``, whose steps equal the steps of ``fedstrata.clients.training.sgd``."""
        from torch import optim

        return optim.SGD, {}


class AdamW(LocalOptimizer):
    """AdamW (Loshchilov and Hutter 2019).

    The steps equal the steps of ``torch.optim.AdamW``. The setting ``training.momentum`` must be 0.

    Args:
        betas: Decay rates β₁ and β₂ of the running means of the gradient and its square.
        eps: Small number added to the denominator of each step.
    """

    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8

    def find(self) -> tuple[type[Optimizer], Mapping[str, Any]]:
        """Return PyTorch's class ``AdamW`` and its settings."""
        from torch import optim

        return optim.AdamW, {"betas": self.betas, "eps": self.eps}


class OwnOptimizer(LocalOptimizer):
    """A PyTorch optimiser, given by the path of its class.

    Args:
        path: The path ``"module:Class"`` of a subclass of ``torch.optim.Optimizer``, such as ``"torch.optim:RMSprop"``.
        arguments: Further arguments of the class. In a spec, all keys of the table except ``name`` are arguments.
    """

    path: str
    arguments: dict[str, Any] = Field(default_factory=dict)

    @property
    def label(self) -> str:
        """The path ``"module:Class"`` of the optimiser."""
        return self.path

    def to_spec(self) -> dict[str, Any]:
        """Return the settings as a dict for a spec: ``name`` is the path, and the other keys are the arguments."""
        return {"name": self.path, **plain(self.arguments)}

    def find(self) -> tuple[type[Optimizer], Mapping[str, Any]]:
        """Return the optimiser's class and the arguments that the spec sets."""
        return load_object(self.path, "local optimiser"), self.arguments


class _Optimizers(Registry[LocalOptimizer]):
    """The registry of local optimisers. A name may also be the path of a class; see ``OwnOptimizer``."""

    def make(self, name: str, table: Mapping[str, Any]) -> LocalOptimizer:
        """Create the optimiser called ``name`` with the settings in ``table``; see ``Registry.make``."""
        if ":" not in name:
            return super().make(name, table)
        from torch.optim import Optimizer

        cls = load_object(name, self.kind)
        if not inspect.isclass(cls) or not issubclass(cls, Optimizer):
            raise SpecError(
                "name", "is not a subclass of torch.optim.Optimizer. Use the path of such a subclass.", name
            )
        for key in ELSEWHERE:
            if key in table:
                raise SpecError(
                    key,
                    (f"cannot be set in training.optimizer. Set training.{key}, which applies to every optimiser."),
                    table[key],
                )
        return build(OwnOptimizer, {"path": name, "arguments": dict(table)})


OPTIMIZERS = _Optimizers(
    "local optimiser",
    LocalOptimizer,  # type: ignore[type-abstract]
    {"sgd": "fedstrata.federation.optimizers:SGD", "adamw": "fedstrata.federation.optimizers:AdamW"},
)
"""The optimisers of local training that a spec can choose."""

AnyOptimizer = Annotated[LocalOptimizer, FromRegistry(OPTIMIZERS)]
