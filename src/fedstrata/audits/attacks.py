"""Attacks of an honest but curious server that draw an image from a feature (ReBaFL §5.6).

The attacker has the client's model, the feature (such as a prototype), its class, and images of its own of the same
kind, which no client holds. It never has a client's image.
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
"""Held-out images that choose the weight of the prior in feature matching; decoders are not trained on them."""
PRIORS = (0.003, 0.01, 0.03)
"""Weights of the total variation to choose from."""


@dataclass(frozen=True)
class View:
    """The attacker's knowledge about one client, and its own images.

    Args:
        model: The model with the client's parameters, in evaluation mode.
        params: The parameters, from ``Model.loaded``.
        pixels: The map from images to the model's inputs.
        images: Held-out images, (n, C, H, W) in [0, 1].
        labels: Their classes, (n,).
        features: Their features under the client's model, (n, d).
        class_means: Mean held-out image of every class, (classes, C, H, W); the mean of all for a class without images.
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
        """Make the view on a loaded model."""
        features = features_of(model, params, pixels, images)
        means = [images[labels == c] for c in range(pixels.data.classes)]
        class_means = torch.stack([(of if len(of) else images).mean(dim=0) for of in means])
        return cls(model, params, pixels, images, labels, features, class_means)

    def seen(self, images: Tensor) -> Tensor:
        """Return the features of images, (B, d); differentiable."""
        features, _ = self.model.with_features(self.params, self.pixels.inputs(images))
        return features.flatten(1)

    @property
    def for_training(self) -> tuple[Tensor, Tensor]:
        """Features and images to train a decoder on: all except those for tuning."""
        return self.features[:-TUNING], self.images[:-TUNING]


@torch.no_grad()
def features_of(model: Model, params: Params, pixels: Pixels, images: Tensor) -> Tensor:
    """Return the features of many images, (n, d)."""
    parts = [images[begin : begin + 500] for begin in range(0, len(images), 500)]
    return torch.cat([model.with_features(params, pixels.inputs(part))[0].flatten(1) for part in parts])


Invert = Callable[[Tensor, Tensor], Tensor]
"""Features (B, d) and their classes (B,) to images (B, C, H, W) in [0, 1]."""


def decode(kind: type[UpConvolutional | Variational], view: View, steps: int, seed: int, client: int) -> Invert:
    """Train a decoder to draw the held-out images from their features."""
    features, images = view.for_training
    mean = features.mean(dim=0)
    # One scale for all features: a feature that is almost always 0 must not become very large.
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
    """Optimise the image itself until its features are those given, under a total-variation prior.

    Minimises ‖f(x) − h‖² / ‖h‖² + α TV(x) with Adam over the logits of the pixels (Mahendran & Vedaldi 2015; GRNN
    uses a generator instead of the prior), from the mean held-out image of the class. It uses the α that reconstructs
    held-out images best.
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
    """Find images whose features are near the given ones.

    Args:
        view: The attacker's knowledge.
        features: h, (B, d).
        start: Initial images, (B, C, H, W).
        steps: Steps of Adam.
        alpha: α, the weight of the total variation (a mean over pixels).
        lr: Its learning rate.
    """
    pixels = torch.logit(start.clamp(0.01, 0.99)).requires_grad_()
    norm = features.square().sum(dim=1).clamp(min=1e-12)
    optimiser = torch.optim.Adam([pixels], lr=lr)
    for _ in range(steps):
        images = pixels.sigmoid()
        error = (view.seen(images) - features).square().sum(dim=1) / norm
        # A sum over images: Adam treats each pixel separately, so images do not influence each other.
        loss = error.sum() + (alpha * total_variation(images).sum() if alpha else 0.0)
        (pixels.grad,) = torch.autograd.grad(loss, [pixels])
        optimiser.step()
    return pixels.detach().sigmoid()


def total_variation(images: Tensor) -> Tensor:
    """Return the mean absolute differences of neighbouring pixels, down plus across, shape (B,).

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
"""Attacks by name; an attack maps view, steps, seed and client to a function that inverts features."""
