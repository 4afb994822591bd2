"""Send the server's numbered messages to all sites at the same time. Messages also acknowledge earlier replies."""

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
"""The minimum number of seconds for a site to load its data and set up its clients, even if ``patience`` is shorter."""

MOST_AT_ONCE = 64
"""The maximum number of sites to which messages are sent at the same time."""


class Transport(Protocol):
    """A connection that carries bytes to sites and back."""

    def send(self, site: str, data: bytes, patience: float, number: int) -> object:
        """Send a message to a site, and return the site's reply.

        Args:
            site: The name of the site.
            data: The encoded message.
            patience: The number of seconds to wait for the reply.
            number: The sequence number of the message. Later messages have larger numbers. If a site receives the same
                number again, it repeats its first reply.

        Raises:
            SiteLostError: The site cannot be reached, or does not answer within ``patience`` seconds.
        """

    def is_reachable(self, site: str) -> bool:
        """Return True if a site can probably be reached now.

        Raises:
            Exception: The job is over.
        """


class Messenger:
    """The server's side of the protocol between server and sites.

    Args:
        transport: The connection to the sites.
        site_of_client: The name of each client's site; the index is the client's id.
        patience: The number of seconds within which a site must reply.
        least: The minimum number of sites that must reply, before the first round and in every round.
        fewer: The server's action if fewer than ``least`` sites reply.
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
        """A mapping from each site to the newest head of its ledger; see ``fedstrata.sites.ledger``."""
        self._transport, self._patience = transport, patience
        self._acks: dict[str, list[Message]] = {site: [] for site in directory.sites}
        # Message numbers start from the current time, so that they are larger than the numbers of an earlier run. Sites
        # refuse a message whose number is smaller than an earlier message's number.
        self._numbers = itertools.count(time.time_ns())
        self._pool = ThreadPoolExecutor(min(len(directory.sites), MOST_AT_ONCE), thread_name_prefix="sites")

    def close(self) -> None:
        """Stop the threads. Do not wait for sites that have not answered."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def next_exchange(self) -> int:
        """Begin an exchange (requests to clients and their replies), and return the number of the exchange."""
        self.exchange += 1
        return self.exchange

    def acknowledge(self, site: str, ack: Message) -> None:
        """Attach an acknowledgement to each message to a site, until the site has replied to one of these messages."""
        if site not in self.directory.excluded:
            self._acks[site].append(ack)

    def ask(self, site: str, body: Message, *kinds: type[Message]) -> Any:
        """Send a message, and return the site's reply. If the reply's class is not in ``kinds``, return an error."""
        self.directory.gather()
        return self._send(site, body, kinds, next(self._numbers))

    def ask_all(
        self, bodies: Mapping[str, Message], kind: type[Message], ended: Callable[[str, Any], None] | None = None
    ) -> dict[str, Any]:
        """Wait until enough sites can be reached, send messages to several sites, and return their replies or errors.

        Args:
            bodies: A mapping from each site to its message.
            kind: The expected class of the replies.
            ended: A function that is called with a site and its reply or error, as soon as the reply arrives. Pass a
                function only if the clients at these sites add up tensors together. Messages to failed sites are then
                not sent again, because the other sites do not wait for failed sites.
        """
        self.directory.gather()
        outcomes = self.deliver(bodies, kind, ended)
        self.directory.require_enough(outcomes.values())
        return outcomes

    def deliver(
        self, bodies: Mapping[str, Message], kind: type[Message], ended: Callable[[str, Any], None] | None = None
    ) -> dict[str, Any]:
        """Send messages to several sites as ``ask_all`` does, but do not check that enough sites can be reached."""
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
            # A message is sent again with the same number, so a site that has already answered repeats its answer.
            directory.wait_for_any(wanted)

    def _complete(self, site: str, outcome: Any) -> Any:
        """Fetch the replies that did not fit into the first message of a site, and return all replies of the site."""
        while isinstance(outcome, wire.Answers) and outcome.left:
            rest = self._send(site, wire.More(self.exchange), (wire.Answers,), next(self._numbers))
            if isinstance(rest, FedstrataError):
                # Do not return a SiteLostError. It would make the server send the question again, but the site can
                # repeat only its last answer.
                return WireError(f"site {site} was lost between two parts of its reply: {rest}")
            if not rest.outcomes or rest.left != outcome.left - len(rest.outcomes):
                return WireError(f"site {site} announced {outcome.left} more replies, but did not send them")
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
