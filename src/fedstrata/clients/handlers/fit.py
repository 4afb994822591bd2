"""Answer the requests for local training that most methods send."""

from __future__ import annotations

import numpy as np
from torch.nn.modules.batchnorm import _BatchNorm

from fedstrata.clients.client import Client, ClientContext
from fedstrata.clients.handling import handles
from fedstrata.clients.training.devices import on_device
from fedstrata.clients.training.local import OBJECTIVE, LocalData, train
from fedstrata.clients.training.personal import LAYERS, train_in_stages, with_kept_layers
from fedstrata.evaluation.messages import Evaluate
from fedstrata.federation.messages import Fit, FitReply, ModelRequest, WeightedFitReply, Weights

BUFFERS = "buffers"
"""The key under which a client's state stores the client's own BatchNorm statistics."""


@handles(Fit)
def fit(client: Client, request: Fit) -> FitReply:
    """Train on the client's samples for one round. Values that stay at the client become part of its state."""
    config, weights, chosen = client.context.config, starting_point(client, request), np.arange(len(client))
    if request.keep < 1:
        chosen = chosen[client.rng("keep", request.round).random(len(chosen)) < request.keep]
    client.authorize_update(len(chosen))
    data = LocalData(client, chosen, client.context.cached(on_device).device)
    if client.context.objective.has_stages:
        outcome = train_in_stages(client, weights, data, request)
    else:
        outcome = train(client, weights, data, round=request.round, message=request.message)
    if outcome.kept is not None:
        client.state[OBJECTIVE] = outcome.kept
    params, buffers = outcome.weights.params, outcome.weights.buffers
    if config.training.batch_norm == "local" and (names := client.context.cached(statistics)):
        # The client keeps its own BatchNorm statistics. The reply contains the statistics from the request instead.
        client.state[BUFFERS] = {name: b for name, b in buffers.items() if name in names}
        buffers = buffers | {name: b for name, b in request.weights.buffers.items() if name in names}
    counts = (len(chosen), outcome.steps, outcome.seen) if request.counts else (0, 0, 0)
    if not request.counts:
        # BatchNorm counts its batches, and the count would reveal the number of samples. The reply contains the
        # counters from the request instead.
        buffers = buffers | {n: b for n, b in request.weights.buffers.items() if not b.is_floating_point()}
    reply = FitReply(Weights(params, buffers), *counts, outcome.loss, outcome.message, outcome.steps > 0)
    return weighted(reply, data) if config.task.weighted and request.counts else reply


def weighted(reply: FitReply, data: LocalData) -> FitReply:
    """Add the sum of the samples' weights to a reply. A weight may be the sample's number of tokens."""
    return WeightedFitReply(**vars(reply), weight=data.weight())


def starting_point(client: Client, request: ModelRequest | Evaluate) -> Weights:
    """Return the request's model, but with the client's own layers and BatchNorm statistics."""
    local = client.context.config.training.batch_norm == "local"
    sent = with_kept_layers(client, request.weights) if LAYERS in client.state else request.weights
    kept = client.state.get(BUFFERS)
    return Weights(sent.params, {**sent.buffers, **kept}) if local and isinstance(kept, dict) else sent


def statistics(context: ClientContext) -> frozenset[str]:
    """Return the names of the buffers of all BatchNorm layers."""
    modules = context.config.model.module.named_modules()
    layers = [(name, module) for name, module in modules if isinstance(module, _BatchNorm)]
    return frozenset(buffer for name, layer in layers for buffer, _ in layer.named_buffers(prefix=name))
