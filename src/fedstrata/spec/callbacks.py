"""Callbacks, which observe a run and may stop it.

A callback is a ``Setting``, so specs can name it. Callbacks store their state in the run's ``memory``, which every
checkpoint contains. A run that is killed and resumed therefore gives the same results as an uninterrupted run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

import safetensors.torch
from pydantic import NonNegativeFloat, PositiveInt

from fedstrata.base.config import FromRegistry, Registry, Setting
from fedstrata.base.errors import SpecError, not_among
from fedstrata.base.jsonl import replace_file
from fedstrata.evaluation.history import History
from fedstrata.evaluation.settings import Evaluation

if TYPE_CHECKING:
    from fedstrata.runs.simulation import Simulation

BEST = "best.safetensors"
"""The file in a run folder in which ``KeepBest`` stores the best model."""


class Callback(Setting):
    """Base class of callbacks. A subclass overrides the methods that it needs.

    The fields of a subclass are its settings. In ``simulation.memory``, store the values that a resumed run needs. All
    other attributes are lost if the run is killed, so set them in ``on_start``.

    >>> class StopEarly(Callback):
    ...     rounds: int = 10
    ...     def on_round(self, simulation, record):
    ...         if record["round"] == self.rounds:
    ...             simulation.stop(f"it has run {self.rounds} rounds")
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name in type(self).model_fields:
            super().__setattr__(name, value)
        else:
            object.__setattr__(self, name, value)

    def check(self, evaluation: Evaluation) -> None:
        """Raise ``SpecError`` if ``evaluation`` lacks a metric or validation samples that the callback needs."""

    def on_start(self, simulation: Simulation) -> None:
        """Prepare the callback. This method is called before the first round, and again when the run is resumed."""

    def on_round(self, simulation: Simulation, record: Mapping[str, Any]) -> None:
        """React to the end of a round. The argument ``record`` contains the round's metrics and counts."""

    def on_end(self, simulation: Simulation, history: History) -> None:
        """React to the end of the last round, before the final model is stored."""

    def on_close(self, simulation: Simulation, history: History, error: BaseException | None) -> None:
        """Release resources at the end of a run, even after an error.

        Args:
            simulation: The run.
            history: The records of the run's rounds.
            error: The exception that ended the run; None if the run ended normally and all its files were written.
        """


class _Best(Callback):
    """Base class of callbacks that compare the evaluations of a run to find the best round.

    Args:
        metric: Metric that selects the best round: ``accuracy``, ``loss`` or a metric in ``evaluation.metrics``.
            Default: ``evaluation.primary``.
        mode: Whether larger (``max``) or smaller (``min``) values of the metric are better. Default: depends on the
            metric.
    """

    metric: str | None = None
    mode: Literal["max", "min"] | None = None

    def check(self, evaluation: Evaluation) -> None:
        """Raise ``SpecError`` if the run does not compute the metric."""
        known = evaluation.measured
        if self.metric is not None and self.metric not in known:
            use = "Add the metric to evaluation.metrics, or use one of"
            problem = not_among("is not a metric of this run", self.metric, known, use)
            raise SpecError("callbacks.metric", problem, self.metric)

    def compared(self, simulation: Simulation) -> str:
        """Return the name of the metric that is compared."""
        return self.metric or simulation.spec.evaluation.primary

    def value(self, simulation: Simulation, record: Mapping[str, Any]) -> float | None:
        """Return the metric on the validation samples or, if there are none, on the test set.

        Return None if the round was not evaluated.
        """
        metrics: Mapping[str, Any] = record.get("validation") or {}
        if simulation.spec.evaluation.validation is None:
            metrics = {"accuracy": record["accuracy"], "loss": record["loss"], **record.get("test", {})}
        return metrics.get(self.compared(simulation))

    def improves(self, simulation: Simulation, value: float | None, best: float | None, least: float = 0.0) -> bool:
        """Return True if ``value`` is better than ``best`` by more than ``least``."""
        if value is None or best is None:
            return value is not None
        lower = (
            self.compared(simulation) in simulation.spec.evaluation.lower if self.mode is None else self.mode == "min"
        )
        return (best - value if lower else value - best) > least


class EarlyStopping(_Best):
    """Stops a run when a metric stops improving, and restores the model of the best round.

    The callback uses the validation samples (``evaluation.validation``), never the test set. The model of the best
    round becomes the final model, even if the run is not stopped early.

    Args:
        patience: Number of consecutive evaluations without an improvement before the run stops.
        min_delta: Threshold: an improvement must be larger than this value.
    """

    patience: PositiveInt = 5
    min_delta: NonNegativeFloat = 0.0

    def check(self, evaluation: Evaluation) -> None:
        """Raise ``SpecError`` if the run does not compute the metric, or does not have validation samples."""
        super().check(evaluation)
        if evaluation.validation is None:
            problem = "'early-stopping' requires validation samples, because it never uses the test set."
            raise SpecError("callbacks", f"{problem} Set evaluation.validation, for example to 0.1.")

    def on_round(self, simulation: Simulation, record: Mapping[str, Any]) -> None:
        """If the metric has improved, store the model in memory.

        Stop after ``patience`` evaluations without improvement.
        """
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
            best_round = f"the best evaluation was in round {best['round']}"
            simulation.stop(f"validation {self.compared(simulation)} has not improved for {since}; {best_round}")

    def on_end(self, simulation: Simulation, history: History) -> None:
        """Use the model of the best round as the final model."""
        if (best := simulation.memory.get(self.name)) is not None:
            simulation.leave(best["weights"], best["round"])


class KeepBest(_Best):
    """Stores the model of the best round as ``best.safetensors`` in the run folder.

    The callback compares results on the validation samples. Without validation samples, the callback uses the test set,
    and this makes test results too optimistic.
    """

    def on_round(self, simulation: Simulation, record: Mapping[str, Any]) -> None:
        """Store the model if it is better than all earlier models of the run."""
        value, best = self.value(simulation, record), simulation.memory.get(self.name)
        if not self.improves(simulation, value, None if best is None else best["value"]):
            return
        simulation.memory[self.name] = {"round": record["round"], "value": value}
        if simulation.folder is not None:
            weights = simulation.evaluated()
            tensors = {name: tensor.contiguous() for name, tensor in {**weights.params, **weights.buffers}.items()}
            # safetensors writes several entries of metadata in random order. With a single entry, equal models give
            # equal files.
            metadata = {"round": str(record["round"])}
            replace_file(simulation.folder / BEST, safetensors.torch.save(tensors, metadata))


CALLBACKS: Registry[Callback] = Registry(
    "callback",
    Callback,
    {"early-stopping": "fedstrata.spec.callbacks:EarlyStopping", "keep-best": "fedstrata.spec.callbacks:KeepBest"},
)

AnyCallback = Annotated[Callback, FromRegistry(CALLBACKS)]


@contextmanager
def named(callback: object, history: History) -> Iterator[None]:
    """Add the callback's name and the run's history to exceptions in the ``with`` block."""
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
