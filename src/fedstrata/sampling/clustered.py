"""Clustered sampling (Fraboni et al. 2021, Clustered Sampling: Low-Variance and Improved Representativity, ICML).

Each of the m draws of a round has a distribution of its own over the clients. In whole numbers: client k brings a mass
of m n_k, every distribution holds exactly Σn, and all mass is used; so the expected weight of k, each draw counting
1/m, is exactly n_k / Σn, however the masses are arranged. Algorithm 1 arranges clients by size, Algorithm 2 by the
likeness of their updates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedstrata.base.errors import SpecError
from fedstrata.base.records import Tree, record
from fedstrata.federation.allowed import Agreed, Allowed
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import FitReply, Weights
from fedstrata.sampling.base import ClientSampler, Selection, Strata
from fedstrata.sampling.client_sizes import Sizes, allowed_sizes
from fedstrata.sampling.sketches import Sketches, learn, nobody, sketch

Algorithm = Literal[1, 2]

LARGEST = 5000
"""Clients up to which Ward's clustering, which keeps all their distances, is done."""


@dataclass(frozen=True)
class Distributions:
    """m distributions one after another: shares of clients, of which every Σn in a row are one distribution.

    Args:
        places: Whose share, a place among the clients, shape (s,).
        masses: How large it is, shape (s,); they add up to ``draws`` · ``each``.
        draws: m.
        each: Σn.
    """

    places: NDArray[np.int64]
    masses: NDArray[np.int64]
    draws: int
    each: int

    def matrix(self, clients: int) -> NDArray[np.float64]:
        """r_i(k), shape (m, N), for looking at."""
        result = np.zeros((self.draws, clients))
        which = (np.cumsum(self.masses) - 1) // self.each
        np.add.at(result, (which, self.places), self.masses / self.each)
        return result

    def draw(self, generator: np.random.Generator) -> NDArray[np.int64]:
        """One client from every distribution, shape (m,)."""
        pointers = generator.integers(self.each, size=self.draws) + self.each * np.arange(self.draws)
        drawn: NDArray[np.int64] = self.places[np.searchsorted(np.cumsum(self.masses), pointers, side="right")]
        return drawn


@record("ClusteredState")
class ClusteredState:
    """What the server remembers.

    Args:
        sizes: Of all clients.
        sketches: Of the last update of each client, for Algorithm 2.
        seed: The experiment's seed, which the sketches belong to.
    """

    sizes: Sizes
    sketches: Sketches
    seed: int


class Clustered(ClientSampler):
    """m draws from m distributions that each hold similar clients; the aggregators ``size`` and ``mean`` are unbiased.

    Args:
        algorithm: 1 groups clients by size; 2 groups them by their last updates (Ward's method on directions), those
            that never took part among themselves.
        coordinates: The length of the sketch of its update that is kept of a client; 0 for the whole update.
    """

    algorithm: Algorithm = 2
    coordinates: int = Field(default=2048, ge=0)

    def check(self, config: FederationConfig) -> None:
        """Algorithm 2 is for thousands of clients at most."""
        super().check(config)
        if self.algorithm == 2 and config.clients > LARGEST:
            problem = (
                f"clusters {config.clients} clients by all their distances, which is made for {LARGEST} at most; "
                "use 1, or the sampler fedsts with refresh = 'participants'"
            )
            raise SpecError("method.client_sampler.algorithm", problem, self.algorithm)

    @property
    def tells_sizes(self) -> bool:
        """Clients are drawn by size."""
        return True

    def learns(self, config: FederationConfig) -> bool:
        """Algorithm 2 compares updates."""
        return self.algorithm == 2

    def allowed(self, agreed: Agreed) -> list[Allowed]:
        """Return the request for sizes, once."""
        return [allowed_sizes(phase="enrolment")]

    def init(self, federation: Federation) -> Tree:
        """The sizes; no updates yet."""
        return ClusteredState(Sizes.ask(federation), nobody(), federation.config.seed)

    def select(self, federation: Federation, state: Tree, weights: Weights) -> tuple[Selection, Tree]:
        """Arrange those who may be invited, draw one from each distribution."""
        config = federation.config
        clients, sizes = state.sizes.among(federation.candidates())
        if len(clients) == 0:
            return Selection.plain(clients, 0), state
        m = config.training.invited(config.clients)
        metrics: dict[str, Any] = {}
        if self.algorithm == 1:
            made = by_size(sizes, m)
        else:
            sent = sketch(weights.params, self.coordinates, state.seed)
            state = replace(state, sketches=replace(state.sketches, sent=sent))
            groups = group(_updates(state.sketches, clients, len(sent)), sizes, m)
            made = by_group(groups, sizes, m)
            metrics = {"strata_sizes": np.bincount(groups).tolist()}
        drawn = made.draw(federation.rng("client-sampling"))
        return replace(counted(clients, sizes, drawn), metrics=metrics), state

    def observe(self, state: Tree, replies: Mapping[int, FitReply]) -> Tree:
        """The updates of the participants, for Algorithm 2."""
        if self.algorithm == 1:
            return state
        return replace(state, sketches=learn(state.sketches, replies, self.coordinates, state.seed, updates=True))

    def stratification(self, config: FederationConfig, state: Tree, round: int) -> Strata | None:
        """The groups of Algorithm 2."""
        if self.algorithm == 1 or len(state.sizes.known) == 0 or len(state.sketches.known) == 0:
            return None
        clients, sizes = state.sizes.known, state.sizes.samples
        updates = _updates(state.sketches, clients, state.sketches.points.shape[1])
        return Strata(clients, updates, group(updates, sizes, config.training.invited(config.clients)))


def counted(clients: NDArray[np.int64], sizes: NDArray[np.int64], drawn: NDArray[np.int64]) -> Selection:
    """A selection from draws whose expected number is in proportion to ``sizes``."""
    times = np.bincount(drawn, minlength=len(clients))
    there = times > 0
    return Selection(
        clients=clients[there],
        draws=times[there],
        probability=(sizes / sizes.sum())[there],
        stratum=np.zeros(int(there.sum()), dtype=np.int64),
        stratum_sizes=np.array([len(clients)]),
        stratum_samples=np.array([sizes.sum()]),
    )


def by_size(sizes: NDArray[np.int64], m: int) -> Distributions:
    """Algorithm 1: the largest clients fill the first distributions, and so on.

    Args:
        sizes: n_k, shape (N,), positive.
        m: Draws.

    >>> by_size(np.array([1, 3, 2]), 2).matrix(3).round(2).tolist()
    [[0.0, 1.0, 0.0], [0.33, 0.0, 0.67]]
    """
    order = np.argsort(-sizes, kind="stable")
    return _fill([(order, sizes[order] * m)], m, int(sizes.sum()))


def by_group(groups: NDArray[np.int64], sizes: NDArray[np.int64], m: int) -> Distributions:
    """Algorithm 2, lines 5 to 12: the m heaviest groups are a distribution each, the others fill what is left of them.

    A client with a mass of Σn or more first fills as many distributions by itself as it can.

    Args:
        groups: The group of each client, whose masses (without the distributions that one client fills) are Σn at most.
        sizes: n_k, shape (N,), positive.
        m: Draws.
    """
    total = int(sizes.sum())
    alone, masses = np.divmod(sizes * m, total)
    left = m - int(alone.sum())
    weight = np.bincount(groups, weights=masses).astype(np.int64)
    heaviest = np.argsort(-weight, kind="stable")
    seeds = heaviest[:left]
    rest = np.concatenate([np.flatnonzero(groups == g) for g in heaviest[left:]] or [np.empty(0, dtype=np.int64)])
    pouring = [[int(k), int(masses[k])] for k in rest if masses[k]]
    pouring.reverse()
    parts: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    for seed in seeds:
        members = np.flatnonzero((groups == seed) & (masses > 0))
        parts.append((members, masses[members]))
        room = total - int(weight[seed])
        while room:
            place, mass = pouring[-1]
            taken = min(mass, room)
            parts.append((np.array([place]), np.array([taken])))
            room -= taken
            pouring[-1][1] -= taken
            if pouring[-1][1] == 0:
                pouring.pop()
    lone = np.repeat(np.arange(len(sizes)), alone)
    return _fill([(lone, np.full(len(lone), total)), *parts], m, total)


def _fill(parts: Iterable[tuple[NDArray[np.int64], NDArray[np.int64]]], m: int, each: int) -> Distributions:
    """Cut shares where one distribution ends and the next begins."""
    pieces = list(parts)
    places = np.concatenate([place for place, _ in pieces])
    ends = np.cumsum(np.concatenate([mass for _, mass in pieces]))
    cuts = np.union1d(ends, each * np.arange(1, m + 1))
    owners = places[np.searchsorted(ends, cuts, side="left")]
    return Distributions(owners, np.diff(cuts, prepend=0), m, each)


def group(updates: NDArray[np.float32], sizes: NDArray[np.int64], m: int) -> NDArray[np.int64]:
    """Ward's clustering of the clients, cut into the largest groups whose mass is at most Σn (Algorithm 2, lines 1-4).

    Updates are compared by their directions: the distance of two unit vectors grows with the angle between them.
    Clients without an update (zero) are equal.

    Args:
        updates: Representative gradients, shape (N, d).
        sizes: n_k, shape (N,).
        m: Draws.

    Returns:
        The group of each, shape (N,), in 0 … G − 1.
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
    # From the root down: a subtree that is light enough is one group.
    group_of = np.full(2 * n - 1, -1, dtype=np.int64)
    count = 0
    for node in range(2 * n - 2, -1, -1):
        if group_of[node] < 0 and weight[node] <= total:
            group_of[node] = count
            count += 1
        if node >= n and group_of[node] >= 0:
            group_of[children[node - n]] = group_of[node]
    return group_of[:n]


def _updates(sketches: Sketches, clients: NDArray[np.int64], length: int) -> NDArray[np.float32]:
    """The last update of each client; zero for one that never took part."""
    result = np.zeros((len(clients), length), dtype=np.float32)
    there = np.isin(sketches.known, clients)
    if there.any():
        result[np.searchsorted(clients, sketches.known[there])] = sketches.points[there]
    return result
