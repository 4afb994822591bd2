"""The state of a run beside the state of its method: evaluations, replies, and the memory of callbacks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedstrata.base.records import Tree, record
from fedstrata.evaluation.evaluator import Score
from fedstrata.evaluation.history import Confusion
from fedstrata.evaluation.settings import Evaluation
from fedstrata.federation.communication.compression import CompressionState
from fedstrata.federation.messages import Weights


@record("Measured")
class Measured:
    """The part of an evaluation that is kept.

    Args:
        round: The round.
        value: The accuracy: on the validation samples if there are any, else on the test set.
        confusion: The confusion matrix of the test set, (C, C); rows are true classes.
    """

    round: int
    value: float | None
    confusion: torch.Tensor


@record("LoopState")
class SavedLoopState:
    """The loop's state as a checkpoint holds it; for the fields see ``LoopState``.

    Args:
        heard: ``LoopState.last_reply``.
        evaluated: The last evaluated rounds.
        last: The last evaluation.
        best: The best evaluation.
        memory: The memory of callbacks.
        stopped: Why the run was stopped.
        channel: The server's state of compression; None without compression.
    """

    heard: NDArray[np.int64]
    evaluated: list[int]
    last: Measured | None
    best: Measured | None
    memory: dict[str, Tree]
    stopped: str
    channel: CompressionState | None = None


@dataclass
class LoopState:
    """The state of a run beside the state of its method.

    Args:
        last_reply: The last round in which a reply of each client counted, 0 for none, (N,); empty if the clients have
            no test parts of their own.
        evaluated: The last evaluated rounds, at most ``evaluation.unheard`` of them.
        last: The last evaluation.
        best: The first of the best evaluations.
        memory: The memory of callbacks, by their names.
        stopped: Why the run ends before its last round; empty if it does not.
        final_model: The model that the run saves at its end, and its round; None for the last model.
        score: The last evaluation of this process, with all its results.
        late_events: Events after the round's events were written.
    """

    last_reply: NDArray[np.int64]
    evaluated: list[int] = field(default_factory=list)
    last: Measured | None = None
    best: Measured | None = None
    memory: dict[str, Tree] = field(default_factory=dict)
    stopped: str = ""
    final_model: tuple[Weights, int] | None = None
    score: Score | None = None
    late_events: list[dict[str, Any]] = field(default_factory=list)

    def save(self, channel: CompressionState | None) -> SavedLoopState:
        """Return what a checkpoint holds."""
        return SavedLoopState(self.last_reply, self.evaluated, self.last, self.best, self.memory, self.stopped, channel)

    def restore(self, saved: SavedLoopState) -> None:
        """Continue from a checkpoint."""
        if len(saved.heard) == len(self.last_reply):
            self.last_reply = saved.heard.copy()
        self.evaluated, self.last, self.best = list(saved.evaluated), saved.last, saved.best
        self.memory, self.stopped = dict(saved.memory), saved.stopped

    def add_score(self, score: Score, round: int, settings: Evaluation) -> None:
        """Keep an evaluation."""
        self.score = score
        self.evaluated = [*self.evaluated, round][-settings.unheard :]
        value = score.accuracy
        if settings.validation is not None:
            value = (score.more.get("validation") or {}).get("accuracy")
        self.last = Measured(round, value, torch.from_numpy(score.confusion.copy()))
        if self.best is None or (value is not None and (self.best.value is None or value > self.best.value)):
            self.best = self.last

    def unheard(self, evaluations: int) -> list[int]:
        """Return the clients without a reply that counted since so many evaluations ago."""
        first = self.evaluated[0] if len(self.evaluated) == evaluations else 0
        clients: list[int] = np.flatnonzero(self.last_reply <= first).tolist()
        return clients

    def confusions(self) -> dict[str, Confusion]:
        """Return the confusion matrices of the last and of the best evaluation."""
        kept = {"last": self.last, "best": self.best}
        return {key: Confusion(m.round, m.confusion.numpy()) for key, m in kept.items() if m is not None}
