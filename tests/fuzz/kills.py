"""Runs that are killed at any time, and go on: the same bytes, and nobody is left behind."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
from tests.fuzz.cases import RAN, Family, SilentDifferenceError
from tests.fuzz.folders import METHODS, TINY, spec_of, undisturbed

import fedstrata as fs

SUBREAPER = 36
"""``PR_SET_CHILD_SUBREAPER``: orphans come to this process, which can then see them."""

LINGER = 20.0
"""Seconds that a worker may take to notice that its parent is gone; generous."""


def spec(method: str, workers: int) -> dict[str, Any]:
    return {**spec_of(method), "training": {**TINY["training"], "workers": workers}}


def forked(work: Callable[[], object], log: Path) -> int:
    """A process that does some work and ends; what goes wrong there is in the log."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        warnings.simplefilter("ignore")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        work()
        code = 0
    except BaseException:
        log.write_text(traceback.format_exc())
    finally:
        os._exit(code)


def try_one(number: int, chance: random.Random, place: Path) -> str:
    """A run killed a few times, then left alone."""
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    method, workers = chance.choice(list(METHODS)), chance.choice([1, 1, 2])
    wanted = undisturbed(method)[0]
    folder, table = place / "run", spec(method, workers)

    def go_on() -> None:
        if workers > 1:
            _force_workers()
        fs.run(table, out=folder, resume=(folder / "spec.toml").exists())

    for _ in range(chance.randint(1, 4)):
        child = forked(go_on, place / "log.txt")
        time.sleep(chance.uniform(0.0, 0.25))
        os.kill(child, chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
        os.waitpid(child, 0)
        _nobody_is_left()
    child = forked(go_on, place / "log.txt")
    _, status = os.waitpid(child, 0)
    if status:
        raise RuntimeError(f"the run cannot go on: {(place / 'log.txt').read_text()}")
    _nobody_is_left()
    found = safetensors.torch.load((folder / "model.safetensors").read_bytes())
    if safetensors.torch.save(found) != wanted:
        raise SilentDifferenceError(f"{method}, {workers} workers: another model than the undisturbed run's")
    return RAN


def _force_workers() -> None:
    """Workers although they do not pay for work as small as this."""
    from fedstrata.engines import local

    local.TEAM_PAYS = local.ASKING_PAYS = 0.0


def _nobody_is_left() -> None:
    """Those whom the killed run had started end too.

    Raises:
        SilentDifferenceError: Somebody still lives.
    """
    until = time.monotonic() + LINGER
    while True:
        try:
            child, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if child == 0:
            if time.monotonic() > until:
                raise SilentDifferenceError("a process that the killed run had started lives on")
            time.sleep(0.01)


FAMILY = Family("kills", try_one, seconds=180.0)
