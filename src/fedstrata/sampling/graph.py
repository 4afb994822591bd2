"""FedGS's sampler, which chooses clients that are far apart in a graph of label similarity (Wang et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveFloat
from scipy.sparse import csr_array
from scipy.sparse.csgraph import floyd_warshall

from fedstrata.base.arrays import Floats, Ints
from fedstrata.base.errors import SpecError
from fedstrata.base.records import Tree, record
from fedstrata.federation.allowed import Agreed, Allowed
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import FitReply, Weights
from fedstrata.sampling.base import ClientSampler, Selection
from fedstrata.sampling.label_counts import LabelCounts, allowed_label_counts

MOST_CLIENTS = 2000
"""The maximum number of clients. On one core, computing the shortest paths between all clients takes 1 s for 1,000
clients, and 12 s for 2,000 clients."""


@record("GraphState")
class GraphState:
    """The state of FedGS's sampler between rounds.

    Args:
        labels: The clients' label counts.
        times: How often each client k in ``labels.known`` was chosen (v_k), int64.
    """

    labels: LabelCounts
    times: Ints


class Graph(ClientSampler):
    """Chooses clients that have different labels and were rarely chosen in earlier rounds.

    The m clients of the set S maximise α d(S) − Var(v + s).

    - The value d(S) is the mean distance between two clients of S, in the graph of ``distances``.

    - Client k was chosen v_k times before, and s_k is 1 for clients of S and 0 for other clients. The divisor of the
      variance Var(v + s) over all N clients is N − 1.

    The paper's algorithm finds the best set. This implementation adds clients one by one, and then swaps chosen clients
    with other clients until no swap improves the set. Ties are broken at random.

    Each client sends its label counts once. In the long run, all clients that are available often enough are chosen
    equally often.

    Args:
        alpha: Weight α of the mean distance between the chosen clients. With 0, the sampler ignores distances.
        epsilon: Similarity ε above which the sampler's graph connects two clients.
        sigma: Constant σ² in the length exp(−V² / σ²) of an edge between two clients with similarity V.
        counted: Which events count as participation in earlier rounds. ``invited``: invitations, as in the paper.
            ``returned``: replies that the server used.
    """

    tells_sizes = True
    needs_replies = "asks each client for its label counts"

    alpha: NonNegativeFloat = 0.1
    epsilon: Annotated[float, Field(ge=0, lt=1)] = 0.01
    sigma: PositiveFloat = 0.1
    counted: Literal["invited", "returned"] = "invited"

    def check(self, config: FederationConfig) -> None:
        """Raise ``SpecError`` if samples are not divided into classes or strata, or if there are too many clients."""
        super().check(config)
        if not config.strata:
            problem = (
                f"needs classes, but the task {config.task.name!r} has no classes. {config.task.stratum_hint}".rstrip()
            )
            raise SpecError("method.client_sampler", problem, self.name)
        if config.clients > MOST_CLIENTS:
            problem = f"would take too long to find all shortest paths between {config.clients} clients. Use at most "
            raise SpecError(
                "method.client_sampler", f"{problem}{MOST_CLIENTS} clients, or the sampler fedentopt.", self.name
            )

    def allowed(self, agreed: Agreed) -> list[Allowed]:
        """Return the request that asks for the clients' label counts. The sampler sends this request once per run."""
        return [allowed_label_counts()]

    def init(self, federation: Federation) -> Tree:
        """Ask all clients for their label counts."""
        labels = LabelCounts.ask(federation)
        return GraphState(labels, np.zeros(len(labels.known), dtype=np.int64))

    def select(self, federation: Federation, state: Tree, weights: Weights) -> tuple[Selection, Tree]:
        """Choose the clients of the round. If invitations are counted, add 1 to the count of each chosen client."""
        known, counts, times = state.labels.known, state.labels.counts, state.times
        places = np.flatnonzero(np.isin(known, federation.candidates()))
        m = min(federation.config.training.invited(federation.config.clients), len(places))
        if m == 0:
            return Selection.plain(places, 0), state
        apart = _distances(counts.astype(np.int64).tobytes(), counts.shape[1], self.epsilon, self.sigma)
        order = federation.rng("client-sampling").permutation(places)
        # If the set S of clients is chosen, the variance of the counts v (``times``) changes, up to a constant, by the
        # sum of these costs over S: (2 (v_k − mean) + 1) / (N − 1).
        costs = (2 * (times[order] - times.mean()) + 1) / max(len(known) - 1, 1)
        chosen = order[farthest(self.alpha * apart[np.ix_(order, order)], costs, m)]
        if self.counted == "invited":
            times = counted(times, chosen)
        pairs = apart[np.ix_(chosen, chosen)].sum() / max(m * (m - 1), 1)
        metrics = {"client_distance": float(pairs), "most_invited": int(times.max()), "least_invited": int(times.min())}
        selection = replace(Selection.plain(known[chosen], len(places)), metrics=metrics)
        return selection, replace(state, times=times)

    def observe(self, state: Tree, replies: Mapping[int, FitReply]) -> Tree:
        """If replies are counted, add 1 to the count of each client that replied.

        If the sampler counts invitations, this method does not change the state.
        """
        if self.counted == "invited":
            return state
        places = np.flatnonzero(np.isin(state.labels.known, list(replies)))
        return replace(state, times=counted(state.times, places))


def counted(times: Ints, places: Ints) -> Ints:
    """Return a copy of ``times`` in which the counts at the indices ``places`` are increased by 1."""
    result = times.copy()
    result[places] += 1
    return result


def distances(counts: Ints, epsilon: float, sigma: float) -> Floats:
    """Return the distance between each pair of N clients, from 0 to 1, shape (N, N).

    The similarity V of two clients is the cosine between their label counts. Similarities are scaled so that the
    smallest is 0 and the largest is 1. Two clients with V > ε are joined by an edge of length exp(−V² / σ²). The
    distance between two clients is the length of the shortest path between them. If two clients are not connected,
    their distance is the larger of two numbers: the largest distance between two connected clients, and the length of
    an edge with similarity ε. All distances are then divided by the largest distance. For unconnected clients, the
    authors' code always uses the largest distance between two connected clients. The authors' code also divides
    similarities by the largest similarity, but does not subtract the smallest similarity.

    Args:
        counts: The label counts of each client, shape (N, C).
        epsilon: The similarity ε above which two clients are joined by an edge.
        sigma: The constant σ² in the length of an edge.
    """
    n = len(counts)
    lengths = np.linalg.norm(counts, axis=1, keepdims=True)
    directions = np.divide(counts, lengths, out=np.zeros(counts.shape), where=lengths > 0)
    pairs = ~np.eye(n, dtype=bool)
    similarity = directions @ directions.T
    if n > 1:
        least, most = similarity[pairs].min(), similarity[pairs].max()
        similarity = (similarity - least) / (most - least) if most - least > 1e-12 else np.ones((n, n))
    # Use a sparse matrix. In a dense matrix, SciPy would treat edges with a length near 0 as missing edges.
    ends = np.nonzero((similarity > epsilon) & pairs)
    edges = csr_array((np.exp(-(similarity[ends] ** 2) / sigma), ends), shape=(n, n))
    paths = floyd_warshall(edges, directed=False)
    reached = np.isfinite(paths)
    limit = paths[reached].max(initial=0.0)
    if not reached.all():
        limit = max(limit, np.exp(-(epsilon**2) / sigma))
    result: Floats = np.where(reached, paths, limit) / (limit or 1.0)
    return result


@lru_cache(maxsize=2)
def _distances(counts: bytes, classes: int, epsilon: float, sigma: float) -> Floats:
    """Return ``distances`` for label counts that are given as the bytes of an int64 array, shape (N, ``classes``)."""
    return distances(np.frombuffer(counts, dtype=np.int64).reshape(-1, classes), epsilon, sigma)


def farthest(apart: Floats, costs: Floats, m: int) -> Ints:
    """Choose m clients that maximise their mean distance minus the sum of their costs, and return their indices.

    This function adds the best clients one by one, and then swaps chosen clients with other clients until no swap
    improves the set. If several clients are equally good, the first of them is used.

    Args:
        apart: The distance between each pair of n clients, shape (n, n).
        costs: The cost of each client, shape (n,).
        m: The number of clients, at most n.

    >>> apart = np.array([[0, 1, 4], [1, 0, 2], [4, 2, 0]])
    >>> farthest(apart, np.zeros(3), 2).tolist(), farthest(apart, np.array([0, 0, 9]), 2).tolist()
    ([0, 2], [0, 1])
    """
    pair = 2 / (m * (m - 1)) * apart if m > 1 else np.zeros_like(apart, dtype=float)
    inside = np.zeros(len(costs), dtype=bool)
    links = np.zeros(len(costs))  # Each entry is the sum of ``pair`` over the chosen clients.
    for _ in range(m):
        best = _first_best(np.where(inside, -np.inf, links - costs))
        inside[best] = True
        links += pair[best]
    while not inside.all():
        out, others = np.flatnonzero(inside), np.flatnonzero(~inside)
        gains = (links - costs)[None, others] - pair[np.ix_(out, others)] - (links - costs)[out, None]
        if gains.max() < 1e-9:
            break
        i, j = divmod(_first_best(gains.ravel()), len(others))
        inside[out[i]], inside[others[j]] = False, True
        links += pair[others[j]] - pair[out[i]]
    return np.flatnonzero(inside)


def _first_best(values: Floats) -> int:
    """Return the index of the first value that equals the largest value, up to rounding errors."""
    return int(np.flatnonzero(values >= values.max() - 1e-12)[0])
