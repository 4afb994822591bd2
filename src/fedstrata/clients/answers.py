"""How a client answers what most methods ask."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch.nn.modules.batchnorm import _BatchNorm

from fedstrata.clients.client import Client, World, answers
from fedstrata.clients.training import LocalData, Outcome, computing, train
from fedstrata.federation.messages import (
    Compress,
    CompressReply,
    Fit,
    FitReply,
    LossReply,
    LossReport,
    SizeReply,
    SizeReport,
    Sketch,
    SketchReply,
    Weights,
)
from fedstrata.objectives.base import CrossEntropy
from fedstrata.sampling.privacy import randomised_size
from fedstrata.sampling.sketches import sketch
from fedstrata.sampling.squeeze import pack, project, squeeze

OBJECTIVE, BUFFERS = "objective", "buffers"
"""Names under which a client keeps its state."""


@answers(Fit)
def fit(client: Client, request: Fit) -> FitReply:
    """Train on the samples kept this round, and keep the objective's state."""
    chosen, weights = samples_kept(client, request), starting_point(client, request)
    data, objective = LocalData(client, chosen), client.world.objective
    with computing(client.world.job.training):
        message = objective.survey(client.model, weights, data.in_order, request.message)
    outcome = train(
        client,
        weights,
        data,
        round=request.round,
        message=message,
        kept=client.state.get(OBJECTIVE),
    )
    return fit_reply(client, request, len(chosen), outcome)


def samples_kept(client: Client, request: Fit) -> NDArray[np.int64]:
    """The samples kept this round, by their place among the client's own."""
    chosen = np.arange(len(client))
    if request.keep < 1:
        chosen = chosen[client.rng("keep", request.round).random(len(client)) < request.keep]
    return chosen


def starting_point(client: Client, request: Fit | Compress | LossReport) -> Weights:
    """The model that came, with the client's own statistics where it keeps them."""
    local = client.world.job.training.batch_norm == "local"
    sent = request.weights
    own = client.state.get(BUFFERS)
    return Weights(sent.params, {**sent.buffers, **own}) if local and isinstance(own, dict) else sent


def fit_reply(client: Client, request: Fit, samples: int, outcome: Outcome) -> FitReply:
    """What the server learns of a client's training; the rest becomes the client's state."""
    if outcome.kept is not None:
        client.state[OBJECTIVE] = outcome.kept
    result = outcome.weights
    if client.world.job.training.batch_norm == "local" and (names := client.world.once(statistics)):
        # The statistics stay here; what goes back is what came, so that nobody learns them.
        client.state[BUFFERS] = {name: b for name, b in result.buffers.items() if name in names}
        came = {name: b for name, b in request.weights.buffers.items() if name in names}
        result = Weights(result.params, {**result.buffers, **came})
    told = (samples, outcome.steps, outcome.seen) if request.counts else (0, 0, 0)
    if not request.counts:
        # BatchNorm counts batches, and batches tell samples.
        counters = {n: b for n, b in request.weights.buffers.items() if not b.is_floating_point()}
        result = Weights(result.params, {**result.buffers, **counters})
    return FitReply(result, *told, outcome.loss, outcome.message)


def statistics(world: World) -> frozenset[str]:
    """Names of BatchNorm's buffers; frozen parameters and other buffers are none of them."""
    layers = [(at, part) for at, part in world.job.model.module.named_modules() if isinstance(part, _BatchNorm)]
    return frozenset(f"{at}.{own}" if at else own for at, part in layers for own, _ in part.named_buffers())


@answers(SizeReport)
def report_size(client: Client, request: SizeReport) -> SizeReply:
    """The number of samples, under local differential privacy where a bound is given."""
    if request.bound == 0:
        return SizeReply(len(client))
    # In a simulation a spec has one result. At a real site the server, who knows the seed, could take the noise off.
    simulated = client.world.job.sizes is not None
    draw = client.rng("size-privacy", request.round) if simulated else np.random.default_rng()
    return SizeReply(randomised_size(len(client), request.bound, request.alpha, draw))


@answers(Compress)
def compress(client: Client, request: Compress) -> CompressReply:
    """The gradient of the mean cross-entropy over all samples at the global model, projected and squeezed."""
    weights = starting_point(client, request)
    flat = torch.zeros(sum(tensor.numel() for tensor in weights.params.values()))
    data = LocalData(client, np.arange(len(client)))
    # Evaluation mode: one batch's BatchNorm statistics would otherwise leak into the comparison of gradients.
    with client.model.loaded(weights.params, weights.buffers, train=False) as params:
        leaves = list(params.values())
        for batch in data.in_order():
            loss = F.cross_entropy(client.model(params, batch.x), batch.y) * (len(batch.y) / len(data))
            gradient = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
            flat += torch.cat([g.reshape(-1) for g in gradient])
    job = client.world.job
    projected = project(flat, request.coordinates, job.seed)
    centres, codes = squeeze(projected.numpy(), request.centres)
    return CompressReply(torch.from_numpy(centres), torch.from_numpy(pack(codes, len(centres))), projected.numel())


@answers(Sketch)
def send_sketch(client: Client, request: Sketch) -> SketchReply:
    """Train as in any round, and keep nothing of it but the sketch."""
    data = LocalData(client, np.arange(len(client)))
    outcome = train(client, request.weights, data, round=request.round, message={}, objective=CrossEntropy())
    values = sketch(outcome.weights.params, request.coordinates, client.world.job.seed)
    return SketchReply(torch.from_numpy(values))


@answers(LossReport)
@torch.no_grad()
def report_loss(client: Client, request: LossReport) -> LossReply:
    """Mean cross-entropy over all samples at the global model; 0 without samples."""
    data, weights = LocalData(client, np.arange(len(client))), starting_point(client, request)
    total = 0.0
    with client.model.loaded(weights.params, weights.buffers, train=False) as params:
        for batch in data.in_order():
            total += float(F.cross_entropy(client.model(params, batch.x), batch.y, reduction="sum"))
    return LossReply(total / max(len(data), 1))
