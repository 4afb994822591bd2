"""Lock a run folder, append the records of rounds, save checkpoints, and write the results."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import tomli_w
import torch

from fedstrata.base.errors import CheckpointError, DataError, SpecError
from fedstrata.base.jsonl import MetricsLog, jsonable, read_jsonl, replace_file, write_json
from fedstrata.base.locking import occupied
from fedstrata.data.partitions.picture import draw_partition
from fedstrata.data.partitions.schemes import Given
from fedstrata.evaluation.history import (
    CLIENTS,
    EVALUATIONS,
    History,
    column_of,
    numbers,
    read_weights,
    write_evaluations,
)
from fedstrata.runs import checkpoint
from fedstrata.runs.checkpoint import Checkpoint
from fedstrata.runs.identity import environment, require_same, well_formed
from fedstrata.runs.predictor import write_model
from fedstrata.runs.preparation import Prepared, prepare
from fedstrata.spec.experiment import Experiment

if TYPE_CHECKING:
    from fedstrata.runs.simulation import Simulation

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
"""The reasons for missing replies. For example, the column ``clients_failed`` counts the missing replies with the key
``failed``."""

LONG = 100
"""The maximum number of sample indices (partition ``given``) in ``spec.toml``. Longer lists are stored in a separate
file."""


def rounds_done(folder: Path) -> int:
    """Return the number of rounds that a run has recorded. The run may still be in progress in another process."""
    try:
        with (folder / METRICS).open("rb") as file:
            return sum(1 for _ in file)
    except OSError:
        return 0


def last_number(folder: Path, column: str) -> float | None:
    """Return the last number that a run has recorded in a column; None if the column has no number.

    The run may be in progress in another process, so the last line may be incomplete.
    """
    with suppress(OSError):
        for line in reversed((folder / METRICS).read_bytes().splitlines()):
            with suppress(ValueError):
                if (value := numbers(json.loads(line)).get(column)) is not None:
                    return value
    return None


def is_over(path: Path, rounds: int) -> bool:
    """Return True if a folder contains a finished run: all ``rounds`` are done, or the run was stopped early."""
    if not ((path / SUMMARY).exists() and (path / WEIGHTS).exists()):
        return False
    history = History.load(path)
    return bool(history.stopped) or len(history) == rounds


class RunFolder:
    """Writes the files of a run. If ``path`` is None, no files are written, and the history is kept in memory.

    Args:
        path: The folder; None to write no files.
        prepared: The experiment.
        checkpoint: The checkpoint from which the run continues; None for a new run.
        notes: Strings to record as events when the run is resumed, such as the description of a changed setting.
    """

    def __init__(
        self, path: Path | None, prepared: Prepared, checkpoint: Checkpoint | None = None, notes: Sequence[str] = ()
    ) -> None:
        self.path, self.prepared, self.checkpoint, self._notes = path, prepared, checkpoint, list(notes)
        spec = prepared.spec
        self.history = History(path=path, **about(spec))
        self._saved: int | None = None
        """The round of the latest checkpoint that this process saved; None before the first checkpoint."""
        # Keep each log open for the whole run, because opening a log reads the whole file to find its last line.
        self._logs = {} if path is None else {name: MetricsLog(path / name) for name in (METRICS, EVENTS)}

    @classmethod
    @contextmanager
    def open(cls, path: Path | None, prepared: Prepared, *, resume: bool = False) -> Iterator[RunFolder]:
        """Lock a folder during the ``with`` block. Files in the folder change only after ``begin`` is called.

        Args:
            path: The folder; None to write no files.
            prepared: The experiment.
            resume: Whether to resume the run in the folder.

        Raises:
            SpecError: The folder contains another experiment's run, or contains a run although ``resume`` is False.
            CheckpointError: Every checkpoint is damaged.
        """
        if path is None:
            refuse_foreign(path, prepared, resume=resume)
            yield cls(None, prepared)
            return
        created = not path.exists()
        try:
            with occupied(path):
                changes = refuse_foreign(path, prepared, resume=resume)
                newest = checkpoint.load(path / CHECKPOINT) if resume else None
                yield cls(path, prepared, newest, [f"resumed with another setting: {change}" for change in changes])
        except BaseException:
            if created:
                # The folder is still empty if the run failed before it began, for example because an engine is missing.
                with suppress(OSError):
                    path.rmdir()
            raise

    def finished(self) -> History | None:
        """Return the history of a finished run that has no checkpoint; None for other runs.

        Resuming a run without a checkpoint would start from round 1 and delete the results.
        """
        rounds = self.prepared.spec.training.rounds
        if self.path is None or self.checkpoint is not None or not is_over(self.path, rounds):
            return None
        history = History.load(self.path)
        history.params = read_weights(self.path / WEIGHTS)
        return history

    def begin(self, simulation: Simulation) -> None:
        """Write the first files of a run. If the run is resumed, remove the records of rounds after the checkpoint.

        Raises:
            DataError: The records end before the checkpoint's round.
        """
        if self.path is None:
            return
        done, notes = simulation.round, self._notes + self._other_environment()
        # Write the identity before the spec, so that a folder with a spec always has an identity, even if the process
        # is killed here.
        about = {"privacy": simulation.privacy} if simulation.privacy else {}
        write_json(
            self.path / RUN,
            {"identity": self.prepared.identity, "made_with": environment(self.prepared.spec.training.device), **about},
        )
        self._write_spec(self.path)
        for log in self._logs.values():
            if log.path.exists() and (damage := log.salvage()):
                notes.append(f"{damage} The damaged file was renamed and kept.")
            # A run that starts from the beginning repeats round 0 (the method's ``init``), so remove the events of
            # round 0 too.
            log.truncate_after(done if done else -1)
        if (self.path / METRICS).exists():
            for record in read_jsonl(self.path / METRICS):
                self.history.append(record)
        if done != (self.history[-1]["round"] if self.history else 0):
            raise DataError(
                f"{self.path / METRICS} ends before round {done}, but a checkpoint of this round exists. Restore the "
                "file, or start another run."
            )
        history, loop_state = self.history, simulation.loop_state
        validated = history.best_on == "validation"
        rounds, values = history.points(f"validation.{history.primary}" if validated else column_of(history.primary))
        known = dict(zip(rounds.tolist(), values.tolist(), strict=True))
        if loop_state.best is not None and loop_state.best.value != known.get(loop_state.best.round):
            loop_state.best = None  # chosen by another primary metric, that of an earlier spec
        # Check that each log contains the line that was its last line at the checkpoint. The checksums within a log do
        # not reveal that lines are missing at its end, or that it is the log of another run.
        for name, last in self.checkpoint.logs.items() if self.checkpoint is not None else ():
            if last and not self._logs[name].holds(last):
                problem = (
                    f"{self.path / name} was changed after the checkpoint of round {done} was written. Restore the "
                    "file, or start another run."
                )
                if name == METRICS:
                    raise DataError(problem)
                notes.append(f"{problem} Some events may be missing.")
        self._log(EVENTS, *({"round": done, "kind": "resumed", "reason": note} for note in notes))
        # Remove the files that are written only at the end of a run, because this run continues.
        for name in (SUMMARY, WEIGHTS, EVALUATIONS, CLIENTS):
            (self.path / name).unlink(missing_ok=True)
        if self.prepared.config.sizes is not None and not (self.path / "partition.png").exists():
            draw_partition(self.prepared.assignment, self.prepared.data, self.path / "partition.png")
        # Write the events of round 0 (the method's ``init``) or, in a resumed run, the events about lost client states.
        self.write_events(simulation)

    def _write_spec(self, folder: Path) -> None:
        """Write ``spec.toml``, and a separate file for a long list of sample indices."""
        table, partition = self.prepared.spec.to_spec(), self.prepared.spec.partition
        if isinstance(partition, Given) and sum(map(len, partition.indices)) > LONG:
            replace_file(folder / INDICES, partition.packed())
            del table["partition"]["indices"]
            table["partition"]["file"] = INDICES
        replace_file(folder / SPEC, tomli_w.dumps(table).encode())

    def _other_environment(self) -> list[str]:
        """If the run began with other software versions or on another processor, warn and return a note."""
        assert self.path is not None
        try:
            before = json.loads((self.path / RUN).read_text(encoding="utf-8"))["made_with"]
            now = environment(self.prepared.spec.training.device).items()
            differ = [f"{key} {before.get(key)}, now {value}" for key, value in now if before.get(key) != value]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return []
        if not differ:
            return []
        note = f"results may differ in the last bits, because the software or processor changed: {'; '.join(differ)}"
        warnings.warn(note, stacklevel=2)
        return [note]

    def write_events(self, simulation: Simulation) -> None:
        """Append the events of the last round, or of a round that has just failed, to ``events.jsonl``."""
        self._log(EVENTS, *simulation.events)

    def log(self, record: Mapping[str, Any], simulation: Simulation) -> None:
        """Append the record of a round to ``metrics.jsonl``, and the round's events to ``events.jsonl``."""
        self.history.append(record)
        self.write_events(simulation)
        self._log(METRICS, record)

    def save_checkpoint(self, simulation: Simulation, *, force: bool = False) -> None:
        """Write the events that are not written yet, and save a checkpoint if it is due.

        If ``force`` is True, a checkpoint is always saved, except if ``evaluation.checkpoint_every`` is 0.
        """
        self._log(EVENTS, *simulation.take_late_events())
        every, round = self.prepared.spec.evaluation.checkpoint_every, simulation.round
        if self.path is None or not every or not (force or simulation.done or round % every == 0):
            return
        if round == self._saved:
            # A checkpoint contains only the states that changed since the previous checkpoint. A second checkpoint of
            # this round would replace the first, whose states would be lost.
            return
        self._saved = round
        simulation.engine.save(round)
        for log in self._logs.values():
            log.sync()  # records must be on disk before the checkpoint, which must not contain rounds without records
        checkpoint.save(
            self.path / CHECKPOINT,
            round,
            simulation.state,
            simulation.store,
            remote=simulation.engine.keeps_states,
            identity=self.prepared.identity,
            logs={name: log.last for name, log in self._logs.items()},
            loop_state=simulation.saved_loop_state(),
        )

    def finish(self, simulation: Simulation) -> History:
        """Write the model, the last evaluations and the summary, and return the history with these results."""
        history, loop_state = self.history, simulation.loop_state
        weights, history.model_round = loop_state.final_model or (simulation.evaluated(), None)
        history.privacy = simulation.privacy.get("protection", "")
        history.kept, history.stopped = jsonable(simulation.evaluate_saved()), simulation.stopped
        final = {name: tensor.contiguous() for name, tensor in {**weights.params, **weights.buffers}.items()}
        history.params = final
        history.confusion = loop_state.confusions()
        history.clients = simulation.client_table()
        history.warning = self._untrained(simulation) or self._broken_down()
        if self.path is not None:
            write_evaluations(history, self.path)
            write_model(self.path, self.prepared, safetensors.torch.save(final))
            write_json(self.path / SUMMARY, history.summary)
        return history

    def _untrained(self, simulation: Simulation) -> str:
        """Return a warning if the model never changed because no reply could be used; otherwise, an empty string."""
        history, initial = self.history, self.prepared.config.model.params()
        absent = {column: int(history.total(f"clients_{column}")) for column in ABSENT}
        trained = any(isinstance(record.get("train_loss"), (int, float)) for record in history)
        if trained or not any(absent.values()):
            return ""
        params = simulation.evaluated().params
        if any(name not in initial or not torch.equal(w.cpu(), initial[name]) for name, w in params.items()):
            return ""
        why = ", ".join(f"{count:,} {ABSENT[column]}" for column, count in absent.items() if count)
        return f"the model never changed, because no reply could be used in {len(history)} rounds ({why})"

    def _broken_down(self) -> str:
        """Return a warning if clients failed and no reply could be used in the last rounds; otherwise an empty string.

        The warning requires at least two rounds without usable replies, because a single such round may be due to
        chance.
        """
        dead = list(takewhile(lambda r: r["clients_failed"] and not r["clients_returned"], reversed(self.history)))
        if len(dead) < 2:
            return ""
        since = f"the model has not changed since round {len(self.history) - len(dead)}"
        count = sum(record["clients_failed"] for record in dead)
        return f"{since}, because no reply could be used in the last {len(dead)} rounds ({count:,} failed or refused)"

    def _log(self, name: str, *records: Mapping[str, Any]) -> None:
        if self.path is not None and records:
            self._logs[name].append(*records)


def refuse_foreign(path: Path | None, prepared: Prepared, *, resume: bool) -> list[str]:
    """Refuse to overwrite the run in a folder, or to resume the run as another experiment.

    Args:
        path: The folder; None if no files are written.
        prepared: The experiment to run in the folder.
        resume: Whether to resume the run in the folder.

    Returns:
        Descriptions of the permitted differences between the two experiments.

    Raises:
        SpecError: The folder contains another experiment's run, or contains a run although ``resume`` is False.
    """
    if path is None:
        if resume:
            raise SpecError("resume", "requires the folder of a run. Set 'out' to this folder.")
        return []
    if not any((path / name).exists() for name in (SPEC, METRICS, CHECKPOINT)):
        return []
    if not resume:
        raise SpecError("out", "the folder already contains a run. Give another folder, or resume the run.", str(path))
    before = identity_in(path)
    if before is None:
        problem = f"contains a run, but its description ({RUN}) cannot be read. Give another folder."
        raise SpecError("out", problem, str(path))
    return require_same(before, prepared.identity, str(path))


def identity_in(path: Path) -> dict[str, Any] | None:
    """Return the identity of the run in a folder; None if the identity cannot be read.

    The identity is read from the newest checkpoint or, without a checkpoint, from ``run.json``. The file ``spec.toml``
    is not used, because a user may have edited it since the run began.
    """
    with suppress(CheckpointError):
        newest = checkpoint.load(path / CHECKPOINT)
        if newest is not None and newest.identity is not None:
            return newest.identity
    try:
        identity: dict[str, Any] = json.loads((path / RUN).read_text(encoding="utf-8"))["identity"]
        return identity if well_formed(identity) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def about(spec: Experiment) -> dict[str, Any]:
    """Return the arguments of ``History`` that a run's spec determines, such as the method's name."""
    evaluation, task = spec.evaluation, spec.task
    has_accuracy = task is None or task.has_classes or task.has_accuracy
    return {
        "method": spec.method.name,
        "seed": spec.seed,
        "targets": evaluation.accuracy_targets if has_accuracy else [],
        "metric_targets": evaluation.metric_targets,
        "lower": evaluation.lower,
        "primary": evaluation.primary,
    }


def spec_of(folder: Path, key: str, overrides: Sequence[str] = ()) -> Experiment:
    """Read the spec in a run folder.

    Args:
        folder: The run folder.
        key: The key that precedes the folder's path in the error message, such as ``--resume``.
        overrides: Changed settings as ``section.key=value``. Only some settings may change when a run is resumed.

    Raises:
        SpecError: The folder is not a run folder.
    """
    if not (folder / SPEC).is_file():
        raise SpecError(
            key,
            "is not a run folder, because it does not contain spec.toml. Give the folder of a run.",
            str(folder),
        )
    return Experiment.from_toml(folder / SPEC, overrides)


def prepare_again(folder: Path, key: str) -> Prepared:
    """Prepare the experiment of an existing run, for example to show the run's strata.

    Args:
        folder: The run folder.
        key: The key that precedes the folder's path in the error message, such as ``--resume``.

    Raises:
        SpecError: The folder is not a run folder, or the spec, the data or the code has changed since the run.
        DataError: The data are missing or damaged, or the run used arrays that were passed to it in Python.
    """
    prepared = prepare(spec_of(folder, key))
    if (before := identity_in(folder)) is not None:
        require_same(before, prepared.identity, str(folder))
    return prepared
