"""What a site does: it holds its clients' data and states, and answers for them."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstrata import checkpoint, records
from fedstrata.clients.client import Client
from fedstrata.clients.context import ClientContext
from fedstrata.clients.store import StateStore
from fedstrata.config import only_from
from fedstrata.deploy.data_schema import UnusableDataError, context_of, survey_of
from fedstrata.deploy.manifest import fingerprint
from fedstrata.engines.local import LocalEngine, failure
from fedstrata.engines.nvflare.sums import SiteGroup
from fedstrata.engines.nvflare.turns import Turns
from fedstrata.engines.nvflare.wire import (
    Answers,
    Ask,
    Begin,
    Begun,
    Done,
    Ended,
    Envelope,
    Failed,
    Fetch,
    Hop,
    Hopped,
    Kept,
    More,
    Refused,
    Save,
    Settled,
    SiteLostError,
    SiteRefusedError,
    Survey,
    Surveyed,
    Unmoved,
    read,
)
from fedstrata.errors import FedstrataError, ReplyRefusedError, SpecError, WireError
from fedstrata.federation.engine import Failure
from fedstrata.federation.messages import ClientId, Request, Weights
from fedstrata.federation.reply_checks import defect_of
from fedstrata.process import prepare_process
from fedstrata.records import Message, Tree
from fedstrata.stratify.masking.key_store import KeyRing

LOG = logging.getLogger(__name__)

LARGEST_ANSWER = 256 << 20
"""Bytes of answers in one message, unless a single one is larger."""

SERVER = "server"
"""Who may ask questions; other sites may only fetch the model of a relay."""

HARMLESS = (FedstrataError, SpecError, WireError, ReplyRefusedError, SiteLostError, SiteRefusedError, UnusableDataError)
"""What tells others of their own messages and of the spec, and of data only why they are not what the spec says."""


class Host:
    """The clients of one site.

    Args:
        name: The site's.
        folder: Where its clients' states survive.
        send: Carries bytes to another site, or to the server's barrier, and gives back what is answered.
        patience: Seconds that a client waits for the others of its group.
        data: The site's own data file; None where the data are the spec's.
        keys: The keys that all clients share; those of the environment unless given.
        allow: Packages from which a spec may name classes; none unless given, None for any.
        tells: Whether the server may learn how good a model is on this site's own samples, metric by metric; sums that
            add up it is told in any case.
        frank: Whether the server is told the text of whatever goes wrong. Otherwise of what goes wrong with its own
            messages and spec only; the rest may say something of the site's data and files, and stays in its log.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        send: Callable[[str, bytes], object],
        *,
        patience: float,
        data: Path | None = None,
        keys: KeyRing | None = None,
        allow: Collection[str] | None = (),
        tells: bool = False,
        frank: bool = False,
    ) -> None:
        self.name, self.folder, self.send, self.patience, self.data = name, folder, send, patience, data
        self._keys, self._allow, self._tells, self._frank = keys, allow, tells, frank
        self.turns, self.refused = Turns(), ""
        self._run: _Run | None = None

    def call(self, caller: str, data: object) -> bytes:
        """The answer to bytes of the server or of another site; ``Refused`` to what is not understood."""
        try:
            if caller != SERVER:
                return records.encode(self._part_of_relay(read(data, Fetch)))
            envelope: Envelope = read(data, Envelope)
            return self.turns.answer(envelope.number, lambda: self._answered(envelope))
        except Exception as error:
            # Whatever it is must not end the site, and the server must learn of it.
            self.refused = str(error)
            return records.encode(Refused(self.message_of(error)))

    def _answered(self, envelope: Envelope) -> bytes:
        with only_from(self._allow):
            return records.encode(self._answer(envelope))

    def message_of(self, error: BaseException, reason: str | None = None) -> str:
        """What others learn of an error; see ``frank``.

        Args:
            error: It.
            reason: What is said about it, where a client raised it.
        """
        if reason is None:
            reason = str(error) if isinstance(error, FedstrataError) else f"{type(error).__name__}: {error}"
            if type(error) in HARMLESS:
                return reason
        if self._frank:
            return reason
        LOG.error("site %s: %s", self.name, reason, exc_info=error)
        return f"{type(error).__name__}; the log of site {self.name} says more"

    def _answer(self, envelope: Envelope) -> Message:
        body = envelope.body
        if isinstance(body, Begin):
            self._run = None
            self._run, round, lost = _Run.begin(self, body)
            return Begun(round, lost)
        if isinstance(body, Survey):
            return Surveyed(survey_of(body, self.data), fingerprint(self.data, self.folder))
        run = self._running()
        for news in envelope.news:
            run.learn(news)
        if isinstance(body, Fetch):
            return self._part_of_relay(body)
        if isinstance(body, Ask):
            return run.ask(body)
        if isinstance(body, More):
            return run.more(body)
        if isinstance(body, Hop):
            return run.hop(body)
        if isinstance(body, Save):
            run.save(body.round)
            return Done()
        raise WireError(f"a {type(body).__name__} is nothing that a site is asked")

    def _part_of_relay(self, fetch: Fetch) -> Weights:
        weights = self._running().stay.model_after(fetch)
        if weights is None:
            raise FedstrataError(f"site {self.name} does not have the model after hop {fetch.hop}")
        return weights

    def _running(self) -> _Run:
        if self._run is None:
            raise FedstrataError(f"site {self.name} has not begun a run")
        return self._run

    def context(self, begin: Begin) -> ClientContext:
        """What the clients of this site share."""
        return context_of(begin, self.data, self._keys or KeyRing.of_site(), tells=self._tells)


class _Run:
    """One run at one site."""

    def __init__(self, host: Host, folder: Path, context: ClientContext, clients: list[ClientId]) -> None:
        self.host, self.folder, self.context, self.clients = host, folder, context, set(clients)
        self.store = StateStore()
        self.engine = LocalEngine(context, self.store)
        self.stay = _Stay(0, context, self.store)
        self._exchange = 0
        self._waiting: list[Any] = []

    @classmethod
    def begin(cls, host: Host, begin: Begin) -> tuple[_Run, int, list[ClientId]]:
        """A run with the clients' states after ``begin.round``, or after the last round before it that is there.

        Returns:
            The run, that round, and the clients that lived elsewhere then: their states are not here.
        """
        if not begin.run.isalnum():
            raise WireError(f"{begin.run!r} names no run")
        context = host.context(begin)
        prepare_process(context.config.training.threads)
        run = cls(host, host.folder / begin.run, context, begin.clients)
        if begin.round == 0:
            shutil.rmtree(run.folder, ignore_errors=True)
            return run, 0, []
        found = checkpoint.load(run.folder, begin.round)
        if found is None:
            return run, 0, begin.clients
        here = run.clients.intersection(found.state["lived"])
        found.only(here).restore(run.store)
        return run, found.round, sorted(run.clients - here)

    def save(self, round: int) -> None:
        """Write the clients' states, and who lives here: also a client without a state has lost nothing."""
        checkpoint.save(self.folder, round, {"lived": sorted(self.clients)}, self.store)

    def learn(self, news: object) -> None:
        """What became of an earlier answer; again, where it is known already."""
        if isinstance(news, Settled):
            if news.exchange == self._exchange:
                self.engine.commit(news.clients)
        elif isinstance(news, Kept):
            self.stay.keep(news)
        elif isinstance(news, Ended):
            self.stay.end(news)
        else:
            raise WireError(f"a {type(news).__name__} is no news")

    def ask(self, ask: Ask) -> Answers:
        """The answers of the clients of this site."""
        self._next(ask.exchange)
        if len(ask.clients) != len(ask.which) or not all(0 <= n < len(ask.requests) for n in ask.which):
            raise WireError("questions and clients do not match")
        asked = zip(ask.clients, ask.which, strict=True)
        requests = {client: self._request(client, ask.requests[n]) for client, n in asked}
        group = None
        if ask.group:
            group = SiteGroup(ask.group, ask.places, lambda part: self.host.send(SERVER, part), self.host.patience)
        outcomes = self.engine.ask(requests, together=group is not None, group=group)
        self._waiting = [self._outcome(outcomes[client]) for client in ask.clients]
        return self._next_answers()

    def more(self, more: More) -> Answers:
        """Those answers of the last exchange that did not fit into the messages before."""
        if more.exchange != self._exchange:
            raise WireError(f"the answers of exchange {more.exchange} are gone")
        return self._next_answers()

    def _next_answers(self) -> Answers:
        """As many answers as one message may hold, at least one."""
        size = count = 0
        for outcome in self._waiting:
            size += records.size(outcome)
            if count and size > LARGEST_ANSWER:
                break
            count += 1
        answers, self._waiting = self._waiting[:count], self._waiting[count:]
        return Answers(answers, len(self._waiting))

    def hop(self, hop: Hop) -> Hopped | Unmoved:
        """One task of a relay."""
        self._next(hop.exchange)
        task = self._request(hop.client, hop.task)
        if hop.back:
            if hop.weights is None:
                raise WireError("a hop without a model")
            outcome = self.engine.hop(hop.client, task, hop.weights)
            if isinstance(outcome, Failure):
                return Hopped(self._outcome(outcome), None)
            weights, reply = outcome
            return Hopped(reply, weights)
        if self.stay.number != hop.journey:
            self.stay = _Stay(hop.journey, self.context, self.store)
        try:
            weights = self._weights(hop)
        except (FedstrataError, OSError) as error:
            return Unmoved(self.host.message_of(error))
        return Hopped(self._outcome(self.stay.work(hop, task, weights)), None)

    def _weights(self, hop: Hop) -> Weights:
        """The travelling model: sent along, left here, or fetched from the site that has it."""
        if hop.weights is not None:
            weights = hop.weights
        elif hop.holder == self.host.name:
            left = self.stay.model_after(Fetch(hop.journey, hop.base))
            if left is None:
                raise FedstrataError(f"the model after hop {hop.base} is not here")
            return left
        else:
            weights = read(self.host.send(hop.holder, records.encode(Fetch(hop.journey, hop.base))), Weights)
        model = self.context.config.model
        if defect := defect_of(weights, lambda found: found.require_like(Weights(model.params(), model.buffers()))):
            raise ReplyRefusedError(f"the model after hop {hop.base} came damaged: {defect}")
        return weights

    def _outcome(self, outcome: Any) -> Any:
        """An outcome as it travels."""
        if not isinstance(outcome, Failure):
            try:
                # What could not be read there would take the answers of all other clients of this site with it.
                records.require_types(outcome)
            except (WireError, AttributeError, KeyError) as error:
                return Failed(str(error), False, True)
            return outcome
        reason = outcome.reason if outcome.error is None else self.host.message_of(outcome.error, outcome.reason)
        return Failed(reason, outcome.bystander, outcome.refused)

    def _next(self, exchange: int) -> None:
        if exchange <= self._exchange:
            raise WireError(f"exchange {exchange} comes after {self._exchange}: nobody waits for it any more")
        self._exchange = exchange

    def _request(self, client: ClientId, request: object) -> Request:
        if client not in self.clients:
            raise WireError(f"client {client} does not live at site {self.host.name}")
        if not isinstance(request, Request):
            raise WireError(f"a {type(request).__name__} is no request")
        return request


@dataclass(frozen=True)
class _Left:
    """What a hop left behind.

    Args:
        hop: Its number.
        weights: The model.
        client: Who worked.
        state: That client's new state.
    """

    hop: int
    weights: Weights
    client: ClientId
    state: Mapping[str, Tree]


class _Stay:
    """A site's part of one journey of a model; clients' states count when it is over."""

    def __init__(self, number: int, context: ClientContext, store: StateStore) -> None:
        self.number, self._context, self._store = number, context, store
        self._states: dict[ClientId, Mapping[str, Tree]] = {}
        self._new: _Left | None = None
        self._kept: _Left | None = None

    def work(self, hop: Hop, task: Request, weights: Weights) -> Any:
        """One client's part."""
        self._new = None
        known = self._states.get(hop.client)
        client = Client(hop.client, self._context, self._store.get(hop.client) if known is None else known)
        try:
            moved, reply = self._context.handlers.hop(type(task))(client, task, weights)
        except Exception as error:
            return failure(error)
        if defect := defect_of(moved, lambda moved: moved.require_like(weights)):
            return Failure(defect, refused=True)
        self._new = _Left(hop.hop, moved, hop.client, client.state)
        return reply

    def keep(self, news: Kept) -> None:
        """The last part counts."""
        new = self._new
        if news.journey == self.number and new is not None and new.hop == news.hop:
            self._states[new.client] = new.state
            self._kept, self._new = new, None

    def end(self, news: Ended) -> None:
        """Keep the states of those whose parts count, and forget the model."""
        if news.journey != self.number:
            return
        for client, state in self._states.items():
            if client not in news.void:
                self._store.put(client, state)
        self._states, self._new, self._kept = {}, None, None

    def model_after(self, fetch: Fetch) -> Weights | None:
        """The model that a hop left, the last or the last that counted."""
        for left in (self._new, self._kept):
            if fetch.journey == self.number and left is not None and left.hop == fetch.hop:
                return left.weights
        return None
