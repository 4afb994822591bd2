"""Run an experiment: from a spec to a history and a run folder."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from fedstrata import checkpoint
from fedstrata.clients.context import ClientContext
from fedstrata.clients.store import StateStore
from fedstrata.config import under
from fedstrata.data import Dataset, from_arrays
from fedstrata.engines import make_engine
from fedstrata.errors import DataError, SpecError
from fedstrata.federation.engine import Engine, FederationConfig, Noting, Remote
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import Weights
from fedstrata.handlers.evaluation import evaluate
from fedstrata.history import History
from fedstrata.jsonl import MetricsLog, replace_file, write_json
from fedstrata.locking import occupied
from fedstrata.nn.batchnorm import federate_batchnorm, has_batchnorm
from fedstrata.nn.memory_format import lay_out
from fedstrata.nn.model import Model
from fedstrata.nn.zoo import make_model
from fedstrata.partitions import Assignment, draw_partition
from fedstrata.partitions.server_data import ServerData
from fedstrata.process import training_process
from fedstrata.spec import Experiment
from fedstrata.training.devices import placed

SPEC, METRICS, EVENTS, SUMMARY, WEIGHTS = (
    "spec.toml",
    "metrics.jsonl",
    "events.jsonl",
    "summary.json",
    "model.safetensors",
)
ARRAYS = ("x_train", "y_train", "x_test", "y_test")
Callback = Callable[[Mapping[str, Any]], None]
Arrays = Dataset | Mapping[str, Any] | Sequence[Any]


@dataclass(frozen=True)
class Prepared:
    """An experiment that was checked and is ready to run.

    Args:
        spec: What was asked for.
        data: The data set.
        assignment: Which samples belong to whom.
        config: What server and clients agree on.
    """

    spec: Experiment
    data: Dataset
    assignment: Assignment
    config: FederationConfig


def prepare(spec: Experiment, *, data: Arrays | None = None, model: nn.Module | Model | None = None) -> Prepared:
    """Load the data, split them and check everything that can be wrong before anything is written.

    Args:
        spec: The experiment.
        data: Data of your own instead of the spec's: a ``Dataset``, ``(x_train, y_train, x_test, y_test)``, or a
            mapping with these keys.
        model: A module of your own instead of the spec's; what it holds is where training starts.

    Raises:
        SpecError: A setting does not fit the data, the federation or another setting.
        DataError: The data are missing or damaged.
    """
    dataset = spec.data.load(spec.seed) if data is None else as_dataset(data, spec)
    assignment = under("partition", lambda: spec.partition.split(dataset, spec.seed))
    return assemble(spec, dataset, assignment, model)


def assemble(
    spec: Experiment,
    dataset: Dataset,
    assignment: Assignment,
    model: nn.Module | Model | None = None,
    *,
    sizes_known: bool = True,
) -> Prepared:
    """An experiment on data that were loaded and split already, and checked against them.

    Args:
        spec: The experiment.
        dataset: The data.
        assignment: Which samples belong to whom; as far as it is known here.
        model: See ``prepare``.
        sizes_known: Whether the assignment is that of all clients; not where sites keep their own data.

    Raises:
        SpecError: A setting does not fit the data, the federation or another setting.
    """
    if isinstance(model, (nn.Module, Model)):
        made = model if isinstance(model, Model) else Model(lay_out(model, dataset.shape))
        _check_outputs(made, dataset)
    elif model is None:
        made = make_model(spec.model, dataset.shape, dataset.classes, spec.seed)
    else:
        raise SpecError("model", "expected an nn.Module or a fedstrata Model; names go into the spec", model)
    federate_batchnorm(made.module)
    _check_start(made, spec)
    config = FederationConfig(
        seed=spec.seed,
        training=spec.training,
        model=made,
        classes=dataset.classes,
        clients=len(assignment),
        sizes=assignment.sizes if sizes_known else None,
        server_data=ServerData(dataset, assignment) if sizes_known else None,
        weight_diversity=spec.evaluation.weight_diversity,
    )
    under("availability", lambda: spec.availability.check(config.clients))
    spec.method.check(config)
    return Prepared(spec, dataset, assignment, config)


def _check_start(model: Model, spec: Experiment) -> None:
    """A model that replies can be like, and that can be evaluated."""
    for name, tensor in {**model.params(), **model.buffers()}.items():
        if not torch.isfinite(tensor).all():
            problem = (
                f"{name} holds NaN or infinity, and replies that do are refused; register_buffer(persistent=False) "
            )
            raise SpecError("model", problem + "keeps a constant out of what travels")
    local = spec.training.batch_norm == "local" and has_batchnorm(model.module)
    if local and spec.evaluation.batch_size == 1:
        problem = "with batch_norm = 'local' batches are evaluated with their own statistics, which take two samples"
        raise SpecError("evaluation.batch_size", problem, 1)


def _check_outputs(model: Model, dataset: Dataset) -> None:
    """A module of the user's own gives a logit for every class."""
    needed = (
        f"a batch of shape (B, {', '.join(map(str, dataset.shape))}) and gives logits of shape (B, {dataset.classes})"
    )
    x = dataset.inputs(slice(0, 2))
    try:
        with torch.no_grad(), model.loaded(model.params(), model.buffers()) as params:
            found = model(params, x)
    except Exception as error:
        raise SpecError("model", f"a model takes {needed}; this one failed: {error}") from error
    if not isinstance(found, torch.Tensor) or tuple(found.shape) != (len(x), dataset.classes):
        shape = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        raise SpecError("model", f"a model takes {needed}; this one gave {shape} for {len(x)} samples")


def as_dataset(data: Arrays, spec: Experiment) -> Dataset:
    """Arrays of the user's own as a data set."""
    if isinstance(data, Dataset):
        return data
    if isinstance(data, Mapping):
        accepted = inspect.signature(from_arrays).parameters
        if wrong := [key for key in data if key not in accepted] + [key for key in ARRAYS if key not in data]:
            problem = f"a mapping has the keys {', '.join(ARRAYS)}, and may have others of from_arrays"
            raise SpecError("data", problem, sorted(map(str, wrong)))
        return from_arrays(**{"normalize": spec.data.normalize, **data})
    if not isinstance(data, Sequence) or len(data) != len(ARRAYS):
        problem = f"expected a Dataset, a mapping, or four arrays: {', '.join(ARRAYS)}"
        raise SpecError("data", problem, f"{len(data)} of them" if isinstance(data, Sequence) else type(data).__name__)
    return from_arrays(*data, normalize=spec.data.normalize)


def run(
    spec: Experiment | str | Path | Mapping[str, Any],
    *,
    out: str | Path | None = None,
    data: Arrays | None = None,
    model: nn.Module | Model | None = None,
    engine: str = "local",
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
) -> History:
    """Run an experiment.

    Args:
        spec: An experiment, a path to a TOML file, or nested tables.
        out: The run folder; nothing is written without one.
        data: Data of your own; see ``prepare``.
        model: A module of your own; see ``prepare``.
        engine: Where clients live.
        resume: Go on with what is in ``out``, from its last checkpoint.
        callbacks: Called with the record of every round.

    Returns:
        The rounds' records; ``params`` holds the final model's parameters and buffers.

    Raises:
        SpecError: A setting is wrong, or ``out`` holds another run.
        DataError: The data are missing or damaged.
        CheckpointError: ``resume``, and every checkpoint is damaged.
    """
    if isinstance(spec, (str, Path)):
        spec = Experiment.from_toml(spec)
    elif not isinstance(spec, Experiment):
        spec = Experiment.from_table(spec)
    folder = None if out is None else Path(out)
    refuse_foreign(folder, spec, resume)
    if engine == "nvflare":
        # There the loop over rounds is itself a job of NVFlare's, so that it is not this process that runs it.
        from fedstrata.deploy.simulator import simulate

        if data is not None or model is not None:
            problem = "loads the spec's data and model at each site: give data and a model that the spec can name"
            raise SpecError("engine", problem, engine)
        return simulate([(spec, folder)], resume=resume, callbacks=callbacks)[0]
    return go(prepare(spec, data=data, model=model), folder, engine, callbacks, resume=resume)


def go(
    prepared: Prepared,
    folder: Path | None,
    engine: str | Engine,
    callbacks: Sequence[Callback] = (),
    *,
    resume: bool = False,
) -> History:
    """Run an experiment that is prepared; see ``run``.

    Args:
        prepared: The experiment.
        folder: The run folder.
        engine: Where clients live: a name, or an engine that is ready and is closed at the end.
        callbacks: Called with the record of every round.
        resume: Go on with what is in ``folder``.
    """
    with training_process(prepared.spec.training.threads):
        return _Run(prepared, folder, engine, callbacks).go(resume)


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


def is_run_of(there: Path, spec: Experiment) -> bool:
    """Whether a run's spec file says the same, however it is written: a key may have its default, or be left out."""
    text = there.read_text(encoding="utf-8")
    try:
        return text == spec.to_toml() or Experiment.from_toml(there) == spec
    except SpecError:
        return False


def refuse_elsewhere(was: bool, will: bool, engine: str) -> None:
    """Never go on without the clients' states, as if they had none.

    Args:
        was: Whether clients kept their states where they live, so that the checkpoint has none.
        will: Whether they will.
        engine: What was asked for.

    Raises:
        SpecError: They are not where the engine would look for them.
    """
    if was and not will:
        problem = "the clients' states of this run are at its sites, not in its checkpoint; resume it with 'nvflare'"
        raise SpecError("engine", f"{problem}, or by 'fedstrata submit' where it was deployed", engine)
    if will and not was:
        problem = "the clients' states of this run are in its checkpoint, and no site has them"
        raise SpecError("engine", f"{problem}; resume it with 'local' or 'ray'", engine)


class _Run:
    """The loop over rounds, and what it leaves behind."""

    def __init__(
        self, prepared: Prepared, folder: Path | None, engine: str | Engine, callbacks: Sequence[Callback]
    ) -> None:
        self.prepared, self.spec, self.folder, self.callbacks = prepared, prepared.spec, folder, callbacks
        self.store = StateStore()
        config = prepared.config
        context = self.context = ClientContext(
            config, prepared.data, prepared.assignment, self.spec.method.objective_in_use()
        )
        self.engine_name = engine if isinstance(engine, str) else type(engine).__name__
        self.engine = make_engine(engine, context, self.store) if isinstance(engine, str) else engine
        self.federation = Federation(self.engine, config, self.spec.availability, self.spec.method.name)
        self.logs: dict[str, MetricsLog] = {}
        self.history = History(
            method=self.spec.method.name,
            seed=self.spec.seed,
            targets=self.spec.evaluation.targets,
            path=folder,
        )

    def go(self, resume: bool) -> History:
        try:
            if self.folder is None:
                return self._go(resume)
            with occupied(self.folder):
                # Once more: another process may have begun a run here a moment ago.
                refuse_foreign(self.folder, self.spec, resume)
                return self._go(resume)
        finally:
            self.engine.close()

    def _go(self, resume: bool) -> History:
        state, done = self._begin(resume)
        for round in range(done + 1, self.spec.training.rounds + 1):
            state = self._round(state, round)
        self._end(self.spec.method.evaluated(self.prepared.config, state))
        return self.history

    def _begin(self, resume: bool) -> tuple[Any, int]:
        found = checkpoint.load(self.folder / "checkpoint") if resume and self.folder else None
        if found:
            refuse_elsewhere(found.remote, isinstance(self.engine, Remote), self.engine_name)
        if self.folder:
            self._open_folder(found.round if found else 0)
        if found:
            found.restore(self.store)
            self._remember(found.round)
            self.federation.resumed = True
            return found.state, found.round
        config = self.prepared.config
        self._remember(0)
        self.federation.begin(0)
        state = self.spec.method.init(self.federation, Weights(config.model.params(), config.model.buffers()))
        self._log(EVENTS, *self._events())
        return state, 0

    def _remember(self, round: int) -> None:
        """Where clients keep their states themselves, let them go back to those after ``round``."""
        if isinstance(self.engine, Remote):
            self.engine.begin(round)

    def _events(self) -> list[dict[str, Any]]:
        """What happened since the events were last written: the engine's own, then the round's."""
        notes = list(self.engine.notes()) if isinstance(self.engine, Noting) else []
        own = [
            {"round": self.federation.round, "kind": kind, "clients": clients, "reason": reason}
            for kind, clients, reason in notes
        ]
        return own + self.federation.events

    def _open_folder(self, done: int) -> None:
        assert self.folder is not None
        replace_file(self.folder / SPEC, self.spec.to_toml().encode())
        for name in (METRICS, EVENTS):
            # Without a checkpoint even round 0 starts over, and with it the events of enrolling.
            MetricsLog(self.folder / name).truncate_after(done if done else -1)
        if (self.folder / METRICS).exists():
            for record in History.load(self.folder):
                self.history.append(record)
        if done != (self.history[-1]["round"] if self.history else 0):
            raise DataError(f"{self.folder / METRICS} ends before its checkpoint, which is of round {done}")
        # Of the rounds so far: who looks for them must not find them before this run is over.
        for name in (SUMMARY, WEIGHTS):
            (self.folder / name).unlink(missing_ok=True)
        if self.prepared.config.sizes is not None and not (self.folder / "partition.png").exists():
            draw_partition(self.prepared.assignment, self.prepared.data, self.folder / "partition.png")

    def _round(self, state: Any, round: int) -> Any:
        began = time.perf_counter()
        spec, federation = self.spec, self.federation
        federation.begin(round)
        state, metrics = spec.method.run_round(federation, state)
        record: dict[str, Any] = {"round": round, "accuracy": None, "loss": None}
        if spec.evaluation.due(round, spec.training.rounds):
            record |= self._evaluate(spec.method.evaluated(federation.config, state))
        # What a method reports comes beside the books, never in their place.
        record |= federation.accounting.metrics()
        record |= {key: value for key, value in metrics.items() if key not in record}
        record["seconds"] = time.perf_counter() - began
        self.history.append(record)
        every = spec.evaluation.checkpoint_every
        due = self.folder and every and (round % every == 0 or round == spec.training.rounds)
        if due and isinstance(self.engine, Remote):
            self.engine.save(round)
        self._log(EVENTS, *self._events())
        self._log(METRICS, record)
        if due and self.folder:
            for log in self.logs.values():
                log.sync()  # A checkpoint must never be ahead of the records that it stands for.
            checkpoint.save(
                self.folder / "checkpoint", round, state, self.store, remote=isinstance(self.engine, Remote)
            )
        for callback in self.callbacks:
            callback(self.history[-1])
        return state

    def _evaluate(self, weights: Weights) -> dict[str, Any]:
        place = self.context.once(placed)
        score = evaluate(
            place.model,
            weights,
            place.data,
            batch_size=self.spec.evaluation.batch_size,
            batch_statistics=self.spec.training.batch_norm == "local",
        )
        found: dict[str, Any] = {"accuracy": score.accuracy, "loss": score.loss}
        return found | ({"per_class": score.per_class} if self.spec.evaluation.per_class else {})

    def _end(self, weights: Weights) -> None:
        final = {name: tensor.contiguous() for name, tensor in {**weights.params, **weights.buffers}.items()}
        self.history.params = final
        if self.folder:
            replace_file(self.folder / WEIGHTS, safetensors.torch.save(final))
            write_json(self.folder / SUMMARY, self.history.summary)

    def _log(self, name: str, *records: Mapping[str, Any]) -> None:
        if self.folder and records:
            # One for the whole run: a new one reads the file to see whether its last line is whole.
            log = self.logs.setdefault(name, MetricsLog(self.folder / name))
            log.append(*records)
