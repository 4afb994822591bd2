"""FedSSAR's sampling: clusters of clients with similar parameters, and each cluster's share of the places."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt

from fedstrata.base.records import Tree, record
from fedstrata.base.rng import rng
from fedstrata.federation.allowed import Agreed, Allowed, step_limit
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import FitReply, Weights
from fedstrata.sampling.allocation import allocate
from fedstrata.sampling.base import ClientSampler, Selection, Strata
from fedstrata.sampling.messages import Sketch
from fedstrata.sampling.sketches import Sketches, learn, nobody, sketch
from fedstrata.sampling.stratified import draw

Features = Literal["parameters", "updates"]


@record("FedSSARState")
class FedSSARState:
    """What the server remembers.

    Args:
        sketches: The last sketch of every client.
        seed: The experiment's seed, which the sketches belong to.
    """

    sketches: Sketches
    seed: int


class FedSSARSampler(ClientSampler):
    """Clients clustered by their parameters with OPTICS; each cluster gets places in proportion to its size.

    In the first round everybody trains once, so that all have parameters; who could not be reached is asked again in
    the next. Afterwards a client that does not take part keeps its last parameters (FedSSAR, Algorithm 1).

    Args:
        min_samples: OPTICS: how many clients, itself included, make a client's neighbourhood dense.
        xi: OPTICS: the relative drop of reachability at which a cluster begins. With the defaults 100 clients of
            MNIST form 1 cluster when their data are IID, 24 with two shards each, 10 with one (the paper: 1, 29, 10).
        features: ``parameters`` (the paper), or ``updates``: the parameters minus the model that the client started
            at, which does not tell clients apart by the round in which they last took part.
        coordinates: K, the length of the sketch of its parameters that is kept of a client; 0 for all of them.
        optics_max: Above so many clients a random subset is clustered, for OPTICS takes quadratic time, and the rest
            joins the nearest cluster.
    """

    min_samples: int = Field(default=2, ge=2)
    xi: float = Field(default=0.1, gt=0, lt=1)
    features: Features = "parameters"
    coordinates: int = Field(default=2048, ge=0)
    optics_max: PositiveInt = 2000

    def learns(self, config: FederationConfig) -> bool:
        """Sketches are of participants' models."""
        return True

    def allowed(self, agreed: Agreed) -> list[Allowed]:
        """Return the request for a sketch, to clients without one."""
        length = f"{self.coordinates} random combinations of " if self.coordinates else ""
        rule = replace(Sketch.rule, description=f"{length}{Sketch.rule.description}")
        return [Allowed(Sketch, where={"coordinates": self.coordinates}, limit=step_limit(agreed), rule=rule)]

    def init(self, federation: Federation) -> Tree:
        """Nobody is known."""
        return FedSSARState(nobody(), federation.config.seed)

    def select(self, federation: Federation, state: Tree, weights: Weights) -> tuple[Selection, Tree]:
        """Ask unseen clients, cluster, allocate, draw."""
        config, candidates = federation.config, federation.candidates()
        state = self._introduce(federation, state, weights, candidates)
        known = state.sketches.known
        available = np.isin(known, candidates)
        if not available.any():
            return Selection.plain(np.empty(0, dtype=np.int64), 0), state
        clusters, noise = cluster(
            state.sketches.points, self.min_samples, self.xi, self.optics_max, federation.rng("optics-subset")
        )
        count = int(clusters.max()) + 1
        sizes = np.bincount(clusters, minlength=count)
        there = np.bincount(clusters[available], minlength=count)
        m = min(config.training.invited(config.clients), int(there.sum()))
        allocation = shares(m, sizes, there, federation.rng("allocation"))
        alike = np.zeros(int(there.sum()))
        selection = draw(
            known[available], clusters[available], sizes, allocation, alike, False, federation.rng("client-sampling")
        )
        # Drawn among those who are there, for a cluster of all who are known.
        share = (there / sizes)[selection.stratum]
        selection = replace(selection, probability=selection.probability * share)
        metrics: dict[str, Any] = {
            "strata_sizes": sizes.tolist(),
            "strata_allocation": allocation.tolist(),
            "strata_noise": noise,
        }
        return replace(selection, metrics=metrics), state

    def observe(self, state: Tree, replies: Mapping[int, FitReply]) -> Tree:
        """Participants have new parameters."""
        updates = self.features == "updates"
        return replace(state, sketches=learn(state.sketches, replies, self.coordinates, state.seed, updates))

    def stratification(self, config: FederationConfig, state: Tree, round: int) -> Strata | None:
        """The clusters of what is known."""
        known, points = state.sketches.known, state.sketches.points
        if len(known) == 0:
            return None
        generator = rng(config.seed, "optics-subset", round)
        return Strata(known, points, cluster(points, self.min_samples, self.xi, self.optics_max, generator)[0])

    def _introduce(
        self, federation: Federation, state: FedSSARState, weights: Weights, candidates: NDArray[np.int64]
    ) -> FedSSARState:
        sent = sketch(weights.params, self.coordinates, state.seed)
        sketches = replace(state.sketches, sent=sent)
        unseen = np.setdiff1d(candidates, sketches.known)
        request = Sketch(federation.round, weights, self.coordinates)
        replies = federation.ask(unseen.tolist(), request, work=float) if len(unseen) else {}
        if replies:
            points = np.stack([reply.values.numpy() for reply in replies.values()])
            points = points - sent if self.features == "updates" else points
            sketches = sketches.with_rows(np.fromiter(replies, dtype=np.int64), points)
        return replace(state, sketches=sketches)


def shares(
    budget: int, sizes: NDArray[np.int64], available: NDArray[np.int64], generator: np.random.Generator
) -> NDArray[np.int64]:
    """Places in proportion to the clusters' sizes, m_h, shape (H,), at most ``available``.

    By largest remainder, at least one for each cluster that has somebody available. Where there are more such clusters
    than places, the largest would always get them: their shares are rounded at random instead, up or down and right on
    average, so that every available client is drawn with the same probability.

    Args:
        budget: m, at most Σ ``available``.
        sizes: N_h, shape (H,).
        available: How many of each may be invited, shape (H,).
        generator: Randomness.
    """
    if (available > 0).sum() <= budget:
        return allocate(budget, available, sizes.astype(np.float64))
    order = generator.permutation(len(sizes))
    ends = np.cumsum(available[order] * budget)
    total = int(available.sum())
    pointers = generator.integers(total) + total * np.arange(budget)
    return np.bincount(order[np.searchsorted(ends, pointers, side="right")], minlength=len(sizes)).astype(np.int64)


def cluster(
    points: NDArray[np.float32], min_samples: int, xi: float, limit: int, generator: np.random.Generator
) -> tuple[NDArray[np.int64], int]:
    """OPTICS clusters (Ankerst et al. 1999) without noise.

    Points that OPTICS calls noise join the cluster with the nearest mean; where it finds no cluster, all are one.

    Args:
        points: Shape (N, d).
        min_samples: See ``FedSSARSampler``.
        xi: See ``FedSSARSampler``.
        limit: Above so many points a random subset is clustered and the rest joins the cluster with the nearest mean.
        generator: Randomness for the subset.

    Returns:
        The cluster of each, shape (N,), in 0 … H − 1, none of them empty; and how many OPTICS called noise.
    """
    n = len(points)
    subset = np.arange(n) if n <= limit else np.sort(generator.choice(n, size=limit, replace=False))
    labels = _optics(points[subset], min_samples, xi)
    noise = int((labels < 0).sum())
    if labels.max(initial=-1) < 0:
        return np.zeros(n, dtype=np.int64), noise
    count = int(labels.max()) + 1
    result = np.full(n, -1, dtype=np.int64)
    result[subset] = labels
    lost = result < 0
    if lost.any():
        centre = points[subset].mean(axis=0, dtype=np.float64).astype(np.float32)
        means = np.stack([points[subset[labels == h]].mean(axis=0, dtype=np.float64) for h in range(count)])
        # Relative to their mean, for models differ by much less than they are long.
        result[lost] = np.argmin(_squares(points[lost] - centre, means.astype(np.float32) - centre), axis=1)
    return np.unique(result, return_inverse=True)[1].astype(np.int64), noise


def _optics(points: NDArray[np.float32], min_samples: int, xi: float) -> NDArray[np.int64]:
    """scikit-learn's clusters of an OPTICS ordering; −1 is noise."""
    from sklearn.cluster import cluster_optics_xi

    if len(points) < max(min_samples, 3):
        return np.full(len(points), -1, dtype=np.int64)
    centred = points - points.mean(axis=0, dtype=np.float64)
    distances = np.sqrt(_squares(centred, centred))
    np.fill_diagonal(distances, 0.0)
    if distances.max() == 0:
        return np.full(len(points), -1, dtype=np.int64)
    ordering, reachability, predecessor = optics_ordering(distances, min_samples)
    with warnings.catch_warnings():
        # Clients with equal parameters have reachability zero, whose ratios are warned about.
        warnings.simplefilter("ignore", RuntimeWarning)
        labels, _ = cluster_optics_xi(
            reachability=reachability, predecessor=predecessor, ordering=ordering, min_samples=min_samples, xi=xi
        )
    clusters: NDArray[np.int64] = labels.astype(np.int64)
    return clusters


def optics_ordering(
    distances: NDArray[np.float64], min_samples: int
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
    """The OPTICS ordering without a largest distance: as scikit-learn's, a hundred times faster for known distances.

    Args:
        distances: Shape (n, n), symmetric, zero on the diagonal.
        min_samples: Points, itself included, within a point's core distance.

    Returns:
        The ordering; and by point its reachability (infinite for the first) and the point that it was reached from
        (−1 for the first).
    """
    n, digits = len(distances), np.finfo(np.float64).precision
    distances = np.around(distances, digits)
    core = np.partition(distances, min_samples - 1, axis=1)[:, min_samples - 1]
    reachability, predecessor = np.full(n, np.inf), np.full(n, -1, dtype=np.int64)
    ordering = np.empty(n, dtype=np.int64)
    # What is not yet in the ordering; infinity for what is.
    waiting = np.full(n, np.finfo(np.float64).max)
    for place in range(n):
        point = int(waiting.argmin())
        ordering[place] = point
        waiting[point] = np.inf
        through = np.maximum(distances[point], core[point])
        nearer = (through < waiting) & (waiting < np.inf)
        waiting[nearer] = reachability[nearer] = through[nearer]
        predecessor[nearer] = point
    return ordering, reachability, predecessor


def _squares(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """Squared distances between the rows of two matrices, not negative."""
    squares = (a * a).sum(axis=1)[:, None] + (b * b).sum(axis=1) - 2 * (a @ b.T)
    clipped: NDArray[Any] = np.maximum(squares, 0.0)
    return clipped
