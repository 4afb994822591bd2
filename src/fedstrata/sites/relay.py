"""Run relays across sites.

In a relay, clients train the same model, one after another. The server sends tasks, and sites pass the model on.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from fedstrata.base.errors import FedstrataError
from fedstrata.federation.engine import Failure
from fedstrata.federation.messages import ClientId, Reply, Request, Weights
from fedstrata.federation.reply_checks import defect_of
from fedstrata.sites.messenger import Messenger
from fedstrata.sites.wire import Failed, Fetch, Hop, HopCommit, Hopped, RelayEnd, Unmoved


class ClientRaisedError(FedstrataError):
    """Represents, at the server, an exception that a client raised at its site."""


def reply_of(outcome: object, request: Request) -> Reply | Failure:
    """Return a client's reply, or a ``Failure`` if the client failed or its reply does not fit the request."""
    if isinstance(outcome, Failed):
        error = None if outcome.bystander or outcome.refused else ClientRaisedError(outcome.reason)
        return Failure(outcome.reason, error, outcome.bystander, outcome.refused)
    wanted = request.reply_type
    if isinstance(outcome, wanted):
        return outcome
    kind, question = type(outcome).__name__, type(request).__name__
    return Failure(f"the reply to {question} is a {kind}, but must be a {wanted.__name__}")


@dataclass
class _Hop:
    """A hop (one client's training of the travelling model) that the server accepted.

    Args:
        site: The site of the client.
        client: The id of the client.
        outcome: The client's reply, or a ``Failure`` if the model that the client trained was lost.
        ticket: A secret with which only the site of the next client can fetch the model.
    """

    site: str
    client: ClientId
    outcome: Reply | Failure
    ticket: str


class SiteRelay:
    """A ``RelaySession`` in which the model goes directly from site to site.

    Each task from the server contains the name of the site that has the model. A site keeps its latest model until the
    relay is over. If a site fails, the run can therefore continue with the previous site's model.

    Args:
        messenger: The messenger that sends messages to the sites.
        number: The id of the relay.
        weights: The initial model.
    """

    def __init__(self, messenger: Messenger, number: int, weights: Weights) -> None:
        self._messenger, self._number, self._weights = messenger, number, weights
        self._site_of_client = messenger.directory.site_of_client
        self._hops: list[_Hop] = []
        self._trail: list[int] = []
        """The index of the last hop of each site, in ascending order. Each site still stores the model of its last
        hop."""
        self._sites: set[str] = set()
        self._last: _Hop | None = None

    def hop(self, client: ClientId, task: Request) -> Reply | Failure:
        """Send a task to a client's site, which fetches the model from another site. Return the reply."""
        self._last = None
        site = self._site_of_client[client]
        self._sites.add(site)
        while True:
            base = self._trail[-1] if self._trail else -1
            ticket = secrets.token_hex(16)
            outcome = self._send(site, client, task, ticket, base, self._weights if base < 0 else None)
            if isinstance(outcome, Unmoved) and base >= 0:
                # Send the model through the server, because the sites may be unable to connect to each other, or
                # because the model arrived damaged.
                model = self._fetch(base)
                if isinstance(model, FedstrataError):
                    self._lose(base, str(model))
                    continue
                outcome = self._send(site, client, task, ticket, base, model)
            break
        reason = outcome.reason if isinstance(outcome, Unmoved) else str(outcome)
        reply = reply_of(outcome.reply, task) if isinstance(outcome, Hopped) else Failure(reason)
        if isinstance(reply, Failure):
            self._messenger.directory.require_enough([reply.reason])
        else:
            self._last = _Hop(site, client, reply, ticket)
        return reply

    def _send(self, site: str, client: ClientId, task: Request, ticket: str, base: int, weights: Weights | None) -> Any:
        """Send a task to a site, and return the site's reply.

        The message contains the model if ``weights`` is not None. If ``weights`` is None, the message names the site
        that has the model after hop ``base``. The receiving site then fetches the model from the named site.
        """
        holder, key = ("", "") if weights is not None else (self._hops[base].site, self._hops[base].ticket)
        exchange, number = self._messenger.next_exchange(), len(self._hops)
        body = Hop(exchange, self._number, number, client, task, holder, base, weights, False, ticket, key)
        return self._messenger.ask(site, body, Hopped, Unmoved)

    def keep(self, accepted: bool) -> None:
        """If the reply to the latest hop is accepted, continue with the model of this hop.

        Otherwise, continue with the model from before the hop.
        """
        if not accepted or self._last is None:
            return
        site, number = self._last.site, len(self._hops)
        self._messenger.acknowledge(site, HopCommit(self._number, number))
        self._hops.append(self._last)
        self._trail = [hop for hop in self._trail if self._hops[hop].site != site] + [number]

    def finish(self) -> tuple[Weights, list[Reply | Failure]]:
        """Return the final model and the outcome of each accepted hop. Tell the sites which hops are invalid."""
        weights = self._weights
        while self._trail:
            base = self._trail[-1]
            model = self._fetch(base)
            if isinstance(model, Weights):
                weights = model
                break
            self._lose(base, str(model))
        void = sorted({hop.client for hop in self._hops if isinstance(hop.outcome, Failure)})
        for site in self._sites:
            self._messenger.acknowledge(site, RelayEnd(self._number, void))
        return weights, [hop.outcome for hop in self._hops]

    def _fetch(self, base: int) -> Weights | FedstrataError:
        hop = self._hops[base]
        outcome = self._messenger.ask(hop.site, Fetch(self._number, base, hop.ticket), Weights)
        if isinstance(outcome, FedstrataError):
            return outcome
        if defect := defect_of(outcome, lambda weights: weights.require_like(self._weights)):
            return FedstrataError(defect)
        weights: Weights = outcome
        return weights

    def _lose(self, base: int, reason: str) -> None:
        """Record that the model after hop ``base`` is lost.

        The run continues with the newest model that a site still has, and later hops become invalid.
        """
        self._trail.remove(base)
        since = self._trail[-1] if self._trail else -1
        for hop in self._hops[since + 1 :]:
            if not isinstance(hop.outcome, Failure):
                hop.outcome = Failure(f"the model that the client trained was lost: {reason}")
