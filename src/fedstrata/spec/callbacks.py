"""What looks at a run while it goes on, and may end it.

A callback is a setting, so that a spec can name it, and what it remembers of a run is in the run's ``memory``, which
travels in its checkpoints: a run that is killed and resumed goes on as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import safetensors.torch
from pydantic import NonNegativeFloat, PositiveInt

from fedstrata.base.config import FromRegistry, Registry, Setting
from fedstrata.base.errors import SpecError, nearest
from fedstrata.base.jsonl import replace_file
from fedstrata.base.records import Tree
from fedstrata.evaluation.history import History
from fedstrata.evaluation.settings import Evaluation
from fedstrata.federation.messages import Weights

BEST = "best.safetensors"
"""In a run folder: the model that ``KeepBest`` keeps."""


class Watched(Protocol):
    """A run as a callback sees it: see ``fedstrata.Simulation``."""

    round: int
    state: Any
    memory: dict[str, Tree]
    folder: Path | None

    @property
    def spec(self) -> Any:
        """The experiment."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """What the run is: see ``fedstrata.runs.identity``."""

    def evaluated(self) -> Weights:
        """The global model as it is evaluated."""

    def stop(self, reason: str) -> None:
        """End the run in order after this round."""

    def leave(self, weights: Weights, round: int) -> None:
        """Let the run leave this model behind, which it had after an earlier round."""


class Callback(Setting):
    """Looks at a run while it goes on. One of your own derives from this and writes what it needs of the four.

    Its fields are its settings. What must survive a kill goes into ``simulation.memory``; other attributes may be set,
    best in ``on_start``.

    >>> class Impatient(Callback):
    ...     rounds: int = 10
    ...     def on_round(self, simulation, record):
    ...         if record["round"] == self.rounds:
    ...             simulation.stop("that is enough")
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name in type(self).model_fields:
            super().__setattr__(name, value)
        else:
            object.__setattr__(self, name, value)

    def check(self, evaluation: Evaluation) -> None:
        """Raise ``SpecError`` where it does not fit what is measured."""

    def on_start(self, simulation: Watched) -> None:
        """Before the first round, or the first after a run was resumed."""

    def on_round(self, simulation: Watched, record: Mapping[str, Any]) -> None:
        """After every round, with its record."""

    def on_end(self, simulation: Watched, history: History) -> None:
        """When the run is over, before it leaves its model behind."""

    def on_close(self, simulation: Watched, history: History, error: BaseException | None) -> None:
        """At last, whatever happened: what is open is to be closed.

        Args:
            simulation: The run.
            history: Its rounds.
            error: Why it broke off; None where it did not, and all its files are written.
        """


class _Best(Callback):
    """Remembers the best evaluation of a run.

    Args:
        metric: By what: ``accuracy``, ``loss`` or another of ``evaluation.metrics``.
        mode: Which of two values is the better one, ``max`` or ``min``; by the metric unless given.
    """

    metric: str = "accuracy"
    mode: Literal["max", "min"] | None = None

    def check(self, evaluation: Evaluation) -> None:
        """The metric must be measured."""
        known = list(dict.fromkeys(["accuracy", "loss", *evaluation.labels]))
        if self.metric not in known:
            problem = f"is not measured (evaluation.metrics); there are: {', '.join(known)}"
            raise SpecError("callbacks.metric", problem + nearest(self.metric, known), self.metric)

    def value(self, simulation: Watched, record: Mapping[str, Any]) -> float | None:
        """The metric in a record: on the validation samples, on the test set where there are none; None for none."""
        evaluation: Evaluation = simulation.spec.evaluation
        found: Mapping[str, Any] = record.get("validation") or {}
        if evaluation.validation is None:
            found = {"accuracy": record["accuracy"], "loss": record["loss"], **record.get("test", {})}
        value: float | None = found.get(self.metric)
        return value

    def improves(self, simulation: Watched, value: float | None, best: float | None, least: float = 0.0) -> bool:
        """Whether a value is better than the best so far, by more than ``least``."""
        if value is None or best is None:
            return value is not None
        lower: bool = self.metric in simulation.spec.evaluation.lower if self.mode is None else self.mode == "min"
        return (best - value if lower else value - best) > least


class EarlyStopping(_Best):
    """Ends a run that has not got better for a while, and leaves the model of its best round behind.

    It looks at the validation samples (``evaluation.validation``), never at the test set. The model of the best round
    is left behind too where the run ends by its number of rounds.

    Args:
        patience: Evaluations without an improvement after which the run ends.
        min_delta: What is no improvement: a difference of at most this.
    """

    patience: PositiveInt = 5
    min_delta: NonNegativeFloat = 0.0

    def check(self, evaluation: Evaluation) -> None:
        """There must be samples to look at."""
        super().check(evaluation)
        if evaluation.validation is None:
            problem = "early-stopping looks at validation samples and never at the test set: give evaluation.validation"
            raise SpecError("callbacks", f"{problem}, such as 0.1")

    def on_round(self, simulation: Watched, record: Mapping[str, Any]) -> None:
        """Count evaluations without an improvement."""
        if record.get("validation") is None:
            return
        best = simulation.memory.get(self.name)
        value = self.value(simulation, record)
        if best is None or self.improves(simulation, value, best["value"], self.min_delta):
            weights = simulation.evaluated()
            simulation.memory[self.name] = {"round": record["round"], "value": value, "weights": weights, "since": 0}
            return
        simulation.memory[self.name] = {**best, "since": best["since"] + 1}
        if best["since"] + 1 >= self.patience:
            since = f"{self.patience} evaluation{'' if self.patience == 1 else 's'}"
            reason = f"validation {self.metric} has not improved for {since}; the best was in round {best['round']}"
            simulation.stop(reason)

    def on_end(self, simulation: Watched, history: History) -> None:
        """Leave the best round's model behind."""
        if (best := simulation.memory.get(self.name)) is not None:
            simulation.leave(best["weights"], best["round"])


class KeepBest(_Best):
    """Keeps the model of the best evaluation so far as ``best.safetensors`` in the run folder.

    By the validation samples where there are any, else by the test set, which flatters.
    """

    def on_round(self, simulation: Watched, record: Mapping[str, Any]) -> None:
        """Write the model where it is the best so far."""
        value, best = self.value(simulation, record), simulation.memory.get(self.name)
        if not self.improves(simulation, value, None if best is None else best["value"]):
            return
        simulation.memory[self.name] = {"round": record["round"], "value": value}
        if simulation.folder is not None:
            weights = simulation.evaluated()
            tensors = {name: tensor.contiguous() for name, tensor in {**weights.params, **weights.buffers}.items()}
            # One entry: safetensors writes several in any order, and the bytes would differ.
            about = {"round": str(record["round"])}
            replace_file(simulation.folder / BEST, safetensors.torch.save(tensors, about))


CALLBACKS: Registry[Callback] = Registry(
    "callback",
    Callback,
    {"early-stopping": "fedstrata.spec.callbacks:EarlyStopping", "keep-best": "fedstrata.spec.callbacks:KeepBest"},
)

AnyCallback = Annotated[Callback, FromRegistry(CALLBACKS)]


@contextmanager
def named(callback: object, history: History) -> Iterator[None]:
    """An exception in the block says whose it is and what to do, and carries the history so far as ``history``."""
    try:
        yield
    except Exception as error:
        name = callback.name if isinstance(callback, Callback) else getattr(callback, "__qualname__", repr(callback))
        name = name or type(callback).__name__
        so_far = f"after round {history[-1]['round']}" if len(history) else "before the first round"
        where = f"; the run is in {history.path} and can be resumed" if history.path is not None else ""
        error.add_note(f"raised by callback {name!r} {so_far}{where}")
        error.history = history  # type: ignore[attr-defined]
        raise
