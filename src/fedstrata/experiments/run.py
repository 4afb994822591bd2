"""Run an experiment: from a spec to a history and a run folder."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn

from fedstrata.base import outer
from fedstrata.base.errors import SpecError
from fedstrata.evaluation.history import History
from fedstrata.models.model import Model
from fedstrata.runs.preparation import Arrays, prepare
from fedstrata.runs.run_folder import rounds_done
from fedstrata.runs.simulation import Watcher, run_prepared
from fedstrata.spec.callbacks import Callback
from fedstrata.spec.experiment import Experiment


def run(
    spec: Experiment | str | Path | Mapping[str, Any],
    *,
    out: str | Path | None = None,
    data: Arrays | None = None,
    model: nn.Module | Model | None = None,
    engine: str = "local",
    resume: bool = False,
    callbacks: Sequence[Callback | Watcher] = (),
    progress: bool = False,
) -> History:
    """Run an experiment.

    Args:
        spec: An experiment, a path to a TOML file, or nested tables.
        out: The run folder; nothing is written without one.
        data: Data of your own; see ``prepare``.
        model: A module of your own; see ``prepare``.
        engine: Where clients live.
        resume: Go on with what is in ``out``, from its last checkpoint.
        callbacks: What looks at the run, beside the spec's own: a ``fedstrata.Callback``, or a function that is called
            with the record of every round.
        progress: Show how far it is: a bar in a terminal and in a notebook, elsewhere a line now and then.

    Returns:
        The rounds' records; ``params`` holds the final model's parameters and buffers, and ``warning`` is empty unless
        the model never took a step, for want of replies that could be used.

    Raises:
        SpecError: A setting is wrong, or ``out`` holds another run.
        DataError: The data are missing or damaged.
        CheckpointError: ``resume``, and every checkpoint is damaged.
    """
    spec = _read(spec)
    watching = list(callbacks)
    with ExitStack() as shown:
        if progress:
            from fedstrata.reporting.progress import Progress

            bars = shown.enter_context(Progress())
            done = rounds_done(Path(out)) if resume and out is not None else 0
            watching.append(bars.of_run(spec.method.name, spec.training.rounds, done))
        history = carry_out(spec, out=out, data=data, model=model, engine=engine, resume=resume, callbacks=watching)
    if history.warning:
        warnings.warn(history.warning, stacklevel=2)
    return history


def carry_out(
    spec: Experiment,
    *,
    out: str | Path | None = None,
    data: Arrays | None = None,
    model: nn.Module | Model | None = None,
    engine: str = "local",
    resume: bool = False,
    callbacks: Sequence[Callback | Watcher] = (),
) -> History:
    """Like ``run``, without a word about it."""
    folder = None if out is None else Path(out)
    if engine == "nvflare":
        # There the loop over rounds is itself a job of NVFlare's, so that it is not this process that runs it.
        if data is not None or model is not None:
            problem = "loads the spec's data and model at each site: give data and a model that the spec can name"
            raise SpecError("engine", problem, engine)
        watchers = [callback for callback in callbacks if not isinstance(callback, Callback)]
        if len(watchers) < len(callbacks):
            problem = "the loop over rounds is another process there: name them in the spec's callbacks, not here"
            raise SpecError("callbacks", problem, engine)
        history: History = outer.load("sites.simulator:simulate")([(spec, folder)], resume=resume, callbacks=watchers)[
            0
        ]
        return history
    return run_prepared(prepare(spec, data=data, model=model), folder, engine, callbacks, resume=resume)


def _read(spec: Experiment | str | Path | Mapping[str, Any]) -> Experiment:
    if isinstance(spec, (str, Path)):
        return Experiment.from_toml(spec)
    return spec if isinstance(spec, Experiment) else Experiment.from_table(spec)
