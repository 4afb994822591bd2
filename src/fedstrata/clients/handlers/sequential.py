"""Answer requests in sequential federated learning, in which clients train the same model one after another."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from fedstrata.base.errors import ReplyRefusedError
from fedstrata.base.records import record
from fedstrata.clients.client import Client
from fedstrata.clients.handling import handles_hop
from fedstrata.clients.training.local import LocalData, train
from fedstrata.federation.messages import Reply, Request, RequestRule, Weights


@record("VisitReply")
class VisitReply(Reply):
    """The result of local training, without the model: numbers of samples and the mean loss.

    Args:
        samples: Number n_k of samples of the client.
        seen: Total number of samples in the batches of all steps, including repetitions.
        loss: Mean training loss over the steps.
    """

    samples: int
    seen: int
    loss: float


@record("Visit")
class Visit(Request):
    """A request to train the travelling model on all samples of a client, in the same way as ``Fit``.

    Args:
        round: The round, counted from 1.
    """

    reply_type: ClassVar[type[Reply]] = VisitReply
    rule = RequestRule(
        "the travelling model after its local training, with how many samples it used and their mean loss",
        relay=True,
        discloses=frozenset({"sizes"}),
    )

    round: int

    def check(self, reply: VisitReply) -> None:
        """Raise an error if a count in the reply is negative."""
        if reply.samples < 0 or reply.seen < 0:
            raise ReplyRefusedError("the reply contains a negative count")


@handles_hop(Visit)
def visit(client: Client, request: Visit, weights: Weights) -> tuple[Weights, VisitReply]:
    """Train the model on the client's samples, and return the trained model for the next client."""
    client.authorize_update(len(client))
    data = LocalData(client, np.arange(len(client)))
    outcome = train(client, weights, data, round=request.round, message={})
    return outcome.weights, VisitReply(len(client), outcome.seen, outcome.loss)
