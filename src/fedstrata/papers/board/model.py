"""Define the board's model, a small convolutional network that first halves the height and width of images."""

from __future__ import annotations

from torch import nn

from fedstrata.models.zoo import CNN


class HalvedCNN(CNN):
    """The network ``cnn`` after 2x2 average pooling, which reduces the number of operations to about a quarter."""

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Create the PyTorch module; see ``ModelSpec.build`` for the arguments."""
        channels, height, width = shape
        module = super().build((channels, height // 2, width // 2), classes)
        module.body.insert(0, nn.AvgPool2d(2))  # type: ignore[operator, union-attr]
        return module
