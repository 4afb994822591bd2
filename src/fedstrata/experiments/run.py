"""Run one experiment, and return its history."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstrata.base import outer
from fedstrata.base.errors import SpecError
from fedstrata.evaluation.history import History
from fedstrata.models.zoo import OwnModel
from fedstrata.reporting.progress import Progress
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
    model: OwnModel | None = None,
    engine: str = "local",
    resume: bool = False,
    callbacks: Sequence[Callback | Watcher] = (),
    progress: bool = False,
) -> History:
    """Run an experiment.

    Args:
        spec: An experiment, the path of a TOML file, or nested dicts.
        out: The run folder. Default: no files are written.
        data: Your own data; see ``prepare``.
        model: Your own model, preferably a Python class; see ``prepare``.
        engine: The engine that runs the clients.
        resume: Whether to continue the run in ``out`` from its last checkpoint.
        callbacks: Additional callbacks. Each callback is a ``fedstrata.Callback``, or a function that receives the
            record of every round.
        progress: Whether to show progress: a bar in a terminal or notebook, and lines of text elsewhere.

    Returns:
        The records of the rounds. The attribute ``params`` contains the final model's parameters and buffers. The
        attribute ``warning`` is usually empty. ``warning`` is set if no reply could be used in the last rounds, or in
        the whole run.

    Raises:
        SpecError: A setting is wrong, or ``out`` contains another run.
        DataError: The data are missing or damaged.
        CheckpointError: The run cannot be resumed, because every checkpoint is damaged.
    """
    if not isinstance(spec, Experiment):
        spec = Experiment.from_toml(spec) if isinstance(spec, (str, Path)) else Experiment.from_table(spec)
    callbacks = list(callbacks)
    with Progress(quiet=not progress) as bars:
        if progress:
            done = rounds_done(Path(out)) if resume and out is not None else 0
            callbacks.append(bars.of_run(spec.method.name, spec.training.rounds, done))
        history = carry_out(spec, out=out, data=data, model=model, engine=engine, resume=resume, callbacks=callbacks)
    if history.warning:
        warnings.warn(history.warning, stacklevel=2)
    return history


def carry_out(
    spec: Experiment,
    *,
    out: str | Path | None = None,
    data: Arrays | None = None,
    model: OwnModel | None = None,
    engine: str = "local",
    resume: bool = False,
    callbacks: Sequence[Callback | Watcher] = (),
) -> History:
    """Run an experiment as ``run`` does, but without showing progress and without a warning at the end."""
    folder = None if out is None else Path(out)
    if engine == "nvflare":
        # NVFlare runs the rounds in another process, which cannot access data, models or callbacks of this process.
        if data is not None or model is not None:
            problem = (
                "loads the data and the model at each site, so it cannot use objects of this process. Set the data and "
                "the model in the spec."
            )
            raise SpecError("engine", problem, engine)
        watchers = [callback for callback in callbacks if not isinstance(callback, Callback)]
        if len(watchers) < len(callbacks):
            problem = (
                f"the engine {engine!r} runs the rounds in another process, which cannot call Python objects of this "
                "process. Set the callbacks in the spec."
            )
            raise SpecError("callbacks", problem)
        simulate = outer.load("sites.simulator:simulate")
        history: History = simulate([(spec, folder)], resume=resume, callbacks=watchers)[0]
        return history
    return run_prepared(prepare(spec, data=data, model=model), folder, engine, callbacks, resume=resume)
