"""Choose clients as in FedSSAR: form clusters of similar clients, and draw more clients from large clusters."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt
from typing_extensions import override

from fedstrata.base.arrays import Floats, Floats32, Ints
from fedstrata.base.records import Tree, record
from fedstrata.base.rng import rng
from fedstrata.federation.allowed import Agreed, Allowed, step_limit
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import FitReply, Weights
from fedstrata.sampling.allocation import allocate, systematic_draws
from fedstrata.sampling.base import ClientSampler, Selection, Strata
from fedstrata.sampling.sketches import Sketch, Sketches, no_sketches, sketch, update_sketches
from fedstrata.sampling.stratified import draw

Features = Literal["parameters", "updates"]


@record("FedSSARState")
class FedSSARState:
    """The sampler's state.

    Args:
        sketches: The most recent sketch (random projection) of every client's parameters.
        seed: The experiment's seed, on which the sketches depend.
    """

    sketches: Sketches
    seed: int


class FedSSARSampler(ClientSampler):
    """Divides clients into clusters by their model parameters, and draws from each cluster in proportion to its size.

    In the first round, every client trains once, so that the server knows the parameters of all clients. If a client
    does not reply, the server asks this client again in the next round. After a client's first reply, the client's
    stored parameters change only in rounds in which it takes part (FedSSAR, Algorithm 1).

    Args:
        min_samples: Minimum number of clients in a core point's neighbourhood, including the point (``min_samples`` of
            OPTICS).
        xi: Minimum relative decrease of the reachability distance at the start of a cluster (``xi`` of OPTICS).
        features: Values by which clients are clustered: their model ``parameters``, as in the paper, or their
            ``updates``.
        coordinates: Number of values that the server stores per client, after a random projection. With 0, all values
            are stored.
        optics_max: Maximum number of clients to which OPTICS is applied. Each additional client joins the nearest
            cluster.
    """

    needs_replies = "forms groups of clients from their models"

    min_samples: int = Field(default=2, ge=2)
    xi: float = Field(default=0.1, gt=0, lt=1)
    features: Features = "parameters"
    coordinates: int = Field(default=2048, ge=0)
    optics_max: PositiveInt = 2000

    @override
    def learns(self, config: FederationConfig) -> bool:
        return True

    def allowed(self, agreed: Agreed) -> list[Allowed]:
        """Return the request for a sketch, which the sampler sends to clients without a sketch."""
        length = f"{self.coordinates} random combinations of " if self.coordinates else ""
        rule = replace(Sketch.rule, description=f"{length}{Sketch.rule.description}")
        return [Allowed(Sketch, where={"coordinates": self.coordinates}, limit=step_limit(agreed), rule=rule)]

    @override
    def init(self, federation: Federation) -> Tree:
        return FedSSARState(no_sketches(), federation.config.seed)

    def select(self, federation: Federation, state: Tree, weights: Weights) -> tuple[Selection, Tree]:
        """Request the missing sketches, cluster all clients that have a sketch, and draw from the clusters."""
        config, candidates = federation.config, federation.candidates()
        state = self._introduce(federation, state, weights, candidates)
        known = state.sketches.known
        available = np.isin(known, candidates)
        if not available.any():
            return Selection.plain(np.empty(0, dtype=np.int64), 0), state
        clusters, noise = cluster(
            state.sketches.points, self.min_samples, self.xi, self.optics_max, federation.rng("optics-subset")
        )
        sizes = np.bincount(clusters)
        available_sizes = np.bincount(clusters[available], minlength=len(sizes))
        total = int(available_sizes.sum())
        m = min(config.training.invited(config.clients), total)
        allocation = shares(m, sizes, available_sizes, federation.rng("allocation"))
        generator = federation.rng("client-sampling")
        # Clusters without an available client get the size 0, because no mean over the drawn clusters includes them.
        sizes_there = np.where(available_sizes > 0, sizes, 0)
        norms = np.zeros(total)
        selection = draw(known[available], clusters[available], sizes_there, allocation, norms, False, generator)
        # ``draw`` computes probabilities among the available clients of a cluster. Multiply them by the available
        # fraction of the cluster, so that they refer to all clients of the cluster.
        probability = selection.probability * (available_sizes / sizes)[selection.stratum]
        metrics: dict[str, Any] = {
            "strata_sizes": sizes.tolist(),
            "strata_allocation": allocation.tolist(),
            "strata_noise": noise,
        }
        # If there are more clusters than draws, ``shares`` draws clusters by systematic sampling, with the
        # probabilities ``chance``.
        few = (available_sizes > 0).sum() > m
        chance = np.minimum(m * available_sizes / total, 1.0) if few else None
        return replace(selection, probability=probability, stratum_chance=chance, metrics=metrics), state

    def observe(self, state: Tree, replies: Mapping[int, FitReply]) -> Tree:
        """Store sketches of the participants' models."""
        updates = self.features == "updates"
        return replace(state, sketches=update_sketches(state.sketches, replies, self.coordinates, state.seed, updates))

    def stratification(self, config: FederationConfig, state: Tree, round: int) -> Strata | None:
        """Cluster all clients that have a sketch, as ``select`` does, and return the clusters."""
        known, points = state.sketches.known, state.sketches.points
        if len(known) == 0:
            return None
        generator = rng(config.seed, "optics-subset", round)
        return Strata(known, points, cluster(points, self.min_samples, self.xi, self.optics_max, generator)[0])

    def _introduce(
        self, federation: Federation, state: FedSSARState, weights: Weights, candidates: Ints
    ) -> FedSSARState:
        """Ask clients that have no sketch to train once, and store the sketches from their replies."""
        sent = sketch(weights.params, self.coordinates, state.seed)
        sketches = replace(state.sketches, sent=sent)
        unknown = np.setdiff1d(candidates, sketches.known)
        request = Sketch(federation.round, weights, self.coordinates)
        replies = federation.ask(unknown.tolist(), request, work=float) if len(unknown) else {}
        if replies:
            points = np.stack([reply.values.numpy() for reply in replies.values()])
            points = points - sent if self.features == "updates" else points
            sketches = sketches.with_rows(np.fromiter(replies, dtype=np.int64), points)
        return replace(state, sketches=sketches)


def shares(budget: int, sizes: Ints, available: Ints, generator: np.random.Generator) -> Ints:
    """Return the number of clients to draw from each cluster: in proportion to its size, but at most ``available``.

    The draws are allocated by the largest-remainder method (see ``allocate``). If there are enough draws, each cluster
    with available clients gets at least one. Otherwise, clusters are drawn at random, in proportion to ``available``.
    Every available client is then drawn with the same probability.

    Args:
        budget: The number of draws, at most the sum of ``available``.
        sizes: The number of clients in each cluster, shape (H,).
        available: For each cluster, the number of clients that may be invited, shape (H,).
        generator: The random generator.
    """
    if (available > 0).sum() <= budget:
        return allocate(budget, available, sizes.astype(np.float64))
    drawn = systematic_draws(np.arange(len(sizes)), available, budget, generator)
    return np.bincount(drawn, minlength=len(sizes)).astype(np.int64)


def cluster(
    points: Floats32, min_samples: int, xi: float, limit: int, generator: np.random.Generator
) -> tuple[Ints, int]:
    """Cluster points with OPTICS (Ankerst et al. 1999), and assign every point to a cluster.

    Points that OPTICS labels as noise join the cluster with the nearest mean. If OPTICS finds no cluster, all points
    are one cluster.

    Args:
        points: The points, shape (N, d).
        min_samples: See ``FedSSARSampler``.
        xi: See ``FedSSARSampler``.
        limit: The maximum number of points for OPTICS. If there are more points, OPTICS is applied to a random subset,
            and all other points join the cluster with the nearest mean.
        generator: The random generator for the subset.

    Returns:
        Two values: the cluster of each point in 0 … H − 1, shape (N,), and the number of points that OPTICS labelled as
        noise. No cluster is empty.
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
    unassigned = result < 0
    if unassigned.any():
        centre = points[subset].mean(axis=0, dtype=np.float64).astype(np.float32)
        means = np.stack([points[subset[labels == h]].mean(axis=0, dtype=np.float64) for h in range(count)])
        # Differences between models are much smaller than the models' norms, so distances in float32 would be
        # inaccurate. Subtracting the mean of all points makes the norms small.
        means = means.astype(np.float32) - centre
        result[unassigned] = np.argmin(_squares(points[unassigned] - centre, means), axis=1)
    return np.unique(result, return_inverse=True)[1].astype(np.int64), noise


def _optics(points: Floats32, min_samples: int, xi: float) -> Ints:
    """Return the OPTICS cluster of each point; −1 for noise. The result is the same as in scikit-learn."""
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
        # Ignore the warning about a division by the reachability, which is 0 for clients with equal parameters.
        warnings.simplefilter("ignore", RuntimeWarning)
        labels, _ = cluster_optics_xi(
            reachability=reachability, predecessor=predecessor, ordering=ordering, min_samples=min_samples, xi=xi
        )
    clusters: Ints = labels.astype(np.int64)
    return clusters


def optics_ordering(distances: Floats, min_samples: int) -> tuple[Ints, Floats, Ints]:
    """Compute the OPTICS ordering with an unlimited neighbourhood (``max_eps`` is infinite).

    The result equals the result of ``sklearn.cluster.compute_optics_graph``. For a matrix of distances, this function
    is a hundred times as fast as scikit-learn's function.

    Args:
        distances: The distance between each pair of n points, shape (n, n), with zeros on the diagonal.
        min_samples: The number of points within the core distance of a point, including the point itself.

    Returns:
        Three arrays of shape (n,): the ordered points, the reachability of each point, and the predecessor from which
        each point was reached. The first point has infinite reachability and the predecessor −1.
    """
    n, digits = len(distances), np.finfo(np.float64).precision
    distances = np.around(distances, digits)
    core = np.partition(distances, min_samples - 1, axis=1)[:, min_samples - 1]
    reachability, predecessor = np.full(n, np.inf), np.full(n, -1, dtype=np.int64)
    ordering = np.empty(n, dtype=np.int64)
    # ``waiting`` is the reachability of points that are not in the ordering yet, and infinite for all other points.
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
    """Return the squared distance between each row of ``a`` and each row of ``b``; negative results are set to 0."""
    squares = (a * a).sum(axis=1)[:, None] + (b * b).sum(axis=1) - 2 * (a @ b.T)
    clipped: NDArray[Any] = np.maximum(squares, 0.0)
    return clipped
