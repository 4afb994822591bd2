"""Ask a site wrong questions, and check that it answers only what its job declared, and never crashes.

The questions are out of order, of other jobs, malformed or damaged. A second implementation of the rules decides which
answers are allowed. It is simpler than the guard: it only knows the jobs below, and watches the calls of handlers.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from asked import CLIENTS, Site
from tests.fuzz.cases import RAN, REFUSED, Family, SilentDifferenceError, damaged

from fedstrata.base import records
from fedstrata.base.errors import WireError
from fedstrata.clients.handlers.sequential import Visit
from fedstrata.evaluation.messages import Evaluate
from fedstrata.federation.communication.messages import Coefficients, Encoded
from fedstrata.federation.messages import Fit, Weights
from fedstrata.sampling.client_sizes import SizeReport
from fedstrata.sampling.label_counts import LabelReport
from fedstrata.sampling.power_of_choice import LossReport
from fedstrata.sampling.sketches import Compress, Sketch
from fedstrata.sites.site_server import SERVER
from fedstrata.sites.wire import (
    Ask,
    Begin,
    Commit,
    Envelope,
    Fetch,
    Hop,
    HopCommit,
    More,
    Refused,
    Save,
    Survey,
)
from fedstrata.stratify.masking.messages import Assign, CountReport, OpenKeys, ShareReport, TagReport
from fedstrata.stratify.messages import Gradient, GradientSteps, Reserve, Steps

QUESTIONS = 100
"""The number of questions in a case."""

ROUNDS = 3
JOBS: dict[str, dict[str, Any]] = {
    "stratify": {"method": {"name": "stratify", "cap": 4}},
    "single": {"method": {"name": "stratify", "mode": "single", "chunk_size": 2}},
    "fedstas": {"method": {"name": "fedstas", "epsilon": 2.0, "bound": 50, "strata": 2}},
    "encoded": {"method": "fedavg", "communication": {"up": "qsgd"}},
    "sfl": {"method": {"name": "sfl", "client_sampler": "power-of-choice"}},
}
MAY: dict[str, dict[str, int]] = {
    "stratify": {"LabelReport": 1, "Assign": 1, "Reserve": 10**6, "Gradient": 10**6},
    "single": {"LabelReport": 1, "Assign": 1, "Steps": 10**6},
    "fedstas": {"Compress": 1, "SizeReport": 1, "Fit": 1},
    "encoded": {"Encoded": 1},
    "sfl": {"SizeReport": 1, "LossReport": 1, "Visit": 1},
}
"""For each job, a mapping from requests to the number of times that a client may answer: before the rounds or in each
round."""


class Witness:
    """A second check of requests behind the guard, when handlers are called."""

    def __init__(self, job: str, site: Site) -> None:
        self.job, self.site, self.done = job, site, 0
        self.broken: list[str] = []
        self.forget(0)

    def forget(self, round: int) -> None:
        """Reset the counts, because a run begins or is resumed."""
        self.begun, self.round = round, 0
        self.counts: Counter[tuple[int, str]] = Counter()
        self.reserved: dict[int, set[int]] = {}
        self.trained: dict[int, int] = {}
        handlers = self.site.site_server._running().context.handlers
        for way in ("alone", "sum", "hop", "relay"):
            table = getattr(handlers, way)
            for kind, handler in list(table.items()):
                table[kind] = self.watching(getattr(handler, "watched", handler), way)

    def watching(self, handler: Any, way: str) -> Any:
        """Return a handler that does the same, and reports the request and the answer to this object."""

        def watched(client: Any, request: Any, *rest: Any) -> Any:
            if not (self.job == "encoded" and type(request) is Fit):
                self.see(client.number, request, way)
            answer = handler(client, request, *rest)
            if isinstance(request, Reserve):
                self.reserved.setdefault(client.number, set()).update(request.batches[~answer.missing].tolist())
            return answer

        watched.watched = handler  # type: ignore[attr-defined]
        return watched

    def see(self, client: int, request: Any, way: str) -> None:
        """Check a request that a client is about to answer."""
        self.done += 1
        name = type(request).__name__
        round = getattr(request, "round", 0 if name in ("LabelReport", "Assign") else self.round)
        self.need(name in MAY[self.job], f"{name} of another job")
        self.need((way == "hop") == (name in ("Visit", "Steps")), f"{name} by way of {way}")
        self.need(
            self.begun <= self.round <= round <= ROUNDS or round > self.begun >= self.round, f"{name} back in time"
        )
        if name in ("LabelReport", "Assign") or (name == "SizeReport" and self.job == "sfl"):
            self.need(self.round == 0 and self.begun == 0, f"{name} in round {self.round}")
        else:
            self.need(round >= 1, f"{name} before the rounds")
        if round > self.round:
            self.round, self.reserved, self.trained = round, {}, {}
            self.counts.clear()
        self.counts[client, name] += 1
        self.need(self.counts[client, name] <= MAY[self.job][name], f"{name} twice")
        if isinstance(request, Gradient):
            self.need(request.batch in self.reserved.get(client, set()), "a gradient of nothing")
            self.need(request.batch > self.trained.get(client, -1), "a gradient again")
            self.trained[client] = request.batch
        if isinstance(request, Reserve):
            self.need(request.fresh == (self.counts[client, name] == 1), "an epoch anew")
            self.need(int(request.batches.min()) > self.trained.get(client, -1), "a batch that is over")
            self.need(tuple(request.window) == (0.0, 1.0), "another window")
        if isinstance(request, SizeReport):
            self.need(request.bound == (50 if self.job == "fedstas" else 0), "another bound")
        if isinstance(request, Fit):
            self.need(request.steps == 2 and 0 < request.keep <= 1 and not request.counts, "another training")
        if isinstance(request, Steps):
            self.need(1 <= len(request.labels) <= 2, "a longer task")

    def need(self, holds: bool, what: str) -> None:
        """Record a violation of the rules if ``holds`` is False."""
        if not holds:
            # Do not raise an error here, because it would only count as a failed client.
            self.broken.append(f"job {self.job} in round {self.round}: {what}")


def question(job: str, site: Site, weights: Weights, chance: random.Random) -> Any:
    """Draw a request of this job or of another one, which is often nearly correct."""
    now = max(site.site_server._running().guard.round, 1)
    round = chance.choice([now, now, now, now, now, now + 1, now - 1, 0, 4, -1, 2**62])
    own = chance.random() < 0.85
    some = torch.tensor([chance.choice([0, 0, 1, 2, -1, 2**40]) for _ in range(chance.choice([0, 1, 2, 3]))])
    some = some.to(chance.choice([torch.int64] * 9 + [torch.float32]))
    batches = torch.tensor([chance.randrange(4) for _ in range(len(some) + (chance.random() < 0.1))], dtype=torch.int64)
    batches = batches.sort().values
    none, fresh = torch.zeros(0, dtype=torch.int64), chance.random() < 0.5
    window = (0.0, 1.0) if own else (0.0, 0.1)
    agreed = next(
        (
            each.where["alpha"]
            for each in site.site_server._running().guard.declaration.allowed or ()
            if each.request is SizeReport
        ),
        1.0,
    )
    private = job == "fedstas"
    fit = Fit(round, weights, {}, chance.choice([1.0, 0.5, 0.0, -1.0, float("nan")]), counts=not private)
    if not private and chance.random() < 0.7:
        fit = dataclasses.replace(fit, keep=1.0)
    kinds: dict[str, Any] = {
        "LabelReport": LabelReport(),
        "Assign": Assign(some),
        "Reserve": Reserve(round, batches, some, none, fresh, window),
        "Gradient": Gradient(round, chance.randrange(-1, 5), weights),
        "GradientSteps": GradientSteps(round, 0, weights, 3, 0.1),
        "Steps": Steps(round, some, none, fresh, window),
        "Fit": fit,
        "Compress": Compress(round, weights, 9 if own else 255, 2048 if own else 0),
        "SizeReport": SizeReport(round, 50 if private and own else 0, agreed if own else 1.0),
        "LossReport": LossReport(round, weights),
        "Sketch": Sketch(round, weights, 0),
        "Visit": Visit(round),
        "Evaluate": Evaluate(round, weights, "test", False, 0, 8, 15),
        "Encoded": Encoded(fit, round if own else round + 1, chance.randrange(1, 9), None, not own, {}),
        "Coefficients": Coefficients(chance.randrange(3), {}),
        "OpenKeys": OpenKeys(False),
        "TagReport": TagReport(),
        "CountReport": CountReport(some, 3),
        "ShareReport": ShareReport(some),
        "no request": Save(1),
    }
    return kinds[chance.choice([*MAY[job], *MAY[job], *MAY[job], *kinds])]


def message(job: str, site: Site, weights: Weights, chance: random.Random) -> tuple[str, Any]:
    """Draw the sender of a message and the message."""
    kind = chance.random()
    exchange = site.exchange = site.exchange + chance.choice([1, 1, 1, 1, 1, 0, -1])
    clients = chance.choice([[0], [1], [0, 1], [0, 0], [2], [-1], []])
    if kind < 0.65:
        requests = [question(job, site, weights, chance) for _ in range(chance.choice([1, 1, 2]))]
        which = [chance.randrange(len(requests)) for _ in clients]
        body: Any = Ask(exchange, clients, requests, which, chance.choice(["", "", "", "g"]), clients)
    elif kind < 0.85:
        task = question(job, site, weights, chance)
        model = chance.choice([weights, weights, weights, None])
        base, back = chance.choice([-1, -1, 0]), chance.random() < 0.2
        body = Hop(exchange, chance.randrange(3), chance.randrange(3), 0, task, "", base, model, back, "t", "t")
    elif kind < 0.9:
        body = Fetch(chance.randrange(3), chance.randrange(3), chance.choice(["", "t", "u"]))
        if chance.random() < 0.7:
            return chance.choice(["b", "c", "server"]), body
    else:
        spec = site.spec.to_toml()
        body = chance.choice(
            [
                Begin("run", spec, None, [0, 1], CLIENTS, chance.choice([0, 1, 2])),
                Begin("../run", spec, None, [0], CLIENTS, 0),
                Begin("run", "[data]\nname = '/etc/passwd.npz'", None, [0], CLIENTS, 0),
                Survey(spec, [0], CLIENTS, False),
                Save(chance.choice([-1, 0, 1, 9])),
                More(exchange),
                SizeReport(0, 0, 1.0),
            ]
        )
    acks = chance.choice([[], [Commit(exchange - 1, [0, 1])], [HopCommit(0, 0)], [Save(1)]])
    return SERVER, Envelope(acks, body)


def try_one(number: int, chance: random.Random, place: Path) -> str:
    """Ask one site many questions, and fail if it answers one that it must not answer."""
    job = list(JOBS)[number % len(JOBS)]
    site = Site(place, JOBS[job])
    site.begin()
    witness, weights = Witness(job, site), site.weights
    for _ in range(QUESTIONS):
        caller, body = message(job, site, weights, chance)
        data = records.encode(body)
        if chance.random() < 0.05:
            data = damaged(data, chance)
        before = site.site_server._run
        answer = records.decode(site.site_server.call(caller, data))
        if witness.broken:
            raise SilentDifferenceError("; ".join(witness.broken))
        if site.site_server._run is None:
            site.exchange = 0
            site.begin()
        if site.site_server._run is not before:
            running = site.site_server._running()
            site.exchange = 0
            witness.forget(running.guard.round)
        if isinstance(answer, Refused) and "the log of site" in answer.reason and "WireError" in answer.reason:
            raise WireError(answer.reason)
    return RAN if witness.done else REFUSED


FAMILY = Family("questions", try_one)
