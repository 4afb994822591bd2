"""Run experiments in NVFlare's simulator: server and sites are processes on this machine, without certificates."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import tomli_w

from fedstrata.base.errors import ExtraMissingError, FedstrataError, SpecError
from fedstrata.base.jsonl import read_jsonl, write_json
from fedstrata.evaluation.history import History
from fedstrata.runs import checkpoint
from fedstrata.runs.preparation import prepare
from fedstrata.runs.run_folder import METRICS, SPEC, WEIGHTS, refuse_foreign
from fedstrata.runs.secure_checks import refuse_secure_sums
from fedstrata.runs.simulation import refuse_elsewhere
from fedstrata.sites.configuration import CLASSES, ERROR, raised, write_job
from fedstrata.sites.nvflare_workarounds import SIMULATOR_ATTEMPTS, simulator_command
from fedstrata.sites.processes import end, start
from fedstrata.sites.settings import LOCAL, PATIENCE, JobSpec, SiteSettings
from fedstrata.spec.experiment import Experiment

Callback = Callable[[Mapping[str, Any]], None]

SITES = "sites.json"
"""The file with the number of sites, in a run folder."""

_LOOK = 0.1
GRACE = 5.0
"""The number of seconds between SIGTERM and SIGKILL, during which processes can end by themselves."""


def require_nvflare() -> None:
    """Raise ``ExtraMissingError`` if NVFlare is not installed."""
    if importlib.util.find_spec("nvflare") is None:
        raise ExtraMissingError("NVFlare", "nvflare")


def simulate(
    runs: Sequence[tuple[Experiment, Path | None]],
    *,
    sites: int | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    patience: float = PATIENCE,
    direct: bool = True,
) -> list[History]:
    """Run experiments one after another in one session of NVFlare's simulator.

    Args:
        runs: Pairs of an experiment and its run folder; None for a temporary folder.
        sites: The number of sites. Each site is a process that runs some of the clients. Default: one site per client,
            but at most one site per processor (or 3 sites, if there are fewer processors). A resumed run keeps its
            number of sites, because the sites store the clients' states.
        resume: Whether to resume the runs in the folders.
        callbacks: Functions that are called with the record of each round.
        patience: The number of seconds within which a site must reply.
        direct: For a model that clients train one after another: True if the model goes directly to the next site;
            False if the server passes the model on.

    Raises:
        ExtraMissingError: NVFlare is not installed.
        SpecError: A setting is wrong.
        FedstrataError: A run ended before its last round.
    """
    require_nvflare()
    for spec, _ in runs:
        refuse_secure_sums(spec)
    ready = [prepare(spec) for spec, _ in runs]
    for prepared, (_, folder) in zip(ready, runs, strict=True):
        refuse_foreign(folder, prepared, resume=resume)
    most = max(prepared.config.clients for prepared in ready)
    if resume:
        sites = _sites_before([folder for _, folder in runs if folder is not None], sites)
    count = min(most, max(3, os.cpu_count() or 1)) if sites is None else sites
    if count < 1:
        raise SpecError("sites", "must be at least 1.", count)
    with tempfile.TemporaryDirectory(prefix="fedstrata-nvflare-", ignore_cleanup_errors=True) as place:
        root = Path(place)
        folders = [(root / f"run-{n}" if folder is None else folder).absolute() for n, (_, folder) in enumerate(runs)]
        plans = [
            JobSpec(f"run-{n}.toml", str(folders[n]), ready[n].config.clients, patience=patience, direct=direct)
            for n in range(len(runs))
        ]
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            # Remove the model file of an earlier run, because a run folder with this file counts as complete; see
            # ``_finished``.
            (folder / WEIGHTS).unlink(missing_ok=True)
            write_json(folder / SITES, {"sites": count})
        states = folders[0] / "sites" if runs[0][1] is not None else root / "sites"
        (root / "keys").mkdir(mode=0o700)
        settings = SiteSettings(keys=root / "keys", states=states, simulated=True, patience=patience)
        untouched = [_touched(folder) for folder in folders]
        for attempt in range(SIMULATOR_ATTEMPTS):
            session = root / f"session-{attempt}"
            session.mkdir()
            write_job(session / "job", plans, [spec.to_toml() for spec, _ in runs])
            _write_settings(session / "workspace", settings)
            watch = _Watch(folders, callbacks)
            with _started(session, count) as process:
                while process.poll() is None:
                    watch.look()
                    time.sleep(_LOOK)
                watch.look()
            if [_touched(folder) for folder in folders] != untouched:
                break
        return [_finished(spec, folder, given, session) for (spec, given), folder in zip(runs, folders, strict=True)]


def _sites_before(folders: Sequence[Path], sites: int | None) -> int | None:
    """Return the number of sites that the resumed runs had before. If none of these runs has begun, return ``sites``.

    Args:
        folders: The run folders.
        sites: The requested number of sites; None for any number.

    Raises:
        SpecError: A resumed run had another number of sites, or did not use NVFlare.
    """
    for folder in folders:
        if saved := checkpoint.load(folder / "checkpoint"):
            refuse_elsewhere(saved.remote, True, "nvflare")
        if (folder / SITES).exists():
            before = int(json.loads((folder / SITES).read_text(encoding="utf-8"))["sites"])
            if sites not in (None, before):
                problem = f"the run in {folder} stored its clients' states at {before} sites. Use {before} sites."
                raise SpecError("sites", problem, sites)
            sites = before
    return sites


def _touched(folder: Path) -> list[tuple[str, int]]:
    """Return the names and modification times of the files that change when a run begins, is resumed or fails."""
    files = [folder / name for name in (SPEC, METRICS, ERROR)]
    return [(file.name, file.stat().st_mtime_ns) for file in files if file.exists()]


def _finished(spec: Experiment, folder: Path, given: Path | None, root: Path) -> History:
    if (folder / ERROR).exists():
        raise raised(folder / ERROR)
    if not (folder / WEIGHTS).exists():
        log = (root / "log.txt").read_text(encoding="utf-8", errors="replace")
        tail = "\n".join(log.splitlines()[-15:])
        raise FedstrataError(f"NVFlare's simulator ended without a result. Its last output: {tail}")
    history = History.load(folder)
    history.params = safetensors.torch.load((folder / WEIGHTS).read_bytes())
    history.path, history.lower = given, spec.evaluation.lower
    return history


def _write_settings(workspace: Path, settings: SiteSettings) -> None:
    """Write the files that the simulator copies to every site: settings, and the classes that a job may name."""
    (workspace / LOCAL).parent.mkdir(parents=True)
    (workspace / LOCAL).write_text(tomli_w.dumps(settings.table()), encoding="utf-8")
    resources = {"format_version": 2, "class_allow_list": list(CLASSES)}
    (workspace / "local" / "resources.json.default").write_text(json.dumps(resources), encoding="utf-8")


@contextmanager
def _started(root: Path, sites: int) -> Iterator[subprocess.Popen[bytes]]:
    command = simulator_command(root / "job", root / "workspace", sites)
    # Each site uses one thread, because it already keeps one processor busy. More threads would slow each other down.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (root / "log.txt").open("wb") as log:
        process = start(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            yield process
        finally:
            end(process, GRACE)


class _Watch:
    """A watcher of run folders, which calls callbacks with each round's record after the server has written it."""

    def __init__(self, folders: Sequence[Path], callbacks: Sequence[Callback]) -> None:
        self._files = [folder / METRICS for folder in folders]
        self._callbacks = callbacks
        self._seen = {file: len(self._records(file)) for file in self._files}

    def look(self) -> None:
        for file in self._files:
            records = self._records(file)
            for record in records[self._seen[file] :]:
                for callback in self._callbacks:
                    callback(record)
            self._seen[file] = len(records)

    @staticmethod
    def _records(file: Path) -> list[dict[str, Any]]:
        return read_jsonl(file) if file.exists() else []
