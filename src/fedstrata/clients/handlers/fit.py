"""How a client answers what most methods ask."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch.nn.modules.batchnorm import _BatchNorm

from fedstrata.clients.client import Client
from fedstrata.clients.context import ClientContext
from fedstrata.clients.handling import handles
from fedstrata.clients.training.devices import CPU, moved, placed
from fedstrata.clients.training.local import LocalData, Outcome, computing, train
from fedstrata.evaluation.messages import Evaluate
from fedstrata.federation.messages import Fit, FitReply, Weights
from fedstrata.sampling.messages import (
    Compress,
    LossReport,
)

OBJECTIVE, BUFFERS = "objective", "buffers"
"""Names under which a client keeps its state."""


@handles(Fit)
def fit(client: Client, request: Fit) -> FitReply:
    """Train on the samples kept this round, and keep the objective's state."""
    place = client.context.once(placed)
    model = client.model if place.device == CPU else place.model
    chosen, weights = samples_kept(client, request), starting_point(client, request)
    client.release_trained(len(chosen))
    data, objective = LocalData(client, chosen, place.device), client.context.objective
    message = request.message if place.device == CPU else moved(request.message, place.device)
    with computing(client.context.config.training, place.device.type):
        message = objective.client_prepare(model, weights, data.in_order, message)
    outcome = train(client, weights, data, round=request.round, message=message, kept=client.state.get(OBJECTIVE))
    return fit_reply(client, request, len(chosen), outcome)


def samples_kept(client: Client, request: Fit) -> NDArray[np.int64]:
    """The samples kept this round, by their place among the client's own."""
    chosen = np.arange(len(client.indices))
    if request.keep < 1:
        chosen = chosen[client.rng("keep", request.round).random(len(chosen)) < request.keep]
    return chosen


def starting_point(client: Client, request: Fit | Compress | LossReport | Evaluate) -> Weights:
    """The model that came, with the client's own statistics where it keeps them."""
    local = client.context.config.training.batch_norm == "local"
    sent = request.weights
    own = client.state.get(BUFFERS)
    return Weights(sent.params, {**sent.buffers, **own}) if local and isinstance(own, dict) else sent


def fit_reply(client: Client, request: Fit, samples: int, outcome: Outcome) -> FitReply:
    """What the server learns of a client's training; the rest becomes the client's state."""
    if outcome.kept is not None:
        client.state[OBJECTIVE] = outcome.kept
    result = outcome.weights
    if client.context.config.training.batch_norm == "local" and (names := client.context.once(statistics)):
        # The statistics stay here; what goes back is what came, so that nobody learns them.
        client.state[BUFFERS] = {name: b for name, b in result.buffers.items() if name in names}
        came = {name: b for name, b in request.weights.buffers.items() if name in names}
        result = Weights(result.params, {**result.buffers, **came})
    counts = (samples, outcome.steps, outcome.seen) if request.counts else (0, 0, 0)
    if not request.counts:
        # BatchNorm counts batches, and batches tell samples.
        counters = {n: b for n, b in request.weights.buffers.items() if not b.is_floating_point()}
        result = Weights(result.params, {**result.buffers, **counters})
    return FitReply(result, *counts, outcome.loss, outcome.message, outcome.steps > 0)


def statistics(context: ClientContext) -> frozenset[str]:
    """Names of BatchNorm's buffers; frozen parameters and other buffers are none of them."""
    layers = [(at, part) for at, part in context.config.model.module.named_modules() if isinstance(part, _BatchNorm)]
    return frozenset(f"{at}.{own}" if at else own for at, part in layers for own, _ in part.named_buffers())
