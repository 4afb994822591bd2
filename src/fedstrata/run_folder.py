"""The files of a run: opened, appended to, checkpointed, finished."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch

from fedstrata import checkpoint
from fedstrata.checkpoint import Checkpoint
from fedstrata.clients.store import StateStore
from fedstrata.errors import DataError, SpecError
from fedstrata.federation.engine import Engine
from fedstrata.federation.messages import Weights
from fedstrata.history import History
from fedstrata.jsonl import MetricsLog, replace_file, write_json
from fedstrata.locking import occupied
from fedstrata.partitions import draw_partition
from fedstrata.preparation import Prepared
from fedstrata.spec import Experiment

SPEC, METRICS, EVENTS, SUMMARY, WEIGHTS, CHECKPOINT = (
    "spec.toml",
    "metrics.jsonl",
    "events.jsonl",
    "summary.json",
    "model.safetensors",
    "checkpoint",
)


class Running(Protocol):
    """What a folder records of a run: see ``fedstrata.simulation.Simulation``."""

    round: int
    state: Any
    store: StateStore
    engine: Engine

    @property
    def events(self) -> list[dict[str, Any]]:
        """What happened in the last round."""

    def evaluated(self) -> Weights:
        """The model that a run leaves behind."""


class RunFolder:
    """A run folder, or a place in memory that keeps the history alone.

    Args:
        path: The folder; None for memory.
        prepared: The experiment.
        found: The checkpoint from which the run goes on.
    """

    def __init__(self, path: Path | None, prepared: Prepared, found: Checkpoint | None = None) -> None:
        self.path, self.prepared, self.checkpoint = path, prepared, found
        spec = prepared.spec
        self.history = History(method=spec.method.name, seed=spec.seed, targets=spec.evaluation.targets, path=path)
        self._logs: dict[str, MetricsLog] = {}

    @classmethod
    @contextmanager
    def open(cls, path: Path | None, prepared: Prepared, *, resume: bool = False) -> Iterator[RunFolder]:
        """A folder that no other process enters for the block; nothing in it changes before ``begin``.

        Args:
            path: The folder; None for memory.
            prepared: The experiment.
            resume: Go on with the run that is there.

        Raises:
            SpecError: The folder holds another run, or one that is not to be resumed.
            CheckpointError: Every checkpoint is damaged.
        """
        if path is None:
            refuse_foreign(path, prepared.spec, resume)
            yield cls(None, prepared)
            return
        made = not path.exists()
        try:
            with occupied(path):
                refuse_foreign(path, prepared.spec, resume)
                yield cls(path, prepared, checkpoint.load(path / CHECKPOINT) if resume else None)
        except BaseException:
            if made:
                # Where the run never began, such as without its engine, nothing is left behind: a folder with
                # something in it stays.
                with suppress(OSError):
                    path.rmdir()
            raise

    def finished(self) -> History | None:
        """The history of a run that was resumed and is over, and of which no checkpoint was kept; None otherwise.

        Without a checkpoint a run starts over, and what it had written goes: never that of a run that is over.
        """
        if self.path is None or self.checkpoint is not None or not (self.path / SUMMARY).exists():
            return None
        history = History.load(self.path)
        if len(history) < self.prepared.spec.training.rounds or not (self.path / WEIGHTS).exists():
            return None
        history.params = safetensors.torch.load((self.path / WEIGHTS).read_bytes())
        return history

    def begin(self, running: Running) -> None:
        """Write what is known before the first round, and drop what comes after the checkpoint.

        Raises:
            DataError: The records end before the checkpoint.
        """
        if self.path is None:
            return
        done = running.round
        replace_file(self.path / SPEC, self.prepared.spec.to_toml().encode())
        for name in (METRICS, EVENTS):
            # Without a checkpoint even round 0 starts over, and with it the events of enrolling.
            MetricsLog(self.path / name).truncate_after(done if done else -1)
        if (self.path / METRICS).exists():
            for record in History.load(self.path):
                self.history.append(record)
        if done != (self.history[-1]["round"] if self.history else 0):
            raise DataError(f"{self.path / METRICS} ends before its checkpoint, which is of round {done}")
        # Of the rounds so far: who looks for them must not find them before this run is over.
        for name in (SUMMARY, WEIGHTS):
            (self.path / name).unlink(missing_ok=True)
        if self.prepared.config.sizes is not None and not (self.path / "partition.png").exists():
            draw_partition(self.prepared.assignment, self.prepared.data, self.path / "partition.png")
        if not done:
            self.write_events(running)

    def write_events(self, running: Running) -> None:
        """Add what happened in the last round, or in the one that has just broken off."""
        self._log(EVENTS, *running.events)

    def write(self, record: Mapping[str, Any], running: Running) -> None:
        """Add a round, and a checkpoint where one is due."""
        self.history.append(record)
        if self.path is None:
            return
        evaluation, round = self.prepared.spec.evaluation, running.round
        every = evaluation.checkpoint_every
        due = every and (round % every == 0 or round == self.prepared.spec.training.rounds)
        if due:
            running.engine.save(round)
        self.write_events(running)
        self._log(METRICS, record)
        if due:
            for log in self._logs.values():
                log.sync()  # A checkpoint must never be ahead of the records that it stands for.
            remote = running.engine.keeps_states
            checkpoint.save(self.path / CHECKPOINT, round, running.state, running.store, remote=remote)

    def finish(self, running: Running) -> History:
        """Leave the model and the summary behind."""
        weights = running.evaluated()
        final = {name: tensor.contiguous() for name, tensor in {**weights.params, **weights.buffers}.items()}
        self.history.params = final
        if self.path is not None:
            replace_file(self.path / WEIGHTS, safetensors.torch.save(final))
            write_json(self.path / SUMMARY, self.history.summary)
        return self.history

    def _log(self, name: str, *records: Mapping[str, Any]) -> None:
        if self.path is not None and records:
            # One for the whole run: a new one reads the file to see whether its last line is whole.
            log = self._logs.setdefault(name, MetricsLog(self.path / name))
            log.append(*records)


def refuse_foreign(folder: Path | None, spec: Experiment, resume: bool) -> None:
    """Never write over another run.

    Raises:
        SpecError: The folder holds a run that is not to be resumed, or one of another spec.
    """
    if folder is None:
        if resume:
            raise SpecError("resume", "needs the run's folder, out")
        return
    there = folder / SPEC
    if not resume and there.exists():
        raise SpecError("out", "holds a run already; give another folder, or resume that run", str(folder))
    if resume and there.exists() and not is_run_of(there, spec):
        raise SpecError("out", "holds a run of another spec; resume it with its own", str(folder))


def spec_of(folder: Path, key: str) -> Experiment:
    """The spec of a run.

    Args:
        folder: Its folder.
        key: By what name the folder was given, for the message.

    Raises:
        SpecError: It is no run folder.
    """
    if not (folder / SPEC).is_file():
        raise SpecError(key, "no run folder: it has no spec.toml", str(folder))
    return Experiment.from_toml(folder / SPEC)


def is_run_of(there: Path, spec: Experiment) -> bool:
    """Whether a run's spec file says the same, however it is written: a key may have its default, or be left out."""
    text = there.read_text(encoding="utf-8")
    try:
        return text == spec.to_toml() or Experiment.from_toml(there) == spec
    except SpecError:
        return False
