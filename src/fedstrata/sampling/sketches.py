"""What the server remembers of every client's model: a short sketch of it instead of the model.

A sketch is the seeded random projection of ``quantization.project``. It is linear, so that the sketch of an update is
the difference of two sketches, and it keeps squared distances in expectation with a relative standard deviation of
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

from fedstrata.base.records import record
from fedstrata.federation.messages import FitReply, Params
from fedstrata.sampling.quantization import bucketed, project, signs
from fedstrata.sampling.row_store import RowStore

TOGETHER = 1 << 18
"""Parameters that are sketched at once: what stays in a cache."""


@record("Sketches")
class Sketches:
    """The last sketch of each client that ever sent a model.

    Args:
        known: Those clients, ascending, int64.
        rows: Their sketches, len(known) rows of length K.
        sent: The sketch of the model that went out last, shape (K,), float32; empty before the first round.
    """

    known: NDArray[np.int64]
    rows: RowStore
    sent: NDArray[np.float32]

    @property
    def points(self) -> NDArray[np.float32]:
        """The sketches, shape (len(known), K); not to be written to."""
        return self.rows.whole()

    def with_rows(self, clients: NDArray[np.int64], points: NDArray[np.float32]) -> Sketches:
        """With the sketches of some clients, ascending, renewed or added.

        Args:
            clients: Whose are new, shape (n,).
            points: The new ones, shape (n, K).
        """
        known, rows = self.rows.joined(self.known, clients, points)
        return replace(self, known=known, rows=rows)


def nobody() -> Sketches:
    """No client is known."""
    empty = np.empty(0, dtype=np.float32)
    return Sketches(np.empty(0, dtype=np.int64), RowStore.of(np.empty((0, 0), dtype=np.float32)), empty)


def sketch(params: Params, coordinates: int, seed: int) -> NDArray[np.float32]:
    """The sketch of a model.

    Args:
        params: By name.
        coordinates: K; 0 for all of them.
        seed: The experiment's seed.

    Returns:
        Shape (min(d, K),).
    """
    sketch: NDArray[np.float32] = project(_flat(params), coordinates, seed).numpy()
    return sketch


def sketches(models: Sequence[Params], coordinates: int, seed: int) -> NDArray[np.float32]:
    """The sketches of several models, shape (n, min(d, K)), without a copy of all of them at once."""
    d = sum(tensor.numel() for tensor in models[0].values())
    if coordinates == 0 or d <= coordinates:
        return np.stack([_flat(params).numpy() for params in models])
    sign = signs(d, seed)
    matrix = np.empty((len(models), coordinates), dtype=np.float32)
    # One buffer for all groups: writing to fresh memory would take longer than the sums.
    size = min(max(1, TOGETHER // d), len(models))
    buffer = torch.empty(size, d)
    for begin in range(0, len(models), size):
        group = models[begin : begin + size]
        for row, params in zip(buffer, group, strict=False):
            torch.cat([tensor.detach().reshape(-1).float() for tensor in params.values()], out=row)
        signed = buffer[: len(group)].mul_(sign)
        matrix[begin : begin + len(group)] = bucketed(signed.numpy(), coordinates)
    return matrix


def _flat(params: Params) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1).float() for tensor in params.values()])


def learn(state: Sketches, replies: Mapping[int, FitReply], coordinates: int, seed: int, updates: bool) -> Sketches:
    """Sketch what the participants of a round sent.

    Args:
        state: What is remembered.
        replies: The models.
        coordinates: K.
        seed: The experiment's seed.
        updates: Whether what counts is the difference from the model that was sent out.
    """
    # A model that took no step is the one that was sent, and says nothing of the client.
    replies = {client: reply for client, reply in replies.items() if reply.trained}
    if not replies:
        return state
    points = sketches([reply.weights.params for reply in replies.values()], coordinates, seed)
    return state.with_rows(np.fromiter(replies, dtype=np.int64), points - state.sent if updates else points)
