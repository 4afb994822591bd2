"""Clip updates and add noise to their sum, for client-level privacy (McMahan et al. 2018, arXiv:1710.06963)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from fedstrata.base.arrays import Floats
from fedstrata.federation.messages import Params
from fedstrata.federation.vectors import changes, split


def clipped_sum(before: Mapping[str, Tensor], models: Iterable[Params], clip: float) -> tuple[Tensor, int]:
    """Clip each client's update to a norm of at most ``clip``, and return the sum of the clipped updates.

    Updates are decoded before they are clipped, because a codec's error can increase the norm of an update.

    Args:
        before: The tensors of the global model that clients train.
        models: The clients' models, which may contain tensors that are not in ``before``.
        clip: The maximum L2 norm C of an update.

    Returns:
        The sum as a vector of float64, shape (d,), and the number of updates that were scaled down.
    """
    total = torch.zeros(sum(tensor.numel() for tensor in before.values()), dtype=torch.float64)
    scaled = 0
    for model in models:
        change = changes(before, model).double()
        norm = float(change.norm())
        scaled += norm > clip
        total += change * min(1.0, clip / norm) if norm else 0.0
    return total, scaled


def noisy_mean(total: Tensor, before: Mapping[str, Tensor], deviation: float, cohort: int, normal: Floats) -> Params:
    """Return (sum + deviation · normal) / cohort, with the names, shapes and dtypes of ``before``.

    The divisor must be the expected number of clients, because ε does not cover the actual number of replies.

    Args:
        total: The sum of the clipped updates, shape (d,).
        before: The tensors of the global model that clients train.
        deviation: The standard deviation of the noise.
        cohort: The expected number of clients per round.
        normal: Standard normal numbers, shape (d,).
    """
    noisy = total + deviation * torch.from_numpy(np.asarray(normal))
    return split(noisy / cohort, before)
