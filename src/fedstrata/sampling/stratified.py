"""Divide clients into strata by compressed gradients, and draw from the strata (FedSTaS, Algorithms 1 and 2).

The symbols are the same as in the paper. The compressed gradient of client k is Z_k. A stratum is a
group of clients, and there are H strata. In stratum h, there are N_h clients and m_h draws, and the gradients Z_k have
the standard deviation S_h. Neyman's allocation is m_h ∝ N_h S_h.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any, Literal

import numpy as np
from pydantic import Field, PositiveInt
from typing_extensions import override

from fedstrata.base.arrays import Floats, Floats32, Ints
from fedstrata.base.errors import SpecError
from fedstrata.base.records import Tree, record
from fedstrata.base.rng import rng
from fedstrata.federation.allowed import Agreed, Allowed
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import FitReply, Weights
from fedstrata.sampling.allocation import Allocation, allocated, quotas, spread, systematic
from fedstrata.sampling.base import ClientSampler, Selection, Strata
from fedstrata.sampling.incremental_kmeans import Clusters
from fedstrata.sampling.sketches import NO_POINTS, Compress, CompressReply, lengths, sketch, sketch_length, with_rows

Refresh = Literal["all", "participants"]
Gradients = Literal["asked", "updates"]
Compared = Literal["restored", "centroids"]
Start = Literal["k-means++", "random"]
Draws = Literal["sequential", "systematic"]

LARGE = 1000
"""By default, all clients send new gradients in every round if there are at most ``LARGE`` clients."""

FITTED = 1000
"""With at most ``FITTED`` clients, k-means and the spread of each stratum use all clients.

With more clients, k-means and the spread use a random subset of this size. All other clients join the stratum with the
nearest centre.
"""


@record("StratifiedState")
class StratifiedState:
    """The sampler's state, which contains the last compressed gradient of each client.

    Args:
        known: Clients with a known gradient, in ascending order, int64.
        points: The compressed gradients of the clients in ``known``, shape (len(known), d).
        participants: Clients that sent back a model in the last round, in ascending order, int64.
        sent: A random projection of the global model of the last round, shape (d,); empty if updates are not used as
            gradients.
        lr: The learning rate of the last round.
        steps: The number of local steps if all clients take the same number of steps; otherwise 1.
        seed: The experiment's seed, which determines the sketches.
        clusters: The state of k-means between rounds; None if k-means will start from scratch. This is the case if
            there are at most ``FITTED`` clients, or if all clients sent new gradients.
    """

    known: Ints
    points: Floats32
    participants: Ints
    sent: Floats32 = field(default_factory=lambda: np.empty(0, dtype=np.float32))
    lr: float = 1.0
    steps: int = 1
    seed: int = 0
    clusters: Clusters | None = None

    def learned(self, clients: Ints, points: Floats32) -> StratifiedState:
        """Return a copy in which the given clients have new compressed gradients.

        The argument ``clients`` contains the clients in ascending order, shape (n,), and ``points`` contains their
        new gradients, shape (n, d).
        """
        known, after = with_rows(self.known, self.points, clients, points)
        clusters = self.clusters
        if clusters is not None and len(clients) == len(known):
            clusters = None
        elif clusters is not None:
            again = np.searchsorted(self.known, clients[np.isin(clients, self.known)])
            clusters = clusters.without(again, self.points[again])
            if len(known) > len(self.known):
                clusters = clusters.among(np.searchsorted(known, self.known), len(known))
        return replace(self, known=known, points=after, clusters=clusters)


class Stratified(ClientSampler):
    """Divides clients into strata with similar gradients, and draws more clients from large and diverse strata.

    Args:
        strata: Number of strata.
        centres: Number d' of distinct values in a compressed gradient. With 0, gradients are not quantised.
        coordinates: Number of coordinates to which a random projection reduces each gradient. With 0, gradients are not
            projected.
        refresh: Clients that send a new gradient in each round: ``all``, as in the paper, or only the round's
            ``participants``. Default: ``participants`` for more than 1,000 clients or ``gradients = "updates"``,
            otherwise ``all``.
        gradients: Gradients by which clients are grouped. ``asked``: the gradient of the client's loss at the global
            model. ``updates``: the client's last update, divided by the learning rate and the number of steps. Default:
            ``asked`` if ``refresh = "all"``, otherwise ``updates``.
        compared: Values by which clients are compared: the compressed gradient (``restored``), as in the paper, or only
            its d' distinct values (``centroids``), as in FedSTaS's code.
        start: Initial centres of k-means. ``random``: random gradients, as in the paper. Default: ``k-means++``.
        replacement: Whether a client may be drawn more than once per round.
        draws: How clients are drawn from a stratum without replacement. ``sequential``: one after another, as in the
            paper. ``systematic``: in equal steps of cumulative probability, so that each client's probability is known
            (Madow 1949).
        allocation: Number of clients drawn from each stratum. ``neyman``: in proportion to the stratum's size times the
            spread of its gradients. ``neyman-random``: as ``neyman``, with unbiased random rounding.
            ``neyman-at-least-one``: as ``neyman``, but at least 1. ``proportional``: in proportion to the stratum's
            size, but at least 1. Default: ``neyman-random`` if draws are systematic or with replacement. Otherwise:
            ``neyman`` if ``refresh = "all"``, else ``neyman-at-least-one``.
    """

    needs_replies = "forms groups of clients from their gradients"

    strata: PositiveInt = 10
    centres: int = Field(default=9, ge=0, le=255)
    coordinates: int = Field(default=2048, ge=0)
    refresh: Refresh | None = None
    gradients: Gradients | None = None
    compared: Compared = "restored"
    start: Start | None = None
    replacement: bool = False
    draws: Draws = "sequential"
    allocation: Allocation | None = None

    def rule(self, config: FederationConfig) -> Allocation:
        """Return the allocation rule to use, which is the setting ``allocation`` or its default."""
        if self.allocation is not None:
            return self.allocation
        if self.replacement or self.draws == "systematic":
            return "neyman-random"
        return "neyman" if self._renewal(config) == "all" else "neyman-at-least-one"

    def check(self, config: FederationConfig) -> None:
        """Raise ``SpecError`` for incompatible settings. Warn if there are fewer draws than strata."""
        super().check(config)
        if self.replacement and self.draws == "systematic":
            problem = "never draws a client twice, so replacement = true is impossible. Set replacement = false."
            raise SpecError("method.client_sampler.draws", problem, self.draws)
        if self._renewal(config) == "all" and self.gradients == "updates":
            problem = "only participants send updates. Set method.refresh = 'participants', or "
            problem += "method.gradients = 'asked'."
            raise SpecError("method.gradients", problem, self.gradients)
        if self.compared == "centroids" and self._renewal(config) == "updates":
            problem = "updates are not compressed and have no centroids. Set method.compared = 'restored', or "
            problem += "method.gradients = 'asked'."
            raise SpecError("method.compared", problem, self.compared)
        if self._renewal(config) == "updates" and not config.training.optimizer.is_sgd:
            problem = "gradients can be computed from updates only if clients use SGD. Set training.optimizer = 'sgd', "
            problem += "or method.gradients = 'asked'."
            raise SpecError("training.optimizer", problem, config.training.optimizer.label)
        if self.compared == "centroids" and not self.centres:
            problem = "gradients that are not rounded (centres = 0) have no centroids. Set compared = 'restored', or a "
            problem += "positive number of centres."
            raise SpecError("method.compared", problem, self.compared)
        if self.strata > config.clients:
            raise SpecError(
                "method.strata",
                f"the partition has {config.clients} clients. Use at most {config.clients}.",
                self.strata,
            )
        d = sketch_length(config.model.params(), self.coordinates)
        if self.centres > d:
            raise SpecError("method.centres", f"the gradient has {d} coordinates. Use at most {d}.", self.centres)
        m = config.training.invited(config.clients)
        if m < self.strata and self.rule(config) in ("neyman-at-least-one", "proportional"):
            warnings.warn(
                f"training.clients_per_round = {m}: is lower than method.strata = {self.strata}. Each round therefore "
                f"leaves out some strata, so the aggregate is biased. Use at least {self.strata}.",
                stacklevel=2,
            )

    def check_private(self, config: FederationConfig) -> None:
        """Raise ``SpecError`` if using updates as gradients would disclose the clients' numbers of samples.

        The norm of an update depends on the number of local steps. If ``training.local_steps`` is not set, the number
        of local steps depends on the client's number of samples.
        """
        if self._renewal(config) == "updates" and config.training.local_steps is None:
            problem = "updates would disclose the clients' numbers of samples, which method.data_sampler keeps private"
            accepted = "Set method.gradients = 'asked', or training.local_steps."
            raise SpecError("method.gradients", f"{problem}. {accepted}", "updates")

    @override
    def learns(self, config: FederationConfig) -> bool:
        return self._renewal(config) == "updates"

    def allowed(self, agreed: Agreed) -> list[Allowed]:
        """Return the request for compressed gradients. Return an empty list if updates are used as gradients."""
        if self._renewal(agreed) == "updates":
            return []
        where = {"centres": self.centres, "coordinates": self.coordinates}
        length = f"{self.coordinates} random combinations of" if self.coordinates else "all of"
        description = f"{length} {Compress.rule.description}"
        description += f", rounded to {self.centres} values" if self.centres else ""
        return [Allowed(Compress, where=where, rule=replace(Compress.rule, description=description))]

    @override
    def init(self, federation: Federation) -> Tree:
        no_clients = np.empty(0, dtype=np.int64)
        return StratifiedState(no_clients, NO_POINTS, no_clients)

    def select(self, federation: Federation, state: Tree, weights: Weights) -> tuple[Selection, Tree]:
        """Renew the gradients, divide the clients into strata, allocate the draws to the strata, and draw clients."""
        config, candidates = federation.config, federation.candidates()
        state, candidates = self._refresh(federation, state, weights, candidates)
        is_known = np.isin(candidates, state.known)
        known = candidates[is_known]
        unseen = candidates[~is_known] if self._renewal(config) == "updates" else candidates[:0]
        clients = np.concatenate([known, unseen])
        if len(clients) == 0:
            return Selection.plain(clients, 0), state
        # Clients without a gradient form one stratum. The number of other strata is proportional to the share of
        # clients with a gradient.
        count = self.strata if len(known) == len(clients) else max(1, (self.strata - 1) * len(known) // len(clients))
        available = np.searchsorted(state.known, known)
        all_norms = lengths(state.points)
        norms = all_norms[available]
        strata, deviations, overall = known, np.empty(0), 1.0
        if len(known):
            state, strata, deviations, overall = self._strata(
                federation, state, all_norms, available, min(count, len(known))
            )
        sizes = np.bincount(strata, minlength=len(deviations))
        if len(unseen):
            strata = np.concatenate([strata, np.full(len(unseen), len(sizes))])
            sizes, deviations = np.append(sizes, len(unseen)), np.append(deviations, overall)
            # Clients without a gradient get the norm 0, because ``draw`` chooses uniformly within a stratum whose norms
            # are all 0.
            norms = np.concatenate([norms, np.zeros(len(unseen))])
        rule, m = self.rule(config), min(config.training.invited(config.clients), len(clients))
        allocation, chance = allocated(rule, m, sizes, deviations, federation.rng("allocation"))
        order, generator = np.argsort(clients), federation.rng("client-sampling")
        selection = draw(
            clients[order], strata[order], sizes, allocation, norms[order], self.replacement, generator, self.draws
        )
        metrics: dict[str, Any] = {
            "strata_sizes": sizes.tolist(),
            "strata_allocation": allocation.tolist(),
            "strata_deviation": [round(float(s), 8) for s in deviations],
        }
        if len(unseen):
            metrics["strata_unknown"] = len(unseen)
        random = chance if rule == "neyman-random" else None
        return replace(selection, stratum_chance=random, metrics=metrics), state

    def observe(self, state: Tree, replies: Mapping[int, FitReply]) -> Tree:
        """Store the participants, and also their updates if updates are used as gradients."""
        # A client without samples took no step, so its update says nothing about its gradient.
        trained = {client: reply for client, reply in replies.items() if reply.trained} if len(state.sent) else {}
        if trained:
            # If sizes are private, replies lack the number of steps. ``check_private`` ensures that all clients then
            # take the same number of steps.
            steps = [reply.steps or state.steps for reply in trained.values()]
            models = np.stack(
                [sketch(reply.weights.params, self.coordinates, state.seed) for reply in trained.values()]
            )
            points = (state.sent - models) / (np.float32(state.lr) * np.array(steps, dtype=np.float32))[:, None]
            state = state.learned(np.fromiter(trained, dtype=np.int64), points)
        return replace(state, participants=np.array(sorted(replies), dtype=np.int64))

    def stratification(self, config: FederationConfig, state: Tree, round: int) -> Strata | None:
        """Return the strata of all clients with a known gradient."""
        if len(state.known) == 0:
            return None
        points = state.points
        if state.clusters is not None:
            strata = np.unique(state.clusters.converged(points, lengths(points)).labels, return_inverse=True)[1]
        else:
            strata = stratify(points, min(self.strata, len(points)), config.seed, round, self.start)
        return Strata(state.known, points, strata)

    def _strata(
        self, federation: Federation, state: StratifiedState, norms: Floats, available: Ints, count: int
    ) -> tuple[StratifiedState, Ints, Floats, float]:
        """Divide the available clients into strata.

        Args:
            federation: The federation.
            state: The sampler's state.
            norms: The norm of each gradient in ``state.points``.
            available: The indices of the available clients in ``state.known``, ascending, shape (n,).
            count: The maximum number of strata.

        Returns:
            The new state, the stratum of each available client, shape (n,), the spread of the gradients in each
            stratum, shape (H,), and the spread over all clients (see ``allocation.spread``).
        """
        seed, round, points, clusters = federation.config.seed, federation.round, state.points, state.clusters
        if len(points) > FITTED and self._renewal(federation.config) != "all":
            # Few rows change per round, so k-means continues from the centres of the last round. k-means starts from
            # scratch when half of the rows have been renewed, when a stratum is empty, or when the number of strata
            # changes.
            stale = clusters is None or 2 * clusters.renewed > len(points) or not clusters.sizes.all()
            if clusters is None or stale or len(clusters.sizes) != count:
                clusters = Clusters.of(points, norms, stratify(points, count, seed, round, self.start))
            clusters = clusters.converged(points, norms)
            deviations, overall = clusters.spread(norms)
            return replace(state, clusters=clusters), clusters.labels[available], deviations, overall
        points = points[available]
        strata = stratify(points, count, seed, round, self.start)
        subset = _subset(len(points), seed, round)
        fitted, fitted_strata = points[subset], strata[subset]
        deviations = spread(fitted, fitted_strata, int(strata.max()) + 1)
        return state, strata, deviations, float(spread(fitted, np.zeros_like(fitted_strata), 1)[0])

    def _refresh(
        self, federation: Federation, state: StratifiedState, weights: Weights, candidates: Ints
    ) -> tuple[StratifiedState, Ints]:
        """Renew the compressed gradients.

        Returns:
            The new state, and the candidates. If all candidates were asked, candidates that did not reply are left out.
        """
        config = federation.config
        renewal, training = self._renewal(config), config.training
        if renewal == "updates":
            sent = sketch(weights.params, self.coordinates, config.seed)
            lr, steps = training.lr_at(federation.round), training.local_steps or 1
            return replace(state, sent=sent, lr=lr, steps=steps, seed=config.seed), candidates
        asked = candidates
        if renewal == "participants":
            # Ask the last round's participants for new gradients. Also ask clients without a gradient, as many as a
            # round invites, because only clients with a gradient can be drawn.
            unseen = np.setdiff1d(candidates, state.known)
            m = min(training.invited(config.clients), len(unseen))
            introduced = federation.rng("introduce").choice(unseen, size=m, replace=False)
            asked = np.union1d(np.intersect1d(state.participants, candidates), introduced)
        request = Compress(federation.round, weights, self.centres, self.coordinates)
        replies = federation.ask(asked, request, work=float)
        if not replies:
            return state, candidates[:0] if renewal == "all" else candidates
        answered, restored = np.fromiter(replies, dtype=np.int64), self.compared == "restored"
        points = [reply.restored if restored else self._centroids(reply) for reply in replies.values()]
        # If all clients were asked, leave out clients that did not answer, because they would probably not train
        # either.
        return state.learned(answered, np.stack(points)), answered if renewal == "all" else candidates

    def _centroids(self, reply: CompressReply) -> Floats32:
        """Return the values that occur in a compressed gradient, shape (d',).

        If there are fewer than d' values, the last value is repeated.
        """
        centres: Floats32 = reply.centres.numpy()
        return np.pad(centres, (0, self.centres - len(centres)), mode="edge")

    def _renewal(self, config: Agreed) -> Literal["all", "participants", "updates"]:
        """Return how gradients are renewed: all clients are asked, only participants are asked, or updates are used."""
        few = config.clients <= LARGE and self.gradients != "updates"
        if self.refresh == "all" or (self.refresh is None and few):
            return "all"
        return "participants" if self.gradients == "asked" else "updates"


def stratify(points: Floats32, count: int, seed: int, round: int, start: Start | None = None) -> Ints:
    """Divide clients into strata by a k-means clustering of their compressed gradients.

    With ``start = "random"``, the first centres are the gradients of ``count`` random clients. The iteration ends when
    no client changes its stratum (FedSTaS, Algorithm 1). If a stratum becomes empty, scikit-learn moves the stratum's
    centre to the client that is farthest from the centre of its own stratum. The paper does not say what happens to an
    empty stratum.

    Args:
        points: The compressed gradient of each client, shape (N, d).
        count: The maximum number of strata. With fewer than ``count`` different gradients, there are fewer strata.
        seed: The experiment's seed.
        round: The round, counted from 1.
        start: See ``Stratified``.

    Returns:
        The stratum of each client, shape (N,), in 0 … H − 1 with H ≤ ``count``. No stratum is empty.
    """
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    subset = _subset(len(points), seed, round)
    fitted = points[subset]
    # Scaling all values does not change the clusters, but keeps the squares within the range of float32.
    largest = np.float32(max(float(fitted.max()), -float(fitted.min())))
    fitted = fitted / largest if largest > 0 else fitted
    state = int(rng(seed, "strata", round).integers(2**31))
    # Count different rows. Rows with different sums are different, and sums are much faster to compare. Compare whole
    # rows only if there are too few different sums.
    distinct = len(np.unique(fitted.sum(axis=1)))
    distinct = distinct if distinct >= count else len(np.unique(fitted, axis=0))
    with warnings.catch_warnings():
        # If points differ only in their last bits, scikit-learn finds fewer clusters and warns needlessly.
        warnings.simplefilter("ignore", ConvergenceWarning)
        # The paper's k-means starts at random clients, and ends when no client changes its stratum (no tolerance).
        how = {"init": "random", "tol": 0.0} if start == "random" else {}
        model = KMeans(min(count, distinct), n_init=1, random_state=state, **how).fit(fitted)
    labels = model.labels_
    if len(fitted) < len(points):
        centres = model.cluster_centers_
        products = points @ centres.T / (largest if largest > 0 else np.float32(1))
        labels = np.argmin((centres * centres).sum(axis=1) - 2 * products, axis=1)
        labels[subset] = model.labels_
    return np.unique(labels, return_inverse=True)[1].astype(np.int64)


def _subset(clients: int, seed: int, round: int) -> Ints | slice:
    """Return the rows that k-means uses: all rows, or a random subset of ``FITTED`` rows that depends on the round."""
    if clients <= FITTED:
        return slice(None)
    return np.sort(rng(seed, "strata-subset", round).choice(clients, FITTED, replace=False))


def draw(
    clients: Ints,
    strata: Ints,
    sizes: Ints,
    allocation: Ints,
    norms: Floats,
    replacement: bool,
    generator: np.random.Generator,
    draws: Draws = "sequential",
) -> Selection:
    """Draw clients from every stratum in proportion to ``norms``, or uniformly if all norms in the stratum are zero.

    Args:
        clients: The clients in ascending order, shape (N,).
        strata: The stratum of each client, shape (N,).
        sizes: The number of clients in each stratum, shape (H,).
        allocation: The number of draws from each stratum, shape (H,).
        norms: The norm of each client's compressed gradient, or another weight, shape (N,).
        replacement: Whether a client may be drawn more than once.
        generator: The random generator.
        draws: How clients are drawn without replacement; see ``Stratified``. With systematic draws, the result's
            ``probability`` is the client's inclusion probability, divided by the number of draws from the stratum.
    """
    probability, times = np.zeros(len(clients)), np.zeros(len(clients), dtype=np.int64)
    for h in range(len(sizes)):
        members = np.flatnonzero(strata == h)
        total = norms[members].sum()
        p = norms[members] / total if total > 0 else np.full(len(members), 1 / max(len(members), 1))
        probability[members] = p
        if allocation[h] == 0:
            continue
        if replacement:
            times[members] = generator.multinomial(allocation[h], p)
        elif draws == "systematic":
            inclusion = quotas(int(allocation[h]), np.ones(len(members), dtype=np.int64), p, np.zeros(len(members)))
            order = generator.permutation(len(members))
            times[members[order]] = systematic(inclusion[order], generator)
            probability[members] = inclusion / allocation[h]
        else:
            # Without replacement, first draw clients with a positive probability, according to these probabilities. If
            # there are fewer such clients than draws, the remaining draws are uniform among the other clients.
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
