"""What the server remembers of every client's model: a short sketch of it instead of the model.

A sketch is the seeded random projection of ``squeeze.project``. It is linear, so that the sketch of an update is the
difference of two sketches, and it keeps squared distances in expectation with a relative standard deviation of
√(2/K): 3 % for K = 2,048 whatever the model's size. Clusters that differ by less are none. A model of no more than K
parameters is kept as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstrata.federation.messages import FitReply, Params
from fedstrata.records import record
from fedstrata.sampling.quantization import bucketed, project, signs

TOGETHER = 1 << 18
"""Parameters that are sketched at once: what stays in a cache."""


@record
class Sketches:
    """The last sketch of each client that ever sent a model.

    Args:
        known: Those clients, ascending, int64.
        points: Their sketches, shape (len(known), K), float32.
        sent: The sketch of the model that went out last, shape (K,), float32; empty before the first round.
    """

    known: NDArray[np.int64]
    points: NDArray[np.float32]
    sent: NDArray[np.float32]


def nobody() -> Sketches:
    """No client is known."""
    empty = np.empty(0, dtype=np.float32)
    return Sketches(np.empty(0, dtype=np.int64), np.empty((0, 0), dtype=np.float32), empty)


def sketch(params: Params, coordinates: int, seed: int) -> NDArray[np.float32]:
    """The sketch of a model.

    Args:
        params: By name.
        coordinates: K; 0 for all of them.
        seed: The experiment's seed.

    Returns:
        Shape (min(d, K),).
    """
    found: NDArray[np.float32] = project(_flat(params), coordinates, seed).numpy()
    return found


def sketches(models: Sequence[Params], coordinates: int, seed: int) -> NDArray[np.float32]:
    """The sketches of several models, shape (n, min(d, K)), without a copy of all of them at once."""
    d = sum(tensor.numel() for tensor in models[0].values())
    if coordinates == 0 or d <= coordinates:
        return np.stack([_flat(params).numpy() for params in models])
    sign = signs(d, seed)
    found = np.empty((len(models), coordinates), dtype=np.float32)
    # One buffer for all groups: writing to fresh memory would take longer than the sums.
    size = min(max(1, TOGETHER // d), len(models))
    buffer = torch.empty(size, d)
    for begin in range(0, len(models), size):
        group = models[begin : begin + size]
        for row, params in zip(buffer, group, strict=False):
            torch.cat([tensor.detach().reshape(-1).float() for tensor in params.values()], out=row)
        signed = buffer[: len(group)].mul_(sign)
        found[begin : begin + len(group)] = bucketed(signed.numpy(), coordinates)
    return found


def _flat(params: Params) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1).float() for tensor in params.values()])


def remember(state: Sketches, clients: NDArray[np.int64], points: NDArray[np.float32]) -> Sketches:
    """Put new sketches in the place of the old ones.

    Args:
        state: What is remembered.
        clients: Whose are new, shape (n,).
        points: The new ones, shape (n, K).
    """
    known, merged = renewed(state.known, state.points, clients, points)
    return replace(state, known=known, points=merged)


def renewed(
    known: NDArray[np.int64], points: NDArray[np.float32], clients: NDArray[np.int64], new: NDArray[np.float32]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Rows of some clients put in the place of their old ones, or added.

    Args:
        known: Clients that have a row, ascending.
        points: Their rows.
        clients: Clients with a new row, ascending.
        new: Their new rows.

    Returns:
        ``known`` and ``points`` afterwards; new arrays.
    """
    if len(clients) == 0:
        return known, points
    there = np.isin(clients, known)
    if there.all():
        merged = points.copy()
    else:
        everybody = np.union1d(known, clients)
        merged = np.empty((len(everybody), new.shape[1]), dtype=np.float32)
        if len(known):
            merged[np.searchsorted(everybody, known)] = points
        known = everybody
    merged[np.searchsorted(known, clients)] = new
    return known, merged


def learn(state: Sketches, replies: Mapping[int, FitReply], coordinates: int, seed: int, updates: bool) -> Sketches:
    """Sketch what the participants of a round sent.

    Args:
        state: What is remembered.
        replies: The models.
        coordinates: K.
        seed: The experiment's seed.
        updates: Whether what counts is the difference from the model that was sent out.
    """
    if not replies:
        return state
    points = sketches([reply.weights.params for reply in replies.values()], coordinates, seed)
    return remember(state, np.fromiter(replies, dtype=np.int64), points - state.sent if updates else points)
