"""Describe everything that a job may request from clients, so that sites can accept or refuse the job."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from fedstrata.evaluation.allowed import allowed_in_evaluation, request_of
from fedstrata.federation.allowed import Agreed, Allowed, Terms, joined
from fedstrata.federation.communication.allowed import encoded
from fedstrata.federation.messages import PHASES, Fact, Phase
from fedstrata.federation.secure.allowed import masked
from fedstrata.federation.settings import Privacy
from fedstrata.runs.dp_record import OUTSIDE, outside_epsilon
from fedstrata.spec.experiment import Experiment

UNDECLARED = (
    "does not declare its requests, so sites do not answer them. Declare them in Method.allowed, or simulate the run"
)

_HEADINGS: dict[Phase, str] = {
    "enrolment": "Before the first round",
    "round": "In each round in which it takes part",
    "evaluation": "After a round, to measure the model",
}
_FACTS: dict[Fact, str] = {
    "labels": "which labels a client has",
    "sizes": "how many samples a client has",
}


@dataclass(frozen=True)
class Declaration:
    """The declaration of a job: everything that the job may request from a site and its clients.

    Args:
        job: The hash of the job's spec, by which a site approves the job.
        method: The method's name.
        rounds: The number of rounds.
        allowed: The requests that a client may get; None if the method or one of its settings does not declare
            requests.
        survey: A description of the statistics that a site with its own data sends before the first round; empty if the
            site does not send statistics.
        own_data: Whether sites bring their own data. If so, each site also sends a fingerprint of its file.
        conceals: The facts about clients that the method hides from the server.
        extremes: Whether the statistics contain minima and maxima, which are values of individual samples.
        privacy: The spec's privacy settings, such as the minimum number of samples per reply.
        targets: Whether the statistics also describe the labels (some tasks require this).
        outside: With ``privacy.dp``, the names of the values to which clients do not add noise; see
            ``outside_epsilon``.
    """

    job: str
    method: str
    rounds: int
    allowed: list[Allowed] | None
    survey: str = ""
    own_data: bool = False
    conceals: frozenset[Fact] = frozenset()
    extremes: bool = False
    privacy: Privacy = field(default_factory=Privacy)
    targets: bool = False
    outside: tuple[str, ...] = ()

    @property
    def discloses(self) -> frozenset[Fact]:
        """The facts about clients that the server can read, because the replies do not mask them."""
        facts: frozenset[Fact] = frozenset({"sizes"} if self.survey else ())
        facts |= frozenset({"labels"} if self.targets else ())
        return facts.union(*(allowed.rule.discloses for allowed in self.allowed or ()))

    def table(self) -> dict[str, Any]:
        """Return the declaration as a dict that JSON can represent."""
        return {
            "job": self.job,
            "method": self.method,
            "rounds": self.rounds,
            "survey": self.survey or None,
            "fingerprint": self.own_data,
            "questions": None if self.allowed is None else [allowed.table() for allowed in self.allowed],
            "discloses": sorted(self.discloses),
            "conceals": sorted(self.conceals),
            **({} if self.privacy.dp is None else {"outside_dp": list(self.outside)}),
        }

    def lines(self) -> Iterator[str]:
        """Yield lines that describe the job's requests in plain English."""
        yield f"Job {self.job}: method {self.method}, at most {self.rounds} rounds."
        if self.allowed is None:
            yield f"The method {UNDECLARED}."
            return
        yield "A site answers only these requests, and only if they come from the server of the job."
        if self.own_data:
            yield "Once, before all other requests:"
            if self.survey:
                yield f"  - It sends {self.survey}."
            yield "  - It sends a fingerprint of its data file, computed with a key that stays at the site."
        for phase in PHASES:
            requests = [allowed for allowed in self.allowed if allowed.rule.phase == phase]
            if requests:
                yield f"{_HEADINGS[phase]}:"
            for allowed in requests:
                yield f"  - It sends {allowed.rule.description} ({_often(allowed)}; {allowed.label})."
        facts = " and ".join(_FACTS[fact] for fact in sorted(self.discloses))
        clear = f"From the replies, the server learns {facts}."
        yield clear if facts else "The server cannot read labels or numbers of samples in the replies."
        if self.privacy.dp is not None:
            outside = "; ".join(OUTSIDE[name] for name in self.outside)
            yield f"Updates have noise (privacy.dp.noise = {self.privacy.dp.noise:g}). Values without noise: {outside}."
            return
        if (dp := self.privacy.clients) is not None and dp.noise_from == "sites":
            most = dp.participations or self.rounds
            yield f"A masked reply has only the update, scaled down to the norm {dp.clip:g}, with a share of noise."
            yield f"The noise of a sum is at least {dp.noise:g} × {dp.clip:g}. A site sends at most {most} replies."
            return
        yield "Models and gradients can reveal something about the samples from which they were computed."


def hash_of(spec: Experiment) -> str:
    """Return the hash that identifies a job and its run.

    The hash depends on the settings, but not on how the spec is formatted.
    """
    return hashlib.sha256(spec.to_toml().encode()).hexdigest()[:16]


def _often(allowed: Allowed) -> str:
    often = {1: "once", None: "as often as the method needs it"}.get(allowed.times, f"at most {allowed.times} times")
    if allowed.per == "run":
        often += " in the whole run"
    if isinstance(allowed.rounds, range):
        often += f", in rounds {allowed.rounds.start} to {allowed.rounds.stop - 1}"
    return f"{often}, to the next client or to the server" if allowed.rule.relay else often


def declaration_of(
    spec: Experiment, *, agreed: Agreed | None = None, clients: int | None = None, own_data: bool | None = None
) -> Declaration:
    """Return the declaration of a job: everything that a job with this spec may request.

    Args:
        spec: The experiment.
        agreed: The values that the server and the clients agreed on, such as the number of classes. Default: the
            values in the spec.
        clients: The number of clients; not used with ``agreed``. Default: the number in the spec, or 1.
        own_data: Whether the clients are sites that bring their own data. Default: True if the spec describes the
            sites' data.

    Raises:
        SpecError: The spec sets ``privacy.sums`` to "secure", but a reply cannot be summed securely.
    """
    data, method = spec.data, spec.method
    own = (data.schema is not None or data.shape is not None) if own_data is None else own_data
    if agreed is None:
        classes = data.classes if data.schema is None else len(data.schema.classes or ()) or None
        agreed = Terms(spec.training, clients or getattr(spec.partition, "clients", None) or 1, classes)
    rounds = spec.training.rounds
    training = method.declared(agreed)
    travelling = None if training is None else encoded(training, spec.communication)
    if spec.privacy.sums == "secure":
        # With secure sums, the server may see only sums over several sites. Sites do not evaluate, because evaluations
        # would show results of single sites.
        allowed = None if travelling is None else masked(travelling, spec.privacy.parties)
    else:
        evaluated = allowed_in_evaluation(spec.evaluation, rounds, elsewhere=own, request=request_of(spec.task))
        allowed = joined(travelling, evaluated)
    features, targets = (_of_features(spec), _of_targets(spec)) if own else ([], [])
    survey = ", ".join([*features, *targets])
    survey = survey and f"the number of its training samples; {survey}"
    extremes = bool(features) and data.normalize == "unit"
    certain = spec.evaluation.client_test is not None or spec.evaluation.validation is not None
    evaluates = certain and any(each.rule.phase == "evaluation" for each in allowed or ())
    outside = () if spec.privacy.dp is None else outside_epsilon(spec, evaluates=evaluates)
    return Declaration(
        job=hash_of(spec),
        method=method.name,
        rounds=rounds,
        allowed=allowed,
        survey=survey,
        own_data=own,
        conceals=method.conceals,
        extremes=extremes,
        privacy=spec.privacy,
        targets=bool(targets),
        outside=outside,
    )


def _of_targets(spec: Experiment) -> list[str]:
    """Return descriptions of the label statistics that a site must send; empty if the task needs no statistics."""
    if spec.task is None or not spec.task.fits:
        return []
    parts = ["the mean and the spread of the labels"]
    counted = spec.task.counted(torch.zeros(0, 1, dtype=torch.float64)) is not None
    return [*parts, "how often each multiple of the label's step occurs"] if counted else parts


def _of_features(spec: Experiment) -> list[str]:
    """Return descriptions of the feature statistics that a site must send; empty if the spec needs no statistics."""
    data = spec.data
    columns = data.schema.inputs if data.schema is not None else {}
    rules = {column.impute for column in columns.values() if column.learnt}
    fitted = data.normalize != "none" and data.shift is None
    if not fitted and not rules:
        return []
    each = "column" if columns else "channel or feature"
    parts = [f"for each {each}, the number of values, their mean and their spread"]
    if fitted and data.normalize == "unit":
        parts.append("the smallest and the largest value")
    if rules & {"median", "most-frequent"} or any(column.type == "category" for column in columns.values()):
        parts.append("how often each category or multiple of a step occurs, if the spec needs it")
    return parts
