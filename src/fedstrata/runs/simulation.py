"""The loop over the rounds of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from fedstrata.base.errors import SpecError
from fedstrata.base.process import training_process
from fedstrata.base.records import Tree
from fedstrata.clients.client import ClientContext
from fedstrata.clients.handlers import encoded, evaluation, fedtan, fit, sampling, sequential
from fedstrata.clients.handling import Handlers
from fedstrata.clients.store import StateStore
from fedstrata.clients.training.devices import on_device
from fedstrata.engines import make_engine
from fedstrata.evaluation.evaluator import Evaluator, Score
from fedstrata.evaluation.history import History
from fedstrata.evaluation.messages import Evaluate, Evaluated
from fedstrata.federation.communication.compression import Compression
from fedstrata.federation.engine import Engine
from fedstrata.federation.federation import Federation, Legs, Listener, one_leg
from fedstrata.federation.messages import ClientId, Weights
from fedstrata.runs.checkpoint import Checkpoint
from fedstrata.runs.loop_state import LoopState, SavedLoopState
from fedstrata.runs.preparation import Prepared
from fedstrata.runs.run_folder import RunFolder
from fedstrata.spec.callbacks import Callback, named
from fedstrata.stratify import client_batch, client_single
from fedstrata.stratify.masking import client as masking

Watcher = Callable[[Mapping[str, Any]], None]
"""A function that is called with the record of every round: the simplest callback."""

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
"""The handlers of all requests of fedstrata; a method's own handlers are added to them."""


def make_context(prepared: Prepared, keys: Any = None) -> ClientContext:
    """Return the context that the clients of a process share.

    Args:
        prepared: The experiment.
        keys: The key store for masked labels; by default, that of this machine.
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


class Simulation:
    """A run, round by round: the loop behind ``run``, which may also be driven by hand.

    Args:
        prepared: The experiment.
        engine: The name of an engine, or an engine that is ready; it is closed at the end.
        checkpoint: The checkpoint to continue from.
        listener: Called with the round and the replies of every exchange.

    Raises:
        SpecError: The engine is unknown, or it would not find the clients' states.

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
        checkpoint: Checkpoint | None = None,
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
            self.round = checkpoint.round if checkpoint else 0
            self._evaluated_rounds = self.spec.evaluation.evaluated_rounds(self.spec.training.rounds)
            self.folder: Path | None = None
            """The run folder; None if nothing is written."""
            watched = prepared.held.own_test is not None
            self.loop_state = LoopState(np.zeros(prepared.config.clients if watched else 0, dtype=np.int64))
            if checkpoint is not None:
                self._restore(checkpoint.loop_state)
                refuse_elsewhere(checkpoint.remote, self.engine.keeps_states, name)
                checkpoint.restore(self.store)
            self.engine.restore(self.round)
            if checkpoint is not None:
                self.federation.exchanges.resumed = True
                self.state = checkpoint.state
            else:
                self.federation.begin(0)
                model = prepared.config.model
                self.state = method.init(self.federation, Weights(model.params(), model.buffers()))
            self.events: list[dict[str, Any]] = []
            """The events of the last round, or of the enrolment before the first."""
            self._collect_events()
            self._closing = closing.pop_all()

    @property
    def identity(self) -> Mapping[str, Any]:
        """The fingerprints of the run's spec, data, model, partition and code."""
        return self.prepared.identity

    @property
    def memory(self) -> dict[str, Tree]:
        """The memory of callbacks by their names; it is part of each checkpoint."""
        return self.loop_state.memory

    @property
    def stopped(self) -> str:
        """Why the run ends before its last round; empty if it does not."""
        return self.loop_state.stopped

    @property
    def score(self) -> Score | None:
        """The last evaluation in this process."""
        return self.loop_state.score

    @property
    def done(self) -> bool:
        """Whether all rounds of the spec have run, or the run was stopped."""
        return bool(self.stopped) or self.round >= self.spec.training.rounds

    def step(self) -> dict[str, Any]:
        """Run one more round and return its record."""
        began = time.perf_counter()
        spec, federation = self.spec, self.federation
        self.events = []
        federation.begin(self.round + 1)
        try:
            self.state, metrics = spec.method.run_round(federation, self.state)
            self.round += 1
            if len(self.loop_state.last_reply):
                self.loop_state.last_reply[list(federation.log.returned)] = self.round
            record: dict[str, Any] = {"round": self.round, "accuracy": None, "loss": None}
            if self.round in self._evaluated_rounds:
                record |= self._record_evaluation()
        finally:
            self._collect_events()  # also those before an error or an interruption
        record |= federation.log.metrics()
        # A method's metrics follow these columns and never replace them.
        record = {**record, **metrics, **record}
        record["seconds"] = time.perf_counter() - began
        return record

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the records of the rounds that are left."""
        while not self.done:
            yield self.step()

    def evaluated(self) -> Weights:
        """Return the global model that is evaluated, and that a run saves at its end."""
        return self.spec.method.evaluated(self.prepared.config, self.state)

    def evaluate(self) -> Score:
        """Evaluate the global model on the test set and on the other samples that the spec names."""
        place, prepared = self.context.cached(on_device), self.prepared
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

        unheard = self.loop_state.unheard(self.spec.evaluation.unheard)
        score = evaluator.score(self.evaluated(), self.round, ask, unheard)
        if sent:
            score.more["bytes_evaluation"] = sent
        return score

    def stop(self, reason: str) -> None:
        """End the run after this round; an event and the summary give the reason."""
        if not self.stopped:
            self.loop_state.stopped = reason
            self.loop_state.late_events.append({"round": self.round, "kind": "stopped", "reason": reason})

    def leave(self, weights: Weights, round: int) -> None:
        """Save another model than the last one at the end of the run.

        Args:
            weights: The model.
            round: The round after which it was evaluated.
        """
        self.loop_state.final_model = weights, round

    def take_late_events(self) -> list[dict[str, Any]]:
        """Return the events after the round's events were written, and forget them."""
        events, self.loop_state.late_events = self.loop_state.late_events, []
        return events

    def client_table(self) -> list[dict[str, Any]]:
        """Return one row per client with its samples and the last evaluation's results; empty without test parts."""
        held, sizes = self.prepared.held, self.prepared.config.sizes
        if held.own_test is None:
            return []
        score = self.score if self.score is not None else self.evaluate()  # a run may be resumed after its last round
        if not score.table:
            return []
        last_reply = self.loop_state.last_reply.tolist()
        clients = len(last_reply)
        columns: dict[str, list[Any]] = {"client": list(range(clients))}
        columns |= {} if held.numbers is None else {"in_partition": held.numbers[:clients].tolist()}
        columns |= {} if sizes is None else {"train_samples": sizes.tolist()}
        columns |= {"heard": last_reply} | score.table
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def saved_loop_state(self) -> SavedLoopState:
        """Return the loop's state for a checkpoint."""
        return self.loop_state.save(self.compression.state if self.compression is not None else None)

    def _restore(self, saved: Tree) -> None:
        if isinstance(saved, SavedLoopState):
            self.loop_state.restore(saved)
            if self.compression is not None and saved.channel is not None:
                self.compression.state = saved.channel

    def _record_evaluation(self) -> dict[str, Any]:
        """Evaluate the model, keep the result, and return its part of the round's record."""
        settings, score = self.spec.evaluation, self.evaluate()
        self.loop_state.add_score(score, self.round, settings)
        record: dict[str, Any] = {"accuracy": score.accuracy, "loss": score.loss}
        record |= {"per_class": score.per_class} if settings.per_class else {}
        return record | score.more

    def close(self) -> None:
        """Free the resources of the engine."""
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _collect_events(self) -> None:
        """Set ``events``: those of the engine, then those of the round."""
        self.events = []
        for kind, clients, reason in self.engine.events():
            event = {"round": self.federation.round, "kind": kind, "clients": clients, "reason": reason}
            self.events.append(event)
        self.events += self.federation.log.events


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
        engine: The name of an engine, or an engine that is ready; it is closed at the end.
        callbacks: Callbacks in addition to those of the spec.
        resume: Continue the run in the folder.
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
            # The memory of callbacks is part of the round's checkpoint. Functions have none and are called after it.
            failed = None
            for callback in watching:
                try:
                    with named(callback, folder.history):
                        callback.on_round(simulation, folder.history[-1])
                except Exception as error:
                    failed = failed or error  # the others must not miss the round
            folder.save_checkpoint(simulation, force=failed is not None)
            if failed is not None:
                raise failed
            for watcher in watchers:
                try:
                    with named(watcher, folder.history):
                        watcher(folder.history[-1])
                except Exception:
                    folder.save_checkpoint(simulation, force=True)
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
    """Let all callbacks close their resources; raise the first error of theirs unless the run itself failed."""
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
    """Refuse to continue without the clients' states.

    Args:
        was: Whether the sites kept the clients' states, so that the checkpoint has none.
        will: Whether they will from now on.
        engine: The engine that was asked for.

    Raises:
        SpecError: The engine would not find the states.
    """
    if was and not will:
        problem = "the clients' states of this run are at its sites, not in its checkpoint; resume it with 'nvflare'"
        raise SpecError("engine", f"{problem}, or by 'fedstrata submit' where it was deployed", engine)
    if will and not was:
        problem = "the clients' states of this run are in its checkpoint, and no site has them"
        raise SpecError("engine", f"{problem}; resume it with 'local' or 'ray'", engine)
