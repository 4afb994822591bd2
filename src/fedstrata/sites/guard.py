"""What a site refuses before a handler runs: whatever its job does not declare, and what its policy forbids."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, FileLock

from fedstrata.base import records
from fedstrata.base.jsonl import replace_file
from fedstrata.base.locking import LOCK
from fedstrata.federation.messages import ClientId, Request
from fedstrata.federation.questions import PHASES, Phase, RequestRule, Rule
from fedstrata.sites.disclosure import Declaration, declaration_of
from fedstrata.sites.policy import Policy, RuleError
from fedstrata.spec.experiment import Experiment, parse_toml

BUNDLED = ("digits",)
"""Data sets that come with scikit-learn, so that naming one reads nothing of a site's."""


def admitted(
    text: str,
    policy: Policy | None,
    *,
    clients: int,
    own_data: bool,
    catalog: Collection[str] | None,
    undeclared: bool = False,
    has_data: bool = False,
    named: Callable[[str], None] = lambda job: None,
) -> Declaration:
    """What a job asks, if a site takes part in it; nothing that the spec names has been read when this is decided.

    Args:
        text: The spec as TOML.
        policy: The site's; None for none.
        clients: N.
        own_data: Whether the job is about the sites' own data; otherwise about those that the spec names.
        catalog: The data sets that a spec may name here; None for any.
        undeclared: Whether a method that does not declare what it asks may run, as in a simulation.
        has_data: Whether the site has a data file of its own, which no spec's data stand in for.
        named: Told the job's hash before the policy looks at it.

    Raises:
        RuleError: It does not take part, by this rule.
        SpecError: The spec is wrong.
    """
    table = parse_toml(text)
    if catalog is not None:
        _refuse_files(table, catalog, data=not own_data and not has_data)
    asked = declaration_of(Experiment.from_table(table), clients=clients, own_data=own_data)
    named(asked.job)
    if policy is not None:
        policy.check(asked)
    elif asked.questions is None and not undeclared:
        Policy(jobs="within-policy", min_samples=1).check(asked)
    return asked


def _refuse_files(table: Mapping[str, Any], catalog: Collection[str], *, data: bool) -> None:
    """A spec names nothing that lies at a site, unless the site's own settings name it too.

    Raises:
        RuleError: It does.
    """
    accepted = ", ".join((*BUNDLED, *catalog))
    where = f"accepted here: {accepted}, by 'catalog' in the site's own settings"
    section = table.get("data", {})
    name = section.get("name", BUNDLED[0]) if isinstance(section, dict) else section
    if data and name not in (*BUNDLED, *catalog):
        raise RuleError("data", f"data.name = {name!r} names what lies at this site or is fetched for it; {where}")
    # What a table's columns are called is no file.
    level: list[tuple[str, Any]] = [("", {key: value for key, value in table.items() if key != "data"})]
    while level:
        place, entry = level.pop()
        if isinstance(entry, dict):
            for key, value in entry.items():
                if key == "file" and value not in catalog:
                    raise RuleError("data", f"{place}file = {value!r} names a file at this site; {where}")
                level.append((f"{place}{key}.", value))
        elif isinstance(entry, list):
            level += [(place, each) for each in entry if isinstance(each, (dict, list))]


class Told:
    """What was tried on a site's own data, over all jobs: whether data are what a spec says is an answer, too.

    A job that was approved is never refused here, but what it was told counts like the rest.

    Args:
        folder: The site's.
        policy: The site's.
        job: The hash of the job's spec.
    """

    def __init__(self, folder: Path, policy: Policy, job: str) -> None:
        self._folder, self._policy, self._job = folder / ".told", policy, job
        self._path = self._folder / "told.json"

    @contextmanager
    def reading(self, description: str, question: bytes) -> Iterator[None]:
        """Let data be read in the block, for one job at a time, and count what becomes of it.

        Each description counts, whether the data fit it or not; and each question at which something failed, until
        the same question is answered, as after the site mended its file.

        Args:
            description: What the data must be.
            question: What is asked, as bytes.

        Raises:
            RuleError: Other jobs were told as much as the policy lets be told.
        """
        key = hashlib.sha256(question).hexdigest()
        self._folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self._folder / LOCK):
            record = self._read()
            self._refuse(record["described"], description, "whether this site's data fit another description")
            self._refuse(record["failed"], key, "why this site's data cannot be used")
            self._add(record, "described", description)
            self._write(record)
            try:
                yield
            except Exception:
                self._add(record, "failed", key)
                raise
            else:
                record["failed"] = [each for each in record["failed"] if each != key]
            finally:
                self._write(record)

    def _refuse(self, before: list[str], key: str, what: str) -> None:
        most = self._policy.surveys
        if key not in before and len(before) >= most and self._job not in self._policy.approved:
            approve = f"'fedstrata approve {self._job} --kit DIR' at the site accepts it"
            raise RuleError(
                "policy.surveys", f"other jobs were told {what}; accepted: {most} such answer(s); {approve}"
            )

    def _add(self, record: dict[str, list[str]], kind: str, key: str) -> None:
        if key not in record[kind] and len(record[kind]) < self._policy.surveys:  # more would change nothing
            record[kind].append(key)

    def _read(self) -> dict[str, list[str]]:
        table = json.loads(self._path.read_text(encoding="utf-8")) if self._path.exists() else {}
        return {kind: list(table.get(kind, [])) for kind in ("described", "failed")}

    def _write(self, record: dict[str, list[str]]) -> None:
        replace_file(self._path, json.dumps(record).encode(), mode=0o600)


SECONDS = 1.0
"""Between two times that what a job had of a site is written down."""


COUNTS = ("starts", "exchanges", "bytes")


class Quota:
    """What a job has had of a site so far, over all times that it began: in a file that outlives processes.

    The same job may be at work in two processes: each adds what it counted to what the file says.

    Args:
        folder: The site's.
        job: The hash of the job's spec.
    """

    def __init__(self, folder: Path, job: str) -> None:
        self._path = folder / ".quota" / f"{job}.json"
        self._survey = self._path.with_suffix(".survey")
        self.starts = self.exchanges = self.bytes = 0
        self.home: list[int] = []
        """Where each site brings its own data: N, and the numbers of the clients here; empty before it is known."""
        self._known, self._saved = dict.fromkeys(COUNTS, 0), 0.0
        self.lock = threading.Lock()
        """Answers leave by several threads."""
        self._read()

    def start(self, policy: Policy | None) -> None:
        """The job begins, or goes on, once more.

        Raises:
            RuleError: It did so too often.
        """
        with self._changing():
            if policy is not None and self.starts >= policy.starts:
                problem = f"the job began {self.starts} times; accepted: {policy.starts} at most"
                raise RuleError("policy.starts", problem)
            self.starts += 1

    def save(self) -> None:
        """Write it down."""
        with self._changing():
            pass

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Read what there is, and write it down after the block; in one step, so that a crash leaves old or new."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self.lock, self.alone():
            self._read()
            yield
            self._known = {key: getattr(self, key) for key in COUNTS}
            part = self._path.with_suffix(".part")
            part.write_text(json.dumps({**self._known, "home": self.home}), encoding="utf-8")
            part.replace(self._path)
            self._saved = time.monotonic()

    def _read(self) -> None:
        table = json.loads(self._path.read_text(encoding="utf-8")) if self._path.exists() else {}
        for key in COUNTS:
            there = int(table.get(key, 0))
            setattr(self, key, there + getattr(self, key) - self._known[key])
            self._known[key] = there
        self.home = table.get("home") or self.home

    def settle(self, clients: list[ClientId], total: int, rule: str) -> None:
        """A job says once which client lives here: another number would hold out other samples.

        Raises:
            RuleError: It says something else than before.
        """
        home = [total, *clients]
        with self._changing():
            if self.home and home != self.home:
                known = f"client(s) {self.home[1:]} of {self.home[0]}"
                raise RuleError(rule, f"asked as client(s) {clients} of {total}; accepted, as before: {known}")
            self.home = home

    @property
    def survey(self) -> bytes | None:
        """The answer to the survey, once it was given."""
        return self._survey.read_bytes() if self._survey.exists() else None

    @survey.setter
    def survey(self, answer: bytes) -> None:
        replace_file(self._survey, answer, mode=0o600)

    def surveys(self) -> list[bytes]:
        """The answers to the surveys of all jobs that there were at the site."""
        return [path.read_bytes() for path in sorted(self._survey.parent.glob(f"*{self._survey.suffix}"))]

    def alone(self) -> BaseFileLock:
        """Keep other processes of the site from what is written here for a block."""
        return FileLock(self._survey.with_name(LOCK))

    def keep(self) -> None:
        """Write it down now and then: a site that is killed forgets a second at most."""
        if time.monotonic() - self._saved > SECONDS:
            self.save()


AGAIN = 3
"""How often a group that broke may be asked the very same again: its parts may have left each time."""

Position = tuple[int, int]
"""A round, 0 before the first, and the place of a phase in it."""


@dataclass(frozen=True)
class Match:
    """A question that may be answered.

    Args:
        client: Who is asked.
        request: As it came.
        number: Of the declared question that it is.
        question: That.
        position: Where the run stands then.
        digests: Of the request, where a group answers, as it came and as it may come again.
        again: Whether it is the very same that this client was asked in a group before.
    """

    client: ClientId
    request: Request
    number: int
    question: RequestRule
    position: Position
    digests: tuple[bytes, ...]
    again: bool


class Guard:
    """What the clients of one site may be asked in a run, and what they were asked.

    Args:
        asked: What the job declares.
        policy: The site's; None for none.
        quota: What the job has had so far.
        round: The round after which the run goes on; 0 where it begins.
    """

    def __init__(self, asked: Declaration, policy: Policy | None, quota: Quota, round: int = 0) -> None:
        self.asked, self.policy, self.quota = asked, policy, quota
        self.position: Position = (round, len(PHASES) - 1 if round else 0)
        self._kinds: dict[type[Request], list[tuple[int, RequestRule]]] = {}
        for number, question in enumerate(asked.questions or ()):
            self._kinds.setdefault(question.kind, []).append((number, question))
        self._phase: dict[tuple[ClientId, int], int] = {}
        self._run: dict[str, int] = {}
        self._rules: dict[tuple[ClientId, type[Rule]], Rule] = {}
        self._same: dict[tuple[ClientId, int], tuple[bytes, ...]] = {}
        self._repeats: dict[tuple[ClientId, int], int] = {}
        self._digests: tuple[Request | None, tuple[bytes, ...]] = (None, ())
        self._relay_over = -1

    @property
    def round(self) -> int:
        """The last round that was begun."""
        return self.position[0]

    @property
    def memory(self) -> dict[str, int]:
        """How often each client was asked what is put a number of times in a run; for a checkpoint."""
        return dict(self._run)

    def remember(self, before: Mapping[str, int]) -> None:
        """Go on from a checkpoint's ``memory``."""
        self._run = dict(before)

    def check(self, client: ClientId, request: Request, *, relay: bool = False, together: bool = False) -> Match | None:
        """Whether a question may be answered; nothing is counted yet.

        Args:
            client: Who is asked.
            request: The question.
            relay: Whether it comes with a travelling model.
            together: Whether a group is to answer.

        Returns:
            What it is; None where the run declares nothing.

        Raises:
            RuleError: It may not.
        """
        if self.asked.questions is None:
            return None
        try:
            number, question, position = self._found(request, relay, together)
            digests = self._digests_of(question, request) if together else ()
            before = self._same.get((client, number), ()) if position == self.position else ()
            again = together and digests[0] in before
            if again and self._repeats.get((client, number), 0) >= AGAIN:
                problem = f"{question.label} of a group that broke, once more; accepted: {AGAIN} times again"
                raise RuleError("repeat", problem)
            match = Match(client, request, number, question, position, digests, again)
            self._refuse_before(match)
            if not again:
                self._refuse_often(match)
            for rule, inner in self._rules_of(match):
                if problem := rule.refusal(inner):
                    raise RuleError("order", f"{question.label}: {problem}")
        except RuleError:
            raise
        except Exception as error:
            problem = f"{type(request).__name__} is malformed: {type(error).__name__}"
            raise RuleError("bounds", problem) from error
        return match

    def take(self, match: Match | None) -> None:
        """Count a question as asked, just before it is answered."""
        if match is None:
            return
        if match.position > self.position:
            self.position = match.position
            self._phase, self._rules, self._same = {}, {}, {}
            self.quota.keep()
        key = match.client, match.number
        if match.again:
            self._repeats[key] = self._repeats.get(key, 0) + 1
        else:
            self._repeats[key], self._same[key] = 0, match.digests
            self._phase[key] = self._phase.get(key, 0) + 1
        for rule, inner in self._rules_of(match, keep=True):
            rule.asked(inner)

    def answered(self, match: Match | None, reply: Any) -> None:
        """A question was answered so; what counts over the whole run are answers, for a client may keep one back."""
        if match is None:
            return
        if match.question.per == "run" or match.question.phase == "enrolment":
            name = _name(match.client, match.number)
            self._run[name] = self._run.get(name, 0) + 1
        if match.question.rule is not None:
            self._rules[match.client, match.question.rule].answered(match.request, reply)

    def begin_exchange(self) -> None:
        """One more exchange or hop.

        Raises:
            RuleError: There were too many.
        """
        with self.quota.lock:
            if self.policy is not None and self.quota.exchanges >= self.policy.exchanges:
                most = self.policy.exchanges
                raise RuleError("policy.exchanges", f"{self.quota.exchanges} exchanges; accepted: {most} at most")
            self.quota.exchanges += 1

    def leave(self, size: int) -> None:
        """So many bytes are about to leave.

        Raises:
            RuleError: There were too many.
        """
        with self.quota.lock:
            total = self.quota.bytes + size
            if self.policy is not None and total > self.policy.megabytes * 1e6:
                problem = (
                    f"all answers would come to {total / 1e6:g} MB; accepted: {self.policy.megabytes:g} MB at most"
                )
                raise RuleError("policy.megabytes", problem)
            self.quota.bytes = total

    def save(self, round: int) -> None:
        """Refuse to store the states of a round that there is not.

        Raises:
            RuleError: There is none.
        """
        if not 0 <= round <= self.asked.rounds:
            raise RuleError("rounds", f"round {round}; accepted: 0 to {self.asked.rounds}")
        self.quota.save()

    def hop(self, relay_id: int, *, back: bool, brought: bool) -> None:
        """Refuse a hop after which, or before which, the server sees a model that was to go from site to site.

        Args:
            relay_id: Which.
            back: Whether the model returns to the server.
            brought: Whether the server brings a model that another site made.

        Raises:
            RuleError: It does.
        """
        if relay_id == self._relay_over:
            raise RuleError("relay", f"relay {relay_id} is over: the server has its model")
        if self.policy is not None and self.policy.relay == "direct" and (back or brought):
            problem = "a travelling model goes through the server; accepted: from site to site"
            raise RuleError("policy.relay", problem)

    def fetched_by_server(self, relay_id: int) -> None:
        """The server has the model of a relay, which is over therefore where it may not see it on the way."""
        if self.policy is not None and self.policy.relay == "direct":
            self._relay_over = relay_id

    def _found(self, request: Request, relay: bool, together: bool) -> tuple[int, RequestRule, Position]:
        """The question that a request is, and where the run stands when it is answered."""
        problem: RuleError | None = None
        for number, question in self._kinds.get(type(request), ()):
            if not question.is_of(request):
                continue
            try:
                return number, question, self._placed(question, request, relay, together)
            except RuleError as error:
                problem = problem or error
        if problem is not None:
            raise problem
        inner = getattr(request, "request", None)
        label = f"{type(request).__name__} of {type(inner).__name__}" if inner is not None else type(request).__name__
        raise RuleError("kind", f"job {self.asked.job} does not declare that it asks {label}")

    def _placed(self, question: RequestRule, request: Request, relay: bool, together: bool) -> Position:
        """Where the run stands when a request is answered."""
        label, rounds = question.label, self.asked.rounds
        if relay != question.relay:
            way = "as a task of a relay" if question.relay else "as a question"
            raise RuleError("kind", f"{label} is declared {way} only")
        if together and not question.together:
            raise RuleError("kind", f"{label} is not declared for groups")
        round = _round_of(request, question.phase, self.round)
        inner = getattr(request, "request", None)
        if question.inside is not None and _round_of(inner, question.phase, round) != round:
            raise RuleError("rounds", f"{label}: two rounds in one question")
        position = round, PHASES.index(question.phase)
        if question.phase == "enrolment":
            if position != (0, 0) or self.position != (0, 0):
                raise RuleError(
                    "phase", f"{label} is asked before the first round; this is round {max(round, self.round)}"
                )
        elif not 1 <= round <= rounds:
            raise RuleError("rounds", f"{label} of round {round}; accepted: 1 to {rounds}")
        elif position < self.position:
            phase = PHASES[self.position[1]]
            raise RuleError("rounds", f"{label} of round {round} comes after the {phase} phase of round {self.round}")
        elif not question.comes_in(round):
            raise RuleError("phase", f"{label} is not declared for round {round}")
        if problem := question.wrong(request, round):
            raise RuleError("bounds", problem)
        return position

    def _refuse_before(self, match: Match) -> None:
        """What enrolment gives a meaning waits for it, also after a site lost what it knew."""
        question = match.question.inside or match.question
        if not question.after:
            return
        firsts = [number for number, each in enumerate(self.asked.questions or ()) if each.label == question.after]
        if not any(self._run.get(_name(match.client, number)) for number in firsts):
            problem = f"{match.question.label} before {question.after} was answered: labels would go by their numbers"
            raise RuleError("order", problem)

    def _refuse_often(self, match: Match) -> None:
        question, key = match.question, (match.client, match.number)
        if question.times is None:
            return
        if question.per == "run":
            count, when = self._run.get(_name(*key), 0), "in the whole run"
        else:
            count, when = self._phase.get(key, 0) if match.position == self.position else 0, _WHEN[question.phase]
        if count >= question.times:
            raise RuleError("repeat", f"{question.label} once more; accepted: {question.times} time(s) {when}")

    def _rules_of(self, match: Match, *, keep: bool = False) -> list[tuple[Rule, Any]]:
        """The rules about a question and about the one inside it, each with what it is about.

        The very same question is in order again; the envelope in which it comes is another one.
        """
        rules: list[tuple[Rule, Any]] = []
        question: RequestRule | None = match.question
        about: Any = match.request
        while question is not None:
            if question.rule is not None and not (match.again and question.inside is None):
                rule = self._rules.get((match.client, question.rule)) if match.position == self.position else None
                rule = question.rule() if rule is None else rule
                if keep:
                    self._rules[match.client, question.rule] = rule
                rules.append((rule, about))
            question, about = question.inside, getattr(about, "request", None)
        return rules

    def _digests_of(self, question: RequestRule, request: Request) -> tuple[bytes, ...]:
        """Many clients are sent the very same request: computed once."""
        if self._digests[0] is not request:
            forms = [request] if question.forms is None else question.forms(request)
            self._digests = request, tuple(hashlib.sha256(records.encode(form)).digest() for form in forms)
        return self._digests[1]


_WHEN: dict[Phase, str] = {"enrolment": "before the first round", "round": "in a round", "evaluation": "after a round"}


def _name(client: ClientId, number: int) -> str:
    return f"{client} {number}"


def _round_of(request: Any, phase: Phase, now: int) -> int:
    """The round of a request; the one that has begun where it does not say."""
    return int(getattr(request, "round", 0 if phase == "enrolment" else now))
