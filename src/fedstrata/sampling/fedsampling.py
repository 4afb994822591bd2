"""FedSampling (Qi et al. 2023): one sample of the data of all clients together, instead of a sample of clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt

from fedstrata.base.records import Tree, record
from fedstrata.federation.allowed import Agreed, Allowed
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import Weights
from fedstrata.sampling.base import ClientSampler, DataSampler, Selection
from fedstrata.sampling.client_sizes import Epsilon, allowed_sizes, ask_sizes, estimated_total
from fedstrata.sampling.ldp import FedSTaSData


class Everyone(ClientSampler):
    """All clients that may be invited, every round; ``training.clients_per_round`` is ignored."""

    def check(self, config: FederationConfig) -> None:
        """Accept every federation."""

    def allowed(self, agreed: Agreed) -> list[Allowed]:
        """Return no requests."""
        return []

    def select(self, federation: Federation, state: Tree, weights: Weights) -> tuple[Selection, Tree]:
        """Select all clients that may be invited."""
        candidates = federation.candidates()
        return Selection.plain(candidates, len(candidates)), state


@record("AnswersState")
class AnswersState:
    """The clients' answers about their sizes.

    Args:
        known: Clients that answered, ascending, int64.
        answers: Their answers, int64.
    """

    known: NDArray[np.int64]
    answers: NDArray[np.int64]


class FedSamplingData(DataSampler):
    """Each sample of the participants is kept with probability K/ñ, the same for all clients.

    Args:
        samples: K, samples wanted in a round over all participants.
        epsilon: ε of local differential privacy for the answers about the clients' sizes; none by default. It protects
            only these answers: the aggregation weighs by the samples that participants kept, which discloses sizes.
        bound: M, the public bound on a client's size under privacy; see ``fedstrata.sampling.ldp``.
        reuse: Ask each client once and keep its answer, so that ε is spent once. Otherwise every client
            answers in every round: the errors of the estimates average out, and T rounds spend T ε.
    """

    samples: PositiveInt = 1000
    epsilon: Epsilon | None = None
    bound: int = Field(default=100, gt=1)
    reuse: bool = True

    def check(self, config: FederationConfig) -> None:
        """Warn if M clips sizes."""
        FedSTaSData(epsilon=self.epsilon, bound=self.bound).check(config)

    def allowed(self, agreed: Agreed) -> list[Allowed]:
        """Return the request for the participants' sizes, once or in every round."""
        return [allowed_sizes(self.epsilon, self.bound, per="run" if self.reuse else "phase")]

    def init(self, federation: Federation) -> Tree:
        """Return a state without answers."""
        nobody = np.empty(0, dtype=np.int64)
        return AnswersState(nobody, nobody)

    def keep(
        self, federation: Federation, state: Tree, clients: Sequence[int]
    ) -> tuple[float, Tree, Mapping[str, Any]]:
        """Ask the clients without a known size, estimate ñ, and return K/ñ."""
        participants = np.array(sorted(clients), dtype=np.int64)
        asked = np.setdiff1d(participants, state.known) if self.reuse else participants
        sizes, bound, alpha = ask_sizes(federation, asked.tolist(), self.epsilon, self.bound)
        fresh = np.fromiter(sizes, dtype=np.int64)
        answers = np.fromiter(sizes.values(), dtype=np.int64)
        stays = ~np.isin(state.known, fresh) & self.reuse
        known = np.concatenate([state.known[stays], fresh])
        answers = np.concatenate([state.answers[stays], answers])
        order = np.argsort(known)
        state = AnswersState(known[order], answers[order])
        heard = state.answers[np.isin(state.known, participants)]
        if len(heard) == 0:
            return 1.0, state, {}
        estimate = estimated_total(heard.tolist(), bound, alpha)
        keep = min(1.0, self.samples / estimate)
        return keep, state, {"estimated_samples": estimate, "requested_samples": float(self.samples), "keep": keep}
