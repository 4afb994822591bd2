"""Compute secure sums over a deployment's sites, at the server. A group of sites (roster) computes several sums."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from fedstrata.base import records
from fedstrata.base.errors import ReplyRefusedError
from fedstrata.base.records import Message
from fedstrata.federation.engine import Failure
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import ClientId, Request, Requests, Work
from fedstrata.federation.secure import protocol
from fedstrata.federation.secure.certificates import Trust
from fedstrata.federation.secure.member import question_of
from fedstrata.federation.secure.requests import (
    FAILED,
    Dealt,
    Masked,
    MaskedReply,
    SecureSum,
    SiteStep,
    StepReply,
    check_vector,
)
from fedstrata.federation.secure.ring import Ring
from fedstrata.federation.secure.server import Exchange, Server

if TYPE_CHECKING:
    from fedstrata.sites.engine import NVFlareEngine


class SecureSums:
    """The server's part in the secure sums of a run. Each site has one client.

    A roster ends when its keys are used up, when a site in the roster is lost, or when the next sum needs other sites.
    If a sum fails, the states of the clients do not change, and an event gives the reason.

    Args:
        engine: The engine of the sites.
        job: The job's hash.
        trust: The certificates that the server accepts.
    """

    def __init__(self, engine: NVFlareEngine, job: bytes, trust: Trust) -> None:
        self._engine, self._job, self._trust = engine, job, trust
        self._site_of = engine.directory.site_of_client
        self._client_of = {site: client for client, site in enumerate(self._site_of)}
        self._server: Server | None = None
        self.packages: dict[str, Any] = {}
        """A mapping from each site to the keys that the site sent for its next roster."""

    def ask(
        self,
        federation: Federation,
        clients: Iterable[ClientId],
        request: Request,
        ring: Ring,
        work: Work | None,
        continues: bool,
    ) -> SecureSum | None:
        """Send a request to sites, and return only the sum of their replies; None if the sum failed."""
        asked = Requests.of(clients, Masked(request))
        reached = federation.exchanges.reach(asked, work)
        least = len(asked) if continues else max(protocol.FEWEST, federation.config.privacy.parties)
        server = self._joined(federation, set(asked) - federation.log.dropped, least)
        if server is None:
            return None
        only = [self._site_of[client] for client in asked] if continues else None
        exchange = server.begin(question_of(request), ring.length, only)
        assert exchange is not None
        self._ask_vectors(federation, exchange, reached, ring.length)
        while exchange.stage not in ("opened", "failed"):
            exchange.receive(self._step(federation, exchange.outgoing))
        failed = exchange.total is None
        self._report(federation, server)
        if failed:
            self._server = None
        if exchange.total is None:
            return None
        contributors = sorted(self._client_of[site] for site in exchange.contributors)
        try:
            total = ring.decode(exchange.total, len(contributors))
        except ReplyRefusedError as error:
            federation.note(FAILED, contributors, f"{error}.")
            return None
        for site, opened in exchange.outgoing.items():
            self._engine.messenger.acknowledge(site, opened)
        return SecureSum(total, contributors)

    def _joined(self, federation: Federation, clients: Collection[ClientId], least: int) -> Server | None:
        """Return the ``Server`` for a roster of these clients' sites; None if fewer than ``least`` sites take part."""
        sites = self._with_keys(federation, clients)
        server = self._server
        # Keep the roster if it has keys left and consists of the same sites, even if one of these sites refused to send
        # shares. Such a site would refuse again in another roster.
        if server is not None and server.roster is not None and server.left and server.roster.names == sites:
            return server
        if len(sites) < least:
            federation.note(FAILED, clients, f"{len(sites)} sites can take part, but the sum needs {least}.")
            return None
        privacy = federation.config.privacy
        server = Server(self._job, self._trust, parties=privacy.parties, colluding=privacy.colluding)
        roster = server.enrol({site: self.packages.pop(site) for site in sites})
        deals = {}
        if roster is not None:
            for site, dealt in self._step(federation, dict.fromkeys(roster.names, roster)).items():
                if isinstance(dealt, Dealt):
                    deals[site], self.packages[site] = dealt.deal, dealt.package
        self._server = server if roster is not None and server.deliver(deals) else None
        self._report(federation, server)
        return self._server

    def _with_keys(self, federation: Federation, clients: Collection[ClientId]) -> list[str]:
        """Return the sites that can be reached and have sent keys, in ascending order of their names."""
        self._engine.directory.gather()
        present = self._engine.directory.present()
        sites = {self._site_of[client] for client in clients}
        for site in sorted(sites - present):
            federation.log.fail(self._client_of[site], Failure(f"site {site} cannot be reached"))
        if lacking := sorted((sites & present) - self.packages.keys()):
            self.packages |= self._step(federation, dict.fromkeys(lacking))
        return sorted(sites & present & self.packages.keys())

    def _ask_vectors(self, federation: Federation, exchange: Exchange, reached: Requests, length: int) -> None:
        """Send the request to the members, and pass to ``exchange`` the masked vectors that arrive in time."""
        begun: dict[ClientId, Request] = {}
        log = federation.log
        for client, request in reached.items():
            site = self._site_of[client]
            if (begin := exchange.outgoing.get(site)) is not None and isinstance(request, Masked):
                begun[client] = Masked(request.request, begin)
                log.bytes_down += records.size(begun[client]) - records.size(request)
            elif client not in log.failed:
                log.fail(client, Failure(f"site {site} has not joined the roster", refused=True))
        requests = Requests.of(begun, begun)
        outcomes = self._engine.ask(requests, together=False)
        self._note_lost(outcomes)
        answers = federation.exchanges.collect(requests, outcomes, False, partial(check_vector, length=length))
        exchange.receive({self._site_of[client]: _vector(reply) for client, reply in answers.items()})

    def _step(self, federation: Federation, messages: Mapping[str, Message | None]) -> dict[str, Any]:
        """Send a message of the protocol to each site, and return the messages of the sites that replied."""
        log = federation.log
        steps = {self._client_of[site]: SiteStep(message, federation.round) for site, message in messages.items()}
        log.exchanges += 1
        log.bytes_down += sum(map(records.size, steps.values()))
        outcomes = self._engine.ask(Requests.of(steps, steps), together=False)
        self._note_lost(outcomes)
        replies = {}
        for client, outcome in outcomes.items():
            if isinstance(outcome, StepReply):
                log.bytes_up += records.size(outcome)
                replies[self._site_of[client]] = outcome.message
            elif isinstance(outcome, Failure):
                log.fail(client, outcome)
        return replies

    def _note_lost(self, outcomes: Mapping[ClientId, Any]) -> None:
        """Forget the keys of lost sites, and end their roster.

        A site that refuses a message, or raises an error, is not lost.
        """
        for client, outcome in outcomes.items():
            if isinstance(outcome, Failure) and not outcome.refused and outcome.error is None:
                site = self._site_of[client]
                self.packages.pop(site, None)
                if self._server is not None and site in self._server.members:
                    self._server = None

    def _report(self, federation: Federation, server: Server) -> None:
        """Record the events of the protocol as events of the round."""
        for event in server.events:
            clients = [self._client_of[site] for site in event.sites]
            if event.kind == "refused":
                federation.log.failed.update(clients)
            federation.note(FAILED if event.kind == "failed" else event.kind, clients, event.reason)
        server.events.clear()


def _vector(reply: MaskedReply) -> protocol.MaskedVector:
    # ``present`` may be None or another message. The exchange checks its type, and then refuses the vector.
    return protocol.MaskedVector(reply.vector, reply.present)  # type: ignore[arg-type]
