"""Attacks that draw an image from a feature: what an honest but curious server could try (ReBaFL §5.6).

The attacker has the client's model, the feature (a prototype is one), its class, and images of its own of the same
kind that no client holds. It never has a client's image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedstrata.audits.decoders import UpConvolutional, Variational, fit
from fedstrata.audits.pixels import Pixels
from fedstrata.base.rng import rng, torch_seeded
from fedstrata.federation.messages import Params
from fedstrata.models.model import Model

TUNING = 16
"""Held-out images that no decoder is trained on: they choose the weight of the prior in feature matching."""
PRIORS = (0.003, 0.01, 0.03)
"""Weights of the total variation to choose from."""


@dataclass(frozen=True)
class View:
    """What the attacker has of one client, and of its own.

    Args:
        model: With the client's parameters installed and in evaluation mode.
        params: What ``Model.loaded`` yielded.
        pixels: The way from images to the model's inputs.
        images: Held-out images, (n, C, H, W) in [0, 1].
        labels: Their classes, (n,).
        features: Their features under the client's model, (n, d).
        class_means: Mean held-out image of every class, (classes, C, H, W); that of all for a class without one.
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
        """The view on a model that is loaded."""
        features = features_of(model, params, pixels, images)
        means = [images[labels == c] for c in range(pixels.data.classes)]
        class_means = torch.stack([(of if len(of) else images).mean(dim=0) for of in means])
        return cls(model, params, pixels, images, labels, features, class_means)

    def seen(self, images: Tensor) -> Tensor:
        """Features of images, (B, d); differentiable."""
        features, _ = self.model.with_features(self.params, self.pixels.inputs(images))
        return features.flatten(1)

    @property
    def for_training(self) -> tuple[Tensor, Tensor]:
        """Features and images to train a decoder on: all but the last few, which are for tuning."""
        return self.features[:-TUNING], self.images[:-TUNING]


@torch.no_grad()
def features_of(model: Model, params: Params, pixels: Pixels, images: Tensor) -> Tensor:
    """Features of many images, (n, d)."""
    parts = [images[begin : begin + 500] for begin in range(0, len(images), 500)]
    return torch.cat([model.with_features(params, pixels.inputs(part))[0].flatten(1) for part in parts])


Invert = Callable[[Tensor, Tensor], Tensor]
"""Features (B, d) and their classes (B,) to images (B, C, H, W) in [0, 1]."""


def up_convolutional(view: View, steps: int, seed: int, client: int) -> Invert:
    """An up-convolutional network, trained to draw the held-out images from their features."""
    return _decoding(UpConvolutional, view, steps, seed, client)


def variational(view: View, steps: int, seed: int, client: int) -> Invert:
    """A variational autoencoder on the features of the held-out images; its answer is the mean code's image."""
    return _decoding(Variational, view, steps, seed, client)


def _decoding(kind: Any, view: View, steps: int, seed: int, client: int) -> Invert:
    features, images = view.for_training
    mean = features.mean(dim=0)
    # By one number: a feature that is almost always 0 must not become an enormous one.
    scale = 1 / (features - mean).square().mean().sqrt().clamp(min=1e-6)
    purpose = f"audit-{kind.__name__}"
    with torch_seeded(seed, purpose, client=client):
        decoder = kind(features.shape[1], tuple(images.shape[1:]))
        fit(
            decoder,
            (features - mean) * scale,
            images,
            steps=steps,
            generator=rng(seed, f"{purpose}-batches", 0, client),
        )

    def invert(given: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            drawn: Tensor = decoder((given - mean) * scale)
        return drawn

    return invert


def feature_matching(view: View, steps: int, seed: int, client: int) -> Invert:
    """Optimise the image itself until its features are those given, under a total-variation prior.

    Minimises ‖f(x) − h‖² / ‖h‖² + α TV(x) with Adam over the logits of the pixels (Mahendran & Vedaldi 2015; GRNN
    puts a generator in the place of the prior), from the mean held-out image of the class. α is the one that
    reconstructs held-out images best from their features.
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
    """Images whose features come near the given ones.

    Args:
        view: What the attacker has.
        features: h, (B, d).
        start: Images to begin with, (B, C, H, W).
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
        # Summed over images: Adam works on every pixel alone, so that no image changes what another becomes.
        loss = error.sum() + (alpha * total_variation(images).sum() if alpha else 0.0)
        (pixels.grad,) = torch.autograd.grad(loss, [pixels])
        optimiser.step()
    return pixels.detach().sigmoid()


def total_variation(images: Tensor) -> Tensor:
    """Mean absolute difference of neighbouring pixels, down plus across, shape (B,).

    >>> total_variation(torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]]]))
    tensor([1.])
    """
    down = (images[:, :, 1:] - images[:, :, :-1]).abs().mean(dim=(1, 2, 3))
    return down + (images[:, :, :, 1:] - images[:, :, :, :-1]).abs().mean(dim=(1, 2, 3))


Attack = Callable[[View, int, int, int], Invert]
ATTACKS: Sequence[tuple[str, Attack]] = (
    ("up-convolutional", up_convolutional),
    ("variational", variational),
    ("feature matching", feature_matching),
)
"""Name and attack: view, steps, seed and client to something that inverts features."""
