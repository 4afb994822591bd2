"""A site with the digits in this process, which receives and sends bytes, as from a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fedstrata as fs
from fedstrata.base import records
from fedstrata.federation.messages import Fit, Request, Weights
from fedstrata.runs.preparation import prepare
from fedstrata.sites.ledger import Entry
from fedstrata.sites.policy import Policy
from fedstrata.sites.privacy_budget import PrivacyBudget
from fedstrata.sites.settings import SiteSettings
from fedstrata.sites.site_server import SERVER, SiteServer
from fedstrata.sites.wire import (
    Answers,
    Ask,
    Begin,
    Begun,
    Commit,
    Done,
    Envelope,
    Hop,
    Hopped,
    Refused,
    Save,
)

CLIENTS = 2


class MemoryLedger:
    """A ledger that keeps its entries in memory."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def append(self, entries: Any) -> None:
        self.entries += entries

    @property
    def refused(self) -> list[str]:
        return [entry.refused for entry in self.entries if entry.refused]

    @property
    def answered(self) -> list[str]:
        return [entry.kind for entry in self.entries if not entry.refused and not entry.failed]


class Site:
    """A site server with all clients of a small run.

    Args:
        folder: The folder for the states of the clients.
        table: Changes of the small default spec.
        settings: The settings of the site, and its ``policy``.
    """

    def __init__(self, folder: Path, table: dict[str, Any] | None = None, **settings: Any) -> None:
        small = {
            "partition": {"name": "iid", "clients": CLIENTS},
            "data": {"name": "digits", "limit": 60},
            "model": {"name": "mlp", "hidden": []},
            "evaluation": {"every": 0},
        }
        given = dict(table or {})
        training = {"rounds": 3, "local_steps": 2, "clients_per_round": 2, **given.pop("training", {})}
        self.spec = fs.Experiment.from_table({**small, **given, "training": training})
        self.policy: Policy | None = settings.pop("policy", None)
        self.folder, self.settings, self.ledger = folder, SiteSettings(patience=5.0, **settings), MemoryLedger()
        self.exchange = 0
        self.start()

    def start(self) -> None:
        """Start the site, also after a kill."""
        options: dict[str, Any] = {"policy": self.policy, "ledger": self.ledger}
        self.site_server = SiteServer("a", self.folder, lambda target, data: b"", self.settings, **options)
        if self.policy is not None:
            self.site_server.budget = PrivacyBudget(self.folder, self.policy)

    @property
    def weights(self) -> Weights:
        model = prepare(self.spec).config.model
        return Weights(model.params(), model.buffers())

    def call(self, body: Any, *acks: Any, caller: str = SERVER) -> Any:
        data = records.encode(Envelope(list(acks), body) if caller == SERVER else body)
        return records.decode(self.site_server.call(caller, data))

    def begin(self, round: int = 0, run: str = "run") -> Begun | Refused:
        found: Begun | Refused = self.call(Begin(run, self.spec.to_toml(), None, list(range(CLIENTS)), CLIENTS, round))
        return found

    def ask(self, *requests: Request, clients: Any = None, group: str = "", acks: Any = ()) -> list[Any]:
        """Send one request to all clients or one to each, and return the outcomes."""
        self.exchange += 1
        asked = list(range(len(requests) if len(requests) > 1 else 1)) if clients is None else list(clients)
        which = list(range(len(asked))) if len(requests) > 1 else [0] * len(asked)
        found = self.call(Ask(self.exchange, asked, list(requests), which, group, asked if group else []), *acks)
        if isinstance(found, Refused):
            return [found]
        assert isinstance(found, Answers)
        return found.outcomes

    def counts(self, *clients: int) -> Commit:
        """Return a message that confirms the last answers of these clients."""
        return Commit(self.exchange, list(clients))

    def hop(self, task: Request, relay_id: int = 1, hop: int = 0, **more: Any) -> Hopped | Refused:
        self.exchange += 1
        about = {"client": 0, "holder": "", "base": -1, "weights": self.weights, "back": False, "ticket": "t", **more}
        found: Hopped | Refused = self.call(Hop(exchange=self.exchange, relay_id=relay_id, hop=hop, task=task, **about))
        return found

    def save(self, round: int, *acks: Any) -> Done | Refused:
        found: Done | Refused = self.call(Save(round), *acks)
        return found


def fit(site: Site, round: int) -> Fit:
    """Return a request for local training."""
    return Fit(round, site.weights, {}, 1.0)


def long_site(folder: Path) -> Site:
    """Return a site whose job trains for hours with noise, and whose privacy budget is enough for one round."""
    table = {
        "data": {"name": "digits", "limit": 60, "shift": [128.0], "scale": [0.01]},
        "training": {"local_steps": 1_000_000, "batch_size": 8},
        "privacy": {"dp": {"clip": 1.0, "noise": 500.0}},
    }
    return Site(folder, table, policy=Policy(jobs="within-policy", min_samples=1, budget=3.0))
