"""Reconstruct an image from a feature vector, as an honest but curious server could (ReBaFL §5.6).

The attacker knows the client's model, the feature vector and the class. The feature vector is, for example, a
prototype, which is the mean feature vector of a class. The attacker does not have any client's images, but has similar
images that no client has ("held-out images").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fedstrata.audits.decoders import UpConvolutional, Variational, fit
from fedstrata.audits.pixels import Pixels
from fedstrata.base.rng import rng, torch_seeded
from fedstrata.federation.messages import Params
from fedstrata.models.model import Model

TUNING = 16
"""The number of held-out images that feature matching uses to choose a weight from ``PRIORS``.

Decoders do not train on these images.
"""
PRIORS = (0.003, 0.01, 0.03)
"""The values that feature matching tries for the weight α of the total variation."""


@dataclass(frozen=True)
class View:
    """The attacker's knowledge about one client, and the attacker's held-out images.

    Args:
        model: The model with the client's parameters, in evaluation mode.
        params: The client's parameters, as ``Model.loaded`` yields them.
        pixels: The conversion from images to the model's inputs.
        images: The attacker's n held-out images, with values in [0, 1] and shape (n, C, H, W).
        labels: The classes of the held-out images, shape (n,).
        features: The features that the client's model computes for the held-out images, shape (n, d).
        class_means: For every class, the mean of its held-out images, shape (classes, C, H, W). For a class without
            held-out images, the mean of all held-out images is used.
    """

    model: Model
    params: Params
    pixels: Pixels
    images: Tensor
    labels: Tensor
    features: Tensor
    class_means: Tensor

    @classmethod
    def of(cls, model: Model, params: Params, pixels: Pixels, images: Tensor, labels: Tensor) -> View:
        """Create a ``View``, and compute the features and the class means from the attacker's images."""
        features = features_of(model, params, pixels, images)
        means = [images[labels == c] for c in range(pixels.data.outputs)]
        class_means = torch.stack([(of if len(of) else images).mean(dim=0) for of in means])
        return cls(model, params, pixels, images, labels, features, class_means)

    def seen(self, images: Tensor) -> Tensor:
        """Return the client model's features (B, d) of images (B, C, H, W), differentiable by autograd."""
        features, _ = self.model.with_features(self.params, self.pixels.inputs(images))
        return features.flatten(1)

    @property
    def for_training(self) -> tuple[Tensor, Tensor]:
        """The held-out features and images on which decoders train: all except the last ``TUNING``."""
        return self.features[:-TUNING], self.images[:-TUNING]


@torch.no_grad()
def features_of(model: Model, params: Params, pixels: Pixels, images: Tensor) -> Tensor:
    """Compute the features of many images, shape (n, d), in batches and without gradients."""
    parts = [images[begin : begin + 500] for begin in range(0, len(images), 500)]
    return torch.cat([model.with_features(params, pixels.inputs(part))[0].flatten(1) for part in parts])


Invert = Callable[[Tensor, Tensor], Tensor]
"""A function that takes features (B, d) and classes (B,), and returns reconstructed images (B, C, H, W)."""


def decode(kind: type[UpConvolutional | Variational], view: View, steps: int, seed: int, client: int) -> Invert:
    """Train a decoder to reconstruct held-out images from their features, and return a function that uses the decoder.

    Args:
        kind: The class of the decoder.
        view: The attacker's knowledge.
        steps: The number of training steps.
        seed: The seed of the audit.
        client: The id of the attacked client.
    """
    features, images = view.for_training
    mean = features.mean(dim=0)
    # Scale all components by the same factor. If each component had its own factor, a component that is almost always 0
    # could become huge.
    scale = 1 / (features - mean).square().mean().sqrt().clamp(min=1e-6)
    purpose = f"audit-{kind.__name__}"
    with torch_seeded(seed, purpose, client=client):
        decoder = kind(features.shape[1], tuple(images.shape[1:]))
        batches = rng(seed, f"{purpose}-batches", 0, client)
        fit(decoder, (features - mean) * scale, images, steps=steps, generator=batches)

    def invert(given: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            drawn: Tensor = decoder((given - mean) * scale)
        return drawn

    return invert


def feature_matching(view: View, steps: int, seed: int, client: int) -> Invert:
    """Return a function that optimises an image x so that its feature f(x) is near a given feature h.

    The function minimises ‖f(x) − h‖² / ‖h‖² + α TV(x), where TV is the total variation (Mahendran & Vedaldi 2015).
    Adam optimises the logits of the pixels, starting from the mean held-out image of the class. The weight α is the
    value in ``PRIORS`` that reconstructs the held-out images best.

    Args:
        view: The attacker's knowledge.
        steps: The number of steps of Adam.
        seed: Not used, because the attack does not draw random numbers.
        client: Not used.
    """
    images, labels, features = view.images[-TUNING:], view.labels[-TUNING:], view.features[-TUNING:]
    errors = []
    for alpha in PRIORS:
        drawn = match(view, features, view.class_means[labels], steps=steps, alpha=alpha)
        errors.append(float((drawn - images).square().mean()))
    best = PRIORS[errors.index(min(errors))]

    def invert(given: Tensor, labels: Tensor) -> Tensor:
        return match(view, given, view.class_means[labels], steps=steps, alpha=best)

    return invert


def match(view: View, features: Tensor, start: Tensor, *, steps: int, alpha: float, lr: float = 0.1) -> Tensor:
    """Find images whose features are near the given features; see ``feature_matching``.

    Args:
        view: The attacker's knowledge.
        features: The features h, shape (B, d).
        start: The initial images, with values in [0, 1] and shape (B, C, H, W).
        steps: The number of steps of Adam.
        alpha: The weight α of the total variation.
        lr: Adam's learning rate.
    """
    pixels = torch.logit(start.clamp(0.01, 0.99)).requires_grad_()
    norm = features.square().sum(dim=1).clamp(min=1e-12)
    optimiser = torch.optim.Adam([pixels], lr=lr)
    for _ in range(steps):
        images = pixels.sigmoid()
        error = (view.seen(images) - features).square().sum(dim=1) / norm
        # The loss is a sum over images, and Adam treats each pixel separately, so images do not influence each other.
        loss = error.sum() + (alpha * total_variation(images).sum() if alpha else 0.0)
        (pixels.grad,) = torch.autograd.grad(loss, [pixels])
        optimiser.step()
    return pixels.detach().sigmoid()


def total_variation(images: Tensor) -> Tensor:
    """Return the total variation of each image, shape (B,).

    The total variation is the mean absolute difference between vertical neighbours, plus the mean absolute difference
    between horizontal neighbours.

    >>> total_variation(torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]]]))
    tensor([1.])
    """
    down = (images[:, :, 1:] - images[:, :, :-1]).abs().mean(dim=(1, 2, 3))
    return down + (images[:, :, :, 1:] - images[:, :, :, :-1]).abs().mean(dim=(1, 2, 3))


Attack = Callable[[View, int, int, int], Invert]
ATTACKS: Sequence[tuple[str, Attack]] = (
    ("up-convolutional", partial(decode, UpConvolutional)),
    ("variational", partial(decode, Variational)),
    ("feature matching", feature_matching),
)
"""The names of the attacks and their functions.

Each function takes a ``View``, a number of steps, a seed and a client, and returns an ``Invert``.
"""
