"""Several methods, several seeds, side by side."""

from __future__ import annotations

import json
import os
import time
import tomllib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from fedstrata.base.config import build
from fedstrata.base.errors import FedstrataError, SpecError
from fedstrata.base.processes import Task, TaskPool, can_fork
from fedstrata.evaluation.history import History
from fedstrata.experiments.references import fold, reference_runs
from fedstrata.experiments.run import carry_out
from fedstrata.models.model import Model
from fedstrata.reporting.runs import keep_order
from fedstrata.runs.preparation import Arrays, Prepared, prepare
from fedstrata.runs.run_folder import SUMMARY, refuse_foreign, rounds_done
from fedstrata.spec.callbacks import Callback
from fedstrata.spec.experiment import Experiment

Runs = dict[str, list[History]]
Key = tuple[str, int]
"""Label and seed of a run."""
Watcher = Callable[[str, int, int], None]
"""Told label, seed and rounds done, now and then."""


def compare(
    experiments: Mapping[str, Experiment],
    *,
    seeds: Sequence[int] | None = None,
    out: str | Path,
    data: Arrays | None = None,
    model: nn.Module | Model | None = None,
    references: Sequence[str] = (),
    jobs: int | None = None,
    watch: Watcher | None = None,
    progress: bool = False,
    report: bool = True,
) -> Runs:
    """Run every experiment with every seed and write a table, a plot and a report.

    Runs that ``out`` holds already are not repeated, and those that were interrupted go on from their last
    checkpoint: calling it again after a kill finishes the work.

    Args:
        experiments: By label.
        seeds: Each experiment runs once with each; with the specs' own one unless given.
        out: The folder; a run goes to ``LABEL/seed-S/``.
        data: Data of your own for all of them; see ``prepare``.
        model: A module of your own for all of them; see ``prepare``.
        references: What else to compare with: ``"local"``, each client training alone (a run for each of them, whose
            mean is the row), and ``"centralised"``, one client with everybody's samples and as many sample-gradients
            a round. See ``fedstrata.experiments.references``.
        jobs: Runs at the same time, each in a process of its own with its own threads; as many as there are
            processors unless given. Results do not depend on it. With data or a model of your own, or classes of the
            program itself, these are forks of this process; where it cannot be forked, runs take turns in it.
        watch: Told about progress.
        progress: Show how far it is: bars in a terminal and in a notebook, elsewhere a line now and then.
        report: Write tables, pictures and a page about all runs of the folder.

    Returns:
        The histories by label, in the order of ``seeds``.

    Raises:
        SpecError: A setting is wrong; every experiment is checked, with its own seed, before the first one starts.
        FedstrataError: A run's process was killed; the others have ended well.
    """
    out, make = Path(out), partial(prepare, data=data, model=model)
    for label, spec in experiments.items():
        if not label or "/" in label or label.startswith(".") or label in references:
            raise SpecError("--methods", "a label names a folder of its own; use letters, digits and dashes", label)
        check(make(spec))
    planned = plan(experiments, seeds, references, data)
    folders = {key: folder_of(out, key) for key in planned}
    for key, spec in planned.items():
        if folders[key].exists():
            refuse_foreign(folders[key], make(spec), resume=True)
    todo = {key: spec for key, spec in planned.items() if not is_done(folders[key], spec)}
    rows = dict.fromkeys((label.partition("/")[0], seed) for label, seed in planned)
    out.mkdir(parents=True, exist_ok=True)
    keep_order(out, dict.fromkeys(label for label, _ in rows))
    with ExitStack() as shown:
        if progress:
            from fedstrata.reporting.progress import Progress

            bars = shown.enter_context(Progress())
            watch = bars.of_runs({key: spec.training.rounds for key, spec in planned.items()})
        _carry_out(todo, folders, data, model, jobs, watch)
    for name in dict.fromkeys(references):
        for seed in dict.fromkeys(seed for _, seed in planned):
            runs = [folder for key, folder in folders.items() if key[0].startswith(f"{name}/") and key[1] == seed]
            fold(name, runs, folder_of(out, (name, seed)), next(iter(experiments.values())).evaluation.lower)
    result: Runs = {}
    for label, seed in rows:
        result.setdefault(label, []).append(History.load(folder_of(out, (label, seed))))
    if report:
        from fedstrata.reporting.html import write_comparison

        write_comparison(out)
    for label, histories in result.items():
        for history in histories:
            if history.warning:
                warnings.warn(f"{label}, seed {history.seed}: {history.warning}", stacklevel=2)
    return result


def check(prepared: Prepared) -> None:
    """Raise where what is to show a run is not there, before anything runs."""
    for callback in prepared.spec.tracking.callbacks:
        callback.check(prepared.spec.evaluation)


def plan(
    experiments: Mapping[str, Experiment],
    seeds: Sequence[int] | None = None,
    references: Sequence[str] = (),
    data: Arrays | None = None,
) -> dict[Key, Experiment]:
    """Every run of a comparison, by label and seed; those of a reference are called ``NAME/RUN``.

    Raises:
        SpecError: The seeds differ, or there is no such reference of these experiments.
    """
    seeds = checked_seeds([common_seed(experiments)] if seeds is None else seeds)
    planned = {
        (label, seed): build(Experiment, {**_fields(spec), "seed": seed})
        for label, spec in experiments.items()
        for seed in seeds
    }
    for name in dict.fromkeys(references):
        for seed in seeds:
            runs = reference_runs(name, {label: planned[label, seed] for label in experiments}, data)
            planned |= {(f"{name}/{run}", seed): spec for run, spec in runs.items()}
    return planned


def checked_seeds(seeds: Sequence[int]) -> tuple[int, ...]:
    """Seeds that runs can have, at least one.

    Raises:
        SpecError: There is none, or one is no seed.
    """
    if not seeds:
        raise SpecError("seeds", "expected at least one", [])
    return tuple(build(Experiment, {"seed": seed}).seed for seed in seeds)


def folder_of(out: Path, key: Key) -> Path:
    """Where a run of a comparison goes."""
    label, _, run = key[0].partition("/")
    return out / label / f"seed-{key[1]}" / run


def is_done(folder: Path, spec: Experiment) -> bool:
    """Whether a folder has the whole run."""
    try:
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        return bool(summary["rounds"] == spec.training.rounds or summary.get("stopped"))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def common_seed(experiments: Mapping[str, Experiment]) -> int:
    """The seed of all of them.

    Raises:
        SpecError: They have different ones: their numbers would not be comparable.
    """
    seeds = {spec.seed for spec in experiments.values()}
    if len(seeds) != 1:
        raise SpecError("seed", "the same for all that are compared, or give --seeds", sorted(seeds))
    return seeds.pop()


def _fields(spec: Experiment) -> dict[str, object]:
    return {key: getattr(spec, key) for key in type(spec).model_fields}


def _carry_out(
    todo: Mapping[Key, Experiment],
    folders: Mapping[Key, Path],
    data: Arrays | None,
    model: nn.Module | Model | None,
    jobs: int | None,
    watch: Watcher | None,
) -> None:
    """Run what is to be run, side by side or in turn.

    Raises:
        FedstrataError: A run's process was killed.
    """
    jobs = min(jobs or os.cpu_count() or 1, max(len(todo), 1))
    fork = forks(todo.values(), data is not None or model is not None) if jobs > 1 else None
    if jobs == 1 or fork is None:
        for key, spec in todo.items():
            callbacks = [] if watch is None else [partial(_tell, watch, key)]
            run_to_end(spec, folders[key], data=data, model=model, callbacks=callbacks)
        return
    tasks: dict[Key, Task] = {}
    for key, spec in todo.items():
        if fork:
            tasks[key] = partial(run_to_end, spec, folders[key], data=data, model=model)
        else:
            tasks[key] = partial(run_text, spec.to_toml(), folders[key])
    waiting, lost = list(tasks), dict[Key, str]()
    with TaskPool[Key](jobs, fork=fork) as pool:
        while waiting or pool.busy:
            while waiting and pool.free:
                key = waiting.pop(0)
                pool.begin(key, tasks[key])
            lost |= {key: how for key, how in pool.finished(timeout=0.5) if how}
            if watch is not None:
                for key in todo:
                    watch(*key, rounds_done(folders[key]))
    refuse_lost({folders[key]: how for key, how in lost.items()}, len(todo))


def refuse_lost(lost: Mapping[Path, str], of: int) -> None:
    """Raise ``FedstrataError`` where runs, by their folder, lost their process."""
    if lost:
        runs = "; ".join(f"that of {folder} {how}" for folder, how in lost.items())
        advice = "the same call goes on from their last checkpoints; fewer jobs at a time take less memory"
        raise FedstrataError(f"{len(lost)} of {of} runs lost their process: {runs}; {advice}")


def forks(specs: Iterable[Experiment], own: bool) -> bool | None:
    """Whether several runs at a time are forks of this process; None where they can only take turns in it.

    A spec that names what another process would not find has to stay in this one, and so have modules and arrays.

    Args:
        specs: What is to run.
        own: Whether data or a model of the caller's own are used.
    """
    specs = list(specs)
    if not own and not any(where in spec.to_toml() for spec in specs for where in ("__main__:", "<locals>")):
        return False
    if can_fork() and all(spec.training.threads == 1 for spec in specs):
        return True
    why = "training.threads is not 1" if can_fork() else "this process cannot be forked"
    warnings.warn(f"runs take turns in this process, for they use what is its own and {why}", stacklevel=4)
    return None


def run_to_end(
    spec: Experiment,
    folder: Path,
    *,
    data: Arrays | None = None,
    model: nn.Module | Model | None = None,
    callbacks: Sequence[Callback | Callable[[Mapping[str, Any]], None]] = (),
) -> None:
    """Run an experiment in its folder, from wherever it is."""
    carry_out(spec, out=folder, data=data, model=model, resume=folder.exists(), callbacks=callbacks)


def run_text(spec: str, folder: Path) -> None:
    """The same in a process that knows nothing but the text of the spec."""
    run_to_end(Experiment.from_table(tomllib.loads(spec)), folder)


def _tell(watch: Watcher, key: Key, record: Mapping[str, Any]) -> None:
    watch(*key, record["round"])


def stamp() -> str:
    """The time of day as part of a folder's name."""
    return time.strftime("%Y%m%d-%H%M%S")
