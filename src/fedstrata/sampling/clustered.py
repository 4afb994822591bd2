"""Clustered sampling (Fraboni et al. 2021, Clustered Sampling: Low-Variance and Improved Representativity, ICML).

Each round has m draws, each from a separate distribution over the clients. The size n_k of client k is its number of
samples, and the sum of all sizes is Σn. Probabilities are stored as integers, called *masses*. Every distribution has
the total mass Σn, and the masses of client k in all distributions add up to m n_k. Each draw has the weight 1/m in the
aggregate, so the expected weight of client k is exactly n_k / Σn. Algorithm 1 fills the distributions with clients in
the order of client size. Algorithm 2 uses groups of clients with similar updates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from pydantic import Field
from typing_extensions import override

from fedstrata.base.arrays import Floats32, Ints
from fedstrata.base.errors import SpecError
from fedstrata.base.records import Tree, record
from fedstrata.federation.allowed import Agreed, Allowed
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import FitReply, Weights
from fedstrata.sampling.base import ClientSampler, Selection, Strata
from fedstrata.sampling.client_sizes import Sizes, allowed_sizes
from fedstrata.sampling.sketches import Sketches, no_sketches, sketch, update_sketches

Algorithm = Literal[1, 2]

LARGEST = 5000
"""The maximum number of clients for Algorithm 2. Ward's clustering needs the distances between all clients."""


@dataclass(frozen=True)
class Distributions:
    """A sequence of m probability distributions over the clients, stored as masses.

    A *mass* is a probability multiplied by ``each``. Masses are integers. The first distribution's masses come first,
    and add up to ``each``. Then come the second distribution's masses, and so on.

    Args:
        places: For each of the s masses, the index of its client in the array of clients, shape (s,).
        masses: The masses, shape (s,). The masses add up to ``draws`` · ``each``.
        draws: The number m of distributions.
        each: The total mass of each distribution: the number of samples of all clients.
    """

    places: Ints
    masses: Ints
    draws: int
    each: int

    def draw(self, generator: np.random.Generator) -> Ints:
        """Draw one client from each of m distributions, and return indices into the array of clients, shape (m,)."""
        pointers = generator.integers(self.each, size=self.draws) + self.each * np.arange(self.draws)
        drawn: Ints = self.places[np.searchsorted(np.cumsum(self.masses), pointers, side="right")]
        return drawn


@record("ClusteredState")
class ClusteredState:
    """The sampler's state.

    Args:
        sizes: The number of samples of each client.
        sketches: The sketch of each client's last update, for Algorithm 2.
        seed: The experiment's seed, on which the sketches depend.
    """

    sizes: Sizes
    sketches: Sketches
    seed: int


class Clustered(ClientSampler):
    """Unbiased sampling that draws each client of a round from a different group of similar clients.

    Args:
        algorithm: How clients are grouped: by number of samples (``1``), or by the directions of their last updates,
            with Ward's method (``2``).
        coordinates: Number of values that the server stores per client, after a random projection. With 0, all values
            are stored.
    """

    tells_sizes = True
    needs_replies = "forms groups of clients from their numbers of samples or updates"

    algorithm: Algorithm = 2
    coordinates: int = Field(default=2048, ge=0)

    def check(self, config: FederationConfig) -> None:
        """Raise ``SpecError`` if Algorithm 2 is used with more than ``LARGEST`` clients."""
        super().check(config)
        if self.algorithm == 2 and config.clients > LARGEST:
            problem = (
                f"computes distances between all pairs of clients, and supports at most {LARGEST} clients, not "
                f"{config.clients}. Set algorithm = 1, or use the sampler fedsts with refresh = 'participants'."
            )
            raise SpecError("method.client_sampler.algorithm", problem, self.algorithm)

    @override
    def learns(self, config: FederationConfig) -> bool:
        return self.algorithm == 2

    def allowed(self, agreed: Agreed) -> list[Allowed]:
        """Return the request for the clients' numbers of samples. The sampler sends it once per run."""
        return [allowed_sizes(phase="enrolment")]

    def init(self, federation: Federation) -> Tree:
        """Ask all clients for their numbers of samples."""
        return ClusteredState(Sizes.ask(federation), no_sketches(), federation.config.seed)

    def select(self, federation: Federation, state: Tree, weights: Weights) -> tuple[Selection, Tree]:
        """Build m distributions over the available clients, and draw one client from each distribution."""
        config = federation.config
        clients, sizes = state.sizes.among(federation.candidates())
        if len(clients) == 0:
            return Selection.plain(clients, 0), state
        m = config.training.invited(config.clients)
        metrics: dict[str, Any] = {}
        if self.algorithm == 1:
            distributions = by_size(sizes, m)
        else:
            sent = sketch(weights.params, self.coordinates, state.seed)
            state = replace(state, sketches=replace(state.sketches, sent=sent))
            groups = group(_updates(state.sketches, clients, len(sent)), sizes, m)
            distributions = by_group(groups, sizes, m)
            metrics = {"strata_sizes": np.bincount(groups).tolist()}
        drawn = distributions.draw(federation.rng("client-sampling"))
        draws = np.bincount(drawn, minlength=len(clients))
        return replace(Selection.from_draws(clients, draws, sizes), metrics=metrics), state

    def observe(self, state: Tree, replies: Mapping[int, FitReply]) -> Tree:
        """Store the participants' updates, for Algorithm 2."""
        if self.algorithm == 1:
            return state
        sketches = update_sketches(state.sketches, replies, self.coordinates, state.seed, updates=True)
        return replace(state, sketches=sketches)

    def stratification(self, config: FederationConfig, state: Tree, round: int) -> Strata | None:
        """Return the groups of Algorithm 2. With Algorithm 1, or before a client has sent an update, return None."""
        if self.algorithm == 1 or len(state.sizes.known) == 0 or len(state.sketches.known) == 0:
            return None
        clients, sizes = state.sizes.known, state.sizes.samples
        updates = _updates(state.sketches, clients, state.sketches.points.shape[1])
        return Strata(clients, updates, group(updates, sizes, config.training.invited(config.clients)))


def by_size(sizes: Ints, m: int) -> Distributions:
    """Build m distributions, each over clients of similar size (Algorithm 1).

    The *mass* of a client is m times its number of samples. The capacity of a distribution is the number of samples of
    all clients. The clients are sorted by size, in descending order. Their masses fill the first distribution to its
    capacity, then the second distribution, and so on.

    Args:
        sizes: The number of samples of each client (at least 1), shape (N,).
        m: The number of draws, which is also the number of distributions.

    >>> distributions = by_size(np.array([1, 3, 2]), 2)
    >>> distributions.places.tolist(), distributions.masses.tolist()
    ([1, 2, 0], [6, 4, 2])
    """
    order, total = np.argsort(-sizes, kind="stable"), int(sizes.sum())
    ends = np.cumsum(sizes[order] * m)
    # If a client's mass exceeds the remaining capacity of a distribution, divide the mass between two distributions.
    cuts = np.union1d(ends, total * np.arange(1, m + 1))
    return Distributions(order[np.searchsorted(ends, cuts)], np.diff(cuts, prepend=0), m, total)


def by_group(groups: Ints, sizes: Ints, m: int) -> Distributions:
    """Build m distributions from groups of clients (Algorithm 2, lines 5 to 12).

    The *mass* of a client is m times its number of samples. The capacity of a distribution is Σn, the number of samples
    of all clients. First, each client with a mass of at least Σn fills as many distributions as it can by itself. Then
    the r groups with the largest remaining masses are assigned to the r remaining distributions, one group to each. The
    clients of all other groups fill these r distributions up to their capacity.

    Args:
        groups: The group of each client, shape (N,). In each group, the clients' masses modulo Σn must add up to at
            most Σn.
        sizes: The number of samples of each client (at least 1), shape (N,).
        m: The number of draws, which is also the number of distributions.
    """
    total = int(sizes.sum())
    filled, masses = np.divmod(sizes * m, total)
    single = np.repeat(np.arange(len(sizes)), filled)
    remaining = m - len(single)
    group_masses = np.bincount(groups, weights=masses).astype(np.int64)
    heaviest = np.argsort(-group_masses, kind="stable")
    rank = np.argsort(heaviest)[groups]
    order = np.argsort(rank, kind="stable")
    order = order[masses[order] > 0]
    first, rest = order[rank[order] < remaining], order[rank[order] >= remaining]
    # The masses of the clients in ``rest`` fill the distributions one after another. A cut is made at the end of each
    # client's mass, and where a distribution is full. The part between two cuts has one client and one distribution.
    room = np.cumsum(total - group_masses[heaviest[:remaining]])
    ends = np.cumsum(masses[rest])
    cuts = np.union1d(ends, room[room > 0])
    distribution = np.concatenate([np.full(len(single), -1), rank[first], np.searchsorted(room, cuts)])
    places = np.concatenate([single, first, rest[np.searchsorted(ends, cuts)]])
    pieces = np.concatenate([np.full(len(single), total), masses[first], np.diff(cuts, prepend=0)])
    by_distribution = np.argsort(distribution, kind="stable")
    return Distributions(places[by_distribution], pieces[by_distribution], m, total)


def group(updates: Floats32, sizes: Ints, m: int) -> Ints:
    """Cut the tree of Ward's clustering into groups that are as large as possible (Algorithm 2, lines 1-4).

    The masses of a group add up to at most Σn, the number of samples of all clients. In this function, the *mass* of a
    client with n samples is (m · n) mod Σn. The function ``by_group`` divides these masses among
    distributions. Updates are scaled to length 1, so that the distance between two updates depends only on their angle.
    A client without an update gets the zero vector, so the distance between two clients without updates is 0.

    Args:
        updates: The last update of each client, shape (N, d).
        sizes: The number of samples of each client, shape (N,).
        m: The number of draws.

    Returns:
        The index of each client's group, counted from 0, shape (N,).
    """
    n, total = len(sizes), int(sizes.sum())
    masses = (sizes * m) % total
    if n == 1:
        return np.zeros(1, dtype=np.int64)
    from sklearn.cluster import ward_tree

    lengths = np.linalg.norm(updates.astype(np.float64), axis=1, keepdims=True)
    children = ward_tree(np.divide(updates, lengths, out=np.zeros(updates.shape), where=lengths > 0))[0]
    weight = np.concatenate([masses, np.zeros(n - 1, dtype=np.int64)])
    for i, (a, b) in enumerate(children):
        weight[n + i] = weight[a] + weight[b]
    # Go from the root of the tree to the leaves. On each path, the first node with a mass of at most Σn forms a group.
    group_of = np.full(2 * n - 1, -1, dtype=np.int64)
    count = 0
    for node in range(2 * n - 2, -1, -1):
        if group_of[node] < 0 and weight[node] <= total:
            group_of[node] = count
            count += 1
        if node >= n and group_of[node] >= 0:
            group_of[children[node - n]] = group_of[node]
    return group_of[:n]


def _updates(sketches: Sketches, clients: Ints, length: int) -> Floats32:
    """Return the last update of each client, or zeros for a client that never took part, shape (N, ``length``)."""
    result = np.zeros((len(clients), length), dtype=np.float32)
    known = np.isin(sketches.known, clients)
    if known.any():
        result[np.searchsorted(clients, sketches.known[known])] = sketches.points[known]
    return result
