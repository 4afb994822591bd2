"""Augment the inputs of training batches at random, as ``data.augment`` specifies.

Only the batches of local training are augmented. All other computations, such as evaluations and predictions, use the
original samples.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import Field, NonNegativeInt
from torch import Tensor

from fedstrata.base.config import FromRegistry, Registry, Setting, build, plain
from fedstrata.base.errors import FedstrataError, SpecError
from fedstrata.base.loading import load_object
from fedstrata.data.dataset import Dataset

KEY, KIND = "data.augment", "data augmentation"

TRIALS = 8
"""The number of test calls of a user's own function before a run."""


class Augmentation(Setting):
    """Base class of data augmentations."""

    @abstractmethod
    def __call__(self, x: Any, generator: torch.Generator) -> Any:
        """Return the augmented inputs of a batch.

        Args:
            x: The normalised inputs of B samples: a tensor (B, …), or a mapping of such tensors.
            generator: The random generator, on the CPU, so that random numbers do not depend on the device.

        Returns:
            The augmented inputs, with the same shapes and types as ``x``.
        """

    @abstractmethod
    def check(self, data: Dataset) -> None:
        """Raise ``SpecError`` if the augmentation does not work for the samples of a data set."""


class CropFlip(Augmentation):
    """Pads each image, crops it at a random position, and mirrors it with probability 1/2.

    The padding reflects the image at its edges.

    Args:
        padding: Number of pixels added on each side before cropping.
        flip: Whether to mirror images. Set false if mirroring changes the class, as for digits.
    """

    padding: NonNegativeInt = 4
    flip: bool = True

    def __call__(self, x: Any, generator: torch.Generator) -> Any:
        """Crop and flip images (B, C, H, W); the result has the channels-last memory format."""
        count, channels, height, width = x.shape
        shifts = torch.randint(-self.padding, self.padding + 1, (2, count, 1), generator=generator)
        rows = _reflected(torch.arange(height) + shifts[0], height)
        columns = _reflected(torch.arange(width) + shifts[1], width)
        if self.flip:
            mirrored = torch.randint(2, (count, 1), generator=generator, dtype=torch.bool)
            columns = torch.where(mirrored, columns.flip(1), columns)
        images = torch.arange(count)[:, None, None] * (height * width)
        places = (images + rows[:, :, None] * width + columns[:, None, :]).flatten().to(x.device)
        pixels = x.permute(0, 2, 3, 1).reshape(-1, channels).index_select(0, places)
        return pixels.view(count, height, width, channels).permute(0, 3, 1, 2)

    def check(self, data: Dataset) -> None:
        """Raise ``SpecError`` if samples are not images, images are too small, or targets are given per pixel."""
        shape = data.shape
        if data.keep or isinstance(shape, Mapping) or len(shape) != 3:
            form = f"ids of shape {shape}" if data.keep else f"the shape {shape}"
            problem = f"needs images (channels, height, width), but a sample has {form}. Remove data.augment."
            raise SpecError(KEY, problem, self.name)
        if min(shape[1:]) <= self.padding:
            problem = f"must be smaller than the sides of the images, {shape[1]}x{shape[2]}. Use a smaller padding."
            raise SpecError(f"{KEY}.padding", problem, self.padding)
        if data.y_train.shape[1:] == shape[1:]:
            problem = "moves pixels, but each pixel has its own target. Use a function that does not move pixels."
            raise SpecError(KEY, problem, self.name)


def _reflected(places: Tensor, size: int) -> Tensor:
    """Reflect positions outside 0 … ``size`` − 1 at the nearer border, so that all positions are valid."""
    last = size - 1
    return last - (last - places.abs()).abs()


class OwnAugmentation(Augmentation):
    """A user's own function ``function(x, generator)``. ``Augmentation.__call__`` describes the two arguments.

    Args:
        path: The path of the function, as ``"module:function"``.
        arguments: Further arguments of the function. In a spec, all keys of the table except ``name`` are arguments.
    """

    path: str
    arguments: dict[str, Any] = Field(default_factory=dict)

    @property
    def implementation(self) -> Any:
        """The function to which ``path`` refers."""
        return load_object(self.path, KIND)

    def to_spec(self) -> dict[str, Any]:
        """Return the settings as keys of a spec: ``name`` is the path, and the other keys are the arguments."""
        return {"name": self.path, **plain(self.arguments)}

    def __call__(self, x: Any, generator: torch.Generator) -> Any:
        """Augment a batch with the user's function, and check the shapes and types of the result.

        Raises:
            SpecError: The function changed the shape or type of an input.
        """
        given = _form(x)
        result = self.implementation(x, generator, **self.arguments)
        if (returned := _form(result)) != given:
            problem = f"returned {returned} for a batch of {given}. Return a batch of the same shape and type."
            raise SpecError(KEY, problem, self.path)
        return result

    def check(self, data: Dataset) -> None:
        """Call the function on two samples.

        Raise ``SpecError`` if a call fails, or if calls with the same seed return different results.
        """
        if not data.train_size:  # the server of a deployment may have no samples
            return
        try:
            with torch.no_grad():
                trials = [self(data.inputs(slice(0, 2)), torch.Generator().manual_seed(0)) for _ in range(TRIALS)]
        except FedstrataError:
            raise
        except Exception as error:  # a user's own function may raise any exception
            problem = f"fails on a batch of {_form(data.inputs(slice(0, 2)))}: {type(error).__name__}: {error}"
            raise SpecError(KEY, problem, self.path) from error
        if not all(_equal(trial, trials[0]) for trial in trials):
            problem = "returned different batches for the same random seed. Draw all random numbers from the generator."
            raise SpecError(KEY, problem, self.path)


def _form(x: Any) -> str:
    """Return the types and shapes of inputs as a string."""
    if isinstance(x, Mapping):
        return "{" + ", ".join(f"{name}: {_form(x[name])}" for name in sorted(x)) + "}"
    if isinstance(x, Tensor):
        return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"
    return type(x).__name__


def _equal(x: Any, y: Any) -> bool:
    """Return True if two inputs of the same form are equal. Two NaN values count as equal."""
    if isinstance(x, Mapping):
        return all(_equal(x[name], y[name]) for name in x)
    return torch.allclose(x, y, rtol=0, atol=0, equal_nan=True)


class _Augmentations(Registry[Augmentation]):
    """The registry of augmentations, which also accepts functions named ``"module:function"``."""

    path_form = "function as 'module:function'"

    def make(self, name: str, table: Mapping[str, Any]) -> Augmentation:
        """Create the augmentation called ``name`` with the settings in ``table``; see ``Registry.make``."""
        if ":" not in name:
            return super().make(name, table)
        function = load_object(name, self.kind)
        if not callable(function):
            raise SpecError(
                "name", f"names an object of type {type(function).__name__}. Give the name of a function.", name
            )
        return build(OwnAugmentation, {"path": name, "arguments": dict(table)})


AUGMENTATIONS = _Augmentations(
    KIND,
    Augmentation,  # type: ignore[type-abstract]
    {"crop-flip": "fedstrata.data.augmentation:CropFlip"},
)
"""The possible values of ``data.augment``."""

AnyAugmentation = Annotated[Augmentation, FromRegistry(AUGMENTATIONS)]
