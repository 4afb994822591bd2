"""Stratify's batch mode: an epoch of union batches over the clients that hold the labels (Algorithms 2 and 4)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedstrata.aggregation.optimizers import ServerOptimizer, Stepper
from fedstrata.base.records import Tree
from fedstrata.clients.training.sgd import clipped
from fedstrata.federation.federation import Federation, Summed
from fedstrata.federation.messages import Weights
from fedstrata.federation.settings import Training
from fedstrata.models.batchnorm import has_batchnorm
from fedstrata.stratify.messages import GatheredReply, Gradient, GradientReply, GradientSteps, Reserve, ReserveReply
from fedstrata.stratify.schedule import Holders
from fedstrata.stratify.selection import select_batches

Ints = NDArray[np.int64]


def rate(training: Training, server: ServerOptimizer | None, scale: float, round: int) -> float:
    """The learning rate of a round's batches.

    Args:
        training: Whose rate it comes from.
        server: The server's optimiser, whose own rate multiplies it.
        scale: What else multiplies it.
        round: Which.
    """
    return training.lr_at(round) * ((server.lr if server else None) or 1.0) * scale


def batch_epoch(
    federation: Federation,
    weights: Weights,
    state: Tree,
    plan: BatchPlan,
    server: ServerOptimizer | None,
    *,
    scale: float = 1.0,
    local_steps: int = 1,
) -> tuple[Weights, Tree, dict[str, Any]]:
    """One exchange and one step of the server's optimiser a batch.

    Args:
        federation: To ask.
        weights: The global model.
        state: The optimiser's.
        plan: Who trains what; its reservation is made here.
        server: The optimiser; see ``Stratify``.
        scale: What the learning rate is multiplied by.
        local_steps: Steps that a client takes on its part of a batch.

    Returns:
        The new model, the optimiser's new state and the metrics.
    """
    training = federation.config.training
    plan.reserve(np.arange(len(plan.wanted)))
    lr = rate(training, server, scale, federation.round)
    stepper = Stepper(
        server or ServerOptimizer(momentum=training.momentum, weight_decay=training.weight_decay),
        weights.params,
        state,
        lr=lr,
    )
    together = has_batchnorm(federation.config.model.module)
    seen, loss, transfers = 0, 0.0, 0
    for batch in range(plan.batches):
        request = Gradient(federation.round, batch, weights)
        if local_steps > 1:
            request = GradientSteps(federation.round, batch, weights, local_steps, lr)
        total = _batch(federation, plan, request, together, local_steps)
        if total is None:
            continue
        reply: GradientReply = total.reply
        if training.clip is None:
            stepper.step(reply.gradient, reply.samples)
        else:
            with torch.no_grad():
                mean = torch._foreach_div(list(reply.gradient.values()), float(reply.samples))
                short = clipped(mean, training.clip)
            stepper.step(dict(zip(reply.gradient, short, strict=True)))
        weights = Weights(stepper.params(), reply.buffers)
        seen, loss, transfers = seen + reply.samples, loss + reply.loss, transfers + len(total.clients)
        # Two gradients at a time would crowd each other out of the processor's cache.
        del total, reply
    # The stepper's own tensors go with it.
    weights = Weights({name: w.clone() for name, w in weights.params.items()}, weights.buffers)
    metrics = {"samples": seen, "train_loss": loss / seen if seen else None, "transfers": transfers}
    return weights, stepper.state(), metrics


def _batch(
    federation: Federation, plan: BatchPlan, request: Gradient, together: bool, local_steps: int
) -> Summed | None:
    """The sum over one batch; who fails is left out and its later positions are given to others."""
    batch = request.batch
    while work := plan.work(batch):
        if together and sum(work.values()) < 2:
            # Nobody's fault: the others of the batch are not there, and BatchNorm needs two samples.
            federation.note("batch skipped", work, "a single sample is left of it, and BatchNorm needs two")
            return None
        total = federation.ask_sum(
            work,
            request,
            together=together,
            work={client: samples * local_steps for client, samples in work.items()},
        )
        absent = set(work) - set(total.clients if total else ())
        if not absent:
            return total
        # In a group that had to be given up nobody answered, and only the culprits count as failed or late.
        culprits = absent if total else (absent & federation.log.absent()) or absent
        plan.lose(culprits, batch)
        if total:
            return total
    return None


class BatchPlan:
    """Which client trains each position of an epoch's schedule, and the reservation that makes sure of it.

    Clients are chosen batch by batch (Algorithm 2), and the requests of the whole epoch travel together: one
    exchange, and another for what could not be served, instead of one a batch.

    Args:
        federation: To ask and to record what happened.
        holders: Who holds which placeholder.
        wanted: The schedule: places of placeholders, shape (L,).
        batch_size: Positions in a batch.
        weighted: Draw a label's holders by how many samples each has, not uniformly.
        window: The part of each label's samples that is there; see ``Reserve``.
        pairs: Whether a batch needs two samples, as BatchNorm does.
    """

    def __init__(
        self,
        federation: Federation,
        holders: Holders,
        wanted: Ints,
        batch_size: int,
        *,
        weighted: bool,
        window: tuple[float, float] = (0.0, 1.0),
        pairs: bool = False,
    ) -> None:
        self.federation, self.holders, self.wanted, self.window = federation, holders, wanted, window
        self.batch_of = np.arange(len(wanted)) // batch_size
        if pairs and len(wanted) > 1 and len(wanted) % batch_size == 1:
            self.batch_of[-1] -= 1  # BatchNorm has no statistics of a single sample: it joins the batch before it
        self.batches = int(self.batch_of[-1]) + 1 if len(wanted) else 0
        self.owner = np.full(len(wanted), -1, dtype=np.int64)
        self.weighted = weighted
        self.generator = federation.rng("client-sampling")
        self.held_back = 0
        """Positions that nobody trains, because their clients would have sent parts of too few samples."""
        self._waiting: dict[int, set[int]] = {}
        """By label, clients that held back samples of it: with more positions they could send them."""
        self._last: set[int] = set()
        """Labels of which nobody but such clients has samples left."""
        self._work: list[dict[int, float]] | None = None
        self._asked: set[int] = set()
        self._gone: set[int] = set()
        self._refill: dict[int, set[int]] = {}
        self._refilled: set[tuple[int, int]] = set()
        self._holding: dict[int, Ints] = {}
        self._share: dict[int, dict[int, int]] = {}
        for p in range(len(holders.placeholders)):
            clients, counts = holders.of_placeholder(p)
            self._holding[p] = clients
            if weighted:
                self._share[p] = dict(zip(clients.tolist(), counts.tolist(), strict=True))
        # Who is known to be away is not chosen; everybody else is only found out by asking.
        announced = federation.candidates()
        self._holding = {p: np.intersect1d(clients, announced) for p, clients in self._holding.items()}
        self.available = dict(self._holding)

    def work(self, batch: int) -> dict[int, float]:
        """The clients of a batch, ascending, and how many samples each has in it."""
        if self._work is None:
            served = self.owner >= 0
            clients = self.federation.config.clients
            cells, counts = np.unique(self.batch_of[served] * clients + self.owner[served], return_counts=True)
            begins = np.searchsorted(cells // clients, np.arange(self.batches + 1)).tolist()
            owners, shares = (cells % clients).tolist(), counts.astype(float).tolist()
            self._work = [dict(zip(owners[i:j], shares[i:j], strict=True)) for i, j in pairwise(begins)]
        return self._work[batch]

    def lose(self, clients: set[int], batch: int) -> None:
        """Somebody fell out during a batch: that part of it is lost, later positions are given to others."""
        self._leave(clients)
        theirs = np.flatnonzero(np.isin(self.owner, list(clients)))
        self.owner[theirs] = -1
        later = theirs[self.batch_of[theirs] > batch]
        self.reserve(later[np.argsort(self.batch_of[later], kind="stable")])

    def reserve(self, positions: Ints) -> None:
        """Find a client with an unused sample for each of the positions."""
        self._work = None
        while len(positions):
            self._refill_empty(positions)
            weights = self._weights() if self.weighted else None
            wanted, batch_of = self.wanted[positions], self.batch_of[positions]
            self.owner[positions] = select_batches(wanted, batch_of, self.available, weights, self.generator)
            positions = self._ask_owners(positions[self.owner[positions] >= 0])

    def _ask_owners(self, positions: Ints) -> Ints:
        """Ask the chosen clients; the positions that are still open."""
        if len(positions) == 0:
            return positions
        placeholders = self.holders.placeholders
        owners = self.owner[positions]
        order = np.argsort(owners, kind="stable")
        clients, begins = np.unique(owners[order], return_index=True)
        theirs = dict(zip(clients.tolist(), np.split(positions[order], begins[1:]), strict=True))
        requests = {}
        for client, own in theirs.items():
            refill = sorted(self._refill.pop(client, ()))
            requests[client] = Reserve(
                round=self.federation.round,
                batches=torch.from_numpy(self.batch_of[own]),
                labels=torch.from_numpy(placeholders[self.wanted[own]]),
                refill=torch.from_numpy(placeholders[np.array(refill, dtype=np.int64)]),
                fresh=client not in self._asked,
                window=self.window,
            )
        replies: dict[int, ReserveReply] = self.federation.ask(
            requests, requests, check=lambda reply: reply.require_before(self.batches)
        )
        self._asked.update(replies)
        self._leave(set(requests) - set(replies))
        still_open = []
        for client, own in theirs.items():
            reply = replies.get(client)
            missing = reply.missing.numpy() if reply is not None else np.ones(len(own), dtype=bool)
            self.owner[own[missing]] = -1
            still_open.append(own[missing])
            if isinstance(reply, GatheredReply):
                self.batch_of[own[~missing]] = reply.batches.numpy()[~missing]
                still_open[-1] = own[missing & ~self._given_up(client, own, missing, reply.held.numpy())]
            if reply is not None:
                self._note_exhausted(client, own, missing, reply)
        left = np.sort(np.concatenate(still_open))
        return left[np.argsort(self.batch_of[left], kind="stable")]

    def _given_up(
        self, client: int, own: Ints, missing: NDArray[np.bool_], held: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """What a client held back and nobody else has left; a refill would train other samples twice instead."""
        wanted = self.wanted[own]
        for p in np.unique(wanted[held]).tolist():
            # Who was asked for more than it has, and for whose samples positions are given up, has none left.
            if p not in self._last or not (missing & ~held & (wanted == p)).any():
                self._waiting.setdefault(p, set()).add(client)
        given_up: NDArray[np.bool_] = held & np.isin(wanted, list(self._last))
        if count := int(given_up.sum()):
            self.held_back += count
            self.federation.note("held back", [client], f"{count} positions: too few samples would go with them")
        return given_up

    def _note_exhausted(self, client: int, own: Ints, missing: NDArray[np.bool_], reply: ReserveReply) -> None:
        empty = {int(p) for p in np.unique(self.wanted[own[missing]])}
        empty |= set(np.flatnonzero(np.isin(self.holders.placeholders, reply.exhausted.numpy())).tolist())
        for p in empty:
            self._drop(self.available, p, client)
            if (client, p) in self._refilled and not (self.wanted[own[~missing]] == p).any():
                # A pool that is empty right after it was refilled will never serve.
                self._drop(self._holding, p, client)
            self._refilled.discard((client, p))

    def _refill_empty(self, positions: Ints) -> None:
        """A label that is wanted and exhausted everywhere begins anew; one that nobody can serve is skipped."""
        for p in np.unique(self.wanted[positions]).tolist():
            if len(self.available[p]):
                continue
            if waiting := self._waiting.pop(p, set()) - self._gone:
                self.available[p] = np.array(sorted(waiting), dtype=np.int64)
                self._last.add(p)
                continue
            if len(self._holding[p]) == 0:
                count = int((self.wanted[positions] == p).sum())
                self.federation.note(
                    "label skipped", reason=f"{count} positions of placeholder {p}: no holder is there"
                )
                continue
            self.available[p] = self._holding[p]
            self._last.discard(p)
            for client in self._holding[p].tolist():
                self._refill.setdefault(client, set()).add(p)
                self._refilled.add((client, p))

    def _leave(self, clients: set[int]) -> None:
        for client in clients - self._gone:
            self._gone.add(client)
            for p in self.available:
                self._drop(self.available, p, client)
                self._drop(self._holding, p, client)

    @staticmethod
    def _drop(table: dict[int, Ints], p: int, client: int) -> None:
        table[p] = table[p][table[p] != client]

    def _weights(self) -> Mapping[int, NDArray[np.float64]]:
        return {
            p: np.array([self._share[p][int(client)] for client in clients], dtype=np.float64)
            for p, clients in self.available.items()
        }
