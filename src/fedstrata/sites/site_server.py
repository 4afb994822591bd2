"""At a site, reply to the server's messages. The site stores the data and states of its clients."""

from __future__ import annotations

import dataclasses
import hmac
import logging
import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fedstrata.base import records
from fedstrata.base.errors import FedstrataError, ReplyRefusedError, SpecError, WireError, WithheldError
from fedstrata.base.loading import only_from
from fedstrata.base.process import prepare_process
from fedstrata.base.records import Message, Tree
from fedstrata.clients.client import Client, ClientContext, StateStore
from fedstrata.clients.handlers.masked import forms
from fedstrata.engines.local import LocalEngine, failure
from fedstrata.federation.engine import Failure, FederationConfig
from fedstrata.federation.messages import ClientId, Fit, Reply, Request, Weights
from fedstrata.federation.reply_checks import defect_of
from fedstrata.federation.secure.requests import Masked
from fedstrata.runs import checkpoint
from fedstrata.runs.accountant import dp_accounting
from fedstrata.runs.identity import fingerprints_of_frozen, require_same_frozen
from fedstrata.sites import wire
from fedstrata.sites.data_schema import FEWEST, UnusableDataError, context_of, description_of, require_home, survey_of
from fedstrata.sites.disclosure import UNDECLARED, Declaration, declaration_of
from fedstrata.sites.guard import Guard, Match, Quota, data_trial, declared
from fedstrata.sites.idempotency import LateError, RequestCache
from fedstrata.sites.ledger import Entry, Ledger
from fedstrata.sites.manifest import fingerprint
from fedstrata.sites.policy import Policy, RuleError
from fedstrata.sites.privacy_budget import PrivacyBudget
from fedstrata.sites.settings import SiteSettings
from fedstrata.sites.sums import SiteGroup
from fedstrata.sites.wire import SiteLostError, SiteRefusedError, read
from fedstrata.spec.experiment import Experiment, parse_toml
from fedstrata.stratify.masking.key_store import KeyRing

if TYPE_CHECKING:
    from fedstrata.federation.secure.member import Member
    from fedstrata.sites.secure_site import Credentials

LOG = logging.getLogger(__name__)

LARGEST_ANSWER = 256 << 20
"""The maximum total size in bytes of the replies in one message. A larger reply is sent in a message of its own."""

SERVER = "server"
"""The server's name as the sender of messages. The server may send all kinds of messages, but other sites may only
fetch a trained model."""

HARMLESS = (
    *(FedstrataError, SpecError, WireError, ReplyRefusedError, SiteLostError, SiteRefusedError),
    *(UnusableDataError, RuleError, LateError),
)
"""Errors whose text the server and other sites may read. Such a text describes only messages that the reader sent, the
spec, or the requirement that a column violates."""

BEGINNINGS = (wire.Survey.__name__, wire.Begin.__name__, wire.BeginOnBase.__name__)
"""Messages before the first round. The ledger also records failures of these messages, because a failure reveals that
the data do not fit the spec."""


class SiteServer:
    """A site, which replies to messages on behalf of its clients.

    Args:
        name: The name of the site.
        folder: The folder of the clients' states.
        send: A function that sends bytes to another site or to the server, and returns the reply. The function sends
            nothing to the server except this site's contributions to sums.
        settings: The site's settings. In a simulation, the site also accepts methods that do not declare their
            requests, and the server sees the text of all errors. In a deployment, the server sees only the text of
            ``HARMLESS`` errors, because other errors may reveal the site's data and files.
        keys: The keys that all clients share to mask labels. Default: the keys from ``KeyRing.of_site``.
        policy: The site's limits on jobs. If None, the site allows everything that a job declares.
        ledger: The site's ledger of replies and refusals; optional.
        credentials: A function that returns the site's certificate. Default: the site has no certificate, so it refuses
            jobs with secure sums.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        send: Callable[[str, bytes], object],
        settings: SiteSettings,
        *,
        keys: KeyRing | None = None,
        policy: Policy | None = None,
        ledger: Ledger | None = None,
        credentials: Callable[[], Credentials] | None = None,
    ) -> None:
        self.name, self.folder, self.send, self.settings = name, folder, send, settings
        self._keys, self.policy, self.ledger, self.credentials = keys, policy, ledger, credentials
        self.budget: PrivacyBudget | None = None
        """The site's privacy budget, which training with ``privacy.dp`` reduces; optional."""
        self._entries: list[tuple[int, Entry]] = []
        """Entries that are not in the ledger yet, each with the id of the thread that added the entry."""
        self._noting = threading.Lock()
        """A lock for changes of the entries, because another site may fetch a model in another thread."""
        self.request_cache, self.problem = RequestCache(), ""
        self._run: SiteRun | None = None
        self._asking = ""
        """The hash of the job whose ``Survey`` or ``Begin`` message the site processes; empty during other messages."""

    def call(self, caller: str, data: object) -> bytes:
        """Return the encoded reply to a message from the server or another site.

        Args:
            caller: The name of the sender, which NVFlare has verified.
            data: The encoded message. If the message is wrong or not allowed, the reply is ``Refused``.
        """
        what = "a message"
        try:
            if caller != SERVER:
                what = wire.Fetch.__name__
                return self._encode(self._part_of_relay(caller, read(data, wire.Fetch)))
            envelope: wire.Envelope = read(data, wire.Envelope)
            what = type(envelope.body).__name__
            return self.request_cache.answer(envelope.number, lambda: self._answered(envelope))
        except Exception as error:
            # All exceptions are caught, because an error must not end the site, and must be reported to the server.
            self._mark(failed=type(error).__name__)
            if isinstance(error, RuleError):
                self.refused(error, what, caller)
            elif not isinstance(error, LateError):
                self.problem = str(error)
                if what in BEGINNINGS:
                    self.note(what, failed=type(error).__name__)
            try:
                # Write the ledger before the error is sent, because an error also reveals something about the data.
                self._write_ledger()
            except Exception as unwritten:
                error, self.problem = unwritten, f"the ledger cannot be written: {unwritten}"
            for_good = isinstance(error, RuleError) and error.for_good
            return records.encode(wire.Refused(self.message_of(error), for_good))

    def _answered(self, envelope: wire.Envelope) -> bytes:
        if self._run is not None:
            # The rounding of sums depends on the number of threads, which PyTorch stores for each calling thread.
            torch.set_num_threads(self._run.context.config.training.threads)
        self._asking = ""
        with only_from(self.settings.packages):
            return self._encode(self._answer(envelope))

    def _encode(self, answer: Message) -> bytes:
        """Write the ledger, and return the encoded reply. Raise ``RuleError`` if the policy forbids this many bytes."""
        # The bytes of a ``Surveyed`` are not counted again, because ``_surveyed`` has counted them.
        if self._run is not None and not isinstance(answer, wire.Surveyed):
            try:
                self._run.guard.leave(records.size(answer))
            except RuleError as error:
                self._mark(refused=error.rule)
                raise
        head = self._write_ledger()
        if isinstance(answer, (wire.Answers, wire.Hopped)):
            answer = dataclasses.replace(answer, ledger=head)
        return records.encode(answer)

    def note(self, kind: str, **about: Any) -> None:
        """Create a ledger ``Entry`` about a request, with the fields in ``about``.

        The entry is written to the ledger (the site's log of all replies) before the reply leaves the site.
        """
        if self.ledger is not None:
            run = "" if self._run is None else self._run.guard.declaration.job
            run = self._asking if kind in BEGINNINGS else run
            with self._noting:
                self._entries.append((threading.get_ident(), Entry(**{"run": run, "kind": kind, **about})))

    def _mark(self, **outcome: Any) -> None:
        """Mark this thread's new ledger entries as refused or failed, because the replies will not leave the site.

        If one of the entries describes the terms of a sum, the entries are not marked. These terms have already left
        the site, and depend on the data of all clients of the site.
        """
        me = threading.get_ident()
        with self._noting:
            mine = [place for place, (thread, _) in enumerate(self._entries) if thread == me]
            if any(self._entries[place][1].kind == wire.Part.__name__ for place in mine):
                return
            for place in mine:
                entry = self._entries[place][1]
                if not entry.refused and not entry.failed:
                    self._entries[place] = me, dataclasses.replace(entry, **outcome)

    def _write_ledger(self) -> str:
        """Write the new entries to the ledger, and return the ledger's ``Head`` as a string; empty without a ledger."""
        if self.ledger is None:
            return ""
        with self._noting:
            head = self.ledger.append([entry for _, entry in self._entries])
            self._entries = []
        return str(head or "")

    def refused(self, error: RuleError, what: str, caller: str = SERVER, client: ClientId | None = None) -> None:
        """Add a refusal to the log and the ledger.

        Args:
            error: The error, which contains the name of the limit and the reason.
            what: The kind of the request.
            caller: The name of the sender of the request.
            client: The client that got the request; None for a request to the site itself.
        """
        LOG.warning("site %s: %s of %s: %s", self.name, what, caller, error)
        self.problem = str(error)
        round = None if self._run is None else self._run.guard.round
        self.note(what, client=client, round=round, refused=error.rule, to="" if caller == SERVER else caller)

    def admit(self, spec: str, clients: int, *, own_data: bool) -> Declaration:
        """Check that this site accepts a job, and return the declaration of what the job may request.

        Args:
            spec: The spec as TOML.
            clients: The number of clients.
            own_data: Whether the job uses the sites' own data.

        Raises:
            RuleError: The site refuses the job.
            SpecError: The spec is wrong.
        """
        asked = declared(spec, self.settings, clients=clients, own_data=own_data)
        self._asking = asked.job
        if self.policy is not None:
            self.policy.check(asked)
        elif asked.allowed is None and not self.settings.simulated:
            raise RuleError("declared", f"the method {asked.method!r} {UNDECLARED}.")
        return asked

    def message_of(self, error: BaseException, reason: str | None = None) -> str:
        """Return the part of an error's text that the server may see; see the argument ``settings`` of ``SiteServer``.

        If a client raised the error, ``reason`` is the client's description of the error.
        """
        if reason is None:
            if self.settings.simulated and isinstance(error, UnusableDataError):
                return str(error.__cause__)
            reason = str(error) if isinstance(error, FedstrataError) else f"{type(error).__name__}: {error}"
            if type(error) in HARMLESS:
                return reason
        if self.settings.simulated:
            return reason
        LOG.error("site %s: %s", self.name, reason, exc_info=error)
        return f"{type(error).__name__}. Read the log of site {self.name}."

    def _answer(self, envelope: wire.Envelope) -> Message:
        body = envelope.body
        if isinstance(body, wire.Begin):
            if self._run is not None:
                self._run.guard.quota.save()
            self._run = None
            self._run, round, lost = SiteRun.begin(self, body)
            own = self._fingerprint() if body.statistics is not None else ""
            member = self._run.context.member
            if member is None:
                return wire.Begun(round, lost, own)
            return wire.BegunWithKeys(round, lost, own, member.site.package())
        if isinstance(body, wire.Survey):
            return self._surveyed(body)
        run = self._running()
        for ack in envelope.acks:
            run.learn(ack)
        answers: dict[type[Any], Callable[[Any], Message]] = {
            wire.Fetch: partial(self._part_of_relay, SERVER),
            wire.Ask: run.ask,
            wire.More: run.more,
            wire.Hop: run.hop,
            wire.Save: run.save,
        }
        if type(body) not in answers:
            raise WireError(f"the message is a {type(body).__name__}, which a site does not accept")
        return answers[type(body)](body)

    def _surveyed(self, survey: wire.Survey) -> wire.Surveyed:
        """Return the statistics of the site's data.

        If the site has a policy, the statistics are computed only once per job. Later requests of the job get the same
        reply.
        """
        require_home(survey.clients, survey.total)
        asked = self.admit(survey.spec, survey.total, own_data=True)
        guard, known, least = None, None, FEWEST
        if self.policy is not None:
            same = self._run is not None and self._run.guard.declaration.job == asked.job
            quota = self._run.guard.quota if self._run is not None and same else Quota(self.folder, asked.job)
            guard, least = Guard(asked, self.policy, quota), self.policy.least(asked.privacy).min_samples
            quota.settle(survey.clients, survey.total, "repeat")
            guard.begin_exchange()
            quota.save()
            known = quota.survey
        if known is None:
            with self._reading(asked.job, survey):
                statistics = survey_of(survey, self.settings.data, least=least)
                if self.policy is not None:
                    counts = [table[:, 1] for table in statistics.counts.values()]
                    self.policy.check_counts(asked.job, counts, max(least, FEWEST))
                surveyed = wire.Surveyed(statistics, self._fingerprint())
        else:
            surveyed = read(known, wire.Surveyed)
            if surveyed.fingerprint != self._fingerprint():
                problem = "the site's data have changed since this job received statistics of the data"
                raise RuleError("repeat", f"{problem}. Submit another job, and approve it at the site.")
        size = records.size(surveyed)
        if guard is not None and self.policy is not None:
            # The lock is needed because jobs run in separate processes, and may ask at the same time.
            with guard.quota.alone():
                if known is None and surveyed.statistics.samples:
                    # The number of different statistics is limited, because two of them can together reveal a single
                    # sample.
                    others = [read(answer, wire.Surveyed).statistics for answer in guard.quota.surveys()]
                    before = {records.encode(statistics) for statistics in others if statistics.samples}
                    topic = "other statistics of this site's data"
                    self.policy.limit(asked.job, records.encode(surveyed.statistics), before, topic)
                guard.leave(size)
                guard.quota.survey = records.encode(surveyed)
            guard.quota.save()
        self.note(wire.Survey.__name__, run=asked.job, samples=surveyed.statistics.samples, bytes=size)
        return surveyed

    def _fingerprint(self) -> str:
        return fingerprint(self.settings.data, self.folder)

    def _part_of_relay(self, caller: str, fetch: wire.Fetch) -> Weights:
        """Return the model of a relay after a hop (one client's training), if the caller has the hop's ticket."""
        run = self._running()
        result = run.leg.result_of(fetch.relay_id, fetch.hop)
        if result is None:
            raise FedstrataError(f"site {self.name} does not have the model that hop {fetch.hop} produced")
        if not result.ticket or not hmac.compare_digest(result.ticket.encode(), fetch.ticket.encode()):
            raise RuleError("relay", f"the request for the model of hop {fetch.hop} lacks this hop's secret")
        if caller == SERVER:
            run.guard.fetched_by_server(fetch.relay_id)
        about = {"client": result.client, "round": run.guard.round, "samples": result.samples}
        to = "" if caller == SERVER else caller
        self.note(wire.Fetch.__name__, bytes=records.size(result.weights), to=to, **about)
        return result.weights

    def _running(self) -> SiteRun:
        if self._run is None:
            raise FedstrataError(f"site {self.name} has not begun a run")
        return self._run

    def _reading(self, job: str, question: wire.Survey | wire.Begin) -> AbstractContextManager[None]:
        """Return a context manager in which the site's own data may be read, within the limits of the policy."""
        if self.policy is None:
            return nullcontext()
        if isinstance(question, wire.Begin):
            # Fields that differ when a run is resumed are left out. The policy therefore counts the question of the
            # resumed run as a repetition of the first question.
            question = dataclasses.replace(question, run="", round=0)
        description = description_of(Experiment.from_table(parse_toml(question.spec)))
        return data_trial(self.folder, self.policy, job, description, records.encode(question))

    def context(self, begin: wire.Begin, job: str) -> ClientContext:
        """Return the context (data, model and settings) that the clients of this site share in a run."""
        with self._reading(job, begin) if begin.statistics is not None else nullcontext():
            keys = self._keys or KeyRing.of_site()
            context = context_of(begin, self.settings.data, keys, tells=self.settings.tells)
        context = _with_secrets(self, context, begin, job)
        if self.policy is None:
            return context
        return dataclasses.replace(context, privacy=self.policy.least(context.privacy))


def _with_secrets(site_server: SiteServer, context: ClientContext, begin: wire.Begin, job: str) -> ClientContext:
    """Return the context, prepared for secret random numbers and secure sums if the run needs them."""
    # The server knows the seed of the spec, so it could compute noise from this seed, and subtract the noise.
    privacy = context.privacy
    if (privacy.dp is not None or privacy.clients is not None) and not site_server.settings.simulated:
        dp_accounting()
        context = dataclasses.replace(context, secret=True)
    if privacy.sums == "secure":
        context = dataclasses.replace(context, member=_member(site_server, begin, job, context.config))
    return context


def _member(site_server: SiteServer, begin: wire.Begin, job: str, config: FederationConfig) -> Member:
    """Return the object that represents a site in secure sums.

    The module of this object needs the extra ``secure``.
    """
    from fedstrata.sites.secure_site import ANSWERED, member_of

    if site_server.credentials is None:
        problem = "needs the site's certificate, but this site does not have a certificate. "
        problem += "Set privacy.sums = 'plain', or run the job in a deployment."
        raise SpecError("privacy.sums", problem, "secure")
    path = site_server.folder / ANSWERED / job
    return member_of(begin, path, site_server.credentials(), site_server.policy, config)


class SiteRun:
    """One run at one site, with the clients' states and the guard that checks all requests.

    Args:
        site_server: The site.
        folder: The folder of the run's checkpoints at this site.
        context: The context of the site's clients.
        clients: The ids of the site's clients.
        guard: The guard, which checks all requests against the job's declaration and the policy.
    """

    def __init__(
        self, site_server: SiteServer, folder: Path, context: ClientContext, clients: list[ClientId], guard: Guard
    ) -> None:
        self.site_server, self.folder, self.context, self.clients = site_server, folder, context, set(clients)
        self.guard = guard
        self.store = StateStore()
        self.engine = LocalEngine(context, self.store)
        self.leg = RelayLeg(0, context, self.store)
        self._exchange = self._part_bytes = 0
        self._unsent: list[Any] = []
        self._matches: dict[ClientId, Match | None] = {}

    @classmethod
    def begin(cls, site_server: SiteServer, begin: wire.Begin) -> tuple[SiteRun, int, list[ClientId]]:
        """Begin a run with the clients' states that were stored after round ``begin.round`` or an earlier round.

        Returns:
            The run, the round of the restored states, and the clients whose states are missing, for example because
            these clients were at other sites before.
        """
        if not begin.run.isalnum():
            raise WireError(f"{begin.run!r} is not the name of a run")
        require_home(begin.clients, begin.total)
        own_data = begin.statistics is not None
        asked = site_server.admit(begin.spec, begin.total, own_data=own_data)
        quota = Quota(site_server.folder, asked.job)
        if own_data and site_server.policy is not None:
            quota.settle(begin.clients, begin.total, "bounds")
        context = site_server.context(begin, asked.job)
        frozen = begin.frozen if isinstance(begin, wire.BeginOnBase) else {}
        require_same_frozen(frozen, fingerprints_of_frozen(context.config.model), "the server's model")
        # Count this start of the run only now, so that a start that failed above does not count.
        quota.start(site_server.policy)
        prepare_process(context.config.training.threads)
        spec = Experiment.from_table(parse_toml(begin.spec))
        asked = declaration_of(spec, agreed=context.config, own_data=own_data)
        guard = Guard(asked, site_server.policy, quota, begin.round)
        run = cls(site_server, site_server.folder / begin.run, context, begin.clients, guard)
        if begin.round == 0:
            shutil.rmtree(run.folder, ignore_errors=True)
            return run, 0, []
        saved = checkpoint.load(run.folder, begin.round)
        if saved is None:
            return run, 0, begin.clients
        stored = run.clients.intersection(saved.state["lived"])
        run.guard.times_in_run = dict(saved.state.get("asked", {}))
        saved.only(stored).restore(run.store)
        return run, saved.round, sorted(run.clients - stored)

    def save(self, save: wire.Save) -> wire.Done:
        """Write a checkpoint with the clients' states.

        The checkpoint also lists all clients at this site. This list distinguishes clients that never had a state from
        clients whose state was lost.
        """
        self.guard.save(save.round)
        state = {"lived": sorted(self.clients), "asked": self.guard.times_in_run}
        checkpoint.save(self.folder, save.round, state, self.store)
        return wire.Done()

    def learn(self, ack: object) -> None:
        """Process an acknowledgement of an earlier reply. The server may send an acknowledgement several times."""
        if isinstance(ack, wire.Commit):
            if ack.exchange == self._exchange:
                self.engine.commit(ack.clients)
        elif isinstance(ack, wire.HopCommit):
            self.leg.keep(ack)
        elif isinstance(ack, wire.RelayEnd):
            self.leg.end(ack)
        elif self.context.member is not None:
            self._opened(self.context.member, ack)
        else:
            raise WireError(f"the message is a {type(ack).__name__}, not an acknowledgement")

    def _opened(self, member: Member, ack: object) -> None:
        """Process the server's message that a secure sum was unmasked, and record the message in the ledger."""
        from fedstrata.sites.secure_site import about, learn

        (client,) = self.clients
        if learn(member, ack, self.store, client):
            self.site_server.note(client=client, round=self.guard.round, **about(ack, member))

    def ask(self, ask: wire.Ask) -> wire.Answers:
        """Return the replies of this site's clients to requests."""
        self._next(ask.exchange)
        matches = len(set(ask.clients)) == len(ask.clients) == len(ask.which)
        if not matches or not all(0 <= n < len(ask.requests) for n in ask.which):
            raise WireError("the message does not have exactly one request for each client")
        asked = zip(ask.clients, ask.which, strict=True)
        requests = {client: self._request(client, ask.requests[n]) for client, n in asked}
        self._unsent = []
        self.engine.commit([])
        self.guard.begin_exchange()
        allowed, outcomes = self._allowed(requests, together=bool(ask.group))
        if allowed:
            group = None
            if ask.group:
                group = SiteGroup(ask.group, ask.places, self._send_part, self.site_server.settings.patience)
            self._part_bytes = 0
            outcomes |= self.engine.ask(allowed, together=group is not None, group=group)
            if self._part_bytes:
                self.site_server.note(wire.Part.__name__, round=self.guard.round, bytes=self._part_bytes)
        for client, request in allowed.items():
            outcomes[client] = self._recorded(client, request, outcomes[client], self.engine.n_contributing(client))
        self._unsent = [outcomes[client] for client in ask.clients]
        return self._next_answers()

    def _send_part(self, part: bytes) -> object:
        """Send this site's encoded terms of a sum over several sites to the server, and return the total.

        The bytes of these terms count towards the limit on the bytes that leave the site.
        """
        try:
            self.guard.leave(len(part))
        except RuleError as error:
            self.site_server.refused(error, wire.Part.__name__)
            raise
        self._part_bytes += len(part)
        return self.site_server.send(SERVER, part)

    def _allowed(
        self, requests: Mapping[ClientId, Request], *, together: bool
    ) -> tuple[dict[ClientId, Request], dict[ClientId, Any]]:
        """Return the requests that may be answered, and a refusal for every other request.

        If ``together`` is true, the clients add up tensors together, so either all requests are answered, or
        all requests are refused.
        """
        allowed: dict[ClientId, Request] = {}
        refused: dict[ClientId, Any] = {}
        self._matches = {}
        for client, request in requests.items():
            try:
                self._matches[client] = match = self.guard.check(client, request, together=together)
                self._spend(client, match)
                self.guard.take(match)
                allowed[client] = request
            except RuleError as error:
                refused[client] = self._refusal(client, request, error)
        if together and refused:
            void = wire.Failed("the request to another client of the group was refused", bystander=True)
            return {}, {client: refused.get(client, void) for client in requests}
        return allowed, refused

    def _spend(self, client: ClientId, match: Match | None) -> None:
        """Deduct a client's training steps with ``privacy.dp`` from the site's privacy budget.

        Raises:
            RuleError: The steps would exceed the budget.
        """
        config, budget = self.context.config, self.site_server.budget
        dp, samples = config.privacy.dp, int(self.context.assignment.sizes[client])
        if budget is None or dp is None or match is None or match.allowed.innermost.request is not Fit:
            return
        # If the client has too few samples, ``authorize_update`` raises ``WithheldError``. The client then takes no
        # steps, so nothing is spent.
        with suppress(WithheldError):
            Client(client, self.context).authorize_update(samples)
            rate, steps = config.training.poisson(samples)
            if steps:
                budget.spend(self.guard.declaration.job, client, noise=dp.noise, rate=rate, steps=steps)

    def _refusal(self, client: ClientId, request: Request, error: RuleError) -> wire.Failed:
        self.site_server.refused(error, type(request).__name__, SERVER, client)
        return wire.Failed(f"site {self.site_server.name}: {error}", bystander=False, refused=True)

    def _recorded(self, client: ClientId, request: Request, outcome: Any, samples: int) -> Any:
        """Add a client's reply or failure to the ledger, and return the reply or failure as a message."""
        match = self._matches.get(client)
        about: dict[str, Any] = {"client": client, "round": self.guard.round}
        if match is not None:
            about |= {"phase": match.allowed.rule.phase}
        answer = self._as_message(outcome)
        if not isinstance(answer, wire.Failed):
            self.guard.answered(match, answer)
            epsilon = None if match is None else match.allowed.rule.epsilon
            about |= {"samples": samples, "bytes": records.size(answer), "epsilon": epsilon} | self._about_sum(request)
        elif "privacy.min_samples" in answer.reason:
            about |= {"refused": "privacy.min_samples"}
        elif answer.refused and self.context.member is not None:
            about |= {"refused": "secure-sums"}
        else:
            error = outcome.error if isinstance(outcome, Failure) else None
            about |= {"failed": "no answer" if error is None else type(error).__name__}
        kind = type(request).__name__ if match is None else match.allowed.label
        self.site_server.note(**{"kind": kind, **about})
        return answer

    def _about_sum(self, request: Request) -> dict[str, Any]:
        """Return the fields of a ledger entry that describe a message of a secure sum."""
        if self.context.member is None:
            return {}
        from fedstrata.sites.secure_site import about

        fields = about(request, self.context.member)
        if isinstance(request, Masked):
            fields["noise"] = self.context.cached(forms)[type(request.request)].ring.noise or None
        return fields

    def more(self, more: wire.More) -> wire.Answers:
        """Return those replies of the last exchange that did not fit into the previous messages."""
        if more.exchange != self._exchange:
            raise WireError(f"the replies of exchange {more.exchange} are no longer stored")
        return self._next_answers()

    def _next_answers(self) -> wire.Answers:
        """Return the next unsent replies: at least one reply, and all further replies that fit into one message."""
        size = count = 0
        for outcome in self._unsent:
            size += records.size(outcome)
            if count and size > LARGEST_ANSWER:
                break
            count += 1
        answers, self._unsent = self._unsent[:count], self._unsent[count:]
        return wire.Answers(answers, len(self._unsent))

    def hop(self, hop: wire.Hop) -> wire.Hopped | wire.Unmoved:
        """Let a client train the model that travels from client to client (a relay), and return the client's reply."""
        self._next(hop.exchange)
        task = self._request(hop.client, hop.task)
        if hop.back and hop.weights is None:
            raise WireError("a request that asks for the model back must contain the model")
        self.guard.begin_exchange()
        try:
            self.guard.hop(hop.relay_id, back=hop.back, brought=hop.weights is not None and hop.base >= 0)
            match = self.guard.check(hop.client, task, relay=True)
        except RuleError as error:
            return wire.Hopped(self._refusal(hop.client, task, error), None)
        self._matches = {hop.client: match}
        if hop.back:
            assert hop.weights is not None
            self.guard.take(match)
            outcome = self.engine.hop(hop.client, task, hop.weights)
            weights, reply = (None, outcome) if isinstance(outcome, Failure) else outcome
            return wire.Hopped(self._recorded(hop.client, task, reply, self.engine.n_contributing(hop.client)), weights)
        if self.leg.number != hop.relay_id:
            self.leg = RelayLeg(hop.relay_id, self.context, self.store)
        try:
            weights = self._weights(hop)
        except (FedstrataError, OSError) as error:
            return wire.Unmoved(self.site_server.message_of(error))
        self.guard.take(match)
        reply, samples = self.leg.work(hop, task, weights)
        return wire.Hopped(self._recorded(hop.client, task, reply, samples), None)

    def _weights(self, hop: wire.Hop) -> Weights:
        """Return a relay's model: from the message, from this site's last hop, or from the site that has the model.

        Raises:
            FedstrataError: The model is not available, or is damaged.
        """
        if hop.weights is None and hop.holder == self.site_server.name:
            result = self.leg.result_of(hop.relay_id, hop.base)
            if result is None:
                raise FedstrataError(f"this site does not have the model that hop {hop.base} produced")
            return result.weights
        weights = hop.weights
        if weights is None:
            fetch = records.encode(wire.Fetch(hop.relay_id, hop.base, hop.key))
            weights = read(self.site_server.send(hop.holder, fetch), Weights)
        model = self.context.config.model
        if defect := defect_of(weights, lambda brought: brought.require_like(Weights(model.params(), model.buffers()))):
            raise ReplyRefusedError(f"the model from hop {hop.base} arrived damaged: {defect}")
        return weights

    def _as_message(self, outcome: Any) -> Any:
        if not isinstance(outcome, Failure):
            try:
                # The reply is checked here, because a reply that the server cannot decode would make the whole message
                # unreadable.
                records.require_types(outcome)
            except (WireError, AttributeError, KeyError) as error:
                return wire.Failed(str(error), False, True)
            return outcome
        reason = outcome.reason if outcome.error is None else self.site_server.message_of(outcome.error, outcome.reason)
        return wire.Failed(reason, outcome.bystander, outcome.refused)

    def _next(self, exchange: int) -> None:
        if exchange <= self._exchange:
            raise WireError(f"exchange {exchange} came after exchange {self._exchange}, but the numbers must increase")
        self._exchange = exchange

    def _request(self, client: ClientId, request: object) -> Request:
        if client not in self.clients:
            raise WireError(f"client {client} is not at site {self.site_server.name}")
        if not isinstance(request, Request):
            raise WireError(f"the message contains a {type(request).__name__} instead of a request")
        return request


@dataclass(frozen=True)
class HopResult:
    """The result of a hop, in which one client trains the model of a relay.

    Args:
        hop: The index of the hop.
        ticket: The secret that the next site needs to fetch the model.
        weights: The model after the hop.
        client: The id of the client.
        samples: The number of samples from which the result was computed.
        state: The new state of the client.
    """

    hop: int
    ticket: str
    weights: Weights
    client: ClientId
    samples: int
    state: Mapping[str, Tree]


class RelayLeg:
    """A site's work in a relay, in which clients train the same model, one after another.

    The new states of the site's clients are stored only when the relay ends.
    """

    def __init__(self, number: int, context: ClientContext, store: StateStore) -> None:
        self.number, self._context, self._store = number, context, store
        self._states: dict[ClientId, Mapping[str, Tree]] = {}
        self._new: HopResult | None = None
        self._kept: HopResult | None = None

    def work(self, hop: wire.Hop, task: Request, weights: Weights) -> tuple[Reply | Failure, int]:
        """Let a client train the model. Return the client's reply (or a failure) and its number of training samples."""
        self._new = None
        state = self._states.get(hop.client)
        client = Client(hop.client, self._context, self._store.get(hop.client) if state is None else state)
        try:
            moved, reply = self._context.handlers.hop[type(task)](client, task, weights)
        except Exception as error:
            return failure(error), 0
        if defect := defect_of(moved, lambda moved: moved.require_like(weights)):
            return Failure(defect, refused=True), 0
        self._new = HopResult(hop.hop, hop.ticket, moved, hop.client, client.n_contributing, client.state)
        return reply, client.n_contributing

    def keep(self, ack: wire.HopCommit) -> None:
        """Record that the last client's result is valid, because the server acknowledged it."""
        new = self._new
        if ack.relay_id == self.number and new is not None and new.hop == ack.hop:
            self._states[new.client] = new.state
            self._kept, self._new = new, None

    def end(self, ack: wire.RelayEnd) -> None:
        """Store the new states of the clients with accepted results, and delete the travelling model."""
        if ack.relay_id != self.number:
            return
        for client, state in self._states.items():
            if client not in ack.void:
                self._store.put(client, state)
        self._states, self._new, self._kept = {}, None, None

    def result_of(self, relay_id: int, hop: int) -> HopResult | None:
        """If ``hop`` is the site's last hop or last acknowledged hop, return its result; otherwise, return None."""
        for result in (self._new, self._kept):
            if relay_id == self.number and result is not None and result.hop == hop:
                return result
        return None
