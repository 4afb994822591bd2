"""Families of runs that are killed and resumed: they must end with the same bytes, and leave no processes."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

from tests.fuzz.cases import RAN, Family, SilentDifferenceError
from tests.fuzz.folders import METHODS, TINY, empty_folder, ending, spec_of, undisturbed

import fedstrata as fs
from fedstrata.engines import local
from fedstrata.runs import run_folder

SUBREAPER = 36
"""``PR_SET_CHILD_SUBREAPER``, an option of ``prctl``: orphaned processes become children of this process."""

LINGER = 20.0
"""The seconds within which a worker must end after its parent has ended."""

COMPARED = ("scaffold", "fedstas", "moon")
"""The methods of a comparison: three runs in two processes, so that one run begins later."""


def forked(work: Callable[[], object], log: Path) -> int:
    """Do some work in a forked process, which writes its error to the log; return the process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        warnings.simplefilter("ignore")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # Use workers although rounds are short, and do not draw pictures, which would take longer than the rounds.
        local.STARTING_PAYS = local.ASKING_PAYS = -1.0
        run_folder.draw_partition = lambda assignment, data, path: path.touch()  # type: ignore[assignment]
        work()
        code = 0
    except BaseException:
        log.write_text(traceback.format_exc())
    finally:
        os._exit(code)


def try_run(number: int, chance: random.Random, place: Path) -> str:
    """Kill and resume a run; the number of the case chooses the method, and whether the run has workers."""
    method, workers = list(METHODS)[number % len(METHODS)], 1 + number // len(METHODS) % 2
    table = spec_of(method) | {"training": {**TINY["training"], "workers": workers}}

    def begin_or_go_on(folder: Path) -> None:
        fs.run(table, out=folder, resume=(folder / "spec.toml").exists())

    killed(begin_or_go_on, lasts(begin_or_go_on, f"{method} {workers}"), chance, place)
    require(method, place / "out", f"{method}, {workers} workers")
    return RAN


def try_compare(number: int, chance: random.Random, place: Path) -> str:
    """Kill and repeat a comparison in two processes."""
    specs = {method: fs.Experiment.from_table(spec_of(method)) for method in COMPARED}

    def begin_or_go_on(folder: Path) -> None:
        fs.compare(specs, out=folder, jobs=2, report=False)  # pictures take longer than everything else

    killed(begin_or_go_on, lasts(begin_or_go_on, "compare"), chance, place)
    for method in COMPARED:
        require(method, place / "out" / method / "seed-0", f"{method} of a comparison")
    return RAN


def require(method: str, folder: Path, what: str) -> None:
    """Check that a folder contains the model and the records of an undisturbed run."""
    if ending(fs.History.load(folder)) != undisturbed(method):
        raise SilentDifferenceError(f"{what}: another model or other records than the undisturbed run's")


_SECONDS: dict[str, float] = {}


def lasts(work: Callable[[Path], None], what: str) -> float:
    """Return the seconds that some work takes without being killed, measured once."""
    if what not in _SECONDS:
        place, began = empty_folder(), time.monotonic()
        _waited(forked(lambda: work(place / "out"), place / "log.txt"), place)
        _SECONDS[what] = time.monotonic() - began
    return _SECONDS[what]


def killed(work: Callable[[Path], None], seconds: float, chance: random.Random, place: Path) -> None:
    """Begin some work, kill and repeat it up to three times at random moments, and then let it end."""
    _adopt_orphans()
    for _ in range(chance.randint(1, 3)):
        child = forked(lambda: work(place / "out"), place / "log.txt")
        time.sleep(chance.uniform(0.0, seconds))
        os.kill(child, chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
        os.waitpid(child, 0)
        _nobody_is_left()
    _waited(forked(lambda: work(place / "out"), place / "log.txt"), place)
    _nobody_is_left()


def _waited(child: int, place: Path) -> None:
    if os.waitpid(child, 0)[1]:
        raise RuntimeError(f"it cannot go on: {(place / 'log.txt').read_text()}")


@cache
def _adopt_orphans() -> None:
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)


def _nobody_is_left() -> None:
    """Check that all processes that the killed work had started end too.

    Raises:
        SilentDifferenceError: A process still runs.
    """
    until = time.monotonic() + LINGER
    while True:
        try:
            child, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if child == 0:
            if time.monotonic() > until:
                raise SilentDifferenceError("a process that the killed work had started lives on")
            time.sleep(0.01)


RUNS = Family("kills", try_run, seconds=600.0)
COMPARES = Family("compares", try_compare, seconds=900.0)
