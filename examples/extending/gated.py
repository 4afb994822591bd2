"""A model: a PyTorch module, or a function that returns one. In a spec: model = {name = "gated:Gated", width = 32}."""

import torch
from torch import nn


class Gated(nn.Module):
    """One hidden layer of gated linear units (Dauphin et al. 2017)."""

    def __init__(self, shape: tuple[int, ...], classes: int, width: int = 64) -> None:
        super().__init__()
        self.enter = nn.Linear(torch.Size(shape).numel(), 2 * width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits, shape (B, classes)."""
        return self.head(nn.functional.glu(self.enter(x.flatten(1))))
