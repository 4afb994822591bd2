"""Several methods, several seeds, side by side."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path

from fedstrata.config import build
from fedstrata.errors import SpecError
from fedstrata.experiment import run
from fedstrata.history import History
from fedstrata.preparation import prepare
from fedstrata.run_folder import METRICS, SPEC, SUMMARY, is_run_of
from fedstrata.spec import Experiment

Runs = dict[str, list[History]]
Watcher = Callable[[str, int, int], None]
"""Told label, seed and rounds done, now and then."""


def compare(
    experiments: Mapping[str, Experiment],
    *,
    seeds: Sequence[int] | None = None,
    out: str | Path,
    jobs: int | None = None,
    watch: Watcher | None = None,
) -> Runs:
    """Run every experiment with every seed and write a table, a plot and a report.

    Runs that ``out`` holds already are not repeated, and those that were interrupted go on from their last
    checkpoint: calling it again after a kill finishes the work.

    Args:
        experiments: By label.
        seeds: Each experiment runs once with each; with the specs' own one unless given.
        out: The folder; a run goes to ``LABEL/seed-S/``.
        jobs: Runs at the same time, each in a process of its own with its own threads; as many as there are
            processors unless given. Results do not depend on it.
        watch: Told about progress.

    Returns:
        The histories by label, in the order of ``seeds``.

    Raises:
        SpecError: A setting is wrong; every experiment is checked, with its own seed, before the first one starts.
    """
    out = Path(out)
    seeds = [common_seed(experiments)] if seeds is None else seeds
    for label, spec in experiments.items():
        if not label or "/" in label or label.startswith("."):
            raise SpecError("--methods", "a label names a folder; use letters, digits and dashes", label)
        prepare(spec)
    planned = {
        (label, seed): build(Experiment, {**_fields(spec), "seed": seed})
        for label, spec in experiments.items()
        for seed in seeds
    }
    folders = {key: out / key[0] / f"seed-{key[1]}" for key in planned}
    for key, spec in planned.items():
        there = folders[key] / SPEC
        if there.exists() and not is_run_of(there, spec):
            raise SpecError("out", f"holds a run of another spec in {folders[key]}; give another folder", str(out))
    todo = [key for key, spec in planned.items() if not _is_done(folders[key], spec)]
    jobs = min(jobs or os.cpu_count() or 1, max(len(todo), 1))
    if jobs == 1:
        for key in todo:
            _one(planned[key], folders[key], _follow(watch, key))
    else:
        _in_processes({key: planned[key] for key in todo}, folders, jobs, watch)
    result: Runs = {label: [History.load(folders[label, seed]) for seed in seeds] for label in experiments}
    from fedstrata.report.html import write_comparison

    write_comparison(out)
    return result


def _is_done(folder: Path, spec: Experiment) -> bool:
    try:
        rounds = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))["rounds"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(rounds == spec.training.rounds)


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


def _follow(watch: Watcher | None, key: tuple[str, int]) -> Callable[[Mapping[str, object]], None] | None:
    if watch is None:
        return None
    return lambda record: watch(*key, int(record["round"]))  # type: ignore[call-overload]


def _one(spec: Experiment, folder: Path, callback: Callable[[Mapping[str, object]], None] | None = None) -> None:
    run(spec, out=folder, resume=(folder / SPEC).exists(), callbacks=[callback] if callback else [])


def _toml(text: str, folder: Path) -> None:
    """One run in a worker process; specs cross over as text."""
    import tomllib

    _one(Experiment.from_table(tomllib.loads(text)), folder)


def _in_processes(
    todo: Mapping[tuple[str, int], Experiment],
    folders: Mapping[tuple[str, int], Path],
    jobs: int,
    watch: Watcher | None,
) -> None:
    # Fresh processes: a fork of one that has used PyTorch's threads may hang.
    context, others = multiprocessing.get_context("spawn"), set(multiprocessing.active_children())
    with ProcessPoolExecutor(max_workers=jobs, mp_context=context, initializer=_die_when_interrupted) as pool:
        futures: dict[Future[None], tuple[str, int]] = {
            pool.submit(_toml, spec.to_toml(), folders[key]): key for key, spec in todo.items()
        }
        pending = set(futures)
        try:
            while pending:
                done, pending = wait(pending, timeout=0.5, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()
                if watch is not None:
                    for key in futures.values():
                        watch(*key, rounds_done(folders[key]))
        except BaseException:
            # Runs that were begun can be resumed; waiting for them to end could take hours.
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in set(multiprocessing.active_children()) - others:
                worker.terminate()
            raise


def _die_when_interrupted() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def rounds_done(folder: Path) -> int:
    """How far a run of another process is, by what it has written."""
    try:
        with (folder / METRICS).open("rb") as file:
            return sum(1 for _ in file)
    except OSError:
        return 0


def stamp() -> str:
    """The time of day as part of a folder's name."""
    return time.strftime("%Y%m%d-%H%M%S")
