"""Compare several experiments, each with several seeds."""

from __future__ import annotations

import html
import json
import os
import tomllib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from fedstrata.base.config import build
from fedstrata.base.errors import FedstrataError, SpecError
from fedstrata.base.processes import Task, TaskPool, can_fork
from fedstrata.evaluation.history import History, column_of, frame
from fedstrata.evaluation.summary import percent
from fedstrata.experiments.references import fold, reference_runs
from fedstrata.experiments.run import carry_out
from fedstrata.models.zoo import OwnModel
from fedstrata.reporting import tables
from fedstrata.reporting.progress import Progress
from fedstrata.reporting.runs import keep_order
from fedstrata.runs.preparation import Arrays, Prepared, prepare
from fedstrata.runs.run_folder import SUMMARY, last_number, refuse_foreign, rounds_done
from fedstrata.spec.experiment import Experiment

if TYPE_CHECKING:
    from pandas import DataFrame

Key = tuple[str, int]
"""The type of a run's key in a comparison: its label and its seed."""
Watcher = Callable[[str, int, int], None]
"""The type of a function that gets a run's label, seed and number of finished rounds, and shows this progress."""


class Comparison(dict[str, list[History]]):
    """The result of a comparison: a mapping from each experiment's label to the histories of its runs, one per seed.

    Notebooks show a comparison as a table.
    """

    def to_frame(self) -> DataFrame:
        """Return a pandas data frame with one row per run: the label, the content of ``summary.json`` and all metrics.

        Raises:
            ExtraMissingError: The extra ``tables`` is not installed.
        """
        rows = ((label, history) for label, histories in self.items() for history in histories)
        return frame([{"label": label, **history.row, "folder": str(history.path)} for label, history in rows])

    def _repr_html_(self) -> str:
        rows = tables.compare_table(self)
        lines = [["", *(row.marked for row in rows)]]
        lines += [[tables.measure(key).heading, *(tables.show(row, key) for row in rows)] for key in tables.keys(rows)]
        cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in line) for line in lines)
        return (
            f"<table>{''.join(f'<tr>{line}</tr>' for line in cells)}</table><p>{html.escape(tables.caption(rows))}</p>"
        )


def compare(
    experiments: Mapping[str, Experiment],
    *,
    seeds: Sequence[int] | None = None,
    out: str | Path,
    data: Arrays | None = None,
    model: OwnModel | None = None,
    engine: str = "local",
    references: Sequence[str] = (),
    jobs: int | None = None,
    watch: Watcher | None = None,
    progress: bool = False,
    report: bool = True,
) -> Comparison:
    """Run every experiment with every seed, and write a report.

    Finished runs in ``out`` are not repeated, and interrupted runs continue from their last checkpoint. If the process
    is killed, repeat the call to finish the comparison.

    Args:
        experiments: A mapping from labels, which are names of your choice, to experiments.
        seeds: Each experiment runs once with each seed. Default: the seed of the specs.
        out: The folder of the comparison. The files of a run are in ``LABEL/seed-S/``.
        data: Your own data for all experiments; see ``prepare``.
        model: Your own model for all experiments, preferably a Python class; see ``prepare``.
        engine: The engine that runs the clients of each run.
        references: The references to add to the comparison. With ``"local"``, each client trains alone, and results are
            means over the clients. With ``"centralised"``, one client trains on all samples. See
            ``fedstrata.experiments.references``.
        jobs: The number of simultaneous runs, each in its own process. Default: the number of processors, or 1 if the
            engine is not ``local``. Results do not depend on this number. The processes are forks of this process if
            you pass data, or if the model or a class is defined only in this program. If forking is impossible, the
            runs are executed one after another.
        watch: A function that is called during each run with the run's label, seed and number of finished rounds.
        progress: Whether to show progress: bars in a terminal or notebook, and lines of text elsewhere.
        report: Whether to write a report into ``out``, with tables, figures and an HTML page about all runs.

    Returns:
        A mapping from each label to the histories of its runs, in the order of ``seeds``.

    Raises:
        SpecError: A setting is wrong. All experiments are checked before the first experiment starts.
        FedstrataError: The process of a run was killed. The error is raised after all other runs have ended.
    """
    out, make = Path(out), partial(prepare, data=data, model=model)
    for label, spec in experiments.items():
        if not label.isprintable() or label in ("", *references) or "/" in label or label.startswith("."):
            raise SpecError(
                "--methods",
                "labels become names of folders, but this label is reserved or not suitable. Use another label of "
                "letters, digits and dashes.",
                label,
            )
        check_trackers(make(spec))
    planned = plan(experiments, seeds, references, data)
    if isinstance(model, nn.Module) and len({seed for _, seed in planned}) > 1:
        problem = (
            "all seeds start from the weights of this module. For different weights, pass the module's class, or a "
            "function that creates the module. To keep these weights without a warning, pass"
        )
        warnings.warn(f"model: {problem} fs.Model(module).", stacklevel=2)
    folders = {key: folder_of(out, key) for key in planned}
    for key, spec in planned.items():
        if folders[key].exists():
            refuse_foreign(folders[key], make(spec), resume=True)
    unfinished = {key: spec for key, spec in planned.items() if not is_done(folders[key], spec)}
    rows = dict.fromkeys((label.partition("/")[0], seed) for label, seed in planned)
    out.mkdir(parents=True, exist_ok=True)
    keep_order(out, dict.fromkeys(label for label, _ in rows))
    with Progress(quiet=not progress) as bars:
        if progress:
            rounds = {key: spec.training.rounds for key, spec in planned.items()}
            done = [key for key in planned if key not in unfinished]
            watch = bars.of_runs(rounds, partial(latest, out, planned), done=done)
        jobs = jobs or ((os.cpu_count() or 1) if engine == "local" else 1)
        own = {name: part for name, part in (("data", data), ("model", model)) if part is not None}
        _run_all(unfinished, folders, jobs, watch, engine, own)
    for name in dict.fromkeys(references):
        for seed in dict.fromkeys(seed for _, seed in planned):
            runs = [folder for key, folder in folders.items() if key[0].startswith(f"{name}/") and key[1] == seed]
            fold(name, runs, folder_of(out, (name, seed)), next(iter(experiments.values())).evaluation.lower)
    result = Comparison()
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


def check_trackers(prepared: Prepared) -> None:
    """Raise ``ExtraMissingError`` if the spec uses a tracker, such as TensorBoard, that is not installed."""
    for callback in prepared.spec.tracking.callbacks:
        callback.check(prepared.spec.evaluation)


def plan(
    experiments: Mapping[str, Experiment],
    seeds: Sequence[int] | None = None,
    references: Sequence[str] = (),
    data: Arrays | None = None,
) -> dict[Key, Experiment]:
    """List the runs of a comparison, as a mapping from each run's label and seed to its experiment.

    A reference may have several runs with labels ``NAME/RUN``, such as ``local/client-0``.

    Raises:
        SpecError: A reference is unknown or does not fit the experiments, or ``seeds`` is None although the experiments
            have different seeds.
    """
    if seeds is None:
        seeds = sorted({spec.seed for spec in experiments.values()})
        if len(seeds) != 1:
            raise SpecError(
                "seed", "differs between the experiments. Use one seed for all experiments, or give --seeds.", seeds
            )
    seeds = checked_seeds(seeds)
    planned = {
        (label, seed): build(Experiment, {**dict(spec), "seed": seed})
        for label, spec in experiments.items()
        for seed in seeds
    }
    for name in dict.fromkeys(references):
        for seed in seeds:
            runs = reference_runs(name, {label: planned[label, seed] for label in experiments}, data)
            planned |= {(f"{name}/{run}", seed): spec for run, spec in runs.items()}
    return planned


def checked_seeds(seeds: Sequence[int]) -> tuple[int, ...]:
    """Return the seeds if they are valid.

    Raises:
        SpecError: The list of seeds is empty, or a value is not a valid seed.
    """
    if not seeds:
        raise SpecError("seeds", "is empty. Give at least one seed.", [])
    return tuple(build(Experiment, {"seed": seed}).seed for seed in seeds)


def folder_of(out: Path, key: Key) -> Path:
    """Return the folder of one run in the folder of a comparison."""
    label, _, run = key[0].partition("/")
    return out / label / f"seed-{key[1]}" / run


def latest(out: Path, planned: Mapping[Key, Experiment], label: str, seed: int) -> str:
    """Return the latest value of a run's primary metric as a string; an empty string before the first evaluation.

    Args:
        out: The folder of the comparison.
        planned: The experiment of each run.
        label: The label of the run.
        seed: The seed of the run.
    """
    metric = planned[label, seed].evaluation.primary
    value = last_number(folder_of(out, (label, seed)), column_of(metric))
    return "" if value is None else percent(value, 1) if metric == "accuracy" else f"{metric} {value:.3f}"


def is_done(folder: Path, spec: Experiment) -> bool:
    """Return True if the run in a folder is finished: it has all rounds of the spec, or it was stopped early."""
    try:
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        return bool(summary["rounds"] == spec.training.rounds or summary.get("stopped"))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _run_all(
    unfinished: Mapping[Key, Experiment],
    folders: Mapping[Key, Path],
    jobs: int,
    watch: Watcher | None,
    engine: str,
    own: Mapping[str, Any],
) -> None:
    """Run experiments in parallel processes, or one after another in this process.

    ``own`` may contain the caller's ``data`` and ``model``.

    Raises:
        FedstrataError: The process of a run was killed.
    """
    jobs = min(jobs, max(len(unfinished), 1))
    fork = forks(unfinished.values(), bool(own)) if jobs > 1 else None
    if jobs == 1 or fork is None:
        for key, spec in unfinished.items():
            callbacks = [] if watch is None else [report_rounds(watch, key)]
            run_to_end(spec, folders[key], callbacks, engine=engine, **own)
        return
    tasks: dict[Key, Task] = {}
    for key, spec in unfinished.items():
        if fork:
            tasks[key] = partial(run_to_end, spec, folders[key], engine=engine, **own)
        else:
            tasks[key] = partial(run_text, spec.to_toml(), folders[key], engine)

    def watch_all() -> None:
        if watch is not None:
            for key in unfinished:
                watch(*key, rounds_done(folders[key]))

    with TaskPool[Key](jobs, fork=fork) as pool:
        failures = {folders[key]: reason for key, reason in pool.run(tasks.items(), watch_all) if reason}
    raise_for_lost(failures, len(unfinished))


def raise_for_lost(failures: Mapping[Path, str], runs: int) -> None:
    """Raise ``FedstrataError`` if the process of any run was killed.

    Args:
        failures: A mapping from the folder of each killed run to the reason why the run ended.
        runs: The total number of runs.
    """
    if failures:
        lost = "; ".join(f"the run in {folder} {reason}" for folder, reason in failures.items())
        advice = "Repeat the same call to resume these runs. If memory ran out, use fewer jobs."
        raise FedstrataError(f"the processes of {len(failures)} of {runs} runs ended unexpectedly: {lost}. {advice}")


def forks(specs: Iterable[Experiment], in_memory: bool) -> bool | None:
    """Decide whether simultaneous runs must be forks of this process.

    New processes cannot use arrays, modules or classes that exist only in this process, so runs that use these objects
    need forks.

    Args:
        specs: The experiments to run.
        in_memory: Whether the runs use data or a model that the caller passes.

    Returns:
        True if runs need forks, and False if new processes are enough. None if forks are needed but impossible; this
        process must then execute one run after another.
    """
    specs = list(specs)
    if not in_memory and not any(part in spec.to_toml() for spec in specs for part in ("__main__:", "<locals>")):
        return False
    if can_fork() and all(spec.training.threads == 1 for spec in specs):
        return True
    why = "training.threads is not 1" if can_fork() else "this process cannot be forked"
    problem = f"the runs are executed one after another, because they use objects of this process, and because {why}."
    warnings.warn(problem, stacklevel=4)
    return None


def run_to_end(spec: Experiment, folder: Path, callbacks: Sequence[Any] = (), **given: Any) -> None:
    """Start or resume an experiment in ``folder``, and run it to its end.

    The arguments ``given`` are passed to ``carry_out``.
    """
    carry_out(spec, out=folder, resume=folder.exists(), callbacks=callbacks, **given)


def run_text(spec: str, folder: Path, engine: str = "local") -> None:
    """Run an experiment to its end in a new process, which receives the spec as a string."""
    run_to_end(Experiment.from_table(tomllib.loads(spec)), folder, engine=engine)


def report_rounds(watch: Watcher, key: Key) -> Callable[[Mapping[str, Any]], None]:
    """Return a callback that calls ``watch`` with a run's progress after each round."""
    return lambda record: watch(*key, record["round"])
