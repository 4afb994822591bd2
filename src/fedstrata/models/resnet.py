"""Residual networks for small images, with BatchNorm or GroupNorm.

These networks cannot be trained under ``torch.func.vmap``: BatchNorm changes its buffers in place, and PyTorch 2.13's
GroupNorm does not support images under ``vmap``.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from fedstrata.models.zoo import Classifier, ModelSpec, check_image

Norm = Literal["bn", "gn"]


class ResNet9(ModelSpec):
    """The nine-layer network of DAWNBench (Page 2018).

    The first layers are convolutions with 64 and 128 channels, and a residual connection around two convolutions with
    128 channels. Then come convolutions with 256 and 512 channels, and a residual connection around two convolutions
    with 512 channels. The last layers are global max-pooling and a linear layer. The three convolutions that double the
    number of channels are followed by max-pooling. Unlike in DAWNBench, the logits are not scaled. With 3 input
    channels and 10 classes, the network has 6,573,130 parameters.

    Args:
        norm: Type of the normalisation layers: ``bn`` (BatchNorm) or ``gn`` (GroupNorm).
    """

    norm: Norm = "bn"

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Create the module; see ``ModelSpec.build`` for the arguments."""
        check_image(self.name, shape, 8)
        model = Classifier(
            _unit(shape[0], 64, self.norm),
            _unit(64, 128, self.norm, pool=True),
            Residual(nn.Sequential(_unit(128, 128, self.norm), _unit(128, 128, self.norm))),
            _unit(128, 256, self.norm, pool=True),
            _unit(256, 512, self.norm, pool=True),
            Residual(nn.Sequential(_unit(512, 512, self.norm), _unit(512, 512, self.norm))),
            nn.AdaptiveMaxPool2d(1),
            nn.Flatten(),
            head=nn.Linear(512, classes),
        )
        return _prepared(model)


class ResNet18(ModelSpec):
    """ResNet-18 (He et al. 2016) for small images: the first convolution is 3x3, without pooling after it.

    With 3 input channels and 10 classes, the network has 11,173,962 parameters.

    Args:
        norm: Type of the normalisation layers: ``bn`` (BatchNorm) or ``gn`` (GroupNorm).
    """

    norm: Norm = "bn"

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Create the module; see ``ModelSpec.build`` for the arguments."""
        check_image(self.name, shape, 8)
        return _resnet(shape[0], (64, 128, 256, 512), 2, classes, self.norm)


class ResNet20(ModelSpec):
    """ResNet-20 for CIFAR (He et al. 2016), with projection shortcuts.

    With 3 input channels and 10 classes, the network has 272,474 parameters.

    Args:
        norm: Type of the normalisation layers: ``bn`` (BatchNorm) or ``gn`` (GroupNorm).
    """

    norm: Norm = "bn"

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Create the module; see ``ModelSpec.build`` for the arguments."""
        check_image(self.name, shape, 4)
        return _resnet(shape[0], (16, 32, 64), 3, classes, self.norm)


class Residual(nn.Module):
    """A residual connection, ``x + branch(x)``.

    Args:
        branch: A module whose outputs have the same shape as its inputs.
    """

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        """Add the input to the output of the branch."""
        # The sum is not computed in place, because the branch ends with a ReLU, whose backward pass needs its output.
        return x + self.branch(x)  # type: ignore[no-any-return]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut around them, followed by ReLU (He et al. 2016, figure 2).

    Args:
        channels: The number of input channels.
        width: The number of output channels.
        stride: The stride of the first convolution. If the shape changes, the shortcut is a 1x1 convolution.
        norm: The normalisation layers, ``bn`` or ``gn``.
    """

    def __init__(self, channels: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            _conv(channels, width, stride),
            _norm(width, norm),
            nn.ReLU(inplace=True),
            _conv(width, width),
            _norm(width, norm),
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, width, kernel_size=1, stride=stride, bias=False), _norm(width, norm)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, channels, H, W) to (B, width, ⌈H / stride⌉, ⌈W / stride⌉)."""
        return torch.relu_(self.branch(x) + self.shortcut(x))


def _resnet(channels: int, widths: tuple[int, ...], depth: int, classes: int, norm: Norm) -> nn.Module:
    layers: list[nn.Module] = [_conv(channels, widths[0]), _norm(widths[0], norm), nn.ReLU(inplace=True)]
    before = widths[0]
    for stage, width in enumerate(widths):
        for block in range(depth):
            layers.append(BasicBlock(before, width, 2 if stage > 0 and block == 0 else 1, norm))
            before = width
    return _prepared(Classifier(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head=nn.Linear(before, classes)))


def _conv(channels: int, width: int, stride: int = 1) -> nn.Conv2d:
    # The convolution has no bias, because each normalisation that follows adds a bias of its own.
    return nn.Conv2d(channels, width, kernel_size=3, stride=stride, padding=1, bias=False)


def _norm(width: int, norm: Norm) -> nn.Module:
    if norm == "bn":
        return nn.BatchNorm2d(width)
    # Use groups of 16 channels, the best size in table 3 of Wu and He 2018, but use at least two groups.
    return nn.GroupNorm(max(2, width // 16), width)


def _unit(channels: int, width: int, norm: Norm, pool: bool = False) -> nn.Sequential:
    """Return a convolution with normalisation, optional pooling, and ReLU."""
    pooling = [nn.MaxPool2d(2)] if pool else []
    return nn.Sequential(_conv(channels, width), _norm(width, norm), *pooling, nn.ReLU(inplace=True))


def _prepared(model: nn.Module) -> nn.Module:
    """Initialise convolutions as in He et al. 2015, and convert the model to channels-last format."""
    for part in model.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]
