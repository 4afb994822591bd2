"""SFL: sequential federated learning (Li and Lyu 2023), the baseline in the Stratify paper."""

from __future__ import annotations

from typing import Any

from fedstrata.base.errors import SpecError
from fedstrata.base.records import Tree, record
from fedstrata.clients.handlers.sequential import Visit, VisitReply
from fedstrata.federation.allowed import Agreed, Allowed, declares, joined, step_limit
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.exchanges import communication
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import Weights
from fedstrata.methods.base import ASKING, Method
from fedstrata.sampling.base import AnyClientSampler, Uniform


@record("SFLState")
class SFLState:
    """The state of SFL between rounds: the global model and the state of the client sampler."""

    weights: Weights
    clients: Tree


class SFL(Method):
    """One model visits the clients of a round in random order, and each client trains the model.

    The server does not average models, so the model drifts towards the data of the most recent clients. The more the
    clients' data differ, the larger the drift.

    Args:
        client_sampler: Client sampler, which chooses the clients that the model visits.
    """

    needs_replies = "sends the model from client to client"
    paper = "Li and Lyu 2023, Convergence Analysis of Sequential Federated Learning (NeurIPS)"

    client_sampler: AnyClientSampler = Uniform()

    def check(self, config: FederationConfig) -> None:
        """Raise ``SpecError`` if BatchNorm statistics are local, or if the sampler needs the models of all clients."""
        if config.training.batch_norm == "local":
            problem = "SFL trains one model with one set of BatchNorm statistics. Set training.batch_norm = 'average'."
            raise SpecError("training.batch_norm", problem, "local")
        sampler = self.client_sampler
        if sampler.learns(config):
            problem = (
                "learns from the model of every client, but SFL returns only one model per round. Use another sampler."
            )
            raise SpecError("method.client_sampler", problem, sampler.name)
        sampler.check(config)

    def allowed(self, agreed: Agreed) -> list[Allowed] | None:
        """Return the requests of the client sampler, and the request to train the travelling model."""
        sampler = self.client_sampler
        known = declares(type(sampler), "allowed", *ASKING["client_sampler"])
        return joined(sampler.allowed(agreed) if known else None, [Allowed(Visit, limit=step_limit(agreed))])

    def init(self, federation: Federation, weights: Weights) -> SFLState:
        """Return the state before the first round: the initial model and the sampler's initial state."""
        return SFLState(weights, self.client_sampler.init(federation))

    def run_round(self, federation: Federation, state: SFLState) -> tuple[SFLState, dict[str, Any]]:
        """Train the model at each of the selected clients, one after the other."""
        config, sampler = federation.config, self.client_sampler
        selection, clients = sampler.select(federation, state.clients, state.weights)
        order = federation.rng("journey").permutation(selection.clients).tolist()
        visits = [(client, Visit(federation.round)) for client in order]
        gradients = config.training.sample_gradients
        relayed = federation.relay(visits, state.weights, work=lambda _, samples: gradients(samples))
        replies: list[VisitReply] = list(relayed.replies.values())
        seen = sum(reply.seen for reply in replies)
        loss = sum(reply.loss * reply.seen for reply in replies) / seen if seen else None
        metrics = {"samples": seen, "train_loss": loss, **selection.metrics}
        metrics |= communication(relayed.weights, federation.log.hops, config.clients, federation.round)
        # Tell the sampler which clients took part. ``check`` refuses samplers that also need models.
        by_client = {order[position]: reply for position, reply in relayed.replies.items()}
        return SFLState(relayed.weights, sampler.observe(clients, by_client)), metrics
