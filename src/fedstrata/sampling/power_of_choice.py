"""Prefer clients with a large loss: power-of-choice (Cho et al. 2020, Client Selection in Federated Learning)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import PositiveInt

from fedstrata.base.errors import ReplyRefusedError, SpecError
from fedstrata.base.records import Tree, record
from fedstrata.federation.allowed import Agreed, Allowed
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import ModelRequest, Reply, RequestRule, Weights
from fedstrata.sampling.base import ClientSampler, Selection
from fedstrata.sampling.client_sizes import Sizes, allowed_sizes


@record("LossReply")
class LossReply(Reply):
    """The loss of the global model on a client's samples.

    Args:
        loss: Mean cross-entropy over the client's samples.
    """

    loss: float


@record("LossReport")
class LossReport(ModelRequest):
    """A request for the loss of the global model on a client's samples.

    Args:
        round: The round, counted from 1.
        weights: The global model.
    """

    reply_type: ClassVar[type[Reply]] = LossReply
    rule = RequestRule("the mean loss of the global model on its training samples")

    round: int
    weights: Weights

    def check(self, reply: LossReply) -> None:
        """Raise ``ReplyRefusedError`` if the loss is negative."""
        if reply.loss < 0:
            raise ReplyRefusedError(f"the loss {reply.loss} is negative")


class PowerOfChoice(ClientSampler):
    """Draws candidates in proportion to their numbers of samples, and invites the candidates with the largest losses.

    The sampler is biased on purpose: clients with a large loss have a larger weight in the aggregate than in the mean
    over all clients.

    Args:
        candidates: Number of candidates per round. Default: twice the number of clients to invite.
    """

    tells_sizes = True
    needs_replies = "compares the losses of individual clients"

    candidates: PositiveInt | None = None

    def check(self, config: FederationConfig) -> None:
        """Raise ``SpecError`` if there are fewer candidates than clients per round, or more candidates than clients."""
        super().check(config)
        m, key = config.training.invited(config.clients), "method.client_sampler.candidates"
        if self.candidates is not None and self.candidates > config.clients:
            raise SpecError(
                key, f"the partition has {config.clients} clients. Use at most {config.clients}.", self.candidates
            )
        if self.candidates is not None and self.candidates < m:
            raise SpecError(
                key, (f"is less than {m}, the number of clients per round. Use at least {m}."), self.candidates
            )

    def allowed(self, agreed: Agreed) -> list[Allowed]:
        """Return the request for the number of samples (once per run) and the request for the loss (in every round)."""
        return [allowed_sizes(phase="enrolment"), Allowed(LossReport)]

    def init(self, federation: Federation) -> Tree:
        """Ask all clients for their numbers of samples."""
        return Sizes.ask(federation)

    def select(self, federation: Federation, state: Tree, weights: Weights) -> tuple[Selection, Tree]:
        """Draw candidates, and select the candidates with the largest losses. Ties are broken at random."""
        config = federation.config
        clients, sizes = state.among(federation.candidates())
        m = min(config.training.invited(config.clients), len(clients))
        d = min(self.candidates or 2 * m, len(clients))
        if d == 0:
            return Selection.plain(clients, 0), state
        chosen = federation.rng("candidates").choice(clients, size=d, replace=False, p=sizes / sizes.sum())

        request = LossReport(federation.round, weights)
        # The computation of a loss needs only the forward pass, which costs about a third of a training step.
        replies = federation.ask(chosen.tolist(), request, work=lambda samples: samples / 3)
        asked = np.fromiter(replies, dtype=np.int64)
        losses = np.array([reply.loss for reply in replies.values()])
        worst = np.lexsort((federation.rng("client-sampling").permutation(len(asked)), -losses))[:m]
        return Selection.plain(asked[worst], len(clients)), state
