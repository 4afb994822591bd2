"""Stratify in batch mode: the label schedule decides what trains next (Algorithm 2 and 4)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import PositiveInt, field_validator

from fedstrata.aggregation.optimizers import ServerOptimizer, Stepper
from fedstrata.clients.training import clip_
from fedstrata.errors import ReplyRefusedError
from fedstrata.federation.messages import (
    Gradient,
    GradientReply,
    LabelReply,
    LabelReport,
    Params,
    Reserve,
    ReserveReply,
    Weights,
)
from fedstrata.federation.seam import Check, Federation, Job, Summed, require_like
from fedstrata.labels.schedule import Holders, Rule, frequencies, schedule, select_batch
from fedstrata.methods.base import Method
from fedstrata.nn.batchnorm import has_batchnorm
from fedstrata.records import Tree, record

Ints = NDArray[np.int64]


@record
class StratifyState:
    """The global model, who holds which label, and the server optimiser's memory."""

    weights: Weights
    holders: Holders
    optimizer: Tree


class Stratify(Method):
    """One epoch of the stratified label schedule a round, in batches over the clients that hold the labels.

    Every batch is one SGD step on the gradient of the summed loss, divided by the number of samples that were really
    trained: the same step that a centralised run would make on those samples.

    Args:
        schedule: How often each label trains in an epoch: ``capped`` at the median count, ``uniform`` (the mean count
            for every label) or ``uncapped`` (its own count).
        cap: The cap instead of the median.
        selection: Among a label's holders, ``uniform`` or ``weighted`` by how many samples each has.
        batch_size: Samples in a batch over all clients; training's unless given.
        server: The server's optimiser. Its ``lr`` multiplies training's. Unless given, SGD with training's momentum
            and weight decay.
    """

    paper: ClassVar[str] = "Stratify: label-aware sampling for federated learning on non-IID data, Algorithms 2 and 4"

    schedule: Rule = "capped"
    cap: PositiveInt | None = None
    selection: Literal["uniform", "weighted"] = "uniform"
    batch_size: PositiveInt | None = None
    server: ServerOptimizer | None = None

    @field_validator("server", mode="before")
    @classmethod
    def _by_name(cls, value: object) -> object:
        return {"optimizer": value} if isinstance(value, str) else value

    def init(self, federation: Federation, weights: Weights) -> StratifyState:
        """Ask every client once which labels it holds."""
        replies = federation.ask(
            {k: LabelReport() for k in range(federation.job.clients)},
            check=_label_check(federation.job),
            quorum=1,
        )
        return StratifyState(weights, Holders.of(replies), None)

    def run_round(self, federation: Federation, state: StratifyState) -> tuple[StratifyState, dict[str, Any]]:
        """One epoch: schedule, reservation, then one exchange and one step a batch."""
        job, holders = federation.job, state.holders
        totals = holders.totals()
        wanted = schedule(frequencies(totals, self.schedule, self.cap), federation.rng("schedule"))
        plan = Plan(federation, holders, wanted, self.batch_size or job.training.batch_size, self.selection)
        plan.reserve(np.arange(len(wanted)))

        stepper = Stepper(
            self.server or ServerOptimizer(momentum=job.training.momentum, weight_decay=job.training.weight_decay),
            state.weights.params,
            state.optimizer,
            lr=job.training.lr_at(federation.round) * (self.server.lr if self.server else 1.0),
        )
        weights, seen, loss = state.weights, 0, 0.0
        for batch in range(plan.batches):
            total = self._batch(federation, plan, batch, weights)
            if total is None:
                continue
            reply: GradientReply = total.reply
            mean = {name: g / reply.samples for name, g in reply.gradient.items()}
            if job.training.clip is not None:
                with torch.no_grad():
                    clip_(list(mean.values()), job.training.clip)
            stepper.step(mean)
            weights = Weights(stepper.params(), reply.buffers)
            seen, loss = seen + reply.samples, loss + reply.loss
        # The stepper's own tensors go with it.
        weights = Weights({name: w.clone() for name, w in weights.params.items()}, weights.buffers)
        state = StratifyState(weights, holders, stepper.state())
        metrics = {"samples": seen, "train_loss": loss / seen if seen else None, "scheduled": len(wanted)}
        return state, metrics

    def _batch(self, federation: Federation, plan: Plan, batch: int, weights: Weights) -> Summed | None:
        """The sum over one batch; who fails is left out and its later positions are given to others."""
        together = has_batchnorm(federation.job.model.module)
        request = Gradient(federation.round, batch, weights)
        while work := plan.work(batch):
            total = federation.ask_sum(
                dict.fromkeys(work, request),
                check=_gradient_check(weights.params),
                together=together,
                work=work,
            )
            absent = set(work) - set(total.clients if total else ())
            if not absent:
                return total
            # In a group that had to be given up nobody answered, and only the culprits count as failed or late.
            culprits = absent if total else (absent & federation.tally.absent()) or absent
            plan.lose(culprits, batch)
            if total:
                return total
        return None


class Plan:
    """Which client trains each position of an epoch's schedule, and the reservation that settles it.

    Clients are chosen batch by batch (Algorithm 2), and the requests of the whole epoch travel together: one
    exchange, and another for what could not be served, instead of one a batch.

    Args:
        federation: To ask and to record what happened.
        holders: Who holds which placeholder.
        wanted: The schedule: places of placeholders, shape (L,).
        batch_size: Positions in a batch.
        selection: ``uniform`` or ``weighted``.
    """

    def __init__(self, federation: Federation, holders: Holders, wanted: Ints, batch_size: int, selection: str) -> None:
        self.federation, self.holders, self.wanted = federation, holders, wanted
        self.batch_of = np.arange(len(wanted)) // batch_size
        self.batches = int(self.batch_of[-1]) + 1 if len(wanted) else 0
        self.owner = np.full(len(wanted), -1, dtype=np.int64)
        self.weighted = selection == "weighted"
        self.draw = federation.rng("client-sampling")
        self._asked: set[int] = set()
        self._gone: set[int] = set()
        self._refill: dict[int, set[int]] = {}
        self._refilled: set[tuple[int, int]] = set()
        self._holding: dict[int, Ints] = {}
        self._share: dict[int, dict[int, int]] = {}
        for p in range(len(holders.placeholders)):
            clients, counts = holders.of_placeholder(p)
            self._holding[p] = clients
            self._share[p] = dict(zip(clients.tolist(), counts.tolist(), strict=True))
        # Who is known to be away is not chosen; everybody else is only found out by asking.
        announced = federation.candidates()
        self._holding = {p: np.intersect1d(clients, announced) for p, clients in self._holding.items()}
        self.available = dict(self._holding)

    def work(self, batch: int) -> dict[int, float]:
        """The clients of a batch, ascending, and how many samples each has in it."""
        begin, end = np.searchsorted(self.batch_of, [batch, batch + 1])
        owners = self.owner[begin:end]
        clients, counts = np.unique(owners[owners >= 0], return_counts=True)
        return dict(zip(clients.tolist(), counts.astype(float).tolist(), strict=True))

    def lose(self, clients: set[int], batch: int) -> None:
        """Somebody fell out during a batch: that part of it is lost, later positions are given to others."""
        self._leave(clients)
        theirs = np.flatnonzero(np.isin(self.owner, list(clients)))
        self.owner[theirs] = -1
        self.reserve(theirs[self.batch_of[theirs] > batch])

    def reserve(self, positions: Ints) -> None:
        """Find a client with an unused sample for each of the positions."""
        while len(positions):
            self._refill_empty(positions)
            weights = self._weights() if self.weighted else None
            for part in np.split(positions, np.flatnonzero(np.diff(self.batch_of[positions])) + 1):
                self.owner[part] = select_batch(self.wanted[part], self.available, weights, self.draw)
            positions = self._settle(positions[self.owner[positions] >= 0])

    def _settle(self, positions: Ints) -> Ints:
        """Ask the chosen clients; the positions that are still open."""
        if len(positions) == 0:
            return positions
        placeholders = self.holders.placeholders
        theirs = {
            int(client): positions[self.owner[positions] == client] for client in np.unique(self.owner[positions])
        }
        requests = {}
        for client, own in theirs.items():
            refill = sorted(self._refill.pop(client, ()))
            requests[client] = Reserve(
                round=self.federation.round,
                batches=torch.from_numpy(self.batch_of[own]),
                labels=torch.from_numpy(placeholders[self.wanted[own]]),
                refill=torch.from_numpy(placeholders[np.array(refill, dtype=np.int64)]),
                fresh=client not in self._asked,
            )
        replies: dict[int, ReserveReply] = self.federation.ask(requests)
        self._asked.update(replies)
        self._leave(set(requests) - set(replies))
        still_open = []
        for client, own in theirs.items():
            reply = replies.get(client)
            missing = reply.missing.numpy() if reply is not None else np.ones(len(own), dtype=bool)
            if len(missing) != len(own):
                self.federation.note("refused", [client], f"{len(missing)} answers to {len(own)} positions")
                self._leave({client})
                missing = np.ones(len(own), dtype=bool)
            self.owner[own[missing]] = -1
            still_open.append(own[missing])
            if reply is not None:
                self._note_exhausted(client, own, missing, reply)
        return np.sort(np.concatenate(still_open))

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
            if len(self._holding[p]) == 0:
                label = int(self.holders.placeholders[p])
                count = int((self.wanted[positions] == p).sum())
                self.federation.note(
                    "label skipped", reason=f"{count} positions of placeholder {label}: no holder is there"
                )
                continue
            self.available[p] = self._holding[p]
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

    def _weights(self) -> dict[int, NDArray[np.float64]]:
        return {
            p: np.array([self._share[p][int(client)] for client in clients], dtype=np.float64)
            for p, clients in self.available.items()
        }


def _label_check(job: Job) -> Check:
    def check(reply: LabelReply) -> None:
        if reply.labels.dtype != torch.int64 or reply.labels.shape != reply.counts.shape or reply.labels.ndim != 1:
            raise ReplyRefusedError("labels and counts must be whole numbers, one count for each label")
        if len(torch.unique(reply.labels)) != len(reply.labels) or bool((reply.counts < 1).any()):
            raise ReplyRefusedError("a label twice, or a count below 1")

    return check


def _gradient_check(params: Params) -> Check:
    def check(reply: GradientReply) -> None:
        require_like(reply.gradient, params, "gradient")
        if reply.samples < 1:
            raise ReplyRefusedError(f"{reply.samples} samples in a batch")

    return check
