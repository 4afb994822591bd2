"""The server's side: questions go out to the sites where clients live, all sites at once."""

from __future__ import annotations

import itertools
import json
import logging
import math
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from fedstrata.base import records
from fedstrata.base.errors import FedstrataError, WireError
from fedstrata.base.records import Message
from fedstrata.data.fitting import Statistics, Unfitted
from fedstrata.engines.local import refuse_random
from fedstrata.federation.engine import Engine, EngineEvent, Failure, FederationConfig, RelaySession
from fedstrata.federation.messages import ClientId, Reply, Request, Requests, Weights
from fedstrata.federation.reply_checks import defect_of
from fedstrata.sites.sums import Sums
from fedstrata.sites.wire import (
    Answers,
    Ask,
    Begin,
    Begun,
    Commit,
    Done,
    Envelope,
    Failed,
    Fetch,
    Hop,
    HopCommit,
    Hopped,
    More,
    RelayEnd,
    Save,
    SiteLostError,
    SiteRefusedError,
    Survey,
    Surveyed,
    Unmoved,
    read,
)

LOG = logging.getLogger(__name__)

BEGIN_SECONDS = 300.0
"""What a site has at least to load its data and make its clients ready."""

BEGIN_AGAIN = 10.0
"""Seconds after which a site that could not begin is asked again, where sites are waited for."""

WAIT = 0.5
"""Seconds between two looks at whether enough sites are there."""

Fewer = Literal["wait", "abort", "go-on"]
"""What to do with fewer sites than must be there: wait until there are enough, end the run, or go on with those that
are there."""

MOST_AT_ONCE = 64
"""Sites that are talked to at the same time, at least; more where there are more cores."""


class ClientRaisedError(FedstrataError):
    """What a client raised at its site."""


class Transport(Protocol):
    """What carries bytes to a site and back."""

    def send(self, site: str, data: bytes, patience: float, number: int) -> object:
        """What the site answers.

        Args:
            site: Its name.
            data: The question.
            patience: Seconds.
            number: The question's, ascending: asked again with it, a site gives the answer that it gave before.

        Raises:
            SiteLostError: It cannot be reached, or does not answer within ``patience`` seconds.
        """

    def there(self, site: str) -> bool:
        """Whether it is worth asking a site.

        Raises:
            Exception: The job is over.
        """


class NVFlareEngine(Engine):
    """Clients at sites, which keep their data and their states.

    Args:
        config: What was agreed; ``sizes`` may be unknown.
        transport: How sites are reached.
        site_of_client: The site of every client.
        sums: Where sites bring their parts of a group's sums.
        spec: The experiment as TOML.
        run: Names the run at the sites.
        patience: Seconds that a site has for an answer.
        direct: Whether the model of a relay goes from site to site; otherwise through the server, hop by hop.
        log_heads: A file for the heads of the sites' ledgers, round by round; none unless given.
        least: Fewest sites that must answer, before the first round and in every one.
        fewer: What to do when there are fewer.
    """

    keeps_states = True

    def __init__(
        self,
        config: FederationConfig,
        transport: Transport,
        site_of_client: Sequence[str],
        sums: Sums,
        *,
        spec: str,
        run: str,
        patience: float = math.inf,
        direct: bool = True,
        log_heads: Path | None = None,
        least: int = 1,
        fewer: Fewer = "go-on",
    ) -> None:
        self._log_heads_file, self._log_heads, self._log_heads_written = log_heads, dict[str, str](), dict[str, str]()
        self.config, self.transport, self.site_of_client, self.sums = config, transport, list(site_of_client), sums
        self.patience, self.direct, self.least, self.fewer = patience, direct, least, fewer
        self._run, self._spec = run, spec
        self.statistics: Statistics | None = None
        """What all sites' training samples come to, where they bring their own; see ``survey``."""
        self.fingerprints: dict[str, str] = {}
        """Of the sites' files, as they gave them; see ``fedstrata.sites.manifest``."""
        self._sites = sorted(set(site_of_client))
        self._acks: dict[str, list[Message]] = {site: [] for site in self._sites}
        self._pending_events: list[EngineEvent] = []
        self._absent: dict[str, str] = {}
        self._said_of: dict[str, str] = {}
        self._lost: set[str] = set()
        self._refusing: dict[str, str] = {}
        self._unsaved: set[str] = set()
        self._exchange = 0
        self._numbers = itertools.count(time.time_ns())  # of messages; those of the next run at the same sites go on
        self._asked: dict[str, list[ClientId]] = {}
        self._relays = 0
        self._pool = ThreadPoolExecutor(min(len(self._sites), MOST_AT_ONCE), thread_name_prefix="sites")

    def survey(self, unfitted: Unfitted, *, tests: bool) -> Statistics:
        """What the training samples of all sites come to, added up in the order of their clients.

        A site whose data are not what the spec says takes no part, and a note says why.

        Args:
            unfitted: No samples, as the spec describes them.
            tests: Whether sites must have samples to measure models on.

        Raises:
            SiteLostError: No site can be reached.
            FedstrataError: No site has such data.
        """
        asked = {site: self._clients_of(site) for site in dict.fromkeys(self.site_of_client)}
        bodies = {site: Survey(self._spec, clients, self.config.clients, tests) for site, clients in asked.items()}

        def check(site: str, outcome: Surveyed) -> None:
            unfitted.refuse_unlike(outcome.statistics)

        surveyed = self._begin(bodies, Surveyed, check)
        self.fingerprints = {site: surveyed[site].fingerprint for site in bodies if site in surveyed}
        self.statistics = sum(
            (surveyed[site].statistics for site in bodies if site in surveyed), unfitted.statistics(())
        )
        return self.statistics

    def _begin(
        self,
        bodies: Mapping[str, Message],
        kind: type[Message],
        check: Callable[[str, Any], None] = lambda site, outcome: None,
    ) -> dict[str, Any]:
        """What sites answer before the first round; those that cannot take part are left out.

        Args:
            bodies: The question to each.
            kind: Of the answers.
            check: Raises a ``FedstrataError`` where an answer is no good.

        Raises:
            FedstrataError: There are too few, and they are not waited for.
        """
        outcomes: dict[str, Any] = {}
        wanted = dict(bodies)
        while True:
            for site in wanted:
                self._absent.pop(site, None)
            for site, outcome in self._everybody(wanted, kind).items():
                try:
                    if isinstance(outcome, FedstrataError):
                        raise outcome
                    check(site, outcome)
                    outcomes[site] = outcome
                except FedstrataError as error:
                    self._leave_out(site, error)
            wanted = {site: body for site, body in bodies.items() if site not in outcomes}
            if len(outcomes) >= self.least or self.fewer != "wait":
                break
            self._end_if_refused(())  # sites left out for their file count: that can be mended meanwhile
            self._wait(lambda: False, BEGIN_AGAIN)
        for site in wanted:
            self._pending_events.append(("absent", self._clients_of(site), self._absent[site]))
        if not outcomes:
            why = "; ".join(self._absent.values())
            if self._lost >= set(self._sites):
                raise SiteLostError(f"no site can be reached; {why}")
            raise FedstrataError(f"no site takes part; {why}")
        self._refuse_fewer(len(outcomes))
        return outcomes

    def _leave_out(self, site: str, error: FedstrataError) -> None:
        why = str(error).removeprefix(f"site {site}: ")
        reason = f"site {site} takes no part: {why}"
        if self._said_of.get(site) != reason:
            LOG.warning("%s", reason)
        self._absent[site] = self._said_of[site] = reason

    def restore(self, round: int) -> None:
        """Let every site make its clients ready, with their states after ``round``; 0 to start anew.

        A site that cannot is left out of this run, and a note says why; also one whose data are not those with which
        the run began.

        Raises:
            SiteLostError: No site can be reached.
            FedstrataError: No site can begin, or too few can.
        """

        def check(site: str, outcome: Begun) -> None:
            if outcome.fingerprint != self.fingerprints.get(site, outcome.fingerprint):
                problem = "its data are not those with which the run began, or its folder lost the key of fingerprints"
                raise FedstrataError(
                    f"{problem}; accepted: the file as it was then, or a new run, by its seed for example"
                )

        common = self._run, self._spec, self.statistics
        there = [site for site in self._sites if site not in self._absent]
        bodies = {site: Begin(*common, self._clients_of(site), self.config.clients, round) for site in there}
        for site, outcome in self._begin(bodies, Begun, check).items():
            clients = self._clients_of(site)
            if outcome.round != round:
                reason = f"site {site} has its clients' states of round {outcome.round}, not {round}"
                self._pending_events.append(("state lost", clients, reason))
            elif lost := [client for client in outcome.lost if client in clients]:
                reason = f"site {site} has no states of clients that lived elsewhere up to round {round}"
                self._pending_events.append(("state lost", lost, reason))

    def save(self, round: int) -> None:
        """Let every site write its clients' states to its own disk; a note names those that do not any more."""
        outcomes = self._all({site: Save(round) for site in self._sites if site not in self._absent}, Done)
        for site, outcome in outcomes.items():
            if not isinstance(outcome, FedstrataError):
                self._unsaved.discard(site)
            elif site not in self._unsaved:
                self._unsaved.add(site)
                self._pending_events.append(("state not stored", self._clients_of(site), str(outcome)))

    def events(self) -> Iterator[EngineEvent]:
        """What happened since it was last asked."""
        self._write_log_heads()
        while self._pending_events:
            yield self._pending_events.pop(0)

    def ask(self, requests: Mapping[ClientId, Request], *, together: bool) -> Mapping[ClientId, Reply | Failure]:
        """One message to every site, with the questions to its clients."""
        self._asked = {}
        every = Requests.of(requests, requests)
        for client in sorted(requests):
            self._asked.setdefault(self.site_of_client[client], []).append(client)
        group = secrets.token_hex(8) if together else ""
        self._exchange += 1
        bodies: dict[str, Message] = {}
        places = {client: place for place, client in enumerate(sorted(requests))}
        for site, clients in self._asked.items():
            index = {number: place for place, number in enumerate(dict.fromkeys(every.which[c] for c in clients))}
            different = [every.distinct[number] for number in index]
            which = [index[every.which[client]] for client in clients]
            mine = [places[client] for client in clients] if together else []
            bodies[site] = Ask(self._exchange, clients, different, which, group, mine)
        if not together:
            return self._outcomes(self._all(bodies, Answers), requests)
        refuse_random(self.config)
        if gone := [site for site in bodies if site in self._absent]:
            # A sum lacks a part from the start: nobody needs to compute.
            lost = {client: Failure(self._absent[site]) for site in gone for client in self._asked[site]}
            others = Failure("another of the group is absent", bystander=True)
            return {client: lost.get(client, others) for client in requests}
        self.sums.open(group, {site: {places[client] for client in self._asked[site]} for site in bodies})

        def ended(site: str, failed: str) -> None:
            if failed:
                self.sums.abort(group, failed)
            self.sums.leave(group, site)

        try:
            return self._outcomes(self._all(bodies, Answers, ended), requests)
        finally:
            self.sums.close(group)

    def hop(self, client: ClientId, task: Request, weights: Weights) -> tuple[Weights, Reply] | Failure:
        """One hop with the model sent there and back."""
        self._exchange += 1
        self._relays += 1
        self._asked = {self.site_of_client[client]: [client]}
        body = Hop(self._exchange, self._relays, 0, client, task, "", 0, weights, True)
        outcome = self.send(self.site_of_client[client], body, Hopped)
        if isinstance(outcome, FedstrataError):
            self.refuse_solitude([outcome])
            return Failure(str(outcome))
        reply = reply_of(outcome.reply, task)
        if isinstance(reply, Failure):
            self.refuse_solitude([reply])
            return reply
        if outcome.weights is None:
            return Failure("it sent no model back")
        return outcome.weights, reply

    def relay(self, kind: type[Request], weights: Weights) -> RelaySession:
        """A relay from site to site, or hop by hop where the model goes through the server."""
        if not self.direct:
            return super().relay(kind, weights)
        self._relays += 1
        return SiteRelay(self, self._relays, weights)

    def commit(self, accepted: Iterable[ClientId]) -> None:
        """Sites learn with the next message what counts."""
        counted = set(accepted)
        for site, clients in self._asked.items():
            self.tell(site, Commit(self._exchange, [client for client in clients if client in counted]))
        self._asked = {}

    def _write_log_heads(self) -> None:
        """What the sites' ledgers had come to: a site that cuts its own off later is found out."""
        new = {site: head for site, head in self._log_heads.items() if self._log_heads_written.get(site) != head}
        if self._log_heads_file is not None and new:
            with self._log_heads_file.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps({"site": site, "head": head}) + "\n" for site, head in sorted(new.items()))
        self._log_heads_written |= new

    def close(self) -> None:
        """Wait for nobody."""
        self._write_log_heads()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def tell(self, site: str, ack: Message) -> None:
        """Send something along with the next message, and again until one was answered."""
        if site not in self._absent:
            self._acks[site].append(ack)

    def next_exchange(self) -> int:
        """The number of a new exchange."""
        self._exchange += 1
        return self._exchange

    def send(self, site: str, body: Message, *kinds: type[Message]) -> Any:
        """What a site answers, of one of these kinds; a ``FedstrataError`` where it cannot be used."""
        self._gather()
        return self._send(site, body, kinds, next(self._numbers))

    def _send(self, site: str, body: Message, kinds: tuple[type[Message], ...], number: int) -> Any:
        if site in self._absent:
            return SiteLostError(self._absent[site])
        acks = list(self._acks[site])
        patience = max(self.patience, BEGIN_SECONDS) if isinstance(body, (Survey, Begin)) else self.patience
        try:
            data = records.encode(Envelope(acks, body, number))
            answer: Message = read(self.transport.send(site, data, patience, number), *kinds)
        except (SiteLostError, SiteRefusedError, WireError) as error:
            if isinstance(error, SiteLostError):
                self._lost.add(site)
            elif isinstance(error, SiteRefusedError) and error.for_good:
                self._refusing[site] = f"site {site}: {error}"
            return type(error)(f"site {site}: {error}")
        self._lost.discard(site)
        self._refusing.pop(site, None)
        if isinstance(answer, (Answers, Hopped)) and (head := answer.ledger[:100]):
            self._log_heads[site] = head
        del self._acks[site][: len(acks)]
        return answer

    def _all(
        self, bodies: Mapping[str, Message], kind: type[Message], ended: Callable[[str, str], None] | None = None
    ) -> dict[str, Any]:
        """What all sites answer, once enough of them are there.

        Args:
            bodies: The question to each.
            kind: Of the answers.
            ended: Told of each site that has answered, and why its answer breaks the group. A site of a group is not
                asked again: the others do not wait for it.
        """
        self._gather()
        outcomes = self._everybody(bodies, kind, ended)
        self.refuse_solitude(outcomes.values())
        return outcomes

    def _everybody(
        self, bodies: Mapping[str, Message], kind: type[Message], ended: Callable[[str, str], None] | None = None
    ) -> dict[str, Any]:
        numbers = {site: next(self._numbers) for site in bodies}

        def one(site: str) -> Any:
            outcome = self._send(site, bodies[site], (kind,), numbers[site])
            while isinstance(outcome, Answers) and outcome.left:
                rest = self._send(site, More(self._exchange), (Answers,), next(self._numbers))
                if isinstance(rest, FedstrataError):
                    # No SiteLostError: what it was asked first it would not answer again.
                    outcome = WireError(f"site {site} went away between two parts of its answer: {rest}")
                elif not rest.outcomes or rest.left != outcome.left - len(rest.outcomes):
                    outcome = WireError(f"site {site} promised {outcome.left} more answers, and goes on otherwise")
                else:
                    outcome = Answers(outcome.outcomes + rest.outcomes, rest.left)
            if ended is None:
                return outcome
            if isinstance(outcome, FedstrataError):
                ended(site, str(outcome))
            else:
                failed = isinstance(outcome, Answers) and any(isinstance(one, Failed) for one in outcome.outcomes)
                ended(site, f"a client of site {site} failed" if failed else "")
            return outcome

        outcomes: dict[str, Any] = {}
        wanted = list(bodies)
        while True:
            answers = map(one, wanted) if len(wanted) == 1 else self._pool.map(one, wanted)
            outcomes |= dict(zip(wanted, answers, strict=True))
            wanted = [site for site in wanted if isinstance(outcomes[site], SiteLostError) and site not in self._absent]
            missing = self.least - len(self._present() - set(wanted))
            if ended is not None or self.fewer != "wait" or not wanted or missing <= 0:
                return outcomes
            # They are asked the very same again: who has answered already gives the same answer.
            self._wait(partial(self._any_there, wanted), math.inf)

    def _any_there(self, sites: Sequence[str]) -> bool:
        return any(map(self.transport.there, sites))

    def status(self, site: str) -> tuple[str, str]:
        """How a site takes part, in a word, and why it does not: ``in``, ``refused``, ``gone`` or ``late``."""
        if site in self._absent:
            return "refused", self._absent[site]
        if not self.transport.there(site):
            return "gone", "nothing is heard of it, or it has not joined"
        if site in self._refusing:
            return "refused", self._refusing[site]
        return ("late", "its last answer did not come in time") if site in self._lost else ("in", "")

    def _present(self) -> set[str]:
        return {site for site in self._sites if site not in self._absent and self.transport.there(site)}

    def _gather(self) -> None:
        """Before an exchange: enough sites are there, or what ``fewer`` says is done.

        Raises:
            FedstrataError: There are fewer, and they are not waited for.
        """
        if self.fewer == "wait" and len(self._sites) - len(self._absent) >= self.least:
            self._wait(lambda: len(self._present()) >= self.least, math.inf)
        self._refuse_fewer(len(self._present()))

    def _refuse_fewer(self, count: int) -> None:
        if self.fewer == "abort" and count < self.least:
            away = [self._absent.get(site, f"site {site} cannot be reached") for site in self._sites]
            there = self._present()
            why = "; ".join(text for site, text in zip(self._sites, away, strict=True) if site not in there)
            raise FedstrataError(f"{count} sites answer, and least = {self.least}; {why}")

    def _wait(self, ready: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        said = False
        while not ready() and time.monotonic() < end:
            away = ", ".join(site for site in self._sites if site not in self._present())
            if not said:
                LOG.warning("fewer than %d sites answer: waiting for %s", self.least, away)
            said = True
            time.sleep(WAIT)

    def refuse_solitude(self, outcomes: Iterable[object]) -> None:
        """Rounds without anybody would pass in no time; the run can go on when somebody is there again.

        Raises:
            SiteLostError: No site can be reached.
            FedstrataError: Fewer can be than must be, and they are not waited for; or too many refuse to answer, which
                waiting does not change.
        """
        self._end_if_refused(self._absent)
        out = self._lost | self._absent.keys()
        if self.fewer == "wait" and len(self._present()) < self.least:
            return  # the next exchange waits
        if out >= set(self._sites):
            raise SiteLostError(f"no site can be reached; {'; '.join(map(str, outcomes))}")
        self._refuse_fewer(len(set(self._sites) - out))

    def _end_if_refused(self, absent: Collection[str]) -> None:
        willing = len(self._sites) - len(self._refusing.keys() | set(absent))
        if self._refusing and willing < self.least and self.fewer != "go-on":
            why = "; ".join(self._refusing.values())
            raise FedstrataError(f"{willing} sites answer, and least = {self.least}; {why}")

    def _outcomes(
        self, answers: Mapping[str, Any], requests: Mapping[ClientId, Request]
    ) -> dict[ClientId, Reply | Failure]:
        outcomes: dict[ClientId, Reply | Failure] = {}
        for site, answer in answers.items():
            clients = self._asked[site]
            if isinstance(answer, FedstrataError):
                outcomes |= {client: Failure(str(answer)) for client in clients}
            elif len(answer.outcomes) != len(clients):
                reason = f"site {site}: {len(answer.outcomes)} answers to {len(clients)} questions"
                outcomes |= {client: Failure(reason) for client in clients}
            else:
                outcomes |= {
                    client: reply_of(one, requests[client])
                    for client, one in zip(clients, answer.outcomes, strict=True)
                }
        return outcomes

    def _clients_of(self, site: str) -> list[ClientId]:
        return [client for client, at in enumerate(self.site_of_client) if at == site]


def reply_of(outcome: object, request: Request) -> Reply | Failure:
    """A reply to a request, or why there is none."""
    if isinstance(outcome, Failed):
        error = None if outcome.bystander or outcome.refused else ClientRaisedError(outcome.reason)
        return Failure(outcome.reason, error, outcome.bystander, outcome.refused)
    wanted = request.reply_type
    if isinstance(outcome, wanted):
        return outcome
    return Failure(
        f"a {type(outcome).__name__} is no answer to {type(request).__name__}, which wants {wanted.__name__}"
    )


class SiteRelay:
    """A relay in which the model goes from site to site; see ``fedstrata.federation.engine.RelaySession``.

    The server sends the tasks and says where the model is. A site keeps the last model that it made until the relay
    is over, so that the loss of a site costs no more than the hops since the model was last elsewhere.

    Args:
        engine: How sites are reached.
        number: The relay's.
        weights: The model that sets out.
    """

    def __init__(self, engine: NVFlareEngine, number: int, weights: Weights) -> None:
        self._engine, self._number, self._weights = engine, number, weights
        self._trail: list[int] = []
        """The hops after which the model can be had, in order: the last of each site."""
        self._outcomes: list[Reply | Failure] = []
        self._clients: list[ClientId] = []
        self._tickets: list[str] = []
        """Of the hops that count: who is next shows it to get the model, and nobody else can."""
        self._sites: set[str] = set()
        self._last: tuple[ClientId, Reply, str] | None = None

    def hop(self, client: ClientId, task: Request) -> Reply | Failure:
        """Send a task; the site fetches the model from where it is."""
        self._last = None
        site = self._engine.site_of_client[client]
        self._sites.add(site)
        while True:
            base = self._trail[-1] if self._trail else -1
            holder = self._site_of_hop(base) if base >= 0 else ""
            weights = self._weights if base < 0 else None
            number, ticket = len(self._outcomes), secrets.token_hex(16)
            key = self._tickets[base] if base >= 0 else ""
            exchange = self._engine.next_exchange()
            body = Hop(exchange, self._number, number, client, task, holder, base, weights, False, ticket, key)
            outcome = self._engine.send(site, body, Hopped, Unmoved)
            if isinstance(outcome, Unmoved) and base >= 0:
                # Perhaps those two sites may not talk, or it came damaged: through the server then.
                fetched = self._fetch(base)
                if isinstance(fetched, FedstrataError):
                    self._lose(base, str(fetched))
                    continue
                exchange = self._engine.next_exchange()
                body = Hop(exchange, self._number, number, client, task, "", base, fetched, False, ticket)
                outcome = self._engine.send(site, body, Hopped, Unmoved)
            if isinstance(outcome, FedstrataError | Unmoved):
                self._engine.refuse_solitude([outcome])
                return Failure(outcome.reason if isinstance(outcome, Unmoved) else str(outcome))
            reply = reply_of(outcome.reply, task)
            if isinstance(reply, Failure):
                self._engine.refuse_solitude([reply])
            else:
                self._last = client, reply, ticket
            return reply

    def keep(self, accepted: bool) -> None:
        """Let the last hop count, or not."""
        if not accepted or self._last is None:
            return
        client, reply, ticket = self._last
        site, number = self._engine.site_of_client[client], len(self._outcomes)
        self._engine.tell(site, HopCommit(self._number, number))
        self._outcomes.append(reply)
        self._clients.append(client)
        self._tickets.append(ticket)
        self._trail = [hop for hop in self._trail if self._site_of_hop(hop) != site] + [number]

    def finish(self) -> tuple[Weights, list[Reply | Failure]]:
        """Fetch the model, and let the sites keep what counts."""
        weights = self._weights
        while self._trail:
            base = self._trail[-1]
            fetched = self._fetch(base)
            if isinstance(fetched, Weights):
                weights = fetched
                break
            self._lose(base, str(fetched))
        void = {c for c, outcome in zip(self._clients, self._outcomes, strict=True) if isinstance(outcome, Failure)}
        for site in self._sites:
            self._engine.tell(site, RelayEnd(self._number, sorted(void)))
        return weights, self._outcomes

    def _fetch(self, base: int) -> Weights | FedstrataError:
        outcome = self._engine.send(self._site_of_hop(base), Fetch(self._number, base, self._tickets[base]), Weights)
        if isinstance(outcome, FedstrataError):
            return outcome
        if defect := defect_of(outcome, lambda weights: weights.require_like(self._weights)):
            return FedstrataError(defect)
        weights: Weights = outcome
        return weights

    def _lose(self, base: int, reason: str) -> None:
        """The model after a hop cannot be had: what was done since it was last elsewhere does not count."""
        self._trail.remove(base)
        since = self._trail[-1] if self._trail else -1
        for hop in range(since + 1, len(self._outcomes)):
            if not isinstance(self._outcomes[hop], Failure):
                self._outcomes[hop] = Failure(f"the model that it passed on was lost: {reason}")

    def _site_of_hop(self, hop: int) -> str:
        return self._engine.site_of_client[self._clients[hop]]
