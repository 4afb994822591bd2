"""Compute sketches, which the server stores instead of the clients' models.

A sketch is a random projection of the model's parameters to K numbers; see ``quantization.project``. The projection is
linear, so the sketch of an update is the difference of two sketches. On average, the squared distance between two
sketches equals the squared distance between the models. The relative standard deviation of the squared distance is
√(2/K), which is 3 % for K = 2,048 and models of any size. A model of at most K parameters is stored unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from fedstrata.base.arrays import Floats, Floats32, Ints
from fedstrata.base.records import record
from fedstrata.federation.messages import FitReply, Params
from fedstrata.sampling.quantization import project

NO_POINTS: Floats32 = np.empty((0, 0), dtype=np.float32)
"""A matrix without rows."""


@record("Sketches")
class Sketches:
    """The latest sketch of each client that has sent a model.

    Args:
        known: The clients with a sketch, ascending, int64.
        points: The sketches of the clients in ``known``, shape (len(known), K).
        sent: The sketch of the global model that the server sent most recently, shape (K,), float32; empty before the
            first round.
    """

    known: Ints
    points: Floats32
    sent: Floats32

    def with_rows(self, clients: Ints, points: Floats32) -> Sketches:
        """Return a copy in which the given clients have new sketches.

        Args:
            clients: Clients with a new sketch, ascending, shape (n,).
            points: The new sketches, shape (n, K).
        """
        known, points = with_rows(self.known, self.points, clients, points)
        return replace(self, known=known, points=points)


def no_sketches() -> Sketches:
    """Return an empty collection of sketches: the state before the first client sends a model."""
    return Sketches(np.empty(0, dtype=np.int64), NO_POINTS, np.empty(0, dtype=np.float32))


def with_rows(known: Ints, points: Floats32, clients: Ints, rows: Floats32) -> tuple[Ints, Floats32]:
    """Replace the rows of some clients in a copy of a matrix, and add rows for clients without a row.

    Args:
        known: The client of each row of the matrix, ascending, shape (n,).
        points: The matrix, shape (n, d).
        clients: The clients with new rows, ascending, shape (c,).
        rows: The new rows, shape (c, d).

    Returns:
        The client of each row of the new matrix, and the new matrix.
    """
    union = np.union1d(known, clients)
    result = np.empty((len(union), rows.shape[1]), dtype=np.float32)
    if len(known):
        result[np.searchsorted(union, known)] = points
    result[np.searchsorted(union, clients)] = rows
    return union, result


def lengths(points: Floats32) -> Floats:
    """Return the Euclidean norm of every row, shape (n,).

    The type is float64, because squares of very small values are zero in float32.
    """
    norms: Floats = np.sqrt(np.einsum("kd,kd->k", points, points, dtype=np.float64))
    return norms


def sketch(params: Params, coordinates: int, seed: int) -> Floats32:
    """Return the sketch of a model.

    Args:
        params: A mapping from the names of the model's parameters to their values.
        coordinates: The length K of the sketch. With 0, the sketch contains all parameters.
        seed: The experiment's seed.

    Returns:
        The sketch, shape (min(d, K),), for a model with d parameters.
    """
    flat = torch.cat([tensor.detach().reshape(-1).float() for tensor in params.values()])
    sketch: Floats32 = project(flat, coordinates, seed).numpy()
    return sketch


def update_sketches(
    state: Sketches, replies: Mapping[int, FitReply], coordinates: int, seed: int, updates: bool
) -> Sketches:
    """Store sketches of the models that the participants of a round sent.

    Args:
        state: The sketches before the round.
        replies: A mapping from each participant to its reply, which contains the trained model.
        coordinates: The length K of a sketch. With 0, a sketch contains all parameters.
        seed: The experiment's seed.
        updates: Whether to store sketches of updates (trained minus received model) instead of sketches of models.

    Returns:
        The updated sketches, with new sketches for the participants that trained.
    """
    # A client that took no step sent back the model that it received, which says nothing about the client's data.
    models = {client: reply.weights.params for client, reply in replies.items() if reply.trained}
    if not models:
        return state
    points = np.stack([sketch(params, coordinates, seed) for params in models.values()])
    return state.with_rows(np.fromiter(models, dtype=np.int64), points - state.sent if updates else points)
