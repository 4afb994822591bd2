"""The client's part of sequential federated learning: the model comes by, trains on all the data and goes on."""

from __future__ import annotations

import numpy as np

from fedstrata.clients.client import Client, carries
from fedstrata.clients.training import LocalData, train
from fedstrata.federation.messages import Visit, VisitReply, Weights


@carries(Visit)
def visit(client: Client, request: Visit, weights: Weights) -> tuple[Weights, VisitReply]:
    """Local training that starts at the travelling model."""
    data = LocalData(client, np.arange(len(client)))
    outcome = train(client, weights, data, round=request.round, message={})
    return outcome.weights, VisitReply(len(client), outcome.seen, outcome.loss)
