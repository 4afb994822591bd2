"""Run an experiment in this process: the loop over its rounds, with callbacks, checkpoints and the run folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fedstrata.base.errors import SpecError
from fedstrata.base.process import training_process
from fedstrata.base.records import Tree
from fedstrata.clients.client import ClientContext, StateStore
from fedstrata.clients.handlers import encoded, evaluation, fedtan, fit, masked, sampling, sequential
from fedstrata.clients.handling import Handlers
from fedstrata.clients.training.devices import on_device
from fedstrata.engines import make_engine
from fedstrata.evaluation.evaluator import Evaluator, Score
from fedstrata.evaluation.history import History
from fedstrata.evaluation.messages import Evaluate, Evaluated
from fedstrata.federation.communication.compression import Compression
from fedstrata.federation.engine import Engine
from fedstrata.federation.federation import (
    Federation,
    Legs,
    Listener,
    SummedLegs,
    one_leg,
    one_summed_leg,
)
from fedstrata.federation.messages import ClientId, Weights
from fedstrata.runs.checkpoint import Checkpoint
from fedstrata.runs.client_accountant import accountant_of
from fedstrata.runs.dp_record import privacy_record
from fedstrata.runs.loop_state import LoopState, SavedLoopState
from fedstrata.runs.preparation import Prepared
from fedstrata.runs.run_folder import RunFolder
from fedstrata.runs.secure_checks import check_secure_run
from fedstrata.spec.callbacks import Callback, named
from fedstrata.stratify import client_batch, client_single
from fedstrata.stratify.masking import client as masking

Watcher = Callable[[Mapping[str, Any]], None]
"""The type of a callback function, which is called with the record of each round."""

HANDLERS = Handlers(
    [
        fit.fit,
        encoded.answer,
        encoded.answer_second,
        masked.answer,
        masked.step,
        masked.site_step,
        evaluation.evaluate,
        evaluation.evaluate_task,
        sampling.report_size,
        sampling.compress,
        sampling.send_sketch,
        sampling.report_loss,
        sequential.visit,
        fedtan.fit_together,
        client_batch.reserve,
        client_batch.gradient,
        client_batch.gradient_steps,
        client_batch.label_weighted_gradient,
        client_batch.fused_gradient,
        client_batch.fused_label_weighted_gradient,
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
"""The functions with which clients answer requests. ``make_context`` adds the method's own functions."""


def make_context(prepared: Prepared, keys: Any = None) -> ClientContext:
    """Return the context that all clients of a process share: the settings, the data and the request handlers.

    Args:
        prepared: The experiment.
        keys: The key ring with the secret keys for masking labels. Default: the key ring of this machine.
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
        forms=method.forms,
        keys=keys,
    )


class Simulation:
    """A run that your program controls. Each call of ``step`` runs one round.

    Args:
        prepared: The experiment.
        engine: The name of an engine, or an engine object. The engine is closed together with the simulation.
        checkpoint: The checkpoint from which the run continues; None for a new run.
        listener: A function that is called after clients have replied, with the round and the accepted replies.

    Raises:
        SpecError: The engine is unknown, or cannot resume the run from the checkpoint; see ``refuse_elsewhere``.

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
        if self.spec.privacy.sums == "secure":
            check_secure_run(self.spec.privacy, engine, listener)
        with ExitStack() as closing:
            closing.enter_context(training_process(self.spec.training.threads))
            name = engine if isinstance(engine, str) else type(engine).__name__
            self.engine = make_engine(engine, self.context, self.store) if isinstance(engine, str) else engine
            closing.callback(self.engine.close)
            method, availability = self.spec.method, self.spec.availability
            self.compression: Compression | None = None
            """The codecs that compress requests and decode replies; None without compression."""
            legs: Legs = one_leg
            summed_legs: SummedLegs = one_summed_leg
            if not self.spec.communication.plain:
                clients, objective = prepared.config.clients, method.objective_in_use()
                self.compression = Compression(
                    self.spec.communication, clients, self.spec.seed, objective.expected, objective.additive
                )
                legs, summed_legs = self.compression.legs, self.compression.summed_legs
            self.federation = Federation(
                self.engine,
                prepared.config,
                availability,
                method.name,
                listener=listener,
                legs=legs,
                summed_legs=summed_legs,
                attack=self.spec.attack,
            )
            self.round = checkpoint.round if checkpoint else 0
            self._evaluated_rounds = self.spec.evaluation.evaluated_rounds(self.spec.training.rounds)
            self.folder: Path | None = None
            """The run folder; None if nothing is written."""
            self._accountant = accountant_of(self.spec, prepared.config, secret=self.engine.secret)
            if self._accountant is not None:
                self.federation.listener = self._accountant.listening(listener)
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
                if self.spec.attack is not None:
                    self.federation.note("attackers", sorted(self.federation.attackers), self.spec.attack.name)
                model = prepared.config.model
                self.state = method.init(self.federation, Weights(model.params(), model.buffers()))
            self._labels = self._known_labels()
            self.events: list[dict[str, Any]] = []
            """The events of the latest round; before the first round, the events of ``method.init`` (round 0)."""
            self._collect_events()
            self._closing = closing.pop_all()

    @property
    def identity(self) -> Mapping[str, Any]:
        """The identity of the run, such as its spec and checksums of its data; see ``fedstrata.runs.identity``."""
        return self.prepared.identity

    @property
    def privacy(self) -> dict[str, Any]:
        """The record of the run's ε (see ``privacy_record``); empty without ``privacy.dp``."""
        return privacy_record(self.spec, secret=self.engine.secret, evaluates=bool(self.prepared.held))

    @property
    def memory(self) -> dict[str, Tree]:
        """A mapping from the name of each callback to its state, which is part of every checkpoint."""
        return self.loop_state.memory

    @property
    def stopped(self) -> str:
        """The reason why the run was stopped before its last round; empty if the run was not stopped."""
        return self.loop_state.stopped

    @property
    def score(self) -> Score | None:
        """The results of the latest evaluation in this process; None before the first evaluation."""
        return self.loop_state.score

    @property
    def done(self) -> bool:
        """Whether the run has ended: all rounds are finished, or the run was stopped."""
        return bool(self.stopped) or self.round >= self.spec.training.rounds

    def step(self) -> dict[str, Any]:
        """Run one more round and return its record."""
        began = time.perf_counter()
        spec, federation = self.spec, self.federation
        self.events = []
        federation.begin(self.round + 1)
        if self._accountant is not None:
            federation.excluded = self._accountant.excluded(self.memory)
        try:
            self.state, metrics = spec.method.run_round(federation, self.state)
            self.round += 1
            if len(self.loop_state.last_reply):
                self.loop_state.last_reply[list(federation.log.returned)] = self.round
            record: dict[str, Any] = {"round": self.round, "accuracy": None, "loss": None}
            if self.round in self._evaluated_rounds:
                record |= self._record_evaluation()
        finally:
            self._collect_events()  # also if an error or an interrupt ends the round
        record |= federation.log.metrics()
        if self._labels is not None:
            absent = np.ones(self.prepared.config.strata, dtype=bool)
            indices, offsets = self.prepared.assignment.indices, self.prepared.assignment.offsets
            for client in federation.log.returned:
                absent[self._labels[indices[offsets[client] : offsets[client + 1]]]] = False
            record["classes_absent"] = np.flatnonzero(absent).tolist()
        if self._accountant is not None:
            record |= self._accountant.spend(self.memory, federation.log)
            if reason := self._accountant.ending(self.memory):
                self.stop(reason)
        # The columns of ``record`` come first, and keep their values even if a metric of the method has the same name.
        record = {**record, **metrics, **record}
        record["seconds"] = time.perf_counter() - began
        return record

    def _known_labels(self) -> NDArray[np.int64] | None:
        """Return the class of each training sample; None without classes, or if the clients keep their own data."""
        data, config = self.prepared.data, self.prepared.config
        return data.strata if data.task.has_classes and config.sizes is not None else None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Run the remaining rounds, and yield the record of each round."""
        while not self.done:
            yield self.step()

    def evaluated(self) -> Weights:
        """Return the current global model in the form in which it is evaluated and saved."""
        return self.spec.method.evaluated(self.prepared.config, self.state)

    def evaluate(self) -> Score:
        """Evaluate the global model on the test set, and on other samples according to the section ``evaluation``."""
        return self._evaluate(self.evaluated(), self.round)

    def _evaluate(self, weights: Weights, round: int) -> Score:
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
            replies, size = self.federation.measure(question, check=lambda reply: reply.require(place.data.outputs))
            sent += size
            return replies

        unheard = self.loop_state.unheard(self.spec.evaluation.unheard)
        score = evaluator.score(weights, round, ask, unheard)
        if sent:
            score.more["bytes_evaluation"] = sent
        return score

    def stop(self, reason: str) -> None:
        """End the run after this round. Record the reason as an event and in the summary."""
        if not self.stopped:
            self.loop_state.stopped = reason
            self.loop_state.late_events.append({"round": self.round, "kind": "stopped", "reason": reason})

    def leave(self, weights: Weights, round: int) -> None:
        """Choose the model to save at the end of the run. By default, the model of the last round is saved.

        Args:
            weights: The parameters and buffers to save.
            round: The round after which the chosen model was evaluated.
        """
        self.loop_state.final_model = weights, round

    def take_late_events(self) -> list[dict[str, Any]]:
        """Return the events that happened after the round's events were written, and remove them from the state."""
        events, self.loop_state.late_events = self.loop_state.late_events, []
        return events

    def client_table(self) -> list[dict[str, Any]]:
        """Return one row per client: its sample counts, and its results in the last evaluation.

        If ``leave`` was called, the results refer to the model that ``leave`` chose. The list is empty if clients do
        not have test samples of their own.
        """
        held, sizes = self.prepared.held, self.prepared.config.sizes
        if held.own_test is None:
            return []
        score, final = self.score, self.loop_state.final_model
        if final is not None and final[1] not in self.loop_state.evaluated[-1:]:
            score = self._evaluate(*final)
        elif score is None:  # a run that was resumed after its last round
            score = self.evaluate()
        if not score.table:
            return []
        last_reply = self.loop_state.last_reply.tolist()
        clients = len(last_reply)
        columns: dict[str, list[Any]] = {"client": list(range(clients))}
        assignment = self.prepared.assignment
        columns |= {} if assignment.codes is None else {"name": assignment.names(self.prepared.data)}
        columns |= {} if held.numbers is None else {"in_partition": held.numbers[:clients].tolist()}
        columns |= {} if sizes is None else {"train_samples": sizes.tolist()}
        columns |= {"heard": last_reply} | score.table
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def saved_loop_state(self) -> SavedLoopState:
        """Return the part of the training loop's state that is stored in a checkpoint."""
        return self.loop_state.save(self.compression.state if self.compression is not None else None)

    def _restore(self, saved: Tree) -> None:
        if isinstance(saved, SavedLoopState):
            self.loop_state.restore(saved)
            if self.compression is not None and saved.channel is not None:
                self.compression.state = saved.channel

    def _record_evaluation(self) -> dict[str, Any]:
        """Evaluate the model, store the result, and return the result as columns of the round's record."""
        score = self.evaluate()
        self.loop_state.add_score(score, self.round, self.spec.evaluation)
        return self._columns(score)

    def _columns(self, score: Score) -> dict[str, Any]:
        record: dict[str, Any] = {"accuracy": score.accuracy, "loss": score.loss}
        record |= {"per_class": score.per_class} if self.spec.evaluation.per_class else {}
        return record | score.more

    def evaluate_saved(self) -> dict[str, Any]:
        """Evaluate the model that ``leave`` chose.

        The result is empty if ``leave`` was not called, or if the chosen model had already been evaluated.
        """
        final = self.loop_state.final_model
        if final is None or final[1] in self._evaluated_rounds:
            return {}
        return {"round": final[1]} | self._columns(self._evaluate(*final))

    def close(self) -> None:
        """Close the engine to free its processes and memory, and restore this process's number of threads."""
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _collect_events(self) -> None:
        """Set ``events`` to the round's events and the engine's events."""
        self.events = []
        while self.engine.events:
            kind, clients, reason = self.engine.events.popleft()
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
    """Run a prepared experiment; see ``fedstrata.run``.

    Args:
        prepared: The experiment.
        path: The run folder; None to write no files.
        engine: The name of an engine, or an engine object. At the end, the engine is closed.
        callbacks: Callbacks in addition to the spec's callbacks.
        resume: Whether to resume the run in the folder.
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
            # Call ``Callback`` objects before the checkpoint is saved, because the checkpoint contains their states.
            # Plain functions (``watchers``) have no states, and are called after the checkpoint.
            failed = None
            for callback in watching:
                try:
                    with named(callback, folder.history):
                        callback.on_round(simulation, folder.history[-1])
                except Exception as error:
                    failed = failed or error  # the error is raised below, after all callbacks were called for the round
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
    """Call ``on_close`` of all callbacks. If the run did not fail, raise the first error of a callback."""
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
    """Check whether an engine can find the clients' states when it resumes a run.

    Args:
        was: Whether the clients' states are stored at the sites (the clients' own machines). Otherwise, the states are
            in the checkpoint.
        will: Whether the engine that resumes the run leaves the clients' states at the sites.
        engine: The name of the engine.

    Raises:
        SpecError: The engine cannot find the states.
    """
    if was and not will:
        problem = "the clients' states of this run are at the sites, not in the checkpoint. Resume a simulation with"
        raise SpecError("engine", f"{problem} engine 'nvflare'. Resume a deployment with 'fedstrata submit'.", engine)
    if will and not was:
        problem = "the clients' states of this run are in the checkpoint, not at the sites"
        raise SpecError("engine", f"{problem}. Resume the run with engine 'local' or 'ray'.", engine)
