"""Sites with certificates in this process, which answer messages of secure sums as bytes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from asked import MemoryLedger
from secure_world import authority, identity
from site_engine import make_site_engine

import fedstrata as fs
from fedstrata.base import records
from fedstrata.federation.availability_trace import Trace
from fedstrata.federation.messages import Fit, Weights
from fedstrata.federation.secure import protocol
from fedstrata.federation.secure.certificates import fingerprint
from fedstrata.federation.secure.member import question_of
from fedstrata.federation.secure.requests import Masked, SiteStep, StepReply
from fedstrata.federation.secure.server import Exchange, Server
from fedstrata.runs.preparation import prepare
from fedstrata.runs.simulation import run_prepared
from fedstrata.sites.data_schema import prepare_server
from fedstrata.sites.ledger import Entry
from fedstrata.sites.policy import Policy
from fedstrata.sites.privacy_budget import PrivacyBudget
from fedstrata.sites.secure_site import Credentials, job_of
from fedstrata.sites.settings import SiteSettings
from fedstrata.sites.site_server import SERVER, SiteServer
from fedstrata.sites.sums import Sums
from fedstrata.sites.wire import Answers, Ask, Begin, BegunWithKeys, Envelope, SiteLostError, read

PATIENCE = 120.0


def spec(sites: int = 3, sums: str = "secure", rounds: int = 3, **table: Any) -> fs.Experiment:
    """Return a spec of FedAvg whose clients keep a state, the momentum of their optimiser."""
    training = {"rounds": rounds, "local_steps": 3, "optimizer_state": "keep", "momentum": 0.5, "lr": 0.02}
    return fs.Experiment.from_table(
        {
            "seed": 5,
            "data": {"name": "digits", "limit": 400},
            "model": {"name": "mlp", "hidden": [8]},
            "partition": {"name": "dirichlet", "alpha": 0.5, "clients": sites},
            "evaluation": {"every": 0},
            **table,
            "privacy": {"sums": sums, **table.get("privacy", {})},
            "training": training | table.get("training", {}),
        }
    )


def without(
    client: int, first: int, made: fs.Experiment, folder: Path, back: int | None = None, **how: Any
) -> fs.History:
    """Return a simulation in which one of four clients is offline from a round on, perhaps until another round."""
    rounds = made.training.rounds
    times = [(each, 1, rounds) for each in range(4) if each != client] + [(client, 1, first - 1)]
    times += [(client, back, rounds)] if back else []
    lines = [f"{each},{begin},{end}" for each, begin, end in times if begin <= end]
    (folder / "trace.csv").write_text("\n".join(["client,first,last", *lines]))
    trace = Trace(file=str(folder / "trace.csv"))
    return fs.run(made.model_copy(update={"availability": trace}), **how)


class Deployment:
    """A server and sites a, b, … with one client each.

    Args:
        made: The spec.
        folder: The folder of the sites.
        policies: The policies of sites whose policy is not the default.
        own: The number of sites with their own data, which are in the files a.npz, b.npz, …; 0 if the spec names data.
        options: Options of the engine.
    """

    def __init__(
        self,
        made: fs.Experiment,
        folder: Path,
        policies: dict[str, dict[str, Any]] | None = None,
        own: int = 0,
        **options: Any,
    ) -> None:
        self.prepared = prepare_server(made, folder / "test.npz", own) if own else prepare(made)
        self.folder, self.policies, unfitted = folder, policies or {}, self.prepared.data.unfitted
        self.statistics = None if unfitted is None or not own else unfitted.statistics(())
        """Statistics of no samples, which is enough for data that are not normalised; None if the spec names data."""
        self.names = [chr(ord("a") + client) for client in range(self.prepared.config.clients)]
        self.ledgers = {name: MemoryLedger() for name in self.names}
        self.sent: list[tuple[str, Any]] = []
        """The body of each message to a site, with the name of the site."""
        self.dead: set[str] = set()
        self.before: Callable[[str, Any], None] = lambda site, body: None
        """A function that is called before each message with the site and the body."""
        self.after: Callable[[str, Any], None] = lambda site, body: None
        self.site_servers: dict[str, SiteServer] = {}
        for name in self.names:
            self.start(name)
        text, trust = made.to_toml(), authority().trust
        self.engine = make_site_engine(
            self.prepared.config, self, self.names, Sums(PATIENCE), spec=text, run="run", trust=trust, **options
        )

    def start(self, name: str) -> None:
        """Start a site, also after a kill."""
        self.dead.discard(name)
        policy = Policy(**{"jobs": "within-policy", "min_samples": 1, **self.policies.get(name, {})})
        self.site_servers[name] = SiteServer(
            name,
            self.folder / name,
            lambda target, data: b"",
            SiteSettings(patience=PATIENCE, data=None if self.statistics is None else self.folder / f"{name}.npz"),
            policy=policy,
            ledger=self.ledgers[name],  # type: ignore[arg-type]
            credentials=lambda: Credentials(identity(name), authority().trust),
        )
        self.site_servers[name].budget = PrivacyBudget(self.folder / name, policy)

    def is_reachable(self, site: str) -> bool:
        return site not in self.dead

    def send(self, site: str, data: bytes, patience: float, number: int) -> object:
        body = read(data, Envelope).body
        self.before(site, body)
        if site in self.dead:
            raise SiteLostError("it has not answered for 8 s")
        self.sent.append((site, body))
        answer = self.site_servers[site].call(SERVER, data)
        self.after(site, body)
        if site in self.dead:
            raise SiteLostError("it has not answered for 8 s")
        return answer

    def run(self, out: Path | None = None, *, resume: bool = False) -> fs.History:
        return run_prepared(self.prepared, out, self.engine, resume=resume)

    def entries(self, site: str, kind: str) -> list[Entry]:
        return [entry for entry in self.ledgers[site].entries if entry.kind == kind]


class Malicious:
    """A server that sends sites what it wants, after an honest start.

    Args:
        deployment: The sites.
        total: The number of clients that the server names. Default: the number of sites.
    """

    def __init__(self, deployment: Deployment, total: int | None = None) -> None:
        self.deployment, self.numbers = deployment, count(1)
        spec, config = deployment.prepared.spec, deployment.prepared.config
        self.text, self.weights = spec.to_toml(), Weights(config.model.params(), config.model.buffers())
        self.server = Server(job_of(self.text), authority().trust, colluding=config.privacy.colluding)
        names, packages = deployment.names, {}
        for client, name in enumerate(names):
            begun = self.call(name, Begin("run", self.text, deployment.statistics, [client], total or len(names), 0))
            assert isinstance(begun, BegunWithKeys), begun
            packages[name] = begun.package
        roster = self.server.enrol(packages)
        deals = {name: self.step(name, roster).deal for name in names}
        assert self.server.deliver(deals)
        self.ring = spec.method.forms(config)[Fit].ring

    def call(self, site: str, body: Any, *acks: Any) -> Any:
        return records.decode(self.deployment.site_servers[site].call(SERVER, records.encode(Envelope([*acks], body))))

    def ask(self, site: str, request: Any, *acks: Any) -> Any:
        """Send a request to a site, and return the outcome."""
        client = self.deployment.names.index(site)
        answers = self.call(site, Ask(next(self.numbers), [client], [request], [0], "", []), *acks)
        return answers.outcomes[0] if isinstance(answers, Answers) else answers

    def step(self, site: str, message: Any, round: int = 1) -> Any:
        outcome = self.ask(site, SiteStep(message, round))
        return outcome.message if isinstance(outcome, StepReply) else outcome

    def fit(self, round: int = 1, weights: Weights | None = None) -> Fit:
        return Fit(round, weights or self.weights, {}, 1.0)

    def sum(self, round: int = 1, absent: str = "") -> Exchange:
        """Let sites send their masked vectors for the question of a round."""
        exchange = self.server.begin(question_of(self.fit(round)), self.ring.length)
        assert exchange is not None
        self.begins = dict(exchange.outgoing)
        replies = {
            name: self.ask(name, Masked(self.fit(round), begin))
            for name, begin in self.begins.items()
            if name != absent
        }
        exchange.receive({name: protocol.MaskedVector(r.vector, r.present) for name, r in replies.items()})
        return exchange


def peers(*names: str) -> list[str]:
    """Return the fingerprints of sites."""
    return [fingerprint(identity(name).certificate) for name in names]
