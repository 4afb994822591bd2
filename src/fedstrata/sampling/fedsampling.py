"""Draw samples from all clients' data, instead of drawing clients: FedSampling (Qi et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field, PositiveInt
from typing_extensions import override

from fedstrata.base.errors import SpecError
from fedstrata.base.records import Tree
from fedstrata.federation.allowed import Agreed, Allowed
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import Weights
from fedstrata.federation.secure.fit import Forms
from fedstrata.sampling.base import ClientSampler, DataSampler, KeepResult, Selection
from fedstrata.sampling.client_sizes import (
    AnswersState,
    Epsilon,
    FedSTaSData,
    SizeForm,
    SizeReport,
    allowed_sizes,
    ask_new_sizes,
    estimated_total,
    estimated_total_of_sum,
    size_report,
)


class Everyone(ClientSampler):
    """Invites all available clients in every round."""

    needs_replies = ""

    @override
    def most_invited(self, config: FederationConfig) -> int:
        return config.clients

    def check(self, config: FederationConfig) -> None:
        """Accept every value of ``training.clients_per_round``, because this sampler ignores the setting."""

    def cohort(self, config: FederationConfig) -> int:
        """Return the total number of clients."""
        return config.clients

    def allowed(self, agreed: Agreed) -> list[Allowed]:
        """Return an empty list, because the sampler sends no requests."""
        return []

    def select(self, federation: Federation, state: Tree, weights: Weights) -> tuple[Selection, Tree]:
        """Select all clients that may be invited."""
        candidates = federation.candidates()
        return Selection.plain(candidates, len(candidates)), state


class FedSamplingData(DataSampler):
    """Each participant draws samples at random, so that a round uses K samples on average.

    The probability of drawing a sample is K / ñ. Here, ñ is the server's estimate of the participants' total number of
    samples.

    Args:
        samples: Mean number K of samples that a round uses.
        epsilon: Parameter ε of local differential privacy, which protects each client's reported number of samples.
            The number of samples that a client uses is not protected. Default: clients report exact numbers.
        bound: Public upper bound M on reported numbers of samples, if ``epsilon`` is set. A client with M or more
            samples reports at most M − 1.
        reuse: Whether each client reports its number of samples only once. If false, random errors partly cancel out
            over rounds, but a client that sends T reports spends T times ε.
    """

    needs_replies = ""

    samples: PositiveInt = 1000
    epsilon: Epsilon | None = None
    bound: int = Field(default=100, gt=1)
    reuse: bool = True

    def check(self, config: FederationConfig) -> None:
        """Raise ``SpecError`` if ``reuse`` is set and sums are secure. Warn if a client has more samples than M − 1."""
        if self.reuse and config.privacy.sums == "secure":
            problem = "requires each client's reply, but the server sees only sums. Set reuse = false, or "
            problem += "privacy.sums = 'plain'."
            raise SpecError("method.data_sampler.reuse", problem, True)
        FedSTaSData(epsilon=self.epsilon, bound=self.bound).check(config)

    def allowed(self, agreed: Agreed) -> list[Allowed]:
        """Return the request (sent once or in every round) for the participants' numbers of samples."""
        return [allowed_sizes(self.epsilon, self.bound, per="run" if self.reuse else "phase")]

    @override
    def forms(self, config: FederationConfig) -> Forms:
        return {SizeReport: SizeForm(config, 0 if self.epsilon is None else self.bound)}

    def init(self, federation: Federation) -> Tree:
        """Return a state in which no client has reported its number of samples."""
        return AnswersState.empty()

    def keep(self, federation: Federation, state: Tree, clients: Sequence[int]) -> KeepResult:
        """Ask for numbers of samples that are not known yet, estimate the total ñ, and return the probability K/ñ."""
        if federation.config.privacy.sums == "secure":
            return self._keep_of_sum(federation, state, clients)
        known = state if self.reuse else None
        answered = ask_new_sizes(federation, known, sorted(clients), self.epsilon, self.bound)
        if not answered.responses:
            return 1.0, answered.state, {}
        return self._result(answered.state, estimated_total(answered.responses, answered.bound, answered.alpha))

    def _keep_of_sum(self, federation: Federation, state: Tree, clients: Sequence[int]) -> KeepResult:
        """Return the result of ``keep``, computed only from the sum of the participants' replies."""
        from fedstrata.federation.secure.simulated import ask_sum

        request = size_report(federation, self.epsilon, self.bound)
        summed = ask_sum(federation, clients, request, SizeForm(federation.config, request.bound).ring)
        if summed is None:
            return 1.0, state, {}
        total, m = summed.total.counts["samples"], len(summed.clients)
        return self._result(state, estimated_total_of_sum(total, m, request.bound, request.alpha))

    def _result(self, state: Tree, estimate: float) -> KeepResult:
        keep = min(1.0, self.samples / estimate)
        return keep, state, {"estimated_samples": estimate, "requested_samples": float(self.samples), "keep": keep}
