"""A federation whose messages tests can record, drop and change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import printed_protocol
import pytest
from torch import nn

from fedstrata.base import records
from fedstrata.clients.client import ClientContext, StateStore
from fedstrata.data.dataset import from_arrays
from fedstrata.data.partitions.base import Assignment
from fedstrata.engines.local import LocalEngine
from fedstrata.federation.availability import Always
from fedstrata.federation.engine import Engine, Failure, FederationConfig
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import Reply, Request, Weights
from fedstrata.federation.settings import Training
from fedstrata.models.model import Model
from fedstrata.objectives.base import CrossEntropy
from fedstrata.runs.simulation import HANDLERS
from fedstrata.stratify.masking import enrolment
from fedstrata.stratify.masking.key_store import KeyRing


class Wire(Engine):
    """An engine that encodes every message as bytes, as between machines.

    ``received`` contains all messages that the server received. ``cut`` names for each client the kinds of request at
    which it disappears. ``tamper`` changes a client's reply to a kind of request.
    """

    def __init__(self, engine: LocalEngine) -> None:
        self.engine = engine
        self.received: list[bytes] = []
        self.asked: list[tuple[int, type[Request]]] = []
        self.cut: dict[int, type[Request]] = {}
        self.tamper: dict[tuple[int, type[Request]], Callable[[Any], Reply]] = {}
        self.gone: set[int] = set()

    def ask(self, requests: Mapping[int, Request], *, together: bool) -> dict[int, Reply | Failure]:
        self.gone |= {k for k, request in requests.items() if self.cut.get(k) is type(request)}
        self.asked += [(k, type(request)) for k, request in requests.items()]
        there = {k: records.decode(records.encode(r)) for k, r in requests.items() if k not in self.gone}
        outcomes: dict[int, Reply | Failure] = dict(self.engine.ask(there, together=together)) if there else {}
        for k, outcome in outcomes.items():
            if not isinstance(outcome, Failure):
                change = self.tamper.get((k, type(requests[k])), lambda reply: reply)
                self.received.append(records.encode(change(outcome)))
                outcomes[k] = records.decode(self.received[-1])
        return outcomes | {k: Failure("connection lost") for k in requests if k in self.gone}

    def ask_sum(self, requests: Mapping[int, Request]) -> Reply | None:
        reply = self.engine.ask_sum(requests)
        self.received.append(records.encode(reply))
        return reply

    def commit(self, accepted: Iterable[int]) -> None:
        self.engine.commit(accepted)

    def hop(self, client: int, task: Request, weights: Weights) -> tuple[Weights, Reply] | Failure:
        return self.engine.hop(client, task, weights)

    def close(self) -> None:
        self.engine.close()


class Site(Federation):
    """A federation with shortcuts to data that tests check."""

    engine: Wire  # type: ignore[assignment]

    def map_of(self, client: int) -> dict[int, int]:
        """Return the labels that a client knows, as a mapping from placeholder to class index."""
        return dict(self.engine.engine.store.get(client)["placeholders"])

    def reasons(self, kind: str) -> list[str]:
        return [event["reason"] for event in self.events if event["kind"] == kind]

    def count(self, kind: type[Request]) -> int:
        """Return the number of requests of this kind."""
        return sum(asked is kind for _, asked in self.engine.asked)


SHARED = KeyRing()
"""Keys that tests share, because making keys takes longer than most tests."""


def build(
    holdings: Sequence[Mapping[Any, int]], *, names: Sequence[Any] | None = None, keys: KeyRing | None = None
) -> Site:
    """Build a federation whose clients hold given numbers of samples of each label.

    Args:
        holdings: For each client, a mapping from label to number of samples.
        names: All labels. Default: the labels of ``holdings``.
        keys: The clients' keys. Default: those that tests share.
    """
    labels = [label for held in holdings for label, n in held.items() for _ in range(n)]
    everything = list(names) if names is not None else sorted(set(labels))
    y = np.array([*labels, *everything])  # each class also has one test sample
    x = np.zeros((len(y), 1), dtype=np.float32)
    data = from_arrays(x, y, x[:1], y[:1], normalize="none")
    ends = np.cumsum([sum(held.values()) for held in holdings])
    parts = np.split(np.arange(len(labels)), ends[:-1])
    assignment = Assignment.from_lists(parts)
    config = FederationConfig(
        7,
        Training(),
        Model(nn.Linear(1, data.outputs)),
        data.outputs,
        len(holdings),
        assignment.sizes,
        strata=data.outputs,
    )
    context = ClientContext(
        config, data, assignment, CrossEntropy(), HANDLERS + printed_protocol.HANDLERS, keys=keys or SHARED
    )
    site = Site(Wire(LocalEngine(context, StateStore())), config, Always(), "toy")
    site.begin(0)
    return site


@pytest.fixture(autouse=True)
def printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the published protocol to the modes of masking."""
    monkeypatch.setitem(enrolment._MODES, printed_protocol.MODE, printed_protocol.enrol_printed)


@pytest.fixture
def site() -> Callable[..., Site]:
    """Return ``build``."""
    return build


@pytest.fixture
def wire() -> type[Wire]:
    """Return the class ``Wire``."""
    return Wire
