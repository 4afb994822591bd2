"""FedSTaS's data sampler: clients train on a requested number of samples, and can hide their sizes (FedSTaS §2.4)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from pydantic import Field, PositiveInt

from fedstrata.base.records import Tree, record
from fedstrata.federation.allowed import Agreed, Allowed
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.federation import Federation
from fedstrata.sampling.base import DataSampler, KeepResult
from fedstrata.sampling.client_sizes import Epsilon, allowed_sizes, ask_sizes, estimated_total


@record("FedSTaSDataState")
class FedSTaSDataState:
    """The running mean of the estimates of how many samples a round's participants hold together.

    Args:
        total: The sum of the estimates so far.
        rounds: The number of estimates so far.
    """

    total: float
    rounds: int


class FedSTaSData(DataSampler):
    """Each participant uses each of its samples with the same probability, so that about n* are used in total.

    ñ is the server's estimate of how many samples the round's participants hold together.

    Args:
        fraction: Share of the participants' samples that is used per round. n*, the number of samples to use, is this
            share of the estimated number of samples, averaged over all rounds so far.
        samples: Number n* of samples that are used per round. Set either ``samples`` or ``fraction``.
        epsilon: Privacy parameter ε: clients report their number of samples with ε-local differential privacy. A client
            spends ε in each round in which it takes part. Default: clients report exact numbers.
        bound: Public upper bound M of the numbers that clients report with ``epsilon``. Larger numbers are reported as
            M − 1. The estimated total is then too low, and clients use more samples than requested.
    """

    fraction: float = Field(default=0.1, gt=0, le=1)
    samples: PositiveInt | None = None
    epsilon: Epsilon | None = None
    bound: int = Field(default=100, gt=1)

    @property
    def private(self) -> bool:
        """True if clients keep their sizes private, which they do if ``epsilon`` is set."""
        return self.epsilon is not None

    def check(self, config: FederationConfig) -> None:
        """Warn if a client holds more samples than the bound M allows it to report."""
        if self.epsilon is not None and config.sizes is not None and (config.sizes >= self.bound).any():
            clipped = int((config.sizes >= self.bound).sum())
            warnings.warn(
                f"method.bound = {self.bound}: clips the sizes of {clipped} of {config.clients} clients (up to "
                f"{int(config.sizes.max())} samples), so that the estimated total is too low and clients use more "
                "samples than requested. A larger bound avoids this, but adds noise.",
                stacklevel=2,
            )

    def allowed(self, agreed: Agreed) -> list[Allowed]:
        """Return the request for the participants' sizes, which is sent in every round."""
        return [allowed_sizes(self.epsilon, self.bound)]

    def init(self, federation: Federation) -> Tree:
        """Return a state without estimates."""
        return FedSTaSDataState(0.0, 0)

    def keep(self, federation: Federation, state: Tree, clients: Sequence[int]) -> KeepResult:
        """Ask the participants for their sizes; return the wanted number of samples divided by the estimated number."""
        sizes, bound, alpha = ask_sizes(federation, clients, self.epsilon, self.bound)
        if not sizes:
            return self.fraction, state, {}
        estimate = estimated_total(list(sizes.values()), bound, alpha)
        state = FedSTaSDataState(state.total + estimate, state.rounds + 1)
        wanted = float(self.samples) if self.samples is not None else self.fraction * state.total / state.rounds
        keep = min(1.0, wanted / estimate)
        metrics = {"estimated_samples": estimate, "requested_samples": wanted, "keep": keep}
        if (true_sizes := federation.config.sizes) is not None:
            # The true sizes are known only in simulations. Record the expected number of samples, so that methods can
            # be compared at equal numbers. It exceeds n*: slightly because 1/ñ is convex, and by far if M clips sizes.
            metrics["expected_samples"] = keep * float(true_sizes[list(sizes)].sum())
        return keep, state, metrics
