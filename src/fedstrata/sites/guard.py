"""Refuse requests that a job does not declare or that a site's policy forbids, before a client handles them."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, FileLock

from fedstrata.base import records
from fedstrata.base.jsonl import replace_file
from fedstrata.base.locking import LOCK
from fedstrata.federation.allowed import Allowed
from fedstrata.federation.messages import PHASES, ClientId, Order, Phase, Request
from fedstrata.sites.disclosure import Declaration, declaration_of
from fedstrata.sites.policy import Policy, RuleError
from fedstrata.sites.settings import SiteSettings
from fedstrata.spec.experiment import Experiment, parse_toml

BUNDLED = ("digits",)
"""Data sets that come with scikit-learn. A spec may always name these data sets, because they do not contain data of
the site."""


def declared(text: str, settings: SiteSettings, *, clients: int, own_data: bool) -> Declaration:
    """Check that a job reads only files that the site allows, and return everything that the job may request.

    This function does not open files, and does not check the site's policy.

    Args:
        text: The spec as TOML.
        settings: The site's settings. If the settings name a data file, the site uses this file instead of the data
            that the spec names.
        clients: The number of clients.
        own_data: True if the job uses the sites' own data; False if the job uses the data that the spec names.

    Raises:
        RuleError: The spec names data or files that are not in the site's catalog.
        SpecError: The spec is wrong.
    """
    table = parse_toml(text)
    if not settings.simulated:
        refuse_files(table, settings.catalog, data=not own_data and settings.data is None)
    return declaration_of(Experiment.from_table(table), clients=clients, own_data=own_data)


def refuse_files(table: Mapping[str, Any], catalog: Collection[str], *, data: bool) -> None:
    """Raise an error if a spec names data sets or files outside the catalog of this machine (a site or the server).

    Args:
        table: The spec as parsed TOML.
        catalog: The data sets and files that a spec may name on this machine.
        data: Whether to check the name of the data set too. Use True if this machine reads the data that the spec
            names.

    Raises:
        RuleError: The spec names data or a file that is not in the catalog.
    """
    accepted = ", ".join((*BUNDLED, *catalog))
    where = f"is not in this party's catalog. Use one of: {accepted}, or add it to 'catalog' in local/fedstrata.toml."
    section = table.get("data", {})
    name = section.get("name", BUNDLED[0]) if isinstance(section, dict) else section
    if data and name not in (*BUNDLED, *catalog):
        raise RuleError("data", f"data.name = {name!r} {where}")
    # The table [data] is not searched for keys with the name 'file', because a column of the data may have this name.
    level: list[tuple[str, Any]] = [("", {key: value for key, value in table.items() if key != "data"})]
    while level:
        place, entry = level.pop()
        if isinstance(entry, dict):
            for key, value in entry.items():
                if key == "file" and value not in catalog:
                    raise RuleError("data", f"{place}file = {value!r} {where}")
                level.append((f"{place}{key}.", value))
        elif isinstance(entry, list):
            level += [(place, each) for each in entry if isinstance(each, (dict, list))]


@contextmanager
def data_trial(folder: Path, policy: Policy, job: str, description: str, request: bytes) -> Iterator[None]:
    """Let the ``with`` block read a site's data for a job, and limit the number of trials.

    By learning whether the spec's description fits the data, a job learns something about the data. Each different
    description counts as a trial. A failed request also counts as a trial. If the same request later succeeds, for
    example after the site corrected its file, the failed trial no longer counts. This function counts the
    trials of approved jobs too, but never refuses such a job. Only one job can be in the block at a time.

    Args:
        folder: The site's folder.
        policy: The site's policy, which sets the limit.
        job: The hash of the job's spec.
        description: A hash of the spec's description of the data.
        request: The encoded request, which is needed to recognise a repeated request.

    Raises:
        RuleError: Other jobs have used all trials that the policy allows.
    """
    path, key = folder / ".told" / "told.json", hashlib.sha256(request).hexdigest()
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(LOCK)):
        trials: dict[str, list[str]] = {"described": [], "failed": []}
        trials |= json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

        def count(kind: str, entry: str) -> None:
            # Store at most ``surveys`` entries, because further entries would not change any decision.
            if entry not in trials[kind] and len(trials[kind]) < policy.surveys:
                trials[kind].append(entry)
            replace_file(path, json.dumps(trials).encode(), mode=0o600)

        policy.limit(job, description, trials["described"], "whether this site's data fit another description")
        policy.limit(job, key, trials["failed"], "why this site's data cannot be used")
        count("described", description)
        try:
            yield
        except Exception:
            count("failed", key)
            raise
        if key in trials["failed"]:
            trials["failed"].remove(key)
            replace_file(path, json.dumps(trials).encode(), mode=0o600)


SAVE_SECONDS = 1.0
"""The minimum number of seconds between two writes of a quota's counts during a job."""

COUNTS = ("starts", "exchanges", "bytes")


class Quota:
    """The numbers of starts, exchanges and bytes of a job at a site. These numbers are stored in a file.

    The same job may run in two processes. Each process adds its own numbers to the file.

    Args:
        folder: The site's folder.
        job: The hash of the job's spec.
    """

    def __init__(self, folder: Path, job: str) -> None:
        self._path = folder / ".quota" / f"{job}.json"
        self._survey = self._path.with_suffix(".survey")
        self.starts = self.exchanges = self.bytes = 0
        self.home: list[int] = []
        """The total number of clients, followed by the ids of this site's clients; empty until the job assigns the
        clients."""
        self._in_file, self._saved = dict.fromkeys(COUNTS, 0), 0.0
        self.lock = threading.Lock()
        """A lock for changes of the counts, because several threads send replies."""
        self._read()

    def start(self, policy: Policy | None) -> None:
        """Count a start of the job.

        Raises:
            RuleError: The job started more often than the policy allows.
        """
        with self._changing():
            if policy is not None and self.starts >= policy.starts:
                problem = (
                    f"the job began {self.starts} times, but may begin at most {policy.starts} times. Submit a new job."
                )
                raise RuleError("policy.starts", problem)
            self.starts += 1

    def save(self) -> None:
        """Write the counts to the file: add the starts, exchanges and bytes since the last write."""
        with self._changing():
            pass

    def save_now_and_then(self) -> None:
        """Write the counts at most once per second. A killed site loses only the counts of the last second."""
        if time.monotonic() - self._saved > SAVE_SECONDS:
            self.save()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Read the file of the counts before the ``with`` block, and replace the file after the block."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self.lock, self.alone():
            self._read()
            yield
            self._in_file = {key: getattr(self, key) for key in COUNTS}
            replace_file(self._path, json.dumps({**self._in_file, "home": self.home}).encode())
            self._saved = time.monotonic()

    def _read(self) -> None:
        table = json.loads(self._path.read_text(encoding="utf-8")) if self._path.exists() else {}
        for key in COUNTS:
            count = int(table.get(key, 0))
            setattr(self, key, count + getattr(self, key) - self._in_file[key])
            self._in_file[key] = count
        self.home = table.get("home") or self.home

    def settle(self, clients: list[ClientId], total: int, rule: str) -> None:
        """Record the clients that a job assigns to this site, and refuse later changes.

        If the clients' ids changed, other samples would be held out for tests. The difference between two replies
        could then reveal a sample.

        Args:
            clients: The ids of the clients at this site.
            total: The total number of clients.
            rule: The name of the rule, for the error message.

        Raises:
            RuleError: The job has already assigned other clients to this site.
        """
        home = [total, *clients]
        with self._changing():
            if self.home and home != self.home:
                known = f"clients {self.home[1:]} (of {self.home[0]} in total)"
                raise RuleError(
                    rule,
                    f"the job assigns clients {clients} (of {total} in total) to this site, but earlier the site had "
                    f"{known}. Keep the earlier assignment.",
                )
            self.home = home

    @property
    def survey(self) -> bytes | None:
        """The encoded reply to this job's ``Survey`` (a request for statistics); None before the reply is sent."""
        return self._survey.read_bytes() if self._survey.exists() else None

    @survey.setter
    def survey(self, answer: bytes) -> None:
        replace_file(self._survey, answer, mode=0o600)

    def surveys(self) -> list[bytes]:
        """Return the site's encoded replies to the requests for statistics (``Survey``) of all jobs."""
        return [path.read_bytes() for path in sorted(self._survey.parent.glob(f"*{self._survey.suffix}"))]

    def alone(self) -> BaseFileLock:
        """Return a lock for exclusive access to the files of all jobs: their quotas and the replies to ``Survey``."""
        return FileLock(self._survey.with_name(LOCK))


REPEATS = 3
"""If clients add up tensors together for a request: how often it may be repeated because clients failed. The number is
limited, because each repetition may send terms of sums to the server."""

Position = tuple[int, int]
"""The progress of a run: the round (0 before the first round), and the index of the phase in ``PHASES``."""


@dataclass(frozen=True)
class Match:
    """A request that the guard allows because of an entry of the job's declaration.

    Args:
        client: The client to which the request is addressed.
        request: The request as it arrived.
        number: The index of the entry ``allowed`` in the job's declaration.
        allowed: The declaration's entry that allows the request.
        position: The progress of the run after the reply to the request.
        digests: The hashes of all variants of the request; empty unless the clients add up tensors for the reply.
            After other clients failed, the server may send another variant.
        again: Whether the client gets this request again, because another client failed.
    """

    client: ClientId
    request: Request
    number: int
    allowed: Allowed
    position: Position
    digests: tuple[bytes, ...]
    again: bool


class Guard:
    """A guard that decides which requests the clients of one site may answer in a run, and counts the replies.

    Args:
        declaration: Everything that the job may request.
        policy: The site's policy; None if the site has no policy.
        quota: The numbers of starts, exchanges and bytes that the job has used at the site.
        round: The last finished round; 0 for a new run.
    """

    def __init__(self, declaration: Declaration, policy: Policy | None, quota: Quota, round: int = 0) -> None:
        self.declaration, self.policy, self.quota = declaration, policy, quota
        self.position: Position = (round, len(PHASES) - 1 if round else 0)
        self.times_in_run: dict[str, int] = {}
        """How often each client answered each request that is limited per run. A key consists of a client's id and the
        index of the declaration's entry. Checkpoints contain this mapping."""
        self._relay_over = -1
        # ``take`` resets the next three mappings when a phase of a round begins, but not ``_repeats``.
        self._times: dict[tuple[ClientId, int], int] = {}
        self._orders: dict[tuple[ClientId, type[Order]], Order] = {}
        self._last_digests: dict[tuple[ClientId, int], tuple[bytes, ...]] = {}
        self._repeats: dict[tuple[ClientId, int], int] = {}
        # Store the last request and its digests, because many clients get the same request.
        self._digests: tuple[Request | None, tuple[bytes, ...]] = (None, ())

    @property
    def round(self) -> int:
        """The last round that has begun."""
        return self.position[0]

    def check(self, client: ClientId, request: Request, *, relay: bool = False, together: bool = False) -> Match | None:
        """Check whether a client may answer a request, without counting the request.

        Args:
            client: The client that gets the request.
            request: The request.
            relay: Whether the request comes with a model that goes from client to client.
            together: Whether the client adds up tensors with other clients, and must therefore answer together with
                them.

        Returns:
            The match of the request with an entry of the declaration; None if the job has no declaration.

        Raises:
            RuleError: The client must not answer.
        """
        if self.declaration.allowed is None:
            return None
        try:
            number, allowed, position = self._entry(request, relay, together)
            if self.policy is not None and allowed.rule.phase == "evaluation":
                self.policy.check_evaluation()
            digests = self._digests_of(allowed, request) if together else ()
            before = self._last_digests.get((client, number), ()) if position == self.position else ()
            match = Match(client, request, number, allowed, position, digests, together and digests[0] in before)
            self._refuse_early(match)
            self._refuse_often(match)
            for order, ordered in self._orders_of(match):
                if problem := order.refusal(ordered):
                    raise RuleError("order", f"{allowed.label}: {problem}")
        except RuleError:
            raise
        except Exception as error:
            problem = f"{type(request).__name__} is malformed: {type(error).__name__}"
            raise RuleError("bounds", problem) from error
        return match

    def take(self, match: Match | None) -> None:
        """Count a request immediately before the client answers it."""
        if match is None:
            return
        if match.position > self.position:
            self.position = match.position
            self._times, self._orders, self._last_digests = {}, {}, {}
            self.quota.save_now_and_then()
        key = match.client, match.number
        if match.again:
            self._repeats[key] = self._repeats.get(key, 0) + 1
        else:
            self._repeats[key], self._last_digests[key] = 0, match.digests
            self._times[key] = self._times.get(key, 0) + 1
        for order, ordered in self._orders_of(match, keep=True):
            order.asked(ordered)

    def answered(self, match: Match | None, reply: Any) -> None:
        """Count a reply. Limits per run count replies and not requests, because a client may fail to reply."""
        if match is None:
            return
        rule = match.allowed.rule
        if match.allowed.per == "run" or rule.phase == "enrolment":
            name = _name(match.client, match.number)
            self.times_in_run[name] = self.times_in_run.get(name, 0) + 1
        if rule.order is not None:
            self._orders[match.client, rule.order].answered(match.request, reply)

    def begin_exchange(self) -> None:
        """Count a message that contains requests to clients or a hop of a relay.

        Raises:
            RuleError: The job has already sent as many messages as the policy allows.
        """
        with self.quota.lock:
            if self.policy is not None and self.quota.exchanges >= self.policy.exchanges:
                most = self.policy.exchanges
                raise RuleError(
                    "policy.exchanges",
                    f"the job sent {self.quota.exchanges} messages, but this site allows only {most}",
                )
            self.quota.exchanges += 1

    def leave(self, size: int) -> None:
        """Count ``size`` bytes that are about to leave the site.

        Raises:
            RuleError: The replies to the job would exceed the limit ``megabytes`` of the policy.
        """
        with self.quota.lock:
            total = self.quota.bytes + size
            if self.policy is not None and total > self.policy.megabytes * 1e6:
                limit = f"but this site sends at most {self.policy.megabytes:g} MB"
                raise RuleError("policy.megabytes", f"all replies together would take {total / 1e6:g} MB, {limit}")
            self.quota.bytes = total

    def save(self, round: int) -> None:
        """Write the counts of starts, exchanges and bytes to the disk, together with the clients' states.

        Raises:
            RuleError: The round is not between 0 and the job's number of rounds.
        """
        if not 0 <= round <= self.declaration.rounds:
            raise RuleError("rounds", f"round {round} is not between 0 and {self.declaration.rounds}")
        self.quota.save()

    def hop(self, relay_id: int, *, back: bool, brought: bool) -> None:
        """Raise an error if a hop would show a model to the server although the policy forbids this.

        In a relay, clients train the same model, one after another. The training at one client is a hop.

        Args:
            relay_id: The id of the relay.
            back: Whether the model returns to the server.
            brought: Whether the server's message contains a model that another site trained.

        Raises:
            RuleError: The hop would show the model to the server, or the server has already fetched the relay's model.
        """
        if relay_id == self._relay_over:
            raise RuleError("relay", f"relay {relay_id} is over, because the server has already fetched the model")
        if self.policy is not None and self.policy.relay == "direct" and (back or brought):
            problem = "the server could read the relay's models, but this site accepts only relays that prevent this"
            raise RuleError("policy.relay", problem)

    def fetched_by_server(self, relay_id: int) -> None:
        """After the server has fetched the model of a relay, refuse further training if ``policy.relay`` is ``direct``.

        In a relay, clients train the same model, one after another.
        """
        if self.policy is not None and self.policy.relay == "direct":
            self._relay_over = relay_id

    def _entry(self, request: Request, relay: bool, together: bool) -> tuple[int, Allowed, Position]:
        """Return the index of the entry that allows a request, the entry, and the run's progress after the request."""
        problem: RuleError | None = None
        for number, allowed in enumerate(self.declaration.allowed or ()):
            if not allowed.includes(request):
                continue
            try:
                return number, allowed, self._position_of(allowed, request, relay, together)
            except RuleError as error:
                problem = problem or error
        if problem is not None:
            raise problem
        inside = getattr(request, "request", None)
        name = type(request).__name__ + (f" of {type(inside).__name__}" if inside is not None else "")
        raise RuleError("kind", f"job {self.declaration.job} does not declare the request {name}")

    def _position_of(self, allowed: Allowed, request: Request, relay: bool, together: bool) -> Position:
        """Return the progress of the run (see ``Position``) after the reply to a request.

        Raises:
            RuleError: The entry does not allow the request.
        """
        label, rule, rounds = allowed.label, allowed.rule, self.declaration.rounds
        if relay != rule.relay:
            way = "for a relay" if rule.relay else "outside relays"
            raise RuleError("kind", f"the declaration of the job allows {label} only {way}")
        if together and not rule.together:
            raise RuleError("kind", f"the job does not allow a group of clients to add up tensors for {label}")
        round = _round_of(request, rule.phase, self.round)
        inside = getattr(request, "request", None)
        if allowed.inside is not None and _round_of(inside, rule.phase, round) != round:
            raise RuleError("rounds", f"{label} contains a request of another round")
        position = round, PHASES.index(rule.phase)
        if rule.phase == "enrolment":
            if position != (0, 0) or self.position != (0, 0):
                now = max(round, self.round)
                raise RuleError("phase", f"{label} must come before the first round, but this is round {now}")
        elif not 1 <= round <= rounds:
            raise RuleError("rounds", f"{label} arrived for round {round}, but the run has only rounds 1 to {rounds}")
        elif position < self.position:
            phase = PHASES[self.position[1]]
            raise RuleError(
                "rounds", f"{label} of round {round} came too late: phase {phase!r} of round {self.round} has begun"
            )
        elif not allowed.comes_in(round):
            raise RuleError("phase", f"{label} is not declared for round {round}")
        if problem := allowed.wrong(request, round):
            raise RuleError("bounds", problem)
        return position

    def _refuse_early(self, match: Match) -> None:
        """Raise an error if the client has not answered the earlier request that ``RequestRule.after`` names.

        The earlier request replaces the ids of labels, and later requests use the new ids. If a site lost its
        checkpoint, its clients must answer the earlier request again.
        """
        first = match.allowed.rule.after
        numbers = [n for n, allowed in enumerate(self.declaration.allowed or ()) if allowed.request is first]
        if first is not None and numbers and not any(_name(match.client, n) in self.times_in_run for n in numbers):
            problem = f"{match.allowed.label} came before {first.__name__}, so labels would not be masked"
            raise RuleError("order", problem)

    def _refuse_often(self, match: Match) -> None:
        allowed, key = match.allowed, (match.client, match.number)
        if match.again:
            if self._repeats.get(key, 0) >= REPEATS:
                problem = f"{allowed.label} was repeated more than {REPEATS} times after clients of a group failed"
                raise RuleError("repeat", problem)
            return
        if allowed.times is None:
            return
        if allowed.per == "run":
            count, when = self.times_in_run.get(_name(*key), 0), "in the whole run"
        else:
            count, when = self._times.get(key, 0) if match.position == self.position else 0, _WHEN[allowed.rule.phase]
        if count >= allowed.times:
            raise RuleError(
                "repeat", f"{allowed.label} arrived again, but may arrive at most {allowed.times} time(s) {when}"
            )

    def _orders_of(self, match: Match, *, keep: bool = False) -> list[tuple[Order, Any]]:
        """Return pairs of an ``Order`` and a request: for the match's request, and for its inner request, if any.

        An ``Order`` checks the sequence of requests. If the client has already answered the inner request, only the
        outer request gets an ``Order``. If ``keep`` is true, new ``Order`` objects are stored.
        """
        orders: list[tuple[Order, Any]] = []
        allowed: Allowed | None = match.allowed
        request: Any = match.request
        while allowed is not None:
            kind = allowed.rule.order
            if kind is not None and not (match.again and allowed.inside is None):
                order = self._orders.get((match.client, kind)) if match.position == self.position else None
                order = kind() if order is None else order
                if keep:
                    self._orders[match.client, kind] = order
                orders.append((order, request))
            allowed, request = allowed.inside, getattr(request, "request", None)
        return orders

    def _digests_of(self, allowed: Allowed, request: Request) -> tuple[bytes, ...]:
        if self._digests[0] is not request:
            forms = [request] if allowed.rule.forms is None else allowed.rule.forms(request)
            self._digests = request, tuple(hashlib.sha256(records.encode(form)).digest() for form in forms)
        return self._digests[1]


_WHEN: dict[Phase, str] = {"enrolment": "before the first round", "round": "in a round", "evaluation": "after a round"}


def _name(client: ClientId, number: int) -> str:
    return f"{client} {number}"


def _round_of(request: Any, phase: Phase, now: int) -> int:
    """Return the round in a request. Default: ``now``, or 0 in the phase before the first round."""
    return int(getattr(request, "round", 0 if phase == "enrolment" else now))
