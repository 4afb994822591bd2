"""What a job asks its clients, all of it together, in plain English and as a table."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fedstrata.evaluation.questions import evaluation_questions
from fedstrata.federation.communication.questions import encoded
from fedstrata.federation.questions import PHASES, Agreed, Fact, Phase, Questions, RequestRule, Terms, joined
from fedstrata.federation.settings import Privacy
from fedstrata.spec.experiment import Experiment

UNDECLARED = "does not declare what it asks (Method.questions), so that no site answers it; simulations run it"

_HEADINGS: dict[Phase, str] = {
    "enrolment": "Before the first round",
    "round": "In each round in which it takes part",
    "evaluation": "After a round, to measure the model",
}
_TOLD: dict[Fact, str] = {
    "labels": "which labels a client holds",
    "sizes": "how many samples a client holds",
}


@dataclass(frozen=True)
class Declaration:
    """What a job asks.

    Args:
        job: The hash of its spec, by which a site may approve it.
        method: The method's name.
        rounds: The last round.
        questions: All that a client may be asked; None where the method, or a choice of it, does not declare it.
        survey: What is asked before all rounds of a site that brings its own data; empty for nothing.
        own_data: Whether sites bring their own data, of which each sends a fingerprint.
        conceals: What the method keeps private.
        extremes: Whether the survey tells the least and the greatest value of something: those of single samples.
        privacy: The spec's own minimum, below which nothing is answered.
    """

    job: str
    method: str
    rounds: int
    questions: Questions | None
    survey: str = ""
    own_data: bool = False
    conceals: frozenset[Fact] = frozenset()
    extremes: bool = False
    privacy: Privacy = field(default_factory=Privacy)

    @property
    def discloses(self) -> frozenset[Fact]:
        """What answers say in the clear."""
        facts: frozenset[Fact] = frozenset({"sizes"} if self.survey else ())
        return facts.union(*(question.discloses for question in self.questions or ()))

    def table(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {
            "job": self.job,
            "method": self.method,
            "rounds": self.rounds,
            "survey": self.survey or None,
            "fingerprint": self.own_data,
            "questions": None if self.questions is None else [question.table() for question in self.questions],
            "discloses": sorted(self.discloses),
            "conceals": sorted(self.conceals),
        }

    def lines(self) -> Iterator[str]:
        """In plain English."""
        yield f"Job {self.job}: method {self.method}, {self.rounds} rounds at most."
        if self.questions is None:
            yield f"The method {UNDECLARED}."
            return
        yield "A site that takes part answers the following to the server that runs the job, and nothing else."
        if self.own_data:
            yield "Before anything else, once:"
            if self.survey:
                yield f"  - It sends {self.survey}."
            yield "  - It sends a fingerprint of its data file, under a key that stays with it."
        for phase in PHASES:
            asked = [question for question in self.questions if question.phase == phase]
            if asked:
                yield f"{_HEADINGS[phase]}:"
            for question in asked:
                yield f"  - It sends {question.description} ({_often(question)}; {question.label})."
        facts = " and ".join(_TOLD[fact] for fact in sorted(self.discloses))
        yield (
            f"The answers tell in the clear {facts}."
            if facts
            else "No answer tells labels or numbers of samples as such."
        )
        yield "Models and gradients can themselves tell something of the samples that they were computed from."


def hash_of(spec: Experiment) -> str:
    """Names a job by all that its spec says, however it is written; also the name of its run."""
    return hashlib.sha256(spec.to_toml().encode()).hexdigest()[:16]


def _often(question: RequestRule) -> str:
    often = {1: "once", None: "as often as the method needs it"}.get(question.times, f"at most {question.times} times")
    if question.per == "run":
        often += " in the whole run"
    if question.first > 1 or question.last is not None:
        last = "the last" if question.last is None else str(question.last)
        often += f", in rounds {question.first} to {last}"
    return f"{often}, passing it to the next client or the server" if question.relay else often


def declaration_of(
    spec: Experiment, *, agreed: Agreed | None = None, clients: int | None = None, own_data: bool | None = None
) -> Declaration:
    """What a spec asks.

    Args:
        spec: The experiment.
        agreed: What server and clients agreed on, where more is known than the spec tells.
        clients: N, where that is not known either.
        own_data: Whether the clients are sites that bring their own data; by the spec, which then describes them,
            unless given.
    """
    data, method = spec.data, spec.method
    own = (data.schema is not None or data.shape is not None) if own_data is None else own_data
    if agreed is None:
        classes = data.classes if data.schema is None else len(data.schema.classes or ()) or None
        agreed = Terms(spec.training, clients or getattr(spec.partition, "clients", None) or 1, classes)
    rounds = spec.training.rounds
    asked = method.declared(agreed)
    asked = None if asked is None else encoded(asked, spec.communication)
    questions = joined(asked, evaluation_questions(spec.evaluation, rounds, elsewhere=own))
    survey = _survey(spec) if own else ""
    return Declaration(
        hash_of(spec),
        method.name,
        rounds,
        questions,
        survey,
        own,
        method.conceals,
        extremes=bool(survey) and data.normalize == "unit",
        privacy=spec.privacy,
    )


def _survey(spec: Experiment) -> str:
    """What the samples of a site that brings its own come to, as far as the spec needs it; empty for nothing."""
    data = spec.data
    columns = (data.schema.columns or {}) if data.schema is not None else {}
    rules = {column.impute for column in columns.values()} - {None, "constant"}
    fitted = data.normalize != "none" and data.shift is None
    if not fitted and not rules:
        return ""
    each = "column" if columns else "channel or feature"
    parts = [f"how many training samples it has; of each {each} how many values there are, their mean and their spread"]
    if fitted and data.normalize == "unit":
        parts.append("the least and the greatest value")
    if rules & {"median", "most-frequent"} or any(column.type == "category" for column in columns.values()):
        parts.append("how often each category or step of values comes, where the spec asks for it")
    return ", ".join(parts)
