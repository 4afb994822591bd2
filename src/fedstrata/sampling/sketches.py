"""Compute sketches of the clients' models, which the server stores instead of the models.

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

from fedstrata.base.arrays import Floats32, Ints
from fedstrata.base.records import record
from fedstrata.federation.messages import FitReply, Params
from fedstrata.sampling.quantization import project
from fedstrata.sampling.row_store import RowStore


@record("Sketches")
class Sketches:
    """The latest sketch of each client that has sent a model.

    Args:
        known: The clients with a sketch, ascending, int64.
        rows: The sketches, with one row of length K for each client in ``known``.
        sent: The sketch of the global model that the server sent most recently, shape (K,), float32; empty before the
            first round.
    """

    known: Ints
    rows: RowStore
    sent: Floats32

    @property
    def points(self) -> Floats32:
        """The sketches of the clients in ``known``, as a read-only array of shape (len(known), K)."""
        return self.rows.whole()

    def with_rows(self, clients: Ints, points: Floats32) -> Sketches:
        """Return a copy in which the given clients have new sketches.

        Args:
            clients: Clients with a new sketch, ascending, shape (n,).
            points: The new sketches, shape (n, K).
        """
        known, rows = self.rows.joined(self.known, clients, points)
        return replace(self, known=known, rows=rows)


def no_sketches() -> Sketches:
    """Return an empty collection of sketches: the state before the first client sends a model."""
    return Sketches(np.empty(0, dtype=np.int64), RowStore.empty(), np.empty(0, dtype=np.float32))


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
