"""Ask clients for their numbers of samples, exactly or with local differential privacy (FedSTaS §2.4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from fedstrata.base.arrays import Ints
from fedstrata.base.records import record
from fedstrata.federation.allowed import Allowed
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import ClientId, Phase
from fedstrata.federation.secure.fit import largest_size
from fedstrata.federation.secure.ring import Ring, Words, rounding
from fedstrata.sampling.messages import SizeReply, SizeReport

Epsilon = Annotated[float, Field(ge=1e-6)]
"""The privacy parameter ε of local differential privacy, with a minimum so that some replies are truthful."""


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
        """Ask every client for its number of samples. Leave out clients without samples or without a reply."""
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
    """Ask participants for their numbers of samples, except participants that already reported a number.

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
        epsilon: The privacy parameter ε; None if clients report their true numbers. The ``bound`` and the ``alpha`` of
            the request are then 0 and 1.
        bound: The public bound M on a client's number of samples. The bound is used only with ``epsilon``.
    """
    bound, alpha = (0, 1.0) if epsilon is None else (bound, truth_probability(epsilon, bound))
    return SizeReport(federation.round, bound, alpha)


def allowed_sizes(
    epsilon: float | None = None, bound: int = 0, *, phase: Phase = "round", per: Literal["phase", "run"] = "phase"
) -> Allowed:
    """Return the declaration of the request that ``size_report`` creates.

    Samplers list this declaration in ``allowed``.

    Args:
        epsilon: The privacy parameter ε; None if clients report their true numbers.
        bound: The public bound M on a client's number of samples.
        phase: The phase in which the server asks clients: before the first round (enrolment), or in a round.
        per: Whether the server asks a client once per phase or once per run.
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
    # A client without data answers 1, because the answer 0 could not be random and would reveal the truth.
    return max(1, min(size, bound - 1)) if truthful else other


def estimated_total(responses: Sequence[int], bound: int, alpha: float) -> float:
    """Estimate the total number of samples of m clients from their randomised replies (FedSTaS, Eq. 7).

    The estimate is ñ = (Σ r_k − (1 − α) M m / 2) / α, but at least 1. Client k reports the number r_k, the probability
    of a truthful reply is α (``alpha``), and M is ``bound``. Without the minimum of 1, the estimate is unbiased if each
    client has between 1 and M − 1 samples. With strong noise, the minimum often applies and makes the estimate too
    large on average (``fedstrata.papers.calculations``).

    >>> estimated_total([10, 20], bound=100, alpha=1.0)
    30.0
    """
    return estimated_total_of_sum(sum(responses), len(responses), bound, alpha)


def estimated_total_of_sum(total: int, clients: int, bound: int, alpha: float) -> float:
    """Return the estimate of ``estimated_total``, computed from the sum of the replies and the number of clients."""
    return max(1.0, unbiased_total(total, clients, bound, alpha))


def unbiased_total(total: int, clients: int, bound: int, alpha: float) -> float:
    """Return the estimate of ``estimated_total_of_sum`` without its minimum of 1. The result can be negative."""
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
