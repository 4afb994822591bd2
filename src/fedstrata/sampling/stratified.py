"""FedSTS: strata of compressed gradients, Neyman allocation, importance sampling (FedSTaS, Algorithm 1 and 2)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt

from fedstrata.base.errors import SpecError
from fedstrata.base.records import Tree, record
from fedstrata.base.rng import rng
from fedstrata.federation.allowed import Agreed, Allowed
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import FitReply, Weights
from fedstrata.sampling.allocation import Allocation, allocated, spread
from fedstrata.sampling.base import ClientSampler, Selection, Strata
from fedstrata.sampling.incremental_kmeans import Clusters
from fedstrata.sampling.messages import Compress, CompressReply
from fedstrata.sampling.row_store import RowStore
from fedstrata.sampling.sketches import sketch, sketches

Refresh = Literal["all", "participants"]
Gradients = Literal["asked", "updates"]
Compared = Literal["restored", "centroids"]

LARGE = 1000
"""Number of clients above which only participants are renewed by default; see ``refresh``."""

FITTED = 1000
"""Clients above which k-means and S_h see a random subset; the others join the nearest centre."""


@record("StratifiedState")
class StratifiedState:
    """What the server remembers: the last compressed gradient of each client.

    Args:
        known: Clients that ever sent one, ascending, int64.
        rows: Their Z, len(known) rows of length d.
        participants: Who returned a model in the last round, ascending, int64.
        sent: The sketch of the model that went out, shape (d,), where updates stand for gradients.
        lr: η of that round.
        steps: K of every client where it is the same for all, else 1.
        seed: The experiment's seed, which sketches belong to.
        clusters: Where k-means stands, beyond ``FITTED`` clients of whom a few are renewed a round.
    """

    known: NDArray[np.int64]
    rows: RowStore
    participants: NDArray[np.int64]
    sent: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, dtype=np.float32))
    lr: float = 1.0
    steps: int = 1
    seed: int = 0
    clusters: Clusters | None = None

    @property
    def points(self) -> NDArray[np.float32]:
        """Z, shape (len(known), d)."""
        return self.rows.whole()

    def learned(self, clients: NDArray[np.int64], points: NDArray[np.float32]) -> StratifiedState:
        """With Z of some clients, ascending, renewed or added."""
        known, rows = self.rows.joined(self.known, clients, points)
        clusters = self.clusters
        if clusters is not None and len(clients) == len(known):
            clusters = None
        elif clusters is not None:
            again = np.searchsorted(self.known, clients[np.isin(clients, self.known)])
            clusters = clusters.without(again, self.rows.take(again))
            if len(known) > len(self.known):
                clusters = clusters.among(np.searchsorted(known, self.known), len(known))
        return replace(self, known=known, rows=rows, clusters=clusters)


class Stratified(ClientSampler):
    """Clients in strata of similar gradients; more draws where a stratum is large or diverse.

    Args:
        strata: H.
        centres: d', different values that a compressed gradient has.
        coordinates: The length to which a gradient is projected first; 0 for its full length. Our reading of the text's
            K_desired, which in the published code of FedSTaS is the number of samples that a round wants.
        refresh: Whose compressed gradient Z is renewed every round, the others keeping their last one: ``all`` (the
            paper) or ``participants``, by default up to 1,000 clients and beyond.
        gradients: Where Z comes from. ``asked``: those to be renewed are asked for their compressed gradient at w_t,
            which takes them a pass over their data; with ``participants`` as many clients that are not known yet are
            asked too. ``updates``: nobody is asked; what a participant's update says of its gradient, (w_t − w_k) /
            (η K) after K steps, stands for it, and clients that never took part are a stratum of their own. By default
            ``asked`` with ``all`` and ``updates`` with ``participants``: asking would take longer than the training.
        compared: What of a compressed gradient k-means, ‖Z_k‖ and S_h see. ``restored``: the gradient that it stands
            for, as the paper has it. ``centroids``: only its d' centres, as in the published code of FedSTaS; only for
            gradients that are ``asked``.
        replacement: Draw with replacement within a stratum, as unbiased Horvitz-Thompson weights need.
        allocation: How many draws each stratum gets. ``neyman``: in proportion to N_h S_h, by largest remainder, which
            may leave a stratum without any, as in the published code: biased, and no weight repairs that.
            ``neyman-random``: rounded at random, no stratum below half of an equal share on average; weights take
            account of it. ``neyman-at-least-one``: a draw for every stratum first, so that with as many draws as strata
            nothing is left to allocate. ``proportional``: to N_h, with a draw for every stratum. By default ``neyman``;
            ``neyman-random`` with replacement; ``neyman-at-least-one`` where only participants are renewed, since a
            stratum without draws would never be looked at again.
    """

    strata: PositiveInt = 10
    centres: int = Field(default=9, ge=1, le=255)
    coordinates: int = Field(default=2048, ge=0)
    refresh: Refresh | None = None
    gradients: Gradients | None = None
    compared: Compared = "restored"
    replacement: bool = False
    allocation: Allocation | None = None

    def rule(self, config: FederationConfig) -> Allocation:
        """The allocation in use."""
        if self.allocation is not None:
            return self.allocation
        if self.replacement:
            return "neyman-random"
        return "neyman" if self._refreshes(config) == "all" else "neyman-at-least-one"

    def check(self, config: FederationConfig) -> None:
        """No more strata than clients; fewer draws than strata are allowed, and said."""
        super().check(config)
        if self._refreshes(config) == "all" and self.gradients == "updates":
            problem = "there are updates of participants alone: set refresh = 'participants', or use 'asked'"
            raise SpecError("method.gradients", problem, self.gradients)
        if self.compared == "centroids" and self._uses_updates(config):
            problem = "updates are not compressed and have no centroids: use 'restored', or gradients = 'asked'"
            raise SpecError("method.compared", problem, self.compared)
        if self.strata > config.clients:
            raise SpecError("method.strata", f"more strata than clients; give at most {config.clients}", self.strata)
        d = sum(tensor.numel() for tensor in config.model.params().values())
        d = min(d, self.coordinates or d)
        if self.centres > d:
            raise SpecError("method.centres", f"the gradient has {d} coordinates; give at most that", self.centres)
        m = config.training.invited(config.clients)
        if m < self.strata and self.rule(config) in ("neyman-at-least-one", "proportional"):
            warnings.warn(
                f"{m} clients a round are fewer than {self.strata} strata: some strata are left out of every round, "
                "which biases the aggregate; set training.clients_per_round to at least the number of strata",
                stacklevel=2,
            )

    def check_private(self, config: FederationConfig) -> None:
        """Updates of clients that took unequal numbers of steps would be long where a client holds much."""
        if self._uses_updates(config) and config.training.local_steps is None:
            problem = "updates tell how many steps a client took, and with them the size that it keeps private"
            accepted = "use 'asked', or give training.local_steps, the same for all"
            raise SpecError("method.gradients", f"{problem}; {accepted}", "updates")

    def learns(self, config: FederationConfig) -> bool:
        """Updates may stand for gradients."""
        return self._uses_updates(config)

    def allowed(self, agreed: Agreed) -> list[Allowed]:
        """Return the request for compressed gradients, in every round; nothing if updates stand for them."""
        if self._uses_updates(agreed):
            return []
        where = {"centres": self.centres, "coordinates": self.coordinates}
        length = f"{self.coordinates} random combinations of" if self.coordinates else "all of"
        description = f"{length} {Compress.rule.description}, rounded to {self.centres} values"
        return [Allowed(Compress, where=where, rule=replace(Compress.rule, description=description))]

    def init(self, federation: Federation) -> Tree:
        """Nobody is known."""
        nobody = np.empty(0, dtype=np.int64)
        return StratifiedState(nobody, RowStore.of(np.empty((0, 0), dtype=np.float32)), nobody)

    def select(self, federation: Federation, state: Tree, weights: Weights) -> tuple[Selection, Tree]:
        """Refresh Z, stratify, allocate, draw."""
        config, candidates = federation.config, federation.candidates()
        state, candidates = self._refresh(federation, state, weights, candidates)
        met = np.zeros(config.clients, dtype=bool)
        met[state.known] = True
        unseen = np.empty(0, dtype=np.int64)
        if self._uses_updates(config):
            unseen = candidates[~met[candidates]]
        known = candidates[met[candidates]]
        clients = np.concatenate([known, unseen])
        if len(clients) == 0:
            return Selection.plain(clients, 0), state
        # Strangers are a stratum of their own; the few that are known at first have their share of the strata.
        count = self.strata if len(known) == len(clients) else max(1, (self.strata - 1) * len(known) // len(clients))
        there = np.searchsorted(state.known, known)
        norms = state.rows.norms[there]
        # Unseen clients have unknown gradients: give all of them the same length.
        strata, deviations, overall = known, np.empty(0), 1.0
        if len(known):
            state, strata, deviations, overall = self._strata(federation, state, there, min(count, len(known)))
        sizes = np.bincount(strata, minlength=len(deviations))
        if len(unseen):
            strata = np.concatenate([strata, np.full(len(unseen), len(sizes))])
            sizes, deviations = np.append(sizes, len(unseen)), np.append(deviations, overall)
            norms = np.concatenate([norms, np.zeros(len(unseen))])
        m = min(config.training.invited(config.clients), len(clients))
        allocation, chance = allocated(self.rule(config), m, sizes, deviations, federation.rng("allocation"))
        order = np.argsort(clients)
        selection = draw(
            clients[order],
            strata[order],
            sizes,
            allocation,
            norms[order],
            self.replacement,
            federation.rng("client-sampling"),
        )
        metrics: dict[str, Any] = {
            "strata_sizes": sizes.tolist(),
            "strata_allocation": allocation.tolist(),
            "strata_deviation": [round(float(s), 8) for s in deviations],
        }
        if len(unseen):
            metrics["strata_unknown"] = len(unseen)
        random = chance if self.rule(config) == "neyman-random" else None
        return replace(selection, stratum_chance=random, metrics=metrics), state

    def observe(self, state: Tree, replies: Mapping[int, FitReply]) -> Tree:
        """Remember who took part: their compressed gradients are renewed, or their updates stand for them."""
        # A client that took no step, because it kept no sample this time, has not shown what its gradient is like.
        trained = {client: reply for client, reply in replies.items() if reply.trained} if len(state.sent) else {}
        if trained:
            # Where sizes are private nobody tells its steps, and all take the same number: see ``check_private``.
            steps = [reply.steps or state.steps for reply in trained.values()]
            models = sketches([reply.weights.params for reply in trained.values()], self.coordinates, state.seed)
            points = (state.sent - models) / (np.float32(state.lr) * np.array(steps, dtype=np.float32))[:, None]
            state = state.learned(np.fromiter(trained, dtype=np.int64), points)
        return replace(state, participants=np.array(sorted(replies), dtype=np.int64))

    def stratification(self, config: FederationConfig, state: Tree, round: int) -> Strata | None:
        """Cluster the known gradients with k-means."""
        if len(state.known) == 0:
            return None
        points = state.points
        if state.clusters is not None:
            strata = np.unique(state.clusters.converged(state.rows).labels, return_inverse=True)[1]
        else:
            strata = stratify(points, min(self.strata, len(points)), config.seed, round)
        return Strata(state.known, points, strata)

    def _strata(
        self, federation: Federation, state: StratifiedState, there: NDArray[np.int64], count: int
    ) -> tuple[StratifiedState, NDArray[np.int64], NDArray[np.float64], float]:
        """The strata of those known clients that are ``there``, S_h, and S of all of them together."""
        seed, round, rows, clusters = federation.config.seed, federation.round, state.rows, state.clusters
        if len(rows) > FITTED and self._refreshes(federation.config) != "all":
            # Few changed: the last round's centres go on moving, until half the clients have changed once.
            stale = clusters is None or 2 * clusters.renewed > len(rows) or not clusters.sizes.all()
            if clusters is None or stale or len(clusters.sizes) != count:
                clusters = Clusters.of(rows, stratify(state.points, count, seed, round))
            clusters = clusters.converged(rows)
            deviations, overall = clusters.spread(rows.norms)
            return replace(state, clusters=clusters), clusters.labels[there], deviations, overall
        points = state.points if len(there) == len(rows) else rows.take(there)
        strata = stratify(points, count, seed, round)
        seen = _seen(len(points), seed, round)
        fitted, strata_seen = (points, strata) if seen is None else (points[seen], strata[seen])
        deviations = spread(fitted, strata_seen, int(strata.max()) + 1)
        return state, strata, deviations, float(spread(fitted, np.zeros_like(strata_seen), 1)[0])

    def _refresh(
        self, federation: Federation, state: StratifiedState, weights: Weights, candidates: NDArray[np.int64]
    ) -> tuple[StratifiedState, NDArray[np.int64]]:
        """What is known now, and who of the candidates may be drawn."""
        refresh = self._refreshes(federation.config)
        if self._uses_updates(federation.config):
            config = federation.config
            sent = sketch(weights.params, self.coordinates, config.seed)
            training = config.training
            lr, steps = training.lr_at(federation.round), training.local_steps or 1
            return replace(state, sent=sent, lr=lr, steps=steps, seed=config.seed), candidates
        asked = candidates
        if refresh == "participants":
            # Those of the last round renew theirs. Nobody can be drawn before being known: as many unseen clients as
            # a round has places introduce themselves, until all have.
            unseen = np.setdiff1d(candidates, state.known)
            m = min(federation.config.training.invited(federation.config.clients), len(unseen))
            introduced = federation.rng("introduce").choice(unseen, size=m, replace=False)
            asked = np.union1d(np.intersect1d(state.participants, candidates), introduced)
        request = Compress(federation.round, weights, self.centres, self.coordinates)
        replies = federation.ask(asked, request, work=float)
        if not replies:
            return state, candidates[:0] if refresh == "all" else candidates
        fresh = np.array(sorted(replies), dtype=np.int64)
        points = np.stack([self._point(replies[int(client)]) for client in fresh])
        # Who was just asked and did not answer is not there: inviting it would waste a place.
        return state.learned(fresh, points), fresh if refresh == "all" else candidates

    def _point(self, reply: CompressReply) -> NDArray[np.float32]:
        """What clients are compared by, shape (d,), or (d',) of centroids: the largest again where there are fewer."""
        if self.compared == "restored":
            return reply.restored()
        centres: NDArray[np.float32] = reply.centres.numpy()
        return np.pad(centres, (0, self.centres - len(centres)), mode="edge")

    def _refreshes(self, config: Agreed) -> str:
        return self.refresh or ("all" if config.clients <= LARGE and self.gradients != "updates" else "participants")

    def _uses_updates(self, config: Agreed) -> bool:
        return self._refreshes(config) == "participants" and self.gradients != "asked"


def stratify(points: NDArray[np.float32], count: int, seed: int, round: int) -> NDArray[np.int64]:
    """k-means of the compressed gradients into strata 0 … H' − 1, none of them empty (H' ≤ ``count``).

    Args:
        points: Z, shape (N, d).
        count: H.
        seed: The experiment's seed.
        round: The round, counted from 1.
    """
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    seen = _seen(len(points), seed, round)
    fitted = points if seen is None else points[seen]
    # k-means does not mind the scale, but squares of very small or large gradients leave the range of float32.
    largest = np.float32(max(float(fitted.max()), -float(fitted.min())))
    fitted = fitted / largest if largest > 0 else fitted
    state = int(rng(seed, "strata", round).integers(2**31))
    # Sums of rows tell different rows apart far faster than the rows do; only where too few differ it is looked up.
    distinct = len(np.unique(fitted.sum(axis=1)))
    distinct = distinct if distinct >= count else len(np.unique(fitted, axis=0))
    with warnings.catch_warnings():
        # Points that differ in the last bits only make fewer clusters than asked: fewer strata are meant then.
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = KMeans(min(count, distinct), n_init=1, random_state=state).fit(fitted)
    labels = model.labels_
    if seen is not None:
        centres = model.cluster_centers_
        products = points @ centres.T / (largest if largest > 0 else np.float32(1))
        labels = np.argmin((centres * centres).sum(axis=1) - 2 * products, axis=1)
        labels[seen] = model.labels_
    return np.unique(labels, return_inverse=True)[1].astype(np.int64)


def _seen(clients: int, seed: int, round: int) -> NDArray[np.int64] | None:
    """The rows that k-means sees: None for all, or a random subset of many, the same for every caller."""
    if clients <= FITTED:
        return None
    return np.sort(rng(seed, "strata-subset", round).choice(clients, FITTED, replace=False))


def draw(
    clients: NDArray[np.int64],
    strata: NDArray[np.int64],
    sizes: NDArray[np.int64],
    allocation: NDArray[np.int64],
    norms: NDArray[np.float64],
    replacement: bool,
    generator: np.random.Generator,
) -> Selection:
    """Draw m_h clients of every stratum, p_k ∝ ‖Z_k‖ within it (uniform where all norms are zero).

    Args:
        clients: Shape (N,), ascending.
        strata: The stratum of each, shape (N,).
        sizes: N_h, shape (H,).
        allocation: m_h, shape (H,).
        norms: ‖Z_k‖, shape (N,).
        replacement: Whether a client may be drawn more than once.
        generator: Randomness.
    """
    probability = np.zeros(len(clients))
    times = np.zeros(len(clients), dtype=np.int64)
    for h in range(len(sizes)):
        members = np.flatnonzero(strata == h)
        total = norms[members].sum()
        p = norms[members] / total if total > 0 else np.full(len(members), 1 / max(len(members), 1))
        probability[members] = p
        if allocation[h] == 0:
            continue
        if replacement:
            times[members] = generator.multinomial(allocation[h], p)
            continue
        # Without replacement at most as many as have a chance at all can be drawn by weight; the rest is uniform.
        weighted = min(int(allocation[h]), int((p > 0).sum()))
        chosen = generator.choice(members, size=weighted, replace=False, p=p)
        times[chosen] = 1
        if weighted < allocation[h]:
            others = members[times[members] == 0]
            times[generator.choice(others, size=int(allocation[h]) - weighted, replace=False)] = 1
    drawn = times > 0
    return Selection(
        clients=clients[drawn],
        draws=times[drawn],
        probability=probability[drawn],
        stratum=strata[drawn],
        stratum_sizes=sizes,
    )
