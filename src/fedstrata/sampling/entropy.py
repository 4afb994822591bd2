"""Choose clients with FedEntOpt's sampler, which balances the labels of a round (Lutz et al. 2025)."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import numpy as np
from pydantic import Field

from fedstrata.base.arrays import Floats, Ints
from fedstrata.base.errors import SpecError
from fedstrata.base.records import Tree, record
from fedstrata.federation.allowed import Agreed, Allowed
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import Weights
from fedstrata.sampling.base import ClientSampler, Selection
from fedstrata.sampling.label_counts import LabelCounts, allowed_label_counts


@record("EntropyState")
class EntropyState:
    """The state of FedEntOpt's sampler between rounds.

    Args:
        labels: The clients' label counts.
        recent: The buffer: the most recently invited clients, in the order of their invitations, int64.
    """

    labels: LabelCounts
    recent: Ints


class Entropy(ClientSampler):
    """Chooses clients one by one to maximise the entropy of their combined labels.

    The first client is drawn uniformly. Each further client is chosen so that the label counts of all chosen clients
    have the largest entropy. Ties are broken at random. The most recently invited clients (the *buffer*) are not
    chosen. If too few other clients can be invited, the clients that have been in the buffer longest may be chosen,
    too.

    Each client sends its label counts once. The sampler is biased on purpose: it prefers clients with rare labels.

    Args:
        buffer: Size of the buffer of recently invited clients, as a fraction of all clients. Buffered clients are not
            invited.
    """

    tells_sizes = True
    needs_replies = "asks each client for its label counts"

    buffer: Annotated[float, Field(ge=0, lt=1)] = 0.7

    def check(self, config: FederationConfig) -> None:
        """Raise ``SpecError`` if the task has neither classes nor other strata of samples."""
        super().check(config)
        if not config.strata:
            problem = (
                f"needs classes, but the task {config.task.name!r} has no classes. {config.task.stratum_hint}".rstrip()
            )
            raise SpecError("method.client_sampler", problem, self.name)

    def allowed(self, agreed: Agreed) -> list[Allowed]:
        """Return the request that asks for the clients' label counts. The sampler sends this request once per run."""
        return [allowed_label_counts()]

    def init(self, federation: Federation) -> Tree:
        """Ask all clients for their label counts."""
        return EntropyState(LabelCounts.ask(federation), np.zeros(0, dtype=np.int64))

    def select(self, federation: Federation, state: Tree, weights: Weights) -> tuple[Selection, Tree]:
        """Choose the clients of the round, and put them into the buffer."""
        config = federation.config
        clients, counts = state.labels.among(federation.candidates())
        m = min(config.training.invited(config.clients), len(clients))
        if m == 0:
            return Selection.plain(clients, 0), state
        waiting = state.recent[np.isin(state.recent, clients)]
        waiting = waiting[max(0, m - (len(clients) - len(waiting))) :]
        free = np.flatnonzero(~np.isin(clients, waiting))
        order = federation.rng("client-sampling").permutation(free)
        chosen = order[greedy(counts[order], m)]
        size = min(round(self.buffer * config.clients), config.clients - m)
        invited = clients[chosen]
        recent = np.concatenate([state.recent[~np.isin(state.recent, invited)], invited])
        entropy = float(entropies(counts[chosen].sum(axis=0, keepdims=True))[0])
        selection = replace(Selection.plain(invited, len(clients)), metrics={"label_entropy": entropy})
        return selection, replace(state, recent=recent[len(recent) - size :] if size else recent[:0])


def greedy(counts: Ints, m: int) -> Ints:
    """Return the indices of m rows. After row 0, each further row maximises the entropy of the sum of the chosen rows.

    Args:
        counts: The label counts of each of n ≥ m clients, shape (n, C). If several rows are equally good, the first of
            these rows is added.
        m: Number of rows to choose.

    >>> greedy(np.array([[4, 0, 0], [4, 1, 0], [0, 9, 9], [0, 4, 0]]), 3).tolist()
    [0, 2, 1]
    """
    chosen, total = [0], counts[0].copy()
    for _ in range(m - 1):
        gains = entropies(total + counts)
        gains[chosen] = -1
        # Use a tolerance, because rounding must not decide between rows that are equally good.
        best = int(np.flatnonzero(gains >= gains.max() - 1e-12)[0])
        chosen.append(best)
        total += counts[best]
    return np.array(chosen)


def entropies(counts: Ints) -> Floats:
    """Return the entropy in bits of each row of counts, shape (n,); 0 for a row of zeros.

    >>> entropies(np.array([[1, 1, 0, 0], [3, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])).tolist()
    [1.0, 0.0, 0.0, 2.0]
    """
    p = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    result: Floats = np.abs(-(p * np.log2(np.where(p > 0, p, 1))).sum(axis=1))
    return result
