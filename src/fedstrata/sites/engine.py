"""The engine for clients at sites. It sends requests to all sites at the same time, and collects the replies."""

from __future__ import annotations

import json
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from fedstrata.base.errors import FedstrataError, SpecError
from fedstrata.base.records import Message
from fedstrata.data.fitting import Statistics, Unfitted
from fedstrata.engines.local import refuse_random
from fedstrata.federation.engine import Engine, EngineEvent, Failure, FederationConfig, RelaySession
from fedstrata.federation.messages import ClientId, Reply, Request, Requests, Weights
from fedstrata.runs.identity import fingerprints_of_frozen
from fedstrata.sites.messenger import Messenger
from fedstrata.sites.relay import SiteRelay, reply_of
from fedstrata.sites.sums import Sums
from fedstrata.sites.wire import (
    Answers,
    Ask,
    Begin,
    BeginOnBase,
    Begun,
    BegunWithKeys,
    Commit,
    Done,
    Failed,
    Hop,
    Hopped,
    Save,
    Survey,
    Surveyed,
)

if TYPE_CHECKING:
    from fedstrata.federation.secure.certificates import Trust
    from fedstrata.sites.secure_sums import SecureSums

BEGIN_AGAIN = 10.0
"""The number of seconds between two attempts to begin the run at a site, while the run waits for more sites."""


class NVFlareEngine(Engine):
    """An engine for clients at sites. The sites store the clients' data and states.

    In a relay, clients train the same model, one after another. The training at one client is a hop.

    Args:
        config: The settings that server and clients share.
        messenger: The messenger that sends messages to the sites.
        sums: The object that adds up tensors from several sites. Some methods need such sums.
        spec: The experiment as TOML.
        run: The name of the run. Sites store their clients' states under this name.
        direct: True if the model of a relay goes from site to site; False if the model returns to the server after each
            client.
        log_heads: The file to which the heads (last checksums) of the sites' ledgers are written after each round.
            Default: no file.
        trust: The certificates that the server accepts in secure sums. Default: no certificates, so runs with secure
            sums are refused.

    Raises:
        SpecError: Secure sums are needed, but certificates are missing or a site has several clients.
    """

    secure_sums: SecureSums | None = None
    keeps_states = True

    def __init__(
        self,
        config: FederationConfig,
        messenger: Messenger,
        sums: Sums,
        *,
        spec: str,
        run: str,
        direct: bool = True,
        log_heads: Path | None = None,
        trust: Trust | None = None,
    ) -> None:
        self.config, self.sums, self.direct = config, sums, direct
        self.messenger, self.directory = messenger, messenger.directory
        self._run, self._spec = run, spec
        self._log_heads_file, self._log_heads_written = log_heads, dict[str, str]()
        self.statistics: Statistics | None = None
        """The statistics of all sites' training samples, if sites bring their own data; see ``survey``."""
        self.fingerprints: dict[str, str] = {}
        """A mapping from each site to the fingerprint of its data file; see ``fedstrata.sites.manifest``."""
        self.most_samples: dict[ClientId, int] = {}
        """A mapping from each client to the number of training samples that its site reported in ``survey``."""
        self.events: deque[EngineEvent] = deque()
        self._unsaved: set[str] = set()
        self._asked: dict[str, list[ClientId]] = {}
        """A mapping from each site to the ids of the site's clients that got a request in the latest exchange."""
        self._relays = 0
        if config.privacy.sums == "secure":
            self._sum_securely(trust)

    def _sum_securely(self, trust: Trust | None) -> None:
        from fedstrata.sites.secure_site import job_of, require_own_sites
        from fedstrata.sites.secure_sums import SecureSums

        if trust is None:
            problem = "needs certificates, which this server does not have. "
            problem += "Set privacy.sums = 'plain', or run the job in a deployment."
            raise SpecError("privacy.sums", problem, "secure")
        require_own_sites(self.directory.site_of_client)
        self.secure_sums = SecureSums(self, job_of(self._spec), trust)

    def survey(self, unfitted: Unfitted, *, tests: bool) -> Statistics:
        """Ask all sites for statistics of their training samples, and return the combined statistics.

        A site takes part in the run only if its data fit the spec. Otherwise, an event gives the reason.

        Args:
            unfitted: A data set without samples, which was made from the spec's description of the data.
            tests: Whether each site must have test samples.

        Raises:
            SiteLostError: All sites are unreachable.
            FedstrataError: Too few sites have data that fit the spec.
        """
        sites = list(dict.fromkeys(self.directory.site_of_client))
        total = self.config.clients
        bodies = {site: Survey(self._spec, self.directory.clients_of(site), total, tests) for site in sites}
        surveyed = self._begin(bodies, Surveyed, lambda _, answer: unfitted.refuse_unlike(answer.statistics))
        answers = {site: surveyed[site] for site in sites if site in surveyed}
        self.fingerprints = {site: answer.fingerprint for site, answer in answers.items()}
        for site, answer in answers.items():
            if answer.statistics.samples:  # the number is 0 if the features do not depend on statistics
                self.most_samples |= dict.fromkeys(self.directory.clients_of(site), answer.statistics.samples)
        self.statistics = sum((answer.statistics for answer in answers.values()), unfitted.statistics(()))
        return self.statistics

    def _begin(
        self, bodies: Mapping[str, Message], kind: type[Message], check: Callable[[str, Any], None]
    ) -> dict[str, Any]:
        """Send each site a message before the run begins, and exclude all sites that cannot take part.

        Args:
            bodies: A mapping from each site to its message.
            kind: The expected class of the replies.
            check: A function that is called with a site and its reply, and raises a ``FedstrataError`` if the reply
                cannot be used.

        Returns:
            A mapping from site names to replies, for the sites that can take part.

        Raises:
            FedstrataError: No site can take part, or ``fewer`` is ``abort`` and fewer than ``least`` sites can take
                part.
        """
        outcomes: dict[str, Any] = {}
        wanted = dict(bodies)
        while True:
            for site in wanted:
                self.directory.excluded.pop(site, None)
            for site, outcome in self.messenger.deliver(wanted, kind).items():
                try:
                    if isinstance(outcome, FedstrataError):
                        raise outcome
                    check(site, outcome)
                    outcomes[site] = outcome
                except FedstrataError as error:
                    self.directory.exclude(site, error)
            wanted = {site: body for site, body in bodies.items() if site not in outcomes}
            if len(outcomes) >= self.directory.least or self.directory.fewer != "wait":
                break
            # Do not count the sites that were excluded above, because they may still correct their data, and are asked
            # again.
            self.directory.require_willing(())
            self.directory.wait(lambda: False, BEGIN_AGAIN)
        for site in wanted:
            self._note("absent", site, self.directory.excluded[site])
        self.directory.require_begun(len(outcomes))
        return outcomes

    def _note(self, kind: str, site: str, reason: str, clients: list[ClientId] | None = None) -> None:
        """Add an event about some clients of a site, by default about all its clients."""
        self.events.append((kind, self.directory.clients_of(site) if clients is None else clients, reason))

    def restore(self, round: int) -> None:
        """Let each site restore the states that its clients had at the end of ``round``.

        If ``round`` is 0, begin a new run. A site does not take part if it refuses the run, or if its data have
        changed since the run began. Events report why a site does not take part, and which clients' states were not
        restored.

        Raises:
            SiteLostError: All sites are unreachable.
            FedstrataError: Not enough sites can begin the run.
        """

        def check(site: str, answer: Begun) -> None:
            if answer.fingerprint != self.fingerprints.get(site, answer.fingerprint):
                problem = "the site's data have changed since the run began, or the site has lost its fingerprint key"
                raise FedstrataError(
                    f"{problem}. Restore the data or the key, or start a new run, for example with another seed."
                )

        common, total = (self._run, self._spec, self.statistics), self.config.clients
        sites = self.directory.participants()
        frozen = fingerprints_of_frozen(self.config.model)
        first = partial(BeginOnBase, frozen=frozen) if frozen else Begin
        bodies = {site: first(*common, self.directory.clients_of(site), total, round) for site in sites}
        for site, answer in self._begin(bodies, Begun, check).items():
            clients = self.directory.clients_of(site)
            if isinstance(answer, BegunWithKeys) and self.secure_sums is not None:
                self.secure_sums.packages[site] = answer.package
            if answer.round != round:
                reason = f"site {site} has the states of its clients after round {answer.round}, not round {round}"
                self._note("state lost", site, reason)
            elif lost := [client for client in answer.lost if client in clients]:
                reason = f"site {site} does not have the states of clients that were at other sites up to round {round}"
                self._note("state lost", site, reason, lost)

    def save(self, round: int) -> None:
        """Let each site write its clients' states to its disk. Only a site's first failure causes an event."""
        bodies = {site: Save(round) for site in self.directory.participants()}
        for site, outcome in self.messenger.ask_all(bodies, Done).items():
            if not isinstance(outcome, FedstrataError):
                self._unsaved.discard(site)
            elif site not in self._unsaved:
                self._unsaved.add(site)
                self._note("state not stored", site, str(outcome))

    def ask(self, requests: Mapping[ClientId, Request], *, together: bool) -> Mapping[ClientId, Reply | Failure]:
        """Send each site one message with the requests to all its clients, and return the reply of each client."""
        self._asked = {}
        for client in sorted(requests):
            self._asked.setdefault(self.directory.site_of_client[client], []).append(client)
        group = secrets.token_hex(8) if together else ""
        places = {client: place for place, client in enumerate(sorted(requests))}
        bodies = self._bodies(Requests.of(requests, requests), group, places)
        if not together:
            return self._replies(self.messenger.ask_all(bodies, Answers), requests)
        refuse_random(self.config)
        excluded = self.directory.excluded
        if missing := [site for site in bodies if site in excluded]:
            # These clients add up tensors together. If one of them is missing, a sum cannot be complete, so none of
            # them is asked.
            lost = {client: Failure(excluded[site]) for site in missing for client in self._asked[site]}
            others = Failure("another client of the group is absent", bystander=True)
            return {client: lost.get(client, others) for client in requests}
        self.sums.open(group, {site: {places[client] for client in self._asked[site]} for site in bodies})

        def ended(site: str, outcome: Any) -> None:
            if isinstance(outcome, FedstrataError):
                self.sums.abort(group, str(outcome))
            elif any(isinstance(each, Failed) for each in outcome.outcomes):
                self.sums.abort(group, f"a client of site {site} failed")
            self.sums.leave(group, site)

        try:
            return self._replies(self.messenger.ask_all(bodies, Answers, ended), requests)
        finally:
            self.sums.close(group)

    def _bodies(self, requests: Requests, group: str, places: Mapping[ClientId, int]) -> dict[str, Message]:
        """Return a mapping from each site to a message with the requests to the site's clients.

        If several clients of a site get equal requests, the message contains the request only once.
        """
        exchange, bodies = self.messenger.next_exchange(), dict[str, Message]()
        for site, clients in self._asked.items():
            shared = {key: place for place, key in enumerate(dict.fromkeys(requests.which[each] for each in clients))}
            distinct, which = [requests.distinct[key] for key in shared], [shared[requests.which[c]] for c in clients]
            bodies[site] = Ask(exchange, clients, distinct, which, group, [places[c] for c in clients if group])
        return bodies

    def _replies(
        self, answers: Mapping[str, Any], requests: Mapping[ClientId, Request]
    ) -> dict[ClientId, Reply | Failure]:
        replies: dict[ClientId, Reply | Failure] = {}
        for site, answer in answers.items():
            clients = self._asked[site]
            if isinstance(answer, FedstrataError):
                replies |= {client: Failure(str(answer)) for client in clients}
            elif len(answer.outcomes) != len(clients):
                reason = f"site {site} sent {len(answer.outcomes)} replies to {len(clients)} requests"
                replies |= {client: Failure(reason) for client in clients}
            else:
                outcomes = zip(clients, answer.outcomes, strict=True)
                replies |= {client: reply_of(outcome, requests[client]) for client, outcome in outcomes}
        return replies

    def hop(self, client: ClientId, task: Request, weights: Weights) -> tuple[Weights, Reply] | Failure:
        """Send the model to a client's site, let the client train it, and return the new model and the reply."""
        site = self.directory.site_of_client[client]
        self._relays += 1
        self._asked = {site: [client]}
        body = Hop(self.messenger.next_exchange(), self._relays, 0, client, task, "", 0, weights, True)
        outcome = self.messenger.ask(site, body, Hopped)
        reply = Failure(str(outcome)) if isinstance(outcome, FedstrataError) else reply_of(outcome.reply, task)
        if isinstance(reply, Failure):
            self.directory.require_enough([reply.reason])
            return reply
        if outcome.weights is None:
            return Failure(f"site {site} did not send the model back")
        return outcome.weights, reply

    def relay(self, kind: type[Request], weights: Weights) -> RelaySession:
        """Begin a relay. The model goes from site to site if ``direct`` is True, and otherwise through the server."""
        if not self.direct:
            return super().relay(kind, weights)
        self._relays += 1
        return SiteRelay(self.messenger, self._relays, weights)

    def commit(self, accepted: Iterable[ClientId]) -> None:
        """Record which replies the server used. The next message to each site contains this information."""
        counted = set(accepted)
        for site, clients in self._asked.items():
            ack = Commit(self.messenger.exchange, [client for client in clients if client in counted])
            self.messenger.acknowledge(site, ack)
        self._asked = {}

    def write_log_heads(self, record: object = None) -> None:
        """Append new heads of the sites' ledgers to the file.

        With these heads (last checksums), a check can find entries that a site removed. The run calls this method with
        each round's record, but the method does not use the record.
        """
        heads, written = self.messenger.log_heads, self._log_heads_written
        changed = {site: head for site, head in heads.items() if written.get(site) != head}
        if self._log_heads_file is not None and changed:
            lines = [json.dumps({"site": site, "head": head}) + "\n" for site, head in sorted(changed.items())]
            with self._log_heads_file.open("a", encoding="utf-8") as file:
                file.writelines(lines)
        self._log_heads_written |= changed

    @override
    def close(self) -> None:
        self.write_log_heads()
        self.messenger.close()
