"""The files of a run: opened, appended to, checkpointed, finished."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import tomli_w
import torch

from fedstrata.base.errors import CheckpointError, DataError, SpecError
from fedstrata.base.jsonl import MetricsLog, read_jsonl, replace_file, write_json
from fedstrata.base.locking import occupied
from fedstrata.clients.store import StateStore
from fedstrata.data.partitions import Given, draw_partition
from fedstrata.evaluation.history import CLIENTS, EVALUATIONS, Confusion, History, read_weights, write_evaluations
from fedstrata.federation.engine import Engine
from fedstrata.federation.messages import Weights
from fedstrata.runs import checkpoint
from fedstrata.runs.checkpoint import Checkpoint
from fedstrata.runs.identity import environment, require_same, well_formed
from fedstrata.runs.predictor import write_model
from fedstrata.runs.preparation import Prepared, prepare
from fedstrata.spec.experiment import Experiment

RUN, SPEC, INDICES, METRICS, EVENTS, SUMMARY, WEIGHTS, CHECKPOINT = (
    "run.json",
    "spec.toml",
    "partition.npz",
    "metrics.jsonl",
    "events.jsonl",
    "summary.json",
    "model.safetensors",
    "checkpoint",
)

ABSENT = {"failed": "failed or refused", "dropped": "dropped out", "late": "late"}
"""Why a reply is missing, by the columns that count it."""

LONG = 100
"""Sample numbers of a ``given`` partition beyond which they lie beside ``spec.toml``."""


class Running(Protocol):
    """What a folder records of a run: see ``fedstrata.runs.simulation.Simulation``."""

    round: int
    state: Any
    store: StateStore
    engine: Engine
    stopped: str
    left: tuple[Weights, int] | None

    @property
    def done(self) -> bool:
        """Whether no round is left."""

    @property
    def own(self) -> Any:
        """What the loop remembers beside the method's state."""

    def late_events(self) -> list[dict[str, Any]]:
        """What happened after the round's events were written."""

    def confusions(self) -> dict[str, Confusion]:
        """Of the last and of the best evaluation."""

    def client_table(self) -> list[dict[str, Any]]:
        """A row a client, by the last evaluation."""

    @property
    def events(self) -> list[dict[str, Any]]:
        """What happened in the last round."""

    def evaluated(self) -> Weights:
        """The model that a run leaves behind."""


def rounds_done(folder: Path) -> int:
    """How far a run, maybe of another process, is, by what it has written."""
    try:
        with (folder / METRICS).open("rb") as file:
            return sum(1 for _ in file)
    except OSError:
        return 0


def is_over(path: Path, rounds: int) -> bool:
    """Whether a folder holds a whole run of so many rounds, or one that stopped early, with its model."""
    if not ((path / SUMMARY).exists() and (path / WEIGHTS).exists()):
        return False
    history = History.load(path)
    return bool(history.stopped) or len(history) == rounds


class RunFolder:
    """A run folder, or a place in memory that keeps the history alone.

    Args:
        path: The folder; None for memory.
        prepared: The experiment.
        found: The checkpoint from which the run goes on.
        notes: What is to be noted as events when it goes on.
    """

    def __init__(
        self, path: Path | None, prepared: Prepared, found: Checkpoint | None = None, notes: Sequence[str] = ()
    ) -> None:
        self.path, self.prepared, self.checkpoint, self._notes = path, prepared, found, list(notes)
        spec = prepared.spec
        self.history = History(path=path, **about(spec))
        self._kept: int | None = None
        """The round of the last checkpoint that was made here."""
        # One of each for the whole run: a new one reads the file to see how it ends.
        self._logs = {} if path is None else {name: MetricsLog(path / name) for name in (METRICS, EVENTS)}

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
            refuse_foreign(path, prepared, resume=resume)
            yield cls(None, prepared)
            return
        made = not path.exists()
        try:
            with occupied(path):
                changes = refuse_foreign(path, prepared, resume=resume)
                found = checkpoint.load(path / CHECKPOINT) if resume else None
                yield cls(path, prepared, found, [f"resumed with another setting: {change}" for change in changes])
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
        over = bool(history.stopped) or len(history) >= self.prepared.spec.training.rounds
        if not over or not (self.path / WEIGHTS).exists():
            return None
        history.params = read_weights(self.path / WEIGHTS)
        return history

    def begin(self, running: Running) -> None:
        """Write what is known before the first round, and drop what comes after the checkpoint.

        Raises:
            DataError: The records end before the checkpoint.
        """
        if self.path is None:
            return
        done, notes = running.round, self._notes + self._other_environment()
        # First what says which run it is: a folder with a spec has it, whenever it was killed.
        write_json(self.path / RUN, {"identity": self.prepared.identity, "made_with": environment()})
        self._write_spec(self.path)
        for log in self._logs.values():
            if log.path.exists() and (damage := log.salvage()):
                notes.append(f"{damage}; the file as it was lies beside it")
            # Without a checkpoint even round 0 starts over, and with it the events of enrolling.
            log.truncate_after(done if done else -1)
        if (self.path / METRICS).exists():
            for record in read_jsonl(self.path / METRICS):
                self.history.append(record)
        if done != (self.history[-1]["round"] if self.history else 0):
            raise DataError(f"{self.path / METRICS} ends before its checkpoint, which is of round {done}")
        # A running checksum says nothing of lines that are missing at the end, nor of a file of another run.
        for name, last in self.checkpoint.logs.items() if self.checkpoint is not None else ():
            if last and not self._logs[name].holds(last):
                problem = f"{self.path / name} is not what it was when the checkpoint of round {done} was made"
                if name == METRICS:
                    raise DataError(problem)
                notes.append(f"{problem}: some of what had happened is lost")
        self._log(EVENTS, *({"round": done, "kind": "resumed", "reason": note} for note in notes))
        # Of the rounds so far: who looks for them must not find them before this run is over.
        for name in (SUMMARY, WEIGHTS, EVALUATIONS, CLIENTS):
            (self.path / name).unlink(missing_ok=True)
        if self.prepared.config.sizes is not None and not (self.path / "partition.png").exists():
            draw_partition(self.prepared.assignment, self.prepared.data, self.path / "partition.png")
        self.write_events(running)  # of enrolling, or of what was not there any more when the run went on

    def _write_spec(self, folder: Path) -> None:
        """``spec.toml``, with long lists of indices beside it."""
        table, partition = self.prepared.spec.to_spec(), self.prepared.spec.partition
        if isinstance(partition, Given) and sum(map(len, partition.indices)) > LONG:
            replace_file(folder / INDICES, partition.packed())
            del table["partition"]["indices"]
            table["partition"]["file"] = INDICES
        replace_file(folder / SPEC, tomli_w.dumps(table).encode())

    def _other_environment(self) -> list[str]:
        """Where the run was begun with other versions, or on another processor: the last bits may differ."""
        assert self.path is not None
        try:
            before = json.loads((self.path / RUN).read_text(encoding="utf-8"))["made_with"]
            now = environment().items()
            differ = [f"{key} {before.get(key)}, now {value}" for key, value in now if before.get(key) != value]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return []
        if not differ:
            return []
        note = f"this run was begun with {'; '.join(differ)}: what is trained now may differ in the last bits"
        warnings.warn(note, stacklevel=2)
        return [note]

    def write_events(self, running: Running) -> None:
        """Add what happened in the last round, or in the one that has just broken off."""
        self._log(EVENTS, *running.events)

    def write(self, record: Mapping[str, Any], running: Running) -> None:
        """Add a round, and a checkpoint where one is due."""
        self.log(record, running)
        self.keep(running)

    def log(self, record: Mapping[str, Any], running: Running) -> None:
        """Add a round."""
        self.history.append(record)
        self.write_events(running)
        self._log(METRICS, record)

    def keep(self, running: Running, *, anyway: bool = False) -> None:
        """Add a checkpoint where one is due; ``anyway``: wherever the run keeps any."""
        self._log(EVENTS, *running.late_events())
        every, round = self.prepared.spec.evaluation.checkpoint_every, running.round
        if self.path is None or not every or not (anyway or running.done or round % every == 0):
            return
        if round == self._kept:
            return  # a second one would list no client's state: they have not changed since
        self._kept = round
        running.engine.save(round)
        for log in self._logs.values():
            log.sync()  # A checkpoint must never be ahead of the records that it stands for.
        checkpoint.save(
            self.path / CHECKPOINT,
            round,
            running.state,
            running.store,
            remote=running.engine.keeps_states,
            identity=self.prepared.identity,
            logs={name: log.last for name, log in self._logs.items()},
            own=running.own,
        )

    def finish(self, running: Running) -> History:
        """Leave the model and the summary behind."""
        weights = running.evaluated() if running.left is None else running.left[0]
        self.history.stopped = running.stopped
        self.history.model_round = None if running.left is None else running.left[1]
        final = {name: tensor.contiguous() for name, tensor in {**weights.params, **weights.buffers}.items()}
        self.history.params = final
        self.history.confusion = running.confusions()
        self.history.clients = running.client_table()
        self.history.warning = self._untrained(running)
        if self.path is not None:
            write_evaluations(self.history, self.path)
            write_model(self.path, self.prepared, safetensors.torch.save(final))
            write_json(self.path / SUMMARY, self.history.summary)
        return self.history

    def _untrained(self, running: Running) -> str:
        """What is to be said of a run whose model is what it began with, for no reply could be used; else nothing."""
        history, initial = self.history, self.prepared.config.model.params()
        absent = {word: int(history.total(f"clients_{word}")) for word in ("failed", "dropped", "late")}
        trained = any(isinstance(record.get("train_loss"), (int, float)) for record in history)
        if trained or not any(absent.values()):
            return ""
        params = running.evaluated().params
        if any(name not in initial or not torch.equal(w.cpu(), initial[name]) for name, w in params.items()):
            return ""
        why = ", ".join(f"{count:,} {ABSENT[word]}" for word, count in absent.items() if count)
        return f"the model never took a step: in {len(history)} rounds no reply could be used ({why})"

    def _log(self, name: str, *records: Mapping[str, Any]) -> None:
        if self.path is not None and records:
            self._logs[name].append(*records)


def refuse_foreign(path: Path | None, prepared: Prepared, *, resume: bool) -> list[str]:
    """Never write over another run.

    Args:
        path: The folder; None for memory.
        prepared: What is to run there.
        resume: Whether to go on with what is there.

    Returns:
        What differs from what is there, and may.

    Raises:
        SpecError: The folder holds a run that is not to be resumed, or another one.
    """
    if path is None:
        if resume:
            raise SpecError("resume", "needs the run's folder, out")
        return []
    if not any((path / name).exists() for name in (SPEC, METRICS, CHECKPOINT)):
        return []
    if not resume:
        raise SpecError("out", "holds a run already; give another folder, or resume that run", str(path))
    before = identity_in(path)
    if before is None:
        problem = f"holds a run that does not say what it was (no {RUN} that can be read); give another folder"
        raise SpecError("out", problem, str(path))
    return require_same(before, prepared.identity, str(path))


def identity_in(path: Path) -> dict[str, Any] | None:
    """What the run in a folder is, by its newest checkpoint, else by its ``run.json``; None where neither can be read.

    ``spec.toml`` may have been edited since; a checkpoint is bound to what it was made with.
    """
    with suppress(CheckpointError):
        found = checkpoint.load(path / CHECKPOINT)
        if found is not None and found.identity is not None:
            return found.identity
    try:
        identity: dict[str, Any] = json.loads((path / RUN).read_text(encoding="utf-8"))["identity"]
        return identity if well_formed(identity) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def about(spec: Experiment) -> dict[str, Any]:
    """What a history says of its run, as arguments of ``History``."""
    evaluation = spec.evaluation
    return {
        "method": spec.method.name,
        "seed": spec.seed,
        "targets": evaluation.accuracy_targets,
        "metric_targets": evaluation.metric_targets,
        "lower": evaluation.lower,
    }


def spec_of(folder: Path, key: str, overrides: Sequence[str] = ()) -> Experiment:
    """The spec of a run.

    Args:
        folder: Its folder.
        key: By what name the folder was given, for the message.
        overrides: ``section.key=value`` for what may change when the run goes on.

    Raises:
        SpecError: It is no run folder.
    """
    if not (folder / SPEC).is_file():
        raise SpecError(key, "no run folder: it has no spec.toml", str(folder))
    return Experiment.from_toml(folder / SPEC, overrides)


def prepare_again(folder: Path, key: str) -> Prepared:
    """The experiment of a run, for looking at what it did.

    Args:
        folder: Its folder.
        key: By what name the folder was given, for the message.

    Raises:
        SpecError: It is no run folder, or its spec, data or code are not what the run had.
        DataError: The data are missing or damaged, or were the user's own.
    """
    prepared = prepare(spec_of(folder, key))
    if (before := identity_in(folder)) is not None:
        require_same(before, prepared.identity, str(folder))
    return prepared
