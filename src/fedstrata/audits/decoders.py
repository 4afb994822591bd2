"""Define and train decoders, which are networks that reconstruct images from feature vectors."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

COARSE = 7
"""The approximate height and width, in pixels, of the first feature map of an up-convolutional network."""


class UpConvolutional(nn.Module):
    """A decoder of transposed convolutions (Dosovitskiy & Brox 2016).

    A linear layer turns a feature vector into a coarse map. Each transposed convolution doubles the map's size.

    Args:
        features: The length d of a feature vector.
        shape: The shape of an image, (C, H, W).
        width: The number of channels of the coarse map. Every transposed convolution halves this number, but not below
            16.

    >>> UpConvolutional(5, (3, 28, 30))(torch.zeros(2, 5)).shape
    torch.Size([2, 3, 28, 30])
    """

    def __init__(self, features: int, shape: tuple[int, ...], width: int = 64) -> None:
        super().__init__()
        self.shape = shape
        channels, rows, columns = shape
        doublings = max(1, round(math.log2(min(rows, columns) / COARSE)))
        coarse = (width, -(-rows // 2**doublings), -(-columns // 2**doublings))
        layers: list[nn.Module] = [nn.Linear(features, math.prod(coarse)), nn.Unflatten(1, coarse), nn.ReLU()]
        for _ in range(doublings):
            narrower = max(width // 2, 16)
            layers += [nn.ConvTranspose2d(width, narrower, 4, stride=2, padding=1), nn.ReLU()]
            width = narrower
        self.layers = nn.Sequential(*layers, nn.Conv2d(width, channels, 3, padding=1))

    def forward(self, features: Tensor) -> Tensor:
        """Return images (B, C, H, W) in [0, 1] for features (B, d)."""
        drawn: Tensor = self.layers(features)[:, :, : self.shape[1], : self.shape[2]]
        return drawn.sigmoid()

    def loss(self, features: Tensor, images: Tensor) -> Tensor:
        """Return the mean squared error between images and their reconstructions from features (B, d)."""
        return F.mse_loss(self(features), images)


class Variational(nn.Module):
    """A variational autoencoder (Kingma & Welling 2014). Its encoder consists of the attacked model and a linear layer.

    From the model's features, the layer computes the mean and the variance of a Gaussian code. A decoder then computes
    the image from the code. Training draws random codes, so that all codes near the mean give similar images.

    Args:
        features: The length d of a feature vector.
        shape: The shape of an image, (C, H, W).
        code: The length of the code.
        deviation: The standard deviation of a pixel's value (0 to 1) for a given code. With a smaller deviation, the
            loss depends more on the error of the images, and less on the divergence between codes and their prior.
    """

    def __init__(self, features: int, shape: tuple[int, ...], code: int = 32, deviation: float = 0.1) -> None:
        super().__init__()
        self.mean, self.log_variance = nn.Linear(features, code), nn.Linear(features, code)
        self.decoder = UpConvolutional(code, shape)
        self.deviation = deviation

    def forward(self, features: Tensor) -> Tensor:
        """Compute mean codes from features (B, d), and decode the codes to images (B, C, H, W) in [0, 1]."""
        drawn: Tensor = self.decoder(self.mean(features))
        return drawn

    def loss(self, features: Tensor, images: Tensor) -> Tensor:
        """Return the negative evidence lower bound, up to a constant. Codes are drawn by PyTorch's random generator."""
        mean, log_variance = self.mean(features), self.log_variance(features).clamp(-10, 10)
        drawn = self.decoder(mean + torch.randn_like(mean) * (0.5 * log_variance).exp())
        error = (drawn - images).square().sum(dim=(1, 2, 3)) / (2 * self.deviation**2)
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(dim=1)
        bound: Tensor = (error + divergence).mean()
        return bound


def fit(
    decoder: UpConvolutional | Variational,
    features: Tensor,
    images: Tensor,
    *,
    steps: int,
    generator: np.random.Generator,
    batch_size: int = 64,
    lr: float = 2e-3,
) -> None:
    """Train a decoder with Adam. The learning rate falls to 0 along half a cosine wave.

    Args:
        decoder: The network.
        features: The inputs of the network, shape (n, d).
        images: The images that the network should output, shape (n, C, H, W).
        steps: The number of mini-batch steps.
        generator: The random generator that draws the batches.
        batch_size: The number of samples in a batch.
        lr: The initial learning rate.
    """
    optimiser = torch.optim.Adam(decoder.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        batch = torch.from_numpy(generator.integers(len(images), size=batch_size))
        optimiser.zero_grad()
        torch.autograd.backward(decoder.loss(features[batch], images[batch]))
        optimiser.step()
        schedule.step()
