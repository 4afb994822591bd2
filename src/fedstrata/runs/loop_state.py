"""Store the state of the loop over a run's rounds, for example evaluations and callbacks' states.

The loop is in ``Simulation``. The method's state is stored separately.
"""

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
    """The part of an evaluation's results that checkpoints store.

    Args:
        round: The round after which the model was evaluated.
        value: The primary metric on the validation samples or, without validation samples, on the test set.
        confusion: The confusion matrix of the test set, shape (C, C). Rows are true classes, and columns are predicted
            classes.
    """

    round: int
    value: float | None
    confusion: torch.Tensor


@record("LoopState")
class SavedLoopState:
    """The fields of ``LoopState`` that checkpoints store. Some fields have other names than in ``LoopState``.

    Args:
        heard: For each client, the latest round in which the server used the client's reply (``last_reply`` of
            ``LoopState``).
        evaluated: The most recently evaluated rounds.
        last: The latest evaluation.
        best: The best evaluation.
        memory: The state of each callback between rounds.
        stopped: The reason why the run was stopped early; empty if the run was not stopped.
        channel: The state of the server's codecs, which compress messages; None without compression.
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
    """The state of the loop over a run's rounds.

    Args:
        last_reply: For each client, the latest round in which the server used the client's reply, shape (N,); 0 without
            such a round. The array is empty if clients do not have their own test samples.
        evaluated: The most recent rounds with an evaluation, at most ``evaluation.unheard`` rounds.
        last: The latest evaluation.
        best: The evaluation with the best primary metric (the earliest if several are equally good).
        memory: A mapping from the name of each callback to its state between rounds.
        stopped: The reason why the run was stopped before its last round; empty if the run was not stopped.
        final_model: The model to save at the end of the run, and the model's round; None to save the model of the last
            round.
        score: All results of the latest evaluation; None if this process has not evaluated a model yet.
        late_events: Events that are not in the log yet, because they happened after the round's other events were
            written.
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
        """Return the state to store in a checkpoint. The argument ``channel`` is the server's compression state."""
        return SavedLoopState(self.last_reply, self.evaluated, self.last, self.best, self.memory, self.stopped, channel)

    def restore(self, saved: SavedLoopState) -> None:
        """Replace this object's state with the state in a checkpoint."""
        if len(saved.heard) == len(self.last_reply):
            self.last_reply = saved.heard.copy()
        self.evaluated, self.last, self.best = list(saved.evaluated), saved.last, saved.best
        self.memory, self.stopped = dict(saved.memory), saved.stopped

    def add_score(self, score: Score, round: int, settings: Evaluation) -> None:
        """Store an evaluation as ``last`` and, if its primary metric is the best so far, also as ``best``."""
        self.score = score
        self.evaluated = [*self.evaluated, round][-settings.unheard :]
        values = {"accuracy": score.accuracy, "loss": score.loss, **score.more.get("test", {})}
        if settings.validation is not None:
            values = score.more.get("validation") or {}
        value, sign = values.get(settings.primary), -1 if settings.primary in settings.lower else 1
        self.last = Measured(round, value, torch.from_numpy(score.confusion.copy()))
        best = self.best
        if best is None or (value is not None and (best.value is None or sign * value > sign * best.value)):
            self.best = self.last

    def unheard(self, evaluations: int) -> list[int]:
        """Return the ids of *unheard* clients: the server has not used a reply of these clients recently.

        A reply is recent if its round comes after round r. Round r is the first of the last n evaluated rounds, and n
        is ``evaluations``. If the run has had fewer evaluations, all replies are recent.
        """
        first = self.evaluated[0] if len(self.evaluated) == evaluations else 0
        clients: list[int] = np.flatnonzero(self.last_reply <= first).tolist()
        return clients

    def confusions(self) -> dict[str, Confusion]:
        """Return a mapping from the names ``last`` and ``best`` to the confusion matrices of these evaluations.

        The mapping is empty if the task has no classes.
        """
        kept = {"last": self.last, "best": self.best}
        measured = {key: m for key, m in kept.items() if m is not None and m.confusion.numel()}
        return {key: Confusion(m.round, m.confusion.numpy()) for key, m in measured.items()}
