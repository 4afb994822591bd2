"""Draw clients in proportion to their numbers of samples (Li et al. 2020, On the Convergence of FedAvg)."""

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
    """Draws clients in proportion to their numbers of samples. Each client reports its number of samples once.

    With the aggregator ``size`` or ``stratum``, all draws have the same weight. The aggregate is then an unbiased
    estimate of the size-weighted mean over all clients.

    Args:
        replacement: Whether a client may be drawn more than once per round. If false, clients are drawn by systematic
            sampling (Madow 1949).
    """

    tells_sizes = True
    needs_replies = "asks each client for its number of samples"

    replacement: bool = True

    def allowed(self, agreed: Agreed) -> list[Allowed]:
        """Return the request for the clients' numbers of samples, which the sampler sends once per run."""
        return [allowed_sizes(phase="enrolment")]

    def init(self, federation: Federation) -> Tree:
        """Ask all clients for their numbers of samples."""
        return Sizes.ask(federation)

    def select(self, federation: Federation, state: Tree, weights: Weights) -> tuple[Selection, Tree]:
        """Draw the clients of the round in proportion to their numbers of samples."""
        clients, sizes = state.among(federation.candidates())
        m, generator = federation.config.training.invited(federation.config.clients), federation.rng("client-sampling")
        if len(clients) == 0:
            return Selection.plain(clients, 0), state
        draw = with_replacement if self.replacement else without_replacement
        return draw(clients, sizes, m, generator), state


def without_replacement(clients: Ints, sizes: Ints, m: int, generator: np.random.Generator) -> Selection:
    """Draw m different clients, each with a probability that is proportional to its size, but at most 1.

    A client whose probability is 1 forms its own stratum. All other clients form stratum 0.

    Args:
        clients: The clients, ascending, shape (N,).
        sizes: The number of samples n_k > 0 of each client k, shape (N,).
        m: The number of clients to draw. If there are fewer clients, all clients are drawn.
        generator: The random generator.
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
    """Return booleans, shape (N,): which clients are certainly drawn if m clients are drawn in proportion to size.

    A client is always drawn if its size times m is at least the sum of all sizes. This test is repeated for the
    remaining clients, with the number of remaining draws as m, until no further client passes.

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
