"""Sampling by size or with replacement (Li et al. 2020, On the Convergence of FedAvg on Non-IID Data)."""

from __future__ import annotations

import numpy as np

from fedstrata.base.arrays import Bools, Ints
from fedstrata.base.records import Tree
from fedstrata.federation.allowed import Agreed, Allowed
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import Weights
from fedstrata.sampling.allocation import systematic_draws
from fedstrata.sampling.base import ClientSampler, Selection, with_replacement
from fedstrata.sampling.client_sizes import Sizes, allowed_sizes


class Weighted(ClientSampler):
    """Draws m clients per round in proportion to their numbers of samples, which each client sends once.

    The aggregators ``size`` and ``stratum`` give all draws the same weight. The expected weight of client k is then n_k
    / Σn, so that the aggregate is an unbiased estimate of the mean over all clients, weighted by size.

    Args:
        replacement: Whether a client may be drawn twice per round. If not, clients with more than 1/m of all samples
            are always drawn, and the others by systematic sampling (Madow 1949).
    """

    tells_sizes = True

    replacement: bool = True

    def allowed(self, agreed: Agreed) -> list[Allowed]:
        """Return the request for the clients' sizes, which are asked for once."""
        return [allowed_sizes(phase="enrolment")]

    def init(self, federation: Federation) -> Tree:
        """Ask all clients for their sizes."""
        return Sizes.ask(federation)

    def select(self, federation: Federation, state: Tree, weights: Weights) -> tuple[Selection, Tree]:
        """Draw the clients of the round in proportion to their sizes."""
        clients, sizes = state.among(federation.candidates())
        m, generator = federation.config.training.invited(federation.config.clients), federation.rng("client-sampling")
        if len(clients) == 0:
            return Selection.plain(clients, 0), state
        draw = with_replacement if self.replacement else without_replacement
        return draw(clients, sizes, m, generator), state


def without_replacement(clients: Ints, sizes: Ints, m: int, generator: np.random.Generator) -> Selection:
    """Draw m different clients, each with the probability min(1, c n_k), where c makes these probabilities add up to m.

    Each client with probability 1 is a stratum of its own; all other clients are stratum 0.

    Args:
        clients: The clients, ascending, shape (N,).
        sizes: The number of samples n_k of each client k, shape (N,), positive.
        m: Number of clients to draw. If there are fewer clients, all are drawn.
        generator: Randomness.
    """
    m = min(m, len(clients))
    certain = certainties(sizes, m)
    others = np.flatnonzero(~certain)
    chosen = certain.copy()
    if m > certain.sum():
        chosen[systematic_draws(others, sizes, m - int(certain.sum()), generator)] = True
    stratum = np.zeros(len(clients), dtype=np.int64)
    stratum[certain] = np.arange(1, certain.sum() + 1)
    total = int(sizes[others].sum())
    probability = np.where(certain, 1.0, sizes / max(total, 1))
    return Selection(
        clients=clients[chosen],
        draws=np.ones(m, dtype=np.int64),
        probability=probability[chosen],
        stratum=stratum[chosen],
        stratum_sizes=np.concatenate([[len(others)], np.ones(int(certain.sum()), dtype=np.int64)]),
        stratum_samples=np.concatenate([[total], sizes[certain]]),
    )


def certainties(sizes: Ints, m: int) -> Bools:
    """Return True for clients that are certain to be drawn if m are drawn in proportion to size, shape (N,).

    A client is certain if its size times m is at least Σn, the sum of all sizes. These clients and their draws are set
    aside. The test is repeated for the other
    clients, with the remaining draws as m and the sum of their sizes as Σn, until it finds no further client.

    >>> certainties(np.array([70, 20, 6, 4]), 2).tolist()
    [True, False, False, False]
    >>> certainties(np.array([1, 1]), 2).tolist()
    [True, True]
    """
    certain = np.zeros(len(sizes), dtype=bool)
    while True:
        remaining = m - int(certain.sum())
        more = ~certain & (remaining * sizes >= sizes[~certain].sum())
        if not remaining or not more.any():
            return certain
        certain |= more
