"""The attacks of a hostile server in a real federation, after its job has started as agreed."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fedstrata.base import records
from fedstrata.federation.engine import Failure
from fedstrata.federation.messages import Request, Weights
from fedstrata.runs.preparation import Prepared
from fedstrata.runs.simulation import Simulation
from fedstrata.sampling.label_counts import LabelReport
from fedstrata.sites.engine import NVFlareEngine
from fedstrata.sites.wire import Envelope, Survey
from fedstrata.stratify.messages import Gradient, Reserve

NONE = torch.zeros(0, dtype=torch.int64)
LOOT = "loot.json"


def instead_of_the_survey(prepared: Prepared, engine: NVFlareEngine, folder: Path, **_: Any) -> Prepared:
    """Send each probe of ``FEDSTRATA_PROBES`` to each site, and write all replies into a file next to the run."""
    texts, numbers = json.loads(os.environ["FEDSTRATA_PROBES"]), itertools.count(time.time_ns())
    loot = dict[str, list[str]]()
    for client, site in enumerate(engine.directory.site_of_client):
        for text in texts:
            number = next(numbers)
            data = records.encode(Envelope([], Survey(text, [client], prepared.config.clients, False), number))
            answer = engine.messenger._transport.send(site, data, 60.0, number)
            assert isinstance(answer, bytes)
            loot.setdefault(site, []).append(answer.hex())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LOOT).write_text(json.dumps(loot))
    return prepared


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing instead of training."""


def instead_of_the_job(prepared: Prepared, folder: Path, engine: NVFlareEngine, *_: Any, **__: Any) -> None:
    """Enrol clients as agreed, and then attack them; write all data that clients reveal into a file next to the run."""
    clients, loot = range(prepared.config.clients), dict[str, Any]()
    model = prepared.config.model
    weights = Weights(model.params(), model.buffers())

    def ask(requests: Mapping[int, Request]) -> tuple[dict[int, Any], dict[int, str]]:
        """Return the answers of clients, and the reasons of those that did not answer."""
        outcomes = engine.ask(requests, together=False)
        got = {client: outcome for client, outcome in outcomes.items() if not isinstance(outcome, Failure)}
        engine.commit(got)
        return got, {client: found.reason for client, found in outcomes.items() if isinstance(found, Failure)}

    folder.mkdir(parents=True, exist_ok=True)  # closing the engine writes the heads of the ledgers into it
    with Simulation(prepared, engine) as simulation:
        holders = simulation.state.holders
        placeholder: dict[int, int] = {}
        for place, name in enumerate(holders.placeholders.tolist()):
            placeholder |= dict.fromkeys(holders.of_placeholder(place)[0].tolist(), name)
        told, loot["no labels"] = ask(dict.fromkeys(clients, LabelReport()))
        loot["labels"] = {client: sorted(reply.labels.tolist()) for client, reply in told.items()}
        one = torch.zeros(1, dtype=torch.int64)
        ask({c: Reserve(1, one, torch.tensor([placeholder[c]]), NONE, True, (0.0, 1.0)) for c in clients})
        parts, loot["no gradient"] = ask(dict.fromkeys(clients, Gradient(1, 0, weights)))
        loot["samples"] = {client: reply.samples for client, reply in parts.items()}
    (folder / LOOT).write_text(json.dumps(loot))
