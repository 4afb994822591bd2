"""The server's messages to sites: to all at the same time, numbered, with acknowledgements of earlier answers."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from fedstrata.base import records
from fedstrata.base.errors import FedstrataError, WireError
from fedstrata.base.records import Message
from fedstrata.sites import wire
from fedstrata.sites.directory import Fewer, SiteDirectory
from fedstrata.sites.wire import SiteLostError, SiteRefusedError, read

BEGIN_SECONDS = 300.0
"""Least time that a site has to load its data and set up its clients."""

MOST_AT_ONCE = 64
"""Most sites that are asked at the same time."""


class Transport(Protocol):
    """The connection that carries bytes to a site and back."""

    def send(self, site: str, data: bytes, patience: float, number: int) -> object:
        """Return a site's answer.

        Args:
            site: Its name.
            data: The message.
            patience: Seconds to wait.
            number: The message's number, ascending. A site that is asked the same number again repeats its answer.

        Raises:
            SiteLostError: The site cannot be reached, or does not answer within ``patience`` seconds.
        """

    def is_reachable(self, site: str) -> bool:
        """Return whether it is worth asking a site.

        Raises:
            Exception: The job is over.
        """


class Messenger:
    """The server's side of the wire protocol.

    Args:
        transport: How sites are reached.
        site_of_client: The site of every client.
        patience: Seconds that a site has for an answer.
        least: Fewest sites that must answer, before the first round and in every round.
        fewer: What to do when fewer sites answer.
    """

    def __init__(
        self,
        transport: Transport,
        site_of_client: Sequence[str],
        *,
        patience: float = math.inf,
        least: int = 1,
        fewer: Fewer = "go-on",
    ) -> None:
        self.directory = directory = SiteDirectory(site_of_client, transport.is_reachable, least, fewer)
        self.exchange = 0
        self.log_heads: dict[str, str] = {}
        """The newest head of each site's ledger."""
        self._transport, self._patience = transport, patience
        self._acks: dict[str, list[Message]] = {site: [] for site in directory.sites}
        # The next run at the same sites continues the numbers of messages.
        self._numbers = itertools.count(time.time_ns())
        self._pool = ThreadPoolExecutor(min(len(directory.sites), MOST_AT_ONCE), thread_name_prefix="sites")

    def close(self) -> None:
        """Stop, without waiting for sites that have not answered."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def next_exchange(self) -> int:
        """Begin an exchange, and return its number."""
        self.exchange += 1
        return self.exchange

    def acknowledge(self, site: str, ack: Message) -> None:
        """Send an acknowledgement with the site's next messages, until the site has answered one of them."""
        if site not in self.directory.excluded:
            self._acks[site].append(ack)

    def ask(self, site: str, body: Message, *kinds: type[Message]) -> Any:
        """Return a site's answer of one of these kinds, or a ``FedstrataError`` if it cannot be used."""
        self.directory.gather()
        return self._send(site, body, kinds, next(self._numbers))

    def ask_all(
        self, bodies: Mapping[str, Message], kind: type[Message], ended: Callable[[str, Any], None] | None = None
    ) -> dict[str, Any]:
        """Return the answers of several sites, once enough sites can be reached.

        Args:
            bodies: The message to each site.
            kind: The kind of the answers.
            ended: For a group: is called with each site and its answer, or error, as soon as it is there. Sites of a
                group are not asked again, because the others do not wait for them.
        """
        self.directory.gather()
        outcomes = self.deliver(bodies, kind, ended)
        self.directory.require_enough(outcomes.values())
        return outcomes

    def deliver(
        self, bodies: Mapping[str, Message], kind: type[Message], ended: Callable[[str, Any], None] | None = None
    ) -> dict[str, Any]:
        """Return the answers of several sites, or the errors; see ``ask_all``."""
        directory, outcomes = self.directory, dict[str, Any]()
        numbers = {site: next(self._numbers) for site in bodies}

        def ask(site: str) -> Any:
            outcome = self._complete(site, self._send(site, bodies[site], (kind,), numbers[site]))
            if ended is not None:
                ended(site, outcome)
            return outcome

        wanted = list(bodies)
        while True:
            answers = map(ask, wanted) if len(wanted) == 1 else self._pool.map(ask, wanted)
            outcomes |= dict(zip(wanted, answers, strict=True))
            lost = {site for site in wanted if isinstance(outcomes[site], SiteLostError)}
            wanted = [site for site in wanted if site in lost and site not in directory.excluded]
            enough = len(directory.present() - set(wanted)) >= directory.least
            if ended is not None or directory.fewer != "wait" or not wanted or enough:
                return outcomes
            # The messages keep their numbers: a site that has answered repeats its answer.
            directory.wait_for_any(wanted)

    def _complete(self, site: str, outcome: Any) -> Any:
        """Fetch the answers that did not fit into the first message."""
        while isinstance(outcome, wire.Answers) and outcome.left:
            rest = self._send(site, wire.More(self.exchange), (wire.Answers,), next(self._numbers))
            if isinstance(rest, FedstrataError):
                # Not a SiteLostError: the site would not repeat its first answer.
                return WireError(f"site {site} went away between two parts of its answer: {rest}")
            if not rest.outcomes or rest.left != outcome.left - len(rest.outcomes):
                return WireError(f"site {site} promised {outcome.left} more answers, and goes on otherwise")
            outcome = wire.Answers(outcome.outcomes + rest.outcomes, rest.left)
        return outcome

    def _send(self, site: str, body: Message, kinds: tuple[type[Message], ...], number: int) -> Any:
        if site in self.directory.excluded:
            return SiteLostError(self.directory.excluded[site])
        acks = list(self._acks[site])
        patience = max(self._patience, BEGIN_SECONDS) if isinstance(body, (wire.Survey, wire.Begin)) else self._patience
        try:
            data = records.encode(wire.Envelope(acks, body, number))
            answer: Message = read(self._transport.send(site, data, patience, number), *kinds)
        except (SiteLostError, SiteRefusedError, WireError) as error:
            self.directory.record(site, error)
            return type(error)(f"site {site}: {error}")
        self.directory.record(site, None)
        if isinstance(answer, (wire.Answers, wire.Hopped)) and (head := answer.ledger[:100]):
            self.log_heads[site] = head
        del self._acks[site][: len(acks)]
        return answer
