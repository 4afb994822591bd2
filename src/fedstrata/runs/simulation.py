"""The loop over rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from fedstrata.base.errors import SpecError
from fedstrata.base.process import training_process
from fedstrata.base.records import Tree, record
from fedstrata.clients.context import ClientContext
from fedstrata.clients.handlers import encoded, evaluation, fedtan, fit, sampling, sequential
from fedstrata.clients.handling import Handlers
from fedstrata.clients.store import StateStore
from fedstrata.clients.training.devices import placed
from fedstrata.engines import make_engine
from fedstrata.evaluation.evaluator import Evaluator, Score
from fedstrata.evaluation.history import Confusion, History
from fedstrata.evaluation.messages import Evaluate, Evaluated
from fedstrata.federation.communication.compression import Compression, CompressionState
from fedstrata.federation.engine import Engine
from fedstrata.federation.federation import Federation, Legs, Listener, one_leg
from fedstrata.federation.messages import ClientId, Weights
from fedstrata.runs.checkpoint import Checkpoint
from fedstrata.runs.preparation import Prepared
from fedstrata.runs.run_folder import RunFolder
from fedstrata.spec.callbacks import Callback, named
from fedstrata.stratify import client_batch, client_single
from fedstrata.stratify.masking import client as masking

Watcher = Callable[[Mapping[str, Any]], None]
"""Told the record of every round; the plainest callback."""

HANDLERS = Handlers(
    [
        fit.fit,
        encoded.answer,
        encoded.answer_second,
        evaluation.evaluate,
        sampling.report_size,
        sampling.compress,
        sampling.send_sketch,
        sampling.report_loss,
        sequential.visit,
        fedtan.fit_together,
        client_batch.reserve,
        client_batch.gradient,
        client_batch.gradient_steps,
        client_batch.fused_gradient,
        client_single.step,
        client_single.FusedSteps,
        masking.report_labels,
        masking.assign,
        masking.open_keys,
        masking.report_tags,
        masking.seal_labels,
        masking.compare,
        masking.enlist,
        masking.report_counts,
        masking.open_totals,
        masking.report_shares,
    ]
)
"""What every client knows to answer; a method's own handlers come after these."""


def make_context(prepared: Prepared, keys: Any = None) -> ClientContext:
    """What the clients of a process share.

    Args:
        prepared: The experiment.
        keys: The ring of keys for masked labels; this machine's unless given.
    """
    method = prepared.spec.method
    handlers = HANDLERS + method.all_handlers()
    return ClientContext(
        prepared.config,
        prepared.data,
        prepared.assignment,
        method.objective_in_use(),
        handlers,
        held=prepared.held,
        evaluation=prepared.spec.evaluation,
        communication=prepared.spec.communication,
        personal=method.personal_objective(),
        privacy=prepared.config.privacy,
        keys=keys,
    )


@record("Measured")
class Measured:
    """What is kept of an evaluation.

    Args:
        round: Its round.
        value: Its accuracy: on the validation samples, where there are any, else on the test set.
        confusion: Of the test set, (C, C); rows are true classes.
    """

    round: int
    value: float | None
    confusion: torch.Tensor


@record("LoopState")
class LoopState:
    """What the loop remembers, beside the method's state: it travels in checkpoints.

    Args:
        heard: The last round in which a reply of each client counted, 0 for none, (N,); empty where nobody asks.
        evaluated: The last rounds that were evaluated, as many as ``evaluation.unheard``.
        last: The last evaluation.
        best: The best one; the first of those that are equal.
        memory: What callbacks remember.
        stopped: Why the run ended before its last round; empty where it did not.
        channel: What the server remembers of compressed models and updates; None if nothing is compressed.
    """

    heard: NDArray[np.int64]
    evaluated: list[int]
    last: Measured | None
    best: Measured | None
    memory: dict[str, Tree]
    stopped: str
    channel: CompressionState | None = None


class Simulation:
    """A run, round by round: the loop behind ``run``, which may also be driven by hand.

    Args:
        prepared: The experiment.
        engine: Where clients live: a name, or an engine that is ready and is closed at the end.
        found: A checkpoint to go on from.
        listener: Called with the round and the replies of every exchange.

    Raises:
        SpecError: There is no such engine, or the clients' states are not where it would look for them.

    >>> import fedstrata as fs
    >>> spec = fs.Experiment(training={"rounds": 3}, partition=fs.IID(clients=4), evaluation={"every": 0})
    >>> with fs.Simulation(fs.prepare(spec)) as simulation:
    ...     for record in simulation:
    ...         print(record["round"], record["clients_trained"], record["accuracy"] is not None)
    1 4 False
    2 4 False
    3 4 True
    """

    def __init__(
        self,
        prepared: Prepared,
        engine: str | Engine = "local",
        found: Checkpoint | None = None,
        *,
        listener: Listener | None = None,
    ) -> None:
        self.prepared, self.spec = prepared, prepared.spec
        self.store = StateStore()
        self.context = make_context(prepared)
        with ExitStack() as closing:
            closing.enter_context(training_process(self.spec.training.threads))
            name = engine if isinstance(engine, str) else type(engine).__name__
            self.engine = make_engine(engine, self.context, self.store) if isinstance(engine, str) else engine
            closing.callback(self.engine.close)
            method, availability = self.spec.method, self.spec.availability
            self.compression: Compression | None = None
            """What encodes requests and decodes replies; None if they travel as they are."""
            legs: Legs = one_leg
            if not self.spec.communication.plain:
                clients, objective = prepared.config.clients, method.objective_in_use()
                self.compression = Compression(
                    self.spec.communication, clients, self.spec.seed, objective.expected, objective.additive
                )
                legs = self.compression.legs
            self.federation = Federation(
                self.engine, prepared.config, availability, method.name, listener=listener, legs=legs
            )
            self.round = found.round if found else 0
            self.folder: Path | None = None
            """The run folder, where there is one."""
            self.memory: dict[str, Tree] = {}
            """What callbacks remember, by their name; it survives a kill."""
            self.stopped = ""
            """Why the run ended before its last round."""
            self.left: tuple[Weights, int] | None = None
            """The model that the run leaves behind, and its round, where that is not the last one."""
            self.last: Measured | None = None
            self.best: Measured | None = None
            self.score: Score | None = None
            """The last evaluation in this process."""
            watched = prepared.held.own_test is not None
            self._heard = np.zeros(prepared.config.clients if watched else 0, dtype=np.int64)
            self._evaluated: list[int] = []
            if found is not None and isinstance(found.own, LoopState):
                self._take_up(found.own)
            if found is not None:
                refuse_elsewhere(found.remote, self.engine.keeps_states, name)
                found.restore(self.store)
            self.engine.restore(self.round)
            if found is not None:
                self.federation.exchanges.resumed = True
                self.state = found.state
            else:
                self.federation.begin(0)
                model = prepared.config.model
                self.state = method.init(self.federation, Weights(model.params(), model.buffers()))
            self._late: list[dict[str, Any]] = []
            self._events = self._collect_events()
            self._closing = closing.pop_all()

    @property
    def identity(self) -> Mapping[str, Any]:
        """What the run is: its spec, data, model, partition and code, as fingerprints."""
        return self.prepared.identity

    @property
    def done(self) -> bool:
        """Whether all rounds of the spec have run."""
        return bool(self.stopped) or self.round >= self.spec.training.rounds

    @property
    def events(self) -> list[dict[str, Any]]:
        """What happened in the last round, or before the first."""
        return self._events

    def step(self) -> dict[str, Any]:
        """Run one more round; its record."""
        began = time.perf_counter()
        spec, federation = self.spec, self.federation
        federation.begin(self.round + 1)
        try:
            self.state, metrics = spec.method.run_round(federation, self.state)
        except BaseException:
            self._events = self._collect_events()  # what led to it, for whoever records the run
            raise
        self.round += 1
        if len(self._heard):
            self._heard[list(federation.log.returned)] = self.round
        record: dict[str, Any] = {"round": self.round, "accuracy": None, "loss": None}
        if spec.evaluation.due(self.round, spec.training.rounds):
            record |= self._recorded(self.evaluate())
        # What a method reports comes beside the books, never in their place.
        record |= federation.log.metrics()
        record |= {key: value for key, value in metrics.items() if key not in record}
        record["seconds"] = time.perf_counter() - began
        self._events = self._collect_events()
        return record

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The records of the rounds that are left."""
        while not self.done:
            yield self.step()

    def evaluated(self) -> Weights:
        """The global model as it is evaluated, and as a run leaves it behind."""
        return self.spec.method.evaluated(self.prepared.config, self.state)

    def evaluate(self) -> Score:
        """How good the global model is, on the test set and wherever else the spec says."""
        place, prepared = self.context.once(placed), self.prepared
        evaluator = Evaluator(
            self.spec.evaluation,
            place.model,
            place.data,
            prepared.held,
            prepared.config.clients,
            batch_statistics=self.spec.training.batch_norm == "local",
            remote=prepared.config.sizes is None and bool(prepared.held),
        )
        sent = 0

        def ask(question: Evaluate) -> Mapping[ClientId, Evaluated]:
            nonlocal sent
            replies, size = self.federation.measure(question, check=lambda reply: reply.require(place.data.classes))
            sent += size
            return replies

        score = evaluator.score(self.evaluated(), self.round, ask, self._unheard())
        if sent:
            score.more["bytes_evaluation"] = sent
        return score

    def stop(self, reason: str) -> None:
        """End the run in order after this round; an event and the summary say why."""
        if not self.stopped:
            self.stopped = reason
            self._late.append({"round": self.round, "kind": "stopped", "reason": reason})

    def leave(self, weights: Weights, round: int) -> None:
        """Let the run leave another model behind than its last one.

        Args:
            weights: The model.
            round: The round after which it was evaluated.
        """
        self.left = weights, round

    def confusions(self) -> dict[str, Confusion]:
        """Of the last and of the best evaluation, where there was one."""
        kept = {"last": self.last, "best": self.best}
        return {key: Confusion(m.round, m.confusion.numpy()) for key, m in kept.items() if m is not None}

    def client_table(self) -> list[dict[str, Any]]:
        """A row a client: its samples, and how good the model is for it by the last evaluation; empty without parts."""
        held, sizes = self.prepared.held, self.prepared.config.sizes
        if held.own_test is None:
            return []
        score = self.score if self.score is not None else self.evaluate()  # resumed when all was done
        if not score.table:
            return []
        clients = len(self._heard)
        columns: dict[str, list[Any]] = {"client": list(range(clients))}
        columns |= {} if held.numbers is None else {"in_partition": held.numbers[:clients].tolist()}
        columns |= {} if sizes is None else {"train_samples": sizes.tolist()}
        columns |= {"heard": self._heard.tolist()} | score.table
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def late_events(self) -> list[dict[str, Any]]:
        """What happened after the round's events were written."""
        found, self._late = self._late, []
        return found

    @property
    def own(self) -> LoopState:
        """What the loop remembers beside the method's state."""
        compression = self.compression.state if self.compression is not None else None
        return LoopState(self._heard, self._evaluated, self.last, self.best, self.memory, self.stopped, compression)

    def _take_up(self, own: LoopState) -> None:
        if len(own.heard) == len(self._heard):
            self._heard = own.heard.copy()
        self._evaluated, self.last, self.best = list(own.evaluated), own.last, own.best
        self.memory, self.stopped = dict(own.memory), own.stopped
        if self.compression is not None and own.channel is not None:
            self.compression.state = own.channel

    def _recorded(self, score: Score) -> dict[str, Any]:
        """What a record says of an evaluation, which is kept."""
        self.score = score
        settings = self.spec.evaluation
        self._evaluated = [*self._evaluated, self.round][-settings.unheard :]
        value = (score.more.get("validation") or {}).get("accuracy")
        value = score.accuracy if settings.validation is None else value
        self.last = Measured(self.round, value, torch.from_numpy(score.confusion.copy()))
        if self.best is None or (value is not None and (self.best.value is None or value > self.best.value)):
            self.best = self.last
        record: dict[str, Any] = {"accuracy": score.accuracy, "loss": score.loss}
        record |= {"per_class": score.per_class} if settings.per_class else {}
        return record | score.more

    def _unheard(self) -> list[int]:
        """Clients without a reply that counted since so many evaluations ago."""
        first = self._evaluated[0] if len(self._evaluated) == self.spec.evaluation.unheard else 0
        found: list[int] = np.flatnonzero(self._heard <= first).tolist()
        return found

    def close(self) -> None:
        """Free what the engine holds."""
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _collect_events(self) -> list[dict[str, Any]]:
        """The engine's own events, then the round's."""
        round = self.federation.round
        own: list[dict[str, Any]] = [
            {"round": round, "kind": kind, "clients": clients, "reason": reason}
            for kind, clients, reason in self.engine.events()
        ]
        return own + self.federation.events


def run_prepared(
    prepared: Prepared,
    path: Path | None = None,
    engine: str | Engine = "local",
    callbacks: Sequence[Callback | Watcher] = (),
    *,
    resume: bool = False,
) -> History:
    """Run an experiment that is prepared; see ``fedstrata.run``.

    Args:
        prepared: The experiment.
        path: The run folder; nothing is written without one.
        engine: Where clients live: a name, or an engine that is ready and is closed at the end.
        callbacks: What looks at the run, beside those of the spec.
        resume: Go on with what is in the folder.
    """
    tracking = prepared.spec.tracking.callbacks
    watching = [*tracking, *prepared.spec.callbacks, *(each for each in callbacks if isinstance(each, Callback))]
    watchers = [each for each in callbacks if not isinstance(each, Callback)]
    for callback in watching:
        callback.check(prepared.spec.evaluation)
    with RunFolder.open(path, prepared, resume=resume) as folder, ExitStack() as closing:
        if not isinstance(engine, str):
            closing.callback(engine.close)
        if (finished := folder.finished()) is not None:
            return finished
        simulation = closing.enter_context(Simulation(prepared, engine, folder.checkpoint))
        simulation.folder = path
        folder.begin(simulation)
        closing.push(partial(_close, watching, simulation, folder.history))
        for callback in watching:
            with named(callback, folder.history):
                callback.on_start(simulation)
        while not simulation.done:
            try:
                record = simulation.step()
            except BaseException:
                folder.write_events(simulation)
                raise
            folder.log(record, simulation)
            # What callbacks remember is part of the round's checkpoint; functions remember nothing, and come after it.
            failed = None
            for callback in watching:
                try:
                    with named(callback, folder.history):
                        callback.on_round(simulation, folder.history[-1])
                except Exception as error:
                    failed = failed or error  # the others must not miss the round
            folder.keep(simulation, anyway=failed is not None)
            if failed is not None:
                raise failed
            for watcher in watchers:
                try:
                    with named(watcher, folder.history):
                        watcher(folder.history[-1])
                except Exception:
                    folder.keep(simulation, anyway=True)
                    raise
        for callback in watching:
            with named(callback, folder.history):
                callback.on_end(simulation, folder.history)
        return folder.finish(simulation)


def _close(
    watching: Sequence[Callback],
    simulation: Simulation,
    history: History,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
) -> None:
    """Let all callbacks close what they have opened; where the run broke off, that is what is to be told."""
    failed = error
    for callback in watching:
        try:
            with named(callback, history):
                callback.on_close(simulation, history, error)
        except Exception as another:
            failed = failed or another
    if error is None and failed is not None:
        raise failed


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
