"""Several methods, several seeds, side by side."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import sys
import time
import tomllib
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import cast

from fedstrata.config import build
from fedstrata.ending import end_with_parent, ending_in_order, in_main_thread
from fedstrata.errors import FedstrataError, SpecError
from fedstrata.experiment import run
from fedstrata.history import History
from fedstrata.preparation import prepare
from fedstrata.references import fold, reference_runs
from fedstrata.run_folder import METRICS, SUMMARY, refuse_foreign
from fedstrata.spec import Experiment

GRACE = 5.0
"""Seconds for a worker to end in order."""

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
    references: Sequence[str] = (),
    jobs: int | None = None,
    watch: Watcher | None = None,
    report: bool = True,
) -> Runs:
    """Run every experiment with every seed and write a table, a plot and a report.

    Runs that ``out`` holds already are not repeated, and those that were interrupted go on from their last
    checkpoint: calling it again after a kill finishes the work.

    Args:
        experiments: By label.
        seeds: Each experiment runs once with each; with the specs' own one unless given.
        out: The folder; a run goes to ``LABEL/seed-S/``.
        references: What else to compare with: ``"local"``, each client training alone (a run for each of them, whose
            mean is the row), and ``"centralised"``, one client with everybody's samples and as many sample-gradients
            a round. See ``fedstrata.references``.
        jobs: Runs at the same time, each in a process of its own with its own threads; as many as there are
            processors unless given. Results do not depend on it.
        watch: Told about progress.
        report: Write tables, pictures and a page about all runs of the folder.

    Returns:
        The histories by label, in the order of ``seeds``.

    Raises:
        SpecError: A setting is wrong; every experiment is checked, with its own seed, before the first one starts.
        FedstrataError: A run's process was killed; the others have ended well.
    """
    out = Path(out)
    for label, spec in experiments.items():
        if not label or "/" in label or label.startswith(".") or label in references:
            raise SpecError("--methods", "a label names a folder of its own; use letters, digits and dashes", label)
        prepare(spec)
    planned = plan(experiments, seeds, references)
    folders = {key: folder_of(out, key) for key in planned}
    for key, spec in planned.items():
        if folders[key].exists():
            refuse_foreign(folders[key], prepare(spec), resume=True)
    todo = [key for key, spec in planned.items() if not _is_done(folders[key], spec)]
    jobs = min(jobs or os.cpu_count() or 1, max(len(todo), 1))
    if jobs == 1:
        for key in todo:
            _one(planned[key], folders[key], _follow(watch, key))
    else:
        _in_processes({key: planned[key] for key in todo}, folders, jobs, watch)
    for name in dict.fromkeys(references):
        for seed in dict.fromkeys(seed for _, seed in planned):
            runs = [folder for key, folder in folders.items() if key[0].startswith(f"{name}/") and key[1] == seed]
            fold(name, runs, folder_of(out, (name, seed)), next(iter(experiments.values())).evaluation.lower)
    rows = dict.fromkeys((label.partition("/")[0], seed) for label, seed in planned)
    result: Runs = {}
    for label, seed in rows:
        result.setdefault(label, []).append(History.load(folder_of(out, (label, seed))))
    if report:
        from fedstrata.report.html import write_comparison
        from fedstrata.report.runs import keep_order

        keep_order(out, result)
        write_comparison(out)
    return result


def plan(
    experiments: Mapping[str, Experiment], seeds: Sequence[int] | None = None, references: Sequence[str] = ()
) -> dict[Key, Experiment]:
    """Every run of a comparison, by label and seed; those of a reference are called ``NAME/RUN``.

    Raises:
        SpecError: The seeds differ, or there is no such reference of these experiments.
    """
    seeds = [common_seed(experiments)] if seeds is None else seeds
    planned = {
        (label, seed): build(Experiment, {**_fields(spec), "seed": seed})
        for label, spec in experiments.items()
        for seed in seeds
    }
    for name in dict.fromkeys(references):
        for seed in seeds:
            runs = reference_runs(name, {label: planned[label, seed] for label in experiments})
            planned |= {(f"{name}/{run}", seed): spec for run, spec in runs.items()}
    return planned


def folder_of(out: Path, key: Key) -> Path:
    """Where a run of a comparison goes."""
    label, _, run = key[0].partition("/")
    return out / label / f"seed-{key[1]}" / run


def _is_done(folder: Path, spec: Experiment) -> bool:
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


def _follow(watch: Watcher | None, key: tuple[str, int]) -> Callable[[Mapping[str, object]], None] | None:
    if watch is None:
        return None
    return lambda record: watch(*key, int(record["round"]))  # type: ignore[call-overload]


def _one(spec: Experiment, folder: Path, callback: Callable[[Mapping[str, object]], None] | None = None) -> None:
    run(spec, out=folder, resume=folder.exists(), callbacks=[callback] if callback else [])


def _in_processes(
    todo: Mapping[Key, Experiment], folders: Mapping[Key, Path], jobs: int, watch: Watcher | None
) -> None:
    texts = {key: spec.to_toml() for key, spec in todo.items()}
    waiting, workers, lost = list(todo), list[_Worker](), dict[Key, str]()
    busy: dict[Connection, tuple[_Worker, Key]] = {}
    main = any("__main__:" in text for text in texts.values())
    try:
        while waiting or busy:
            while waiting and len(busy) < jobs:
                worker = next((worker for worker in workers if worker.connection not in busy), None)
                if worker is None:
                    worker = _Worker(main=main)
                    workers.append(worker)
                key = waiting.pop(0)
                busy[worker.connection] = worker, key
                worker.begin(texts[key], folders[key])
            for ready in wait(list(busy), timeout=0.5):
                worker, key = busy.pop(cast(Connection, ready))
                try:
                    worker.finish()
                except EOFError:
                    lost[key] = worker.end()
                    workers.remove(worker)
            if watch is not None:
                for key in todo:
                    watch(*key, rounds_done(folders[key]))
    finally:
        # Runs that were begun can be resumed; waiting for them to end could take hours.
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            worker.end()
    if lost:
        runs = "; ".join(f"that of {folders[key]} {how}" for key, how in lost.items())
        advice = "the same call goes on from their last checkpoints; fewer jobs at a time take less memory"
        if main:
            advice = (
                "what specs name in the program itself needs a main guard, if __name__ == '__main__', about compare"
            )
        raise FedstrataError(f"{len(lost)} of {len(todo)} runs lost their process: {runs}; {advice}")


class _Worker:
    """A process that runs one experiment after another.

    Args:
        main: Whether specs name something of the program that called, which is then run there under another name, as
            ``multiprocessing`` does: it has to have a main guard. Without it a script or a notebook needs none.
    """

    def __init__(self, *, main: bool) -> None:
        # A fresh process: a fork of one that has used PyTorch's threads may hang.
        context = multiprocessing.get_context("spawn")
        self.connection, there = context.Pipe()
        self.process = context.Process(target=_work, args=(there, in_main_thread()), name="fedstrata-compare")
        program = sys.modules["__main__"]
        try:
            if not main:
                sys.modules["__main__"] = ModuleType("__main__")
            self.process.start()
        finally:
            sys.modules["__main__"] = program
            there.close()

    def begin(self, spec: str, folder: Path) -> None:
        """Hand it a run; specs cross over as text."""
        with suppress(OSError):  # it is gone, as ``finish`` will find
            self.connection.send((spec, folder))

    def finish(self) -> None:
        """The end of its run, with the error that it raised.

        Raises:
            EOFError: It is gone.
        """
        try:
            error = self.connection.recv()
        except OSError:
            raise EOFError from None
        if error is not None:
            raise error

    def end(self) -> str:
        """Let it end, and after ``GRACE`` seconds end it; how it ended."""
        self.connection.close()
        self.process.join(GRACE)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        code = self.process.exitcode or 0
        return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"


def _work(connection: Connection, asked_by_main_thread: bool) -> None:
    """The life of a worker: until there are no more runs, or nobody who wants them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started this one ends it
    with ending_in_order(), suppress(EOFError, OSError):
        end_with_parent(asked_by_main_thread)
        while True:
            spec, folder = connection.recv()
            error: Exception | None = None
            try:
                _one(Experiment.from_table(tomllib.loads(spec)), folder)
            except Exception as raised:
                raised.add_note(f"in the process of {folder}:\n{traceback.format_exc()}")
                error = raised
            connection.send(_that_crosses(error))


def _that_crosses(error: Exception | None) -> Exception | None:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return FedstrataError(f"{type(error).__name__}: {error}")
    return error


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
