"""Steps of SGD on autograd's gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from fedstrata.federation.settings import Training

Tensors = list[Tensor] | tuple[Tensor, ...]


class SGD:
    """One step after another on the same parameters: d = clip(g + r) + λ w; v ← μ v + d; w ← w − η v.

    Args:
        training: Momentum μ, weight decay λ and the clip.
        lr: η.
    """

    def __init__(self, training: Training, lr: float) -> None:
        self.training, self.lr = training, lr
        self.velocity: list[Tensor] | None = None

    @torch.no_grad()
    def step(self, params: Tensors, gradient: Tensors, correction: Tensors | None = None) -> None:
        """Change the parameters in place.

        Args:
            params: w.
            gradient: g, alike in shape.
            correction: r, alike in shape; None for none.
        """
        # Never in place on what autograd returned: two parameters' gradients may be the same tensor.
        if correction is not None:
            gradient = torch._foreach_add(gradient, correction)
        if self.training.clip is not None:
            gradient = clipped(gradient, self.training.clip)
        if self.training.weight_decay:
            gradient = torch._foreach_add(gradient, params, alpha=self.training.weight_decay)
        if self.training.momentum:
            if self.velocity is None:
                self.velocity = [g.clone() for g in gradient]
            else:
                torch._foreach_mul_(self.velocity, self.training.momentum)
                torch._foreach_add_(self.velocity, gradient)
            gradient = self.velocity
        torch._foreach_add_(params, gradient, alpha=-self.lr)


def clipped(gradient: Tensors, limit: float) -> list[Tensor]:
    """A gradient scaled down so that its norm over all tensors is at most ``limit``.

    Never in place: two parameters' gradients may be the same tensor.
    """
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradient)))
    shrinkage = float(torch.clamp(limit / (norm + 1e-12), max=1.0))
    return list(torch._foreach_mul(gradient, shrinkage))
