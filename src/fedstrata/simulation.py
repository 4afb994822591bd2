"""The loop over rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fedstrata.checkpoint import Checkpoint
from fedstrata.clients.context import ClientContext
from fedstrata.clients.handling import Handlers
from fedstrata.clients.store import StateStore
from fedstrata.engines import make_engine
from fedstrata.errors import SpecError
from fedstrata.federation.engine import Engine
from fedstrata.federation.federation import Federation, Listener
from fedstrata.federation.messages import Weights
from fedstrata.handlers import evaluation, fedtan, fit, sampling, sequential
from fedstrata.history import History
from fedstrata.preparation import Prepared
from fedstrata.process import training_process
from fedstrata.run_folder import RunFolder
from fedstrata.stratify import client_batch, client_single
from fedstrata.stratify.masking import client as masking
from fedstrata.training.devices import placed

Callback = Callable[[Mapping[str, Any]], None]

HANDLERS = Handlers(
    [
        fit.fit,
        sampling.report_size,
        sampling.compress,
        sampling.send_sketch,
        sampling.report_loss,
        sequential.visit,
        fedtan.fit_together,
        client_batch.reserve,
        client_batch.gradient,
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
        masking.seal_pairs,
        masking.compare_one,
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
    objective = method.objective_in_use()
    return ClientContext(prepared.config, prepared.data, prepared.assignment, objective, handlers, keys=keys)


class Simulation:
    """A run, round by round; the same loop whoever drives it.

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
            self.federation = Federation(self.engine, prepared.config, availability, method.name, listener=listener)
            self.round = found.round if found else 0
            if found is not None:
                refuse_elsewhere(found.remote, self.engine.keeps_states, name)
                found.restore(self.store)
            self.engine.restore(self.round)
            if found is not None:
                self.federation.resumed = True
                self.state = found.state
            else:
                self.federation.begin(0)
                model = prepared.config.model
                self.state = method.init(self.federation, Weights(model.params(), model.buffers()))
            self._events = self._collect_events()
            self._closing = closing.pop_all()

    @property
    def done(self) -> bool:
        """Whether all rounds of the spec have run."""
        return self.round >= self.spec.training.rounds

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
        record: dict[str, Any] = {"round": self.round, "accuracy": None, "loss": None}
        if spec.evaluation.due(self.round, spec.training.rounds):
            score = self.evaluate()
            record |= {"accuracy": score.accuracy, "loss": score.loss}
            record |= {"per_class": score.per_class} if spec.evaluation.per_class else {}
        # What a method reports comes beside the books, never in their place.
        record |= federation.accounting.metrics()
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

    def evaluate(self) -> evaluation.Score:
        """How good the global model is on the test set."""
        place = self.context.once(placed)
        return evaluation.evaluate(
            place.model,
            self.evaluated(),
            place.data,
            batch_size=self.spec.evaluation.batch_size,
            batch_statistics=self.spec.training.batch_norm == "local",
        )

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
    callbacks: Sequence[Callback] = (),
    *,
    resume: bool = False,
) -> History:
    """Run an experiment that is prepared; see ``fedstrata.run``.

    Args:
        prepared: The experiment.
        path: The run folder; nothing is written without one.
        engine: Where clients live: a name, or an engine that is ready and is closed at the end.
        callbacks: Called with the record of every round.
        resume: Go on with what is in the folder.
    """
    with RunFolder.open(path, prepared, resume=resume) as folder, ExitStack() as closing:
        if not isinstance(engine, str):
            closing.callback(engine.close)
        if (finished := folder.finished()) is not None:
            return finished
        simulation = closing.enter_context(Simulation(prepared, engine, folder.checkpoint))
        folder.begin(simulation)
        while not simulation.done:
            try:
                record = simulation.step()
            except BaseException:
                folder.write_events(simulation)
                raise
            folder.write(record, simulation)
            for callback in callbacks:
                callback(folder.history[-1])
        return folder.finish(simulation)


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
