"""The built-in models, and users' own models (a spec names them as ``"module:factory"``).

In all models, pooling precedes ReLU. The reverse order would give the same result, but ReLU would process four times as
many values. Convolutions and images are in channels-last memory format.
"""

from __future__ import annotations

import inspect
import itertools
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import torch
from pydantic import Field, PositiveInt
from torch import nn

from fedstrata.base.config import FromRegistry, Registry, Setting, build, plain
from fedstrata.base.errors import FedstrataError, SpecError
from fedstrata.base.inputs import Inputs, Shape, described
from fedstrata.base.loading import load_object
from fedstrata.base.rng import torch_seeded
from fedstrata.models.memory_format import lay_out
from fedstrata.models.model import Model, forward, require_trainable


class ModelSpec(Setting):
    """The settings of a model. The method ``build`` creates the module."""

    @abstractmethod
    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Create a module that is initialised with PyTorch's global random generator.

        Args:
            shape: The shape of one sample: (channels, height, width) or (features,).
            classes: The number of classes.

        Returns:
            A module that maps (B, *shape) to logits (B, classes).

        Raises:
            SpecError: The model does not accept samples of this shape.
        """


class MLP(ModelSpec):
    """Fully connected layers with ReLU, for flattened samples (McMahan et al. 2017).

    Args:
        hidden: Width of each hidden layer. An empty list gives logistic regression.

    >>> sum(p.numel() for p in MLP().build((1, 28, 28), 10).parameters())
    178110
    """

    hidden: tuple[PositiveInt, ...] = (200, 100)

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Create the module; see ``ModelSpec.build`` for the arguments."""
        features = int(torch.Size(shape).numel())
        return _with_dense([nn.Flatten()], features, self.hidden, classes)


class Tabular(ModelSpec):
    """A small MLP for the rows of a table.

    Args:
        hidden: Width of each hidden layer.
    """

    hidden: tuple[PositiveInt, ...] = (128, 64)

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Create the module; see ``ModelSpec.build`` for the arguments."""
        if len(shape) != 1:
            problem = (
                f"takes vectors (features,), but the samples have shape {shape}. Set model.name = 'mlp', which "
                "flattens samples."
            )
            raise SpecError("model.name", problem, self.name)
        return _with_dense([], shape[0], self.hidden, classes)


class CNN(ModelSpec):
    """ReBaFL's convolutional network: 5x5 convolutions with max-pooling, and a hidden layer.

    Convolutions are padded by 2, so 8x8 images are large enough for three convolutions.

    Args:
        channels: Number of channels of each convolution. For CIFAR-10, ReBaFL uses ``[16, 32, 64]``.
        hidden: Width of the hidden layer, whose outputs are the model's features.
    """

    channels: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (16, 32)
    hidden: PositiveInt = 128

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Create the module; see ``ModelSpec.build`` for the arguments."""
        return _convolutional(self.name, shape, self.channels, (self.hidden,), classes)


class CNN64(ModelSpec):
    """FedSSAR's network for CIFAR: two 5x5 convolutions and two hidden layers."""

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Create the module; see ``ModelSpec.build`` for the arguments."""
        return _convolutional(self.name, shape, (64, 64), (394, 192), classes)


class CustomModel(ModelSpec):
    """A PyTorch module that is passed from Python. fedstrata writes this section itself.

    Args:
        custom: Description of the module.
    """

    custom: str = ""

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Create the module; see ``ModelSpec.build`` for the arguments."""
        problem = (
            "the model of this run was a module from a Python program. Pass the module again: "
            "fedstrata.run(spec, model=…, resume=True)."
        )
        raise SpecError("model.name", problem, "custom")


class Custom(ModelSpec):
    """A user's own module, created by a function or a class (the *factory*).

    Args:
        factory: The path of a function that returns an ``nn.Module``, or of a subclass of ``nn.Module``. In
            ``"mymodels:make"``, ``mymodels`` is an importable Python module, and ``make`` is a function in this module.
            The function is called as ``make(shape, classes, **arguments)``, with the shape of one sample and the number
            of classes. If samples have several inputs, ``shape`` is a mapping from the names of the inputs to their
            shapes. ``Model`` describes which features and head the module has.
        arguments: Further arguments of the factory. In a spec, all keys of ``[model]`` except ``name`` are arguments.
    """

    factory: str
    arguments: dict[str, Any] = Field(default_factory=dict)

    def to_spec(self) -> dict[str, Any]:
        """Return the settings as keys of a spec: ``name`` is the factory, and the other keys are its arguments."""
        return {"name": self.factory, **plain(self.arguments)}

    def build(self, shape: Shape, classes: int) -> nn.Module:
        """Create the module; see ``ModelSpec.build`` for the arguments."""
        factory = load_object(self.factory, "model")
        try:
            inspect.signature(factory).bind(shape, classes, **self.arguments)
        except TypeError as error:
            call = ", ".join(["shape", "classes", *(f"{key}=…" for key in self.arguments)])
            raise SpecError(
                "model.name",
                f"cannot be called as factory({call}): {error}. Change the signature of the function or class.",
                self.factory,
            ) from None
        module = factory(shape, classes, **self.arguments)
        if not isinstance(module, nn.Module):
            problem = f"must return an nn.Module, but returned {type(module).__name__}."
            raise SpecError("model.name", problem, self.factory)
        return module


class _Models(Registry[ModelSpec]):
    """The registry of models, which also accepts the path ``"module:factory"`` of a user's own model."""

    def make(self, name: str, table: Mapping[str, Any]) -> ModelSpec:
        """Create the settings of a built-in model or a user's own model; see ``Registry.make``."""
        factory = load_object(name, "model") if ":" in name else None
        if factory is None or (inspect.isclass(factory) and issubclass(factory, ModelSpec)):
            return super().make(name, table)
        if not callable(factory) or isinstance(factory, nn.Module):
            problem = f"is a {type(factory).__name__}. Give a class derived from ModelSpec or nn.Module, or a function."
            raise SpecError("name", problem, name)
        return build(Custom, {"factory": name, "arguments": dict(table)})


MODELS = _Models(
    "model",
    ModelSpec,  # type: ignore[type-abstract]
    {
        "mlp": "fedstrata.models.zoo:MLP",
        "cnn": "fedstrata.models.zoo:CNN",
        "cnn64": "fedstrata.models.zoo:CNN64",
        "resnet9": "fedstrata.models.resnet:ResNet9",
        "resnet18": "fedstrata.models.resnet:ResNet18",
        "resnet20": "fedstrata.models.resnet:ResNet20",
        "tabular": "fedstrata.models.zoo:Tabular",
        "custom": "fedstrata.models.zoo:CustomModel",
    },
)
"""The models that a spec can name."""


OwnModel = nn.Module | Model | Callable[..., nn.Module]
"""A user's own module, or a class or function that creates the module; see ``own_module``."""

AnyModel = Annotated[ModelSpec, FromRegistry(MODELS, default="mlp")]


Trial = tuple[Inputs, Callable[[torch.Tensor], str]] | None
"""A batch on which a model is tested, and a function that checks the model's outputs.

The function returns an empty string if the outputs have the right shape; otherwise, it returns the right shape as a
string. None stands for a batch of zeros, for which the model must return one logit per class.
"""


def make_model(spec: ModelSpec, shape: Shape, classes: int, seed: int, trial: Trial = None) -> Model:
    """Create the model that ``spec`` describes, with initial values that depend on ``seed``.

    The same arguments give bitwise equal models.

    Args:
        spec: The model's settings.
        shape: The shape of one sample, (channels, height, width) or (features,), or the shape of each input of a
            sample.
        classes: The number of outputs, such as the number of classes.
        seed: The experiment's seed.
        trial: A batch on which the model is tested; see ``Trial``.

    Raises:
        SpecError: The model does not accept the shape, or does not return one logit per class.
    """
    name = spec.to_spec().get("name", type(spec).__name__)
    try:
        with torch_seeded(seed, "model"):
            module = _built(spec, shape, classes, name)
            _try_out(module, name, shape, classes, trial)
    except FedstrataError:
        raise
    except Exception as error:  # a user's own model may raise any exception
        problem = f"cannot be built for samples of shape {shape}: {type(error).__name__}: {error}"
        raise SpecError("model.name", problem, name) from error
    return Model(lay_out(module, shape) if isinstance(spec, Custom) else module)


def _built(spec: ModelSpec, shape: Shape, classes: int, name: str) -> nn.Module:
    if isinstance(spec, Custom):
        return spec.build(shape, classes)
    if isinstance(shape, Mapping):
        problem = f"takes one input, but the samples have {len(shape)} inputs ({', '.join(shape)}). Use your own model."
        raise SpecError("model.name", problem, name)
    return spec.build(shape, classes)


def own_module(model: Any, shape: Shape, classes: int, seed: int) -> nn.Module | Model:
    """Return a user's module. ``model`` is the module itself, its Python class, or a function that returns the module.

    A class or function is called as ``model(shape, classes)`` if it accepts these arguments, otherwise as ``model()``.
    The seed determines the module's initial values, as for built-in models.

    Raises:
        SpecError: ``model`` is neither a module nor a class or function that returns a module.
    """
    if callable(model) and not isinstance(model, (nn.Module, Model)):
        try:
            arguments = inspect.signature(model).bind(shape, classes).args
        except (TypeError, ValueError):
            arguments = ()
        with torch_seeded(seed, "model"):
            model = model(*arguments)
    if not isinstance(model, (nn.Module, Model)):
        problem = "must be an nn.Module, a fedstrata Model, or a class or function that creates one"
        raise SpecError("model", f"{problem}. To use a built-in model, set its name in the spec.", model)
    return model


def _try_out(module: nn.Module, name: str, shape: Shape, classes: int, trial: Trial) -> None:
    """Run a forward pass on a sample. Raise ``SpecError`` if the module is unsuitable."""
    require_trainable(module)
    if trial is None:
        # Without samples, a model with several inputs is not tested, because the dtypes of its inputs are unknown. A
        # single input is assumed to be float32.
        if isinstance(shape, Mapping):
            return
        trial = torch.zeros(1, *shape), lambda logits: "" if logits.shape == (1, classes) else f"(B, {classes})"
    x, form_of = trial
    try:
        with torch.no_grad():
            logits = forward(module.eval(), x)
    except Exception as error:  # a user's own module may raise any exception
        raise SpecError("model.name", f"fails on a batch of shape {described(shape)}: {error}", name) from error
    if not isinstance(logits, torch.Tensor) or form_of(logits):
        form = form_of(logits if isinstance(logits, torch.Tensor) else torch.empty(0))
        given = f"a tensor {tuple(logits.shape)}" if isinstance(logits, torch.Tensor) else type(logits).__name__
        problem = f"returned {given} for a batch of shape {described(shape)}. Return logits of shape {form}."
        raise SpecError("model.name", problem, name)


class Classifier(nn.Sequential):
    """A module with two parts: layers that compute features, and a head that computes logits.

    Args:
        layers: The layers that map inputs (B, …) to features (B, features).
        head: The module that maps features to logits (B, classes).
    """

    def __init__(self, *layers: nn.Module, head: nn.Module) -> None:
        super().__init__(OrderedDict(body=nn.Sequential(*layers), head=head))


def check_image(name: str, shape: tuple[int, ...], side: int) -> None:
    """Check that samples are images of at least ``side`` × ``side`` pixels.

    Raises:
        SpecError: The samples are not images, or are too small. The message suggests another model.
    """
    if len(shape) != 3:
        problem = f"takes images (channels, height, width), but the samples have shape {shape}. Set model.name = 'mlp'."
        raise SpecError("model.name", problem, name)
    if min(shape[1:]) < side:
        size = f"{shape[1]}x{shape[2]}"
        problem = f"requires images of at least {side}x{side}, but the images are {size}. Set model.name = 'mlp'."
        raise SpecError("model.name", problem, name)


def _convolutional(
    name: str, shape: tuple[int, ...], channels: tuple[int, ...], hidden: tuple[int, ...], classes: int
) -> nn.Module:
    check_image(name, shape, 2 ** len(channels))
    layers: list[nn.Module] = []
    width, rows, columns = shape
    for out in channels:
        layers += [nn.Conv2d(width, out, kernel_size=5, padding=2), nn.MaxPool2d(2), nn.ReLU(inplace=True)]
        width, rows, columns = out, rows // 2, columns // 2
    model = _with_dense([*layers, nn.Flatten()], width * rows * columns, hidden, classes)
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def _with_dense(layers: list[nn.Module], features: int, hidden: tuple[int, ...], classes: int) -> Classifier:
    """Return a model: ``layers`` (with ``features`` outputs), hidden layers and a head."""
    widths = (features, *hidden)
    for width, out in itertools.pairwise(widths):
        layers += [nn.Linear(width, out), nn.ReLU(inplace=True)]
    return Classifier(*layers, head=nn.Linear(widths[-1], classes))
