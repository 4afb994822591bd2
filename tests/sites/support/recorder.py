"""Engines with a site's guard, which find requests that a job does not declare, or declares but never uses."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import fedstrata as fs
from fedstrata.clients.client import StateStore
from fedstrata.engines.local import LocalEngine
from fedstrata.federation.engine import Engine, Failure
from fedstrata.runs.preparation import Prepared
from fedstrata.runs.simulation import Simulation, make_context
from fedstrata.sites.disclosure import Declaration, declaration_of
from fedstrata.sites.guard import Guard, Quota
from fedstrata.sites.policy import Policy


class Watching(Engine):
    """An engine with a guard for every client: each request must be declared, and is counted."""

    def watch(
        self, prepared: Prepared, folder: Path, declared: Declaration | None = None, policy: Policy | None = None
    ) -> None:
        """Begin to check requests.

        Raises:
            RuleError: The policy does not allow the job.
        """
        self.asked = declared or declaration_of(prepared.spec, agreed=prepared.config, own_data=False)
        if policy is not None:
            policy.check(self.asked)
        self.guard = Guard(self.asked, policy, Quota(folder, self.asked.job))
        self.counts: Counter[tuple[int, int, tuple[int, int]]] = Counter()
        """The number of requests for each declared request, client and point of the run."""

    def note(self, client: int, request: Any, **how: Any) -> Any:
        match = self.guard.check(client, request, **how)
        assert match is not None
        self.guard.take(match)
        self.counts[match.number, client, match.position] += 1
        return match

    def ask(self, requests: Any, *, together: bool, **more: Any) -> Any:
        matches = {client: self.note(client, request, together=together) for client, request in requests.items()}
        outcomes = super().ask(requests, together=together, **more)  # type: ignore[safe-super]
        for client, outcome in outcomes.items():
            if not isinstance(outcome, Failure):
                self.guard.answered(matches[client], outcome)
        return outcomes

    def ask_sum(self, requests: Any) -> Any:
        reply = super().ask_sum(requests)
        if reply is not None:  # if it is None, the caller asks the clients one by one
            for client, request in requests.items():
                self.note(client, request)
        return reply

    def relay(self, kind: Any, weights: Any) -> Any:
        session, note = super().relay(kind, weights), self.note
        hop = session.hop

        def noted(client: int, task: Any) -> Any:
            note(client, task, relay=True)
            return hop(client, task)

        session.hop = noted  # type: ignore[method-assign]
        return session

    def unused(self) -> list[str]:
        """Return the declared requests that the run never sent, or never as often as declared."""
        found = []
        for number, allowed in enumerate(self.asked.allowed or ()):
            counts = [count for (which, _, _), count in self.counts.items() if which == number]
            most = max(counts, default=0)
            if most < (allowed.times or 2):
                found.append(f"{allowed.label}: {most} of {allowed.times or 'several'}")
        return found


class Recorder(Watching, LocalEngine):
    """A local engine with a guard."""

    def __init__(self, prepared: Prepared, folder: Path, declared: Declaration | None = None) -> None:
        super().__init__(make_context(prepared), StateStore())
        self.watch(prepared, folder, declared)


def recorded(table: Any, folder: Path, *, data: Any = None) -> Recorder:
    """Run a spec with a guard for its own declaration.

    Raises:
        RuleError: The run sends a request that it does not declare.
    """
    prepared = fs.prepare(fs.Experiment.from_table(table), data=data)
    engine = Recorder(prepared, folder)
    with Simulation(prepared, engine) as simulation:
        while not simulation.done:
            simulation.step()
            if simulation.round in prepared.spec.evaluation.evaluated_rounds(prepared.spec.training.rounds):
                assert simulation.score is not None
    return engine


def labels(asked: Declaration) -> list[str]:
    """Return the labels of the requests that a job declares."""
    return [allowed.label for allowed in asked.allowed or ()]
