"""Stratify's single-sample mode: the model travels along the label schedule (Algorithms 1 and 3)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedstrata.base.records import Tree
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import Weights
from fedstrata.stratify.messages import Steps, StepsReply
from fedstrata.stratify.schedule import Holders
from fedstrata.stratify.selection import assign_runs, tasks_of

Ints = NDArray[np.int64]

_NONE = np.empty(0, dtype=np.int64)

QUEUE = 2
"""Tasks that stand ready, so that a client knows where to send the model next (Algorithm 3, line 5)."""

FIRST_BLOCK, LARGEST_BLOCK = 8, 1024
"""Chunks planned at once: few after a surprise, more and more while there is none."""


def single_epoch(federation: Federation, weights: Weights, route: Route) -> tuple[Weights, Tree, dict[str, Any]]:
    """The model travels until the schedule is trained.

    Returns:
        The new model, None for the optimiser's state (there is none), and the metrics.
    """
    loss, samples, hops = torch.zeros(()), 0, federation.log.hops
    while route.open():
        # More than one relay only where an engine learnt of a failure too late to go on in the same.
        relayed = federation.relay(
            route.tasks(), weights, heard=route.heard, work=lambda task, _: float(len(task.labels))
        )
        weights = relayed.weights
        for reply in relayed.replies.values():
            loss = loss + reply.loss
            samples += int((~reply.missing).sum())
    metrics: dict[str, Any] = {"samples": samples, "train_loss": float(loss) / samples if samples else None}
    return weights, None, metrics | {"transfers": federation.log.hops - hops}


@dataclass(frozen=True)
class Task:
    """A client, and the consecutive positions of the schedule that it trains.

    Args:
        client: Who.
        places: Places of the placeholders, shape (n,).
        refill: Placeholders whose pools it starts anew first.
    """

    client: int
    places: Ints
    refill: Ints


class Route:
    """Where the model goes: the schedule that is left, the queue of tasks, and who still has samples of what.

    Chunks are planned ahead in blocks (the plan of a chunk depends on nothing but who is available), and planned again
    when that changes or positions come back.

    Args:
        federation: To record what happened.
        holders: Who holds which placeholder.
        wanted: The schedule: places of placeholders, shape (L,).
        chunk_size: Positions that Algorithm 1 looks at together.
        retain: The part of a placeholder's available clients that its pool keeps.
        weighted: Keep clients by how many samples each has, not uniformly.
        window: The part of each label's samples that is there; see ``Reserve``.
    """

    def __init__(
        self,
        federation: Federation,
        holders: Holders,
        wanted: Ints,
        *,
        chunk_size: int,
        retain: float,
        weighted: bool,
        window: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        self.federation, self.holders = federation, holders
        self.chunk_size, self.retain, self.window = chunk_size, retain, window
        self.generator = federation.rng("client-sampling")
        self._left = wanted
        self._place = {number: place for place, number in enumerate(holders.placeholders.tolist())}
        shape = (len(holders.placeholders), federation.config.clients)
        # Who is known to be away is not chosen; everybody else is only found out by asking.
        there = np.zeros(shape[1], dtype=bool)
        there[federation.candidates()] = True
        self._holding = np.zeros(shape, dtype=bool)
        self._weights = np.zeros(shape) if weighted else None
        for p in range(shape[0]):
            clients, counts = holders.of_placeholder(p)
            self._holding[p, clients] = there[clients]
            if self._weights is not None:
                self._weights[p, clients] = counts
        self.available = self._holding.copy()
        self._queue: deque[Task] = deque()
        self._planned: deque[list[tuple[int, Ints]]] = deque()
        self._block = FIRST_BLOCK
        self._refill: dict[int, set[int]] = {}
        self._asked: set[int] = set()
        self._sent: dict[int, Task] = {}
        self._trained: dict[int, Ints] = {}
        self._count = 0

    def open(self) -> bool:
        """Whether there is something left to train."""
        self._sent, self._trained, self._count = {}, {}, 0
        return len(self._left) > 0 or len(self._queue) > 0

    def tasks(self) -> Iterator[tuple[int, Steps]]:
        """The tasks, each decided when the one before the last has been heard of."""
        while True:
            while len(self._queue) < QUEUE and len(self._left):
                self._enqueue_chunk()
            if not self._queue:
                return
            task = self._queue.popleft()
            self._sent[self._count] = task
            self._count += 1
            numbers = self.holders.placeholders
            request = Steps(
                round=self.federation.round,
                labels=torch.from_numpy(numbers[task.places]),
                refill=torch.from_numpy(numbers[task.refill]),
                fresh=task.client not in self._asked,
                window=self.window,
            )
            yield task.client, request

    def heard(self, position: int, reply: StepsReply | None) -> None:
        """What became of a task; None where the hop failed, now or, as it turns out, earlier."""
        task = self._sent[position]
        if reply is None:
            self._leave(task.client)
            self._put_back(self._trained.get(position, task.places))
            return
        self._asked.add(task.client)
        missing = reply.missing.numpy()
        trained = task.places[~missing] if missing.any() else task.places
        self._trained[position] = trained
        exhausted = {self._place[number] for number in reply.exhausted.tolist() if number in self._place}
        if len(trained) < len(task.places):
            exhausted.update(task.places[missing].tolist())
        for p in exhausted:
            if self.available[p, task.client]:
                self.available[p, task.client] = False
                self._replan()
            if p in task.refill and p not in trained:
                # A pool that is empty right after it was refilled will never serve.
                self._holding[p, task.client] = False
        self._put_back(task.places[missing] if len(trained) < len(task.places) else trained[:0])

    def _put_back(self, places: Ints) -> None:
        """Positions that were not trained go back into the schedule, each at a random place (Algorithm 3, line 17)."""
        if len(places):
            self._replan()
            self._left = np.insert(
                self._left, self.generator.integers(0, len(self._left) + 1, size=len(places)), places
            )

    def _replan(self) -> None:
        self._planned.clear()
        self._block = FIRST_BLOCK

    def _enqueue_chunk(self) -> None:
        """The tasks of the next chunk, Algorithm 1 and Algorithm 3 up to line 12."""
        if not self._planned:
            self._plan_block()
        if self._planned:
            for client, places in self._planned.popleft():
                self._queue.append(Task(client, places, self._take_refill(client, places)))
            self._left = self._left[self.chunk_size :]

    def _plan_block(self) -> None:
        """Plan the next chunks; a label that nobody has left is refilled, or skipped if nobody is there at all."""
        while len(block := self._left[: self._block * self.chunk_size]):
            empty = [p for p in np.unique(block).tolist() if not self.available[p].any()]
            if not empty:
                break
            for p in empty:
                self._refill_or_skip(p)
        if len(block) == 0:
            return
        owner = assign_runs(
            block,
            self.available,
            self._weights,
            chunk_size=self.chunk_size,
            retain=self.retain,
            generator=self.generator,
        )
        chunks = -(-len(block) // self.chunk_size)
        self._planned.extend([] for _ in range(chunks))
        for begin, end in zip(*tasks_of(owner, self.chunk_size), strict=True):
            self._planned[begin // self.chunk_size].append((int(owner[begin]), block[begin:end]))
        self._block = min(2 * self._block, LARGEST_BLOCK)

    def _take_refill(self, client: int, places: Ints) -> Ints:
        waiting = self._refill.get(client)
        if not waiting:
            return _NONE
        refill = waiting.intersection(places.tolist())
        waiting -= refill
        return np.array(sorted(refill), dtype=np.int64)

    def _refill_or_skip(self, p: int) -> None:
        holders = np.flatnonzero(self._holding[p])
        if len(holders):
            self.available[p] = self._holding[p]
            for client in holders.tolist():
                self._refill.setdefault(client, set()).add(p)
            return
        count = int((self._left == p).sum())
        self._left = self._left[self._left != p]
        self.federation.note("label skipped", reason=f"{count} positions of placeholder {p}: no holder is there")

    def _leave(self, client: int) -> None:
        """A client that failed or is not there is not chosen again in this epoch."""
        self._replan()
        self.available[:, client] = self._holding[:, client] = False
