"""Ask clients for their numbers of samples, and let them use only some of their samples (FedSTaS §2.4).

Clients report exact numbers, or numbers with local differential privacy.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, PositiveInt, model_validator
from typing_extensions import override

from fedstrata.base.arrays import Ints
from fedstrata.base.errors import ReplyRefusedError, SpecError
from fedstrata.base.records import Tree, record
from fedstrata.federation.allowed import Agreed, Allowed
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import ClientId, Phase, Reply, Request, RequestRule
from fedstrata.federation.secure.fit import largest_size
from fedstrata.federation.secure.ring import Ring, Words, rounding
from fedstrata.sampling.base import DataSampler, KeepResult

Epsilon = Annotated[float, Field(ge=1e-6)]
"""The privacy parameter ε of local differential privacy. The minimum of ε ensures that some replies are truthful."""

Estimates = Literal["round", "pooled"]
"""The estimate that a round uses: the round's own estimate, or the mean of all estimates up to this round."""

MOST_SAMPLES = 2**31
"""The maximum number of samples that a client may report, so that the sum over a million clients fits into 64 bits."""


@record("SizeReply")
class SizeReply(Reply):
    """A client's number of samples, or a random number in place of the true number.

    Args:
        samples: The number of samples, or the random number.
    """

    samples: int


@record("SizeReport")
class SizeReport(Request):
    """A request for a client's number of samples, with local differential privacy if ``bound`` is positive.

    Args:
        round: The round, counted from 1.
        bound: The public bound M on the number of samples; 0 to request the exact number.
        alpha: The probability that the client reports its true number (at most M − 1) instead of a random number; see
            ``truth_probability``.
    """

    reply_type: ClassVar[type[Reply]] = SizeReply
    rule = RequestRule("its number of samples", discloses=frozenset({"sizes"}))

    round: int
    bound: int
    alpha: float

    def check(self, reply: SizeReply) -> None:
        """Raise ``ReplyRefusedError`` if the number of samples is outside the possible range."""
        if not 0 <= reply.samples <= MOST_SAMPLES or (self.bound and not 1 <= reply.samples < self.bound):
            raise ReplyRefusedError(f"the reply contains an impossible number of samples: {reply.samples}")


@record("Sizes")
class Sizes:
    """The clients' numbers of samples.

    Args:
        known: The clients that replied and have samples, in ascending order, int64.
        samples: The number of samples of each client in ``known``, int64.
    """

    known: Ints
    samples: Ints

    @classmethod
    def ask(cls, federation: Federation) -> Sizes:
        """Ask every client for its number of samples. Leave out clients that have no samples or do not reply."""
        replies = federation.ask(federation.candidates().tolist(), size_report(federation))
        held = {client: reply.samples for client, reply in replies.items() if reply.samples}
        return cls(np.fromiter(held, dtype=np.int64), np.fromiter(held.values(), dtype=np.int64))

    def among(self, candidates: Ints) -> tuple[Ints, Ints]:
        """Return the candidates whose numbers of samples are known, and these numbers."""
        available = np.isin(self.known, candidates)
        return self.known[available], self.samples[available]


@record("AnswersState")
class AnswersState:
    """The numbers of samples that clients reported.

    Args:
        known: Clients that reported a number, ascending, int64.
        answers: The number that each client in ``known`` reported, int64.
    """

    known: Ints
    answers: Ints

    @classmethod
    def empty(cls) -> AnswersState:
        """Return a state in which no client has reported its number of samples."""
        no_clients = np.empty(0, dtype=np.int64)
        return cls(no_clients, no_clients)


@dataclass(frozen=True)
class Answered:
    """The numbers of samples that a round's participants reported, in this round or in earlier rounds.

    Args:
        state: All reported numbers, including those of clients that do not take part in this round.
        participants: The participants that reported a number.
        responses: The number that each client in ``participants`` reported.
        bound: The bound M on a reported number; see ``estimated_total``.
        alpha: The probability α of a truthful reply; see ``estimated_total``.
    """

    state: AnswersState
    participants: list[int]
    responses: list[int]
    bound: int
    alpha: float


def ask_new_sizes(
    federation: Federation, state: AnswersState | None, clients: Sequence[int], epsilon: float | None, bound: int
) -> Answered:
    """Ask each participant for its number of samples, unless the participant has already reported it.

    Args:
        federation: The federation, through which the server asks the clients.
        state: The numbers reported in earlier rounds; None to ask all clients.
        clients: The participants of the round.
        epsilon: The privacy parameter ε; None if clients report their true numbers.
        bound: The public bound M on a client's number of samples.
    """
    answers = {} if state is None else dict(zip(state.known.tolist(), state.answers.tolist(), strict=True))
    request = size_report(federation, epsilon, bound)
    replies = federation.ask([client for client in clients if client not in answers], request)
    answers = dict(sorted((answers | {client: reply.samples for client, reply in replies.items()}).items()))
    state = AnswersState(np.fromiter(answers, dtype=np.int64), np.fromiter(answers.values(), dtype=np.int64))
    answered = [client for client in clients if client in answers]
    return Answered(state, answered, [answers[client] for client in answered], request.bound, request.alpha)


def size_report(federation: Federation, epsilon: float | None = None, bound: int = 0) -> SizeReport:
    """Return the request for a client's number of samples.

    If ``epsilon`` is set, replies have ε-local differential privacy.

    Args:
        federation: The federation, which provides the number of the round.
        epsilon: The privacy parameter ε; None if clients report their true numbers. The request then has ``bound = 0``
            and ``alpha = 1``.
        bound: The public bound M on a client's number of samples. The bound is used only with ``epsilon``.
    """
    bound, alpha = (0, 1.0) if epsilon is None else (bound, truth_probability(epsilon, bound))
    return SizeReport(federation.round, bound, alpha)


def allowed_sizes(
    epsilon: float | None = None, bound: int = 0, *, phase: Phase = "round", per: Literal["phase", "run"] = "phase"
) -> Allowed:
    """Return the declaration of the request that ``size_report`` creates.

    A sampler that sends the request must return this declaration from ``allowed``.

    Args:
        epsilon: The privacy parameter ε; None if clients report their true numbers.
        bound: The public bound M on a client's number of samples.
        phase: The phase in which the server asks clients: before the first round (enrolment), or in a round.
        per: How often the server asks a client: once per ``phase`` or once per ``run``.
    """
    rule = replace(SizeReport.rule, phase=phase)
    if epsilon is None:
        return Allowed(SizeReport, where={"bound": 0, "alpha": 1.0}, per=per, rule=rule)
    description = f"{rule.description}, hidden by a random answer below {bound} (local ε = {epsilon:g})"
    rule = replace(rule, description=description, discloses=frozenset(), epsilon=epsilon)
    return Allowed(SizeReport, where={"bound": bound, "alpha": truth_probability(epsilon, bound)}, per=per, rule=rule)


def truth_probability(epsilon: float, bound: int) -> float:
    """Return the probability of a truthful reply, α = (e^ε − 1) / (e^ε + M − 2), where M is ``bound``.

    With this α, replies satisfy ε-local differential privacy (FedSTaS, Lemma 2.4, Eq. 11).

    >>> round(truth_probability(3.0, 100), 4)
    0.1616
    """
    # Divide numerator and denominator by e^ε, because e^ε would overflow for a large ε.
    return -math.expm1(-epsilon) / (1 + (bound - 2) * math.exp(-epsilon))


def randomised_size(size: int, bound: int, alpha: float, generator: np.random.Generator) -> int:
    """Return the number that a client reports: its number of samples (with probability ``alpha``) or a random number.

    The true number is clipped to the range from 1 to M − 1. The random number is uniform in {1, …, M − 1}.

    Args:
        size: The true number of samples.
        bound: The public bound M on a client's number of samples.
        alpha: The probability of a truthful reply.
        generator: The random generator.
    """
    truthful, other = generator.random() < alpha, int(generator.integers(1, bound))
    # A client without data answers 1. A random answer is never 0, so the answer 0 would reveal the truth.
    return max(1, min(size, bound - 1)) if truthful else other


def estimated_total(responses: Sequence[int], bound: int, alpha: float) -> float:
    """Estimate the total number of samples of m clients from their randomised replies (FedSTaS, Eq. 7).

    The estimate is ñ = (Σ r_k − (1 − α) M m / 2) / α, but at least 1. Client k reports the number r_k, the probability
    of a truthful reply is α (``alpha``), and M is ``bound``. Without the lower limit of 1, the estimate would be
    unbiased if each client has between 1 and M − 1 samples. With strong noise, the limit often applies and makes the
    estimate too large on average (``fedstrata.papers.calculations``).

    >>> estimated_total([10, 20], bound=100, alpha=1.0)
    30.0
    """
    return estimated_total_of_sum(sum(responses), len(responses), bound, alpha)


def estimated_total_of_sum(total: int, clients: int, bound: int, alpha: float) -> float:
    """Return the value of ``estimated_total``, computed from the sum of the replies and the number of clients."""
    return max(1.0, unbiased_total(total, clients, bound, alpha))


def unbiased_total(total: int, clients: int, bound: int, alpha: float) -> float:
    """Return ``estimated_total_of_sum`` before its lower limit of 1 is applied. The result can be negative."""
    return (total - (1 - alpha) * bound * clients / 2) / alpha


class SizeForm:
    """The rule by which a secure sum adds up the clients' replies to ``SizeReport``.

    Args:
        config: The settings that server and clients share.
        bound: The public bound M on the reported numbers; 0 if clients report their true numbers.
    """

    def __init__(self, config: FederationConfig, bound: int) -> None:
        self.ring = Ring(config.clients, {}, {"samples": bound or largest_size(config)})

    def encode(self, request: SizeReport, reply: SizeReply, client: ClientId) -> Words:
        """Return the vector that a client adds to the sum."""
        return self.ring.encode({}, {"samples": reply.samples}, rounding(0, request.round, client, 0))


@record("FedSTaSDataState")
class FedSTaSDataState:
    """The estimate of the participants' total number of samples, averaged over past rounds.

    Args:
        total: The sum of the estimates of all past rounds.
        rounds: The number of past rounds with an estimate.
    """

    total: float
    rounds: int


@record("FedSTaSAnswersState")
class FedSTaSAnswersState(FedSTaSDataState):
    """The mean of the past estimates, and the clients' reported numbers of samples, which later rounds use again.

    Args:
        total: The sum of the estimates of all past rounds.
        rounds: The number of past rounds with an estimate.
        answered: The numbers of samples that clients have reported.
    """

    answered: AnswersState


class FedSTaSData(DataSampler):
    """Each participant draws samples at random, so that a round uses the requested number of samples on average.

    The probability is the requested number of samples, divided by the server's estimate of the participants' total
    number of samples. The settings ``share``, ``estimates`` and ``reuse`` are not in the paper.

    Args:
        fraction: Fraction of the participants' samples that a round uses on average.
        samples: Mean number n* of samples that a round uses. Default: computed from ``fraction``.
        epsilon: Parameter ε of local differential privacy, which protects each client's reported number of samples.
            A client spends ε on each report. Default: clients report exact numbers.
        bound: Public upper bound M on reported numbers of samples, if ``epsilon`` is set. A client with M or more
            samples reports at most M − 1.
        share: Fixed probability with which a client uses each of its samples. If set, clients do not reveal their
            numbers of samples, and ``fraction`` and ``bound`` have no effect.
        estimates: Estimate of the participants' total number of samples. ``round``: from the replies of the current
            round, as in the paper. ``pooled``: the mean of all estimates up to the current round. Default: ``round``.
        reuse: Whether each client reports its number of samples only once, and so spends ε only once. Default: false.
    """

    needs_replies = "asks each client for its number of samples, or hides this number"

    fraction: float = Field(default=0.1, gt=0, le=1)
    samples: PositiveInt | None = None
    epsilon: Epsilon | None = None
    bound: int = Field(default=100, gt=1)
    share: float | None = Field(default=None, gt=0, le=1)
    estimates: Estimates | None = None
    reuse: bool | None = None

    @model_validator(mode="after")
    def _check_share(self) -> Self:
        """Raise ``SpecError`` if ``share`` is set together with settings that only affect the clients' reports."""
        for key in ("samples", "epsilon", "estimates", "reuse"):
            if self.share is not None and (value := getattr(self, key)) is not None:
                problem = "has no effect with 'share', because clients do not report their numbers of samples. Remove"
                raise SpecError(key, f"{problem} {key!r} or 'share'.", value)
        return self

    @property
    @override
    def fixed_share(self) -> float | None:
        return self.share

    @property
    def private(self) -> bool:
        """Whether clients keep their numbers of samples private: True if ``epsilon`` or ``share`` is set."""
        return self.epsilon is not None or self.share is not None

    def check(self, config: FederationConfig) -> None:
        """Warn if a client has more samples than the bound M allows."""
        if self.epsilon is not None and config.sizes is not None and (config.sizes >= self.bound).any():
            clipped = int((config.sizes >= self.bound).sum())
            warnings.warn(
                f"method.bound = {self.bound}: the number of samples is clipped for {clipped} of {config.clients} "
                f"clients (the largest client has {int(config.sizes.max())} samples). The estimate of the total is "
                "therefore too low, and clients use more samples than requested. With a larger bound, fewer numbers "
                "are clipped, but the noise increases.",
                stacklevel=2,
            )

    def allowed(self, agreed: Agreed) -> list[Allowed]:
        """Return the request for each participant's number of samples. With ``share``, return an empty list."""
        if self.share is not None:
            return []
        return [allowed_sizes(self.epsilon, self.bound, per="run" if self.reuse else "phase")]

    def init(self, federation: Federation) -> Tree:
        """Return a state without estimates and without reported numbers."""
        return FedSTaSAnswersState(0.0, 0, AnswersState.empty()) if self.reuse else FedSTaSDataState(0.0, 0)

    def keep(self, federation: Federation, state: Tree, clients: Sequence[int]) -> KeepResult:
        """Ask for numbers of samples not known yet. Return the requested total, divided by the estimated total."""
        if self.share is not None:
            return self.share, state, {"keep": self.share, **_expected(federation, self.share, clients)}
        known = state.answered if self.reuse else None
        answered = ask_new_sizes(federation, known, clients, self.epsilon, self.bound)
        if not answered.responses:
            return self.fraction, state, {}
        responses, bound, alpha = answered.responses, answered.bound, answered.alpha
        pooled = self.estimates == "pooled"
        estimate = unbiased_total(sum(responses), len(responses), bound, alpha)
        if not pooled:
            # A pooled estimate is a mean over rounds. With a lower limit in each round, errors in both directions would
            # not average out.
            estimate = max(1.0, estimate)
        state = replace(state, total=state.total + estimate, rounds=state.rounds + 1)
        if self.reuse:
            state = replace(state, answered=answered.state)
        used = max(1.0, state.total / state.rounds) if pooled else estimate
        part = self.fraction * used if pooled else self.fraction * state.total / state.rounds
        wanted = part if self.samples is None else float(self.samples)
        keep = self.fraction if pooled and self.samples is None else min(1.0, wanted / used)
        metrics = {"estimated_samples": used, "requested_samples": wanted, "keep": keep}
        return keep, state, metrics | _expected(federation, keep, answered.participants)


def _expected(federation: Federation, keep: float, clients: Sequence[int]) -> dict[str, float]:
    """In a simulation, return the expected number of samples that clients use; otherwise, an empty mapping.

    Only simulations know how many samples each client has. With the expected number, methods can be compared at equal
    numbers of samples. If the estimate is from a single round, the expected number is slightly larger than n*. If
    clients have more samples than the bound M, the expected number is much larger than n*.
    """
    sizes = federation.config.sizes
    return {} if sizes is None else {"expected_samples": keep * float(sizes[list(clients)].sum())}
