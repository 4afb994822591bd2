"""Run Stratify's single-sample mode: the model travels from client to client along the schedule (Algorithms 1, 3)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedstrata.base.arrays import Floats, Ints
from fedstrata.base.errors import SpecError
from fedstrata.base.records import Tree
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.messages import Weights
from fedstrata.stratify.messages import Steps, StepsReply
from fedstrata.stratify.roster import Roster
from fedstrata.stratify.selection import assign_runs, tasks_of

MOST_CELLS = 2**31
"""The maximum of ``chunk_size`` times the number of clients, to limit the memory for the plan of a chunk."""

QUEUE = 2
"""The number of tasks that the server plans in advance, so that a client knows where to send the model.

See Algorithm 3, line 5.
"""

FIRST_BLOCK, LARGEST_BLOCK = 8, 1024
"""The minimum and the maximum number of chunks of the schedule for which the server chooses clients at once."""


@dataclass(frozen=True)
class SingleMode:
    """Single-sample mode, in which the model travels from client to client. ``Stratify`` describes the fields."""

    chunk_size: int
    retain: float

    def check(self, config: FederationConfig, mode: str = "single") -> None:
        """Raise ``SpecError`` if a setting is incompatible with steps on single samples."""
        if config.privacy.min_samples > 1:
            problem = (
                f"with method.mode = {mode!r}, each update is computed from a single sample. Use min_samples = 1, or "
                "method.mode = 'batch'."
            )
            raise SpecError("privacy.min_samples", problem, config.privacy.min_samples)
        if self.chunk_size * config.clients > MOST_CELLS:
            most = MOST_CELLS // config.clients
            problem = f"needs too much memory with {config.clients:,} clients. Set chunk_size to at most {most}."
            raise SpecError("method.chunk_size", problem, self.chunk_size)
        if config.model.has_batchnorm:
            problem = "BatchNorm cannot normalise batches of one sample. Use method.mode = 'batch'."
            raise SpecError("method.mode", problem, mode)
        if config.training.momentum > 0:
            problem = "in single-sample mode, clients cannot send momentum with the model. Use training.momentum = 0."
            raise SpecError("training.momentum", problem, config.training.momentum)

    def run_epoch(
        self, roster: Roster, wanted: Ints, weights: Weights, optimizer: Tree
    ) -> tuple[Weights, Tree, dict[str, Any]]:
        """Train the model at one client after another until the schedule is complete; see ``BatchMode.run_epoch``.

        Single-sample mode does not use a server optimiser. The argument ``optimizer`` is ignored, and the returned
        state is None.
        """
        federation, route = roster.federation, Route(roster, wanted, chunk_size=self.chunk_size, retain=self.retain)
        loss, samples, hops = torch.zeros(()), 0, federation.log.hops
        while route.open():
            # Usually, one relay (one path of the model from client to client) trains the whole schedule. Another relay
            # is needed if the engine notices the failure of a client only after the relay has ended.
            relayed = federation.relay(
                route.tasks(), weights, on_reply=route.on_reply, work=lambda task, _: float(len(task.labels))
            )
            weights = relayed.weights
            for reply in relayed.replies.values():
                loss = loss + reply.loss
                samples += int((~reply.missing).sum())
        metrics: dict[str, Any] = {"samples": samples, "train_loss": float(loss) / samples if samples else None}
        return weights, None, metrics | {"transfers": federation.log.hops - hops}


@dataclass(frozen=True)
class Task:
    """A client and the consecutive entries of the schedule on which the client trains.

    Labels are indices into ``Roster.holders.placeholders``.

    Args:
        client: The client's id.
        places: The label of each entry on which the client trains, shape (n,).
        refill: The labels for which the client may use all its samples again.
    """

    client: int
    places: Ints
    refill: frozenset[int]


class Route:
    """Plans the path of the model from client to client, and stores the remaining schedule and a queue of tasks.

    The schedule is cut into chunks of consecutive positions. The server can choose the clients of several chunks in
    advance, because the choice depends only on the available clients. The server chooses again when a client becomes
    unavailable, or when untrained labels are put back into the schedule.

    Args:
        roster: The clients that the server can ask.
        wanted: For each position of the schedule, the label to train on, as an index into
            ``roster.holders.placeholders``, shape (L,).
        chunk_size: The number of positions in a chunk; see ``selection.assign_runs``.
        retain: The fraction, in (0, 1], of a label's available clients that may train on this label within a chunk.
    """

    def __init__(self, roster: Roster, wanted: Ints, *, chunk_size: int, retain: float) -> None:
        self.roster, self.chunk_size, self.retain = roster, chunk_size, retain
        self._left = wanted
        self._weights: Floats | None = None
        if roster.weighted:
            self._weights = np.zeros((len(roster.holders.placeholders), roster.federation.config.clients))
            self._weights[roster.places, roster.holders.clients] = roster.holders.counts
        self._queue: deque[Task] = deque()
        self._planned: deque[list[tuple[int, Ints]]] = deque()
        self._block = FIRST_BLOCK
        self._sent: list[Task] = []
        """The tasks of this relay (one path of the model from client to client), in order."""
        self._trained: dict[int, Ints] = {}
        """A mapping from a task's index in ``_sent`` to the trained labels, in the form of ``Task.places``."""

    def open(self) -> bool:
        """Prepare for the next relay. Return True if the schedule still has positions to train on."""
        self._sent, self._trained = [], {}
        return len(self._left) > 0 or len(self._queue) > 0

    def tasks(self) -> Iterator[tuple[int, Steps]]:
        """Yield the client and the request of each task.

        Each task is chosen before the previous task is yielded, so that the previous client knows where to send the
        model.
        """
        while True:
            while len(self._queue) < QUEUE and len(self._left):
                self._enqueue_chunk()
            if not self._queue:
                return
            task = self._queue.popleft()
            self._sent.append(task)
            yield task.client, Steps(**self.roster.request(task.client, task.places, task.refill))

    def on_reply(self, position: int, reply: StepsReply | None) -> None:
        """Record the result of a task.

        Args:
            position: The index of the task among the tasks that were sent.
            reply: The client's reply; None if the task failed. If the server notices a failure later, this method is
                called again with None.
        """
        task, roster = self._sent[position], self.roster
        if reply is None:
            # A client that failed or is absent is not chosen again in this epoch.
            self._replan()
            roster.remove([task.client])
            self._put_back(self._trained.get(position, task.places))
            return
        roster.answered.add(task.client)
        missing = reply.missing.numpy()
        self._trained[position] = trained = task.places[~missing] if missing.any() else task.places
        if len(trained) == len(task.places) and not len(reply.exhausted):
            return
        rows = roster.empty_rows(task.client, task.places[missing], reply.exhausted)
        if roster.available[rows].any():
            roster.available[rows] = False
            self._replan()
        # If a client has no sample of a label, although it may use all its samples again, do not ask it for this label
        # again.
        places = roster.places[rows]
        roster.present[rows[np.isin(places, list(task.refill)) & ~np.isin(places, trained)]] = False
        self._put_back(task.places[missing])

    def _put_back(self, places: Ints) -> None:
        """Insert untrained labels into the remaining schedule again, each at a random position.

        See line 17 of Algorithm 3. ``places`` contains the labels, in the form of ``Task.places``.
        """
        if len(places):
            self._replan()
            to = self.roster.generator.integers(0, len(self._left) + 1, size=len(places))
            self._left = np.insert(self._left, to, places)

    def _replan(self) -> None:
        self._planned.clear()
        self._block = FIRST_BLOCK

    def _enqueue_chunk(self) -> None:
        """Append the tasks of the next chunk to the queue (Algorithm 1, and Algorithm 3 up to line 12)."""
        if not self._planned:
            self._plan_block()
        if self._planned:
            for client, places in self._planned.popleft():
                due = self.roster.refills.get(client)
                refill = frozenset(due.intersection(places.tolist()) if due else ())
                if due:
                    due -= refill
                self._queue.append(Task(client, places, refill))
            self._left = self._left[self.chunk_size :]

    def _plan_block(self) -> None:
        """Choose the clients of the next chunks.

        If all samples of a label have been used, the clients may use these samples again. If no client with samples of
        a label is present, the label is removed from the schedule.
        """
        roster = self.roster
        while len(block := self._left[: self._block * self.chunk_size]):
            left = np.bincount(roster.places[roster.available], minlength=len(roster.holders.placeholders))
            empty = np.unique(block[left[block] == 0]).tolist()
            if not empty:
                break
            for place in empty:
                others = self._left != place
                if not roster.refill(place, int((~others).sum())):
                    self._left = self._left[others]
        if len(block) == 0:
            return
        available = np.zeros((len(roster.holders.placeholders), roster.federation.config.clients), dtype=bool)
        available[roster.places[roster.available], roster.holders.clients[roster.available]] = True
        owner = assign_runs(
            block,
            available,
            self._weights,
            chunk_size=self.chunk_size,
            retain=self.retain,
            generator=roster.generator,
        )
        chunks = -(-len(block) // self.chunk_size)
        self._planned.extend([] for _ in range(chunks))
        for begin, end in zip(*tasks_of(owner, self.chunk_size), strict=True):
            self._planned[begin // self.chunk_size].append((int(owner[begin]), block[begin:end]))
        self._block = min(2 * self._block, LARGEST_BLOCK)
