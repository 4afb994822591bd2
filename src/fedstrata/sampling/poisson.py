"""Draw clients by Poisson sampling: each client is drawn independently of all other clients."""

from __future__ import annotations

from typing_extensions import override

from fedstrata.base.records import Tree
from fedstrata.federation.allowed import Agreed, Allowed
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import Weights
from fedstrata.sampling.base import ClientSampler, Selection


class Poisson(ClientSampler):
    """Draws each of N clients independently with probability ``training.clients_per_round`` / N.

    The number of drawn clients varies, and may be 0. With ``privacy.clients``, the random choice of clients lowers ε.
    """

    needs_replies = ""

    @override
    def most_invited(self, config: FederationConfig) -> int:
        return config.clients

    def allowed(self, agreed: Agreed) -> list[Allowed]:
        """Return an empty list, because the sampler sends no requests."""
        return []

    def select(self, federation: Federation, state: Tree, weights: Weights) -> tuple[Selection, Tree]:
        """Draw clients, independently of each other, from the clients that may be invited."""
        config, candidates = federation.config, federation.candidates()
        drawn = federation.rng("client-sampling").random(config.clients) < self.cohort(config) / config.clients
        return Selection.plain(candidates[drawn[candidates]], len(candidates)), state
