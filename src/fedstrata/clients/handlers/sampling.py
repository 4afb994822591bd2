"""Answer the client samplers' requests for information about clients, such as losses and numbers of samples."""

from __future__ import annotations

import numpy as np
import torch
from pydantic import PrivateAttr

from fedstrata.clients.client import Client
from fedstrata.clients.handlers.fit import starting_point
from fedstrata.clients.handling import handles
from fedstrata.clients.training.local import LocalData, train
from fedstrata.models.model import Model
from fedstrata.objectives.base import CrossEntropy, Objective
from fedstrata.sampling.client_sizes import SizeReply, SizeReport, randomised_size
from fedstrata.sampling.power_of_choice import LossReply, LossReport
from fedstrata.sampling.sketches import Compress, CompressReply, Sketch, SketchReply, pack, project, quantize, sketch


@handles(SizeReport)
def report_size(client: Client, request: SizeReport) -> SizeReply:
    """Return the client's number of samples. If ``request.bound`` > 0, the reply is locally differentially private."""
    if request.bound == 0:
        client.authorize_release(len(client))
        return SizeReply(len(client))
    # authorize_release() is not called, because a missing reply would reveal that the client has few samples.
    client.n_contributing = len(client)
    # A simulation must be repeatable. At a real site the noise must not depend on the seed, which the server knows.
    simulated = client.context.config.sizes is not None
    generator = client.rng("size-privacy", request.round) if simulated else np.random.default_rng()
    return SizeReply(randomised_size(len(client), request.bound, request.alpha, generator))


@handles(Compress)
def compress(client: Client, request: Compress) -> CompressReply:
    """Return the gradient of the mean loss over all samples, projected and, if requested, quantized."""
    client.authorize_release(len(client))
    data, config = LocalData(client, np.arange(len(client))), client.context.config
    task, whole = config.task, data.weight() or 1.0
    weights = starting_point(client, request)
    flat = torch.zeros(sum(map(torch.numel, weights.params.values())))
    # train=False, so that gradients do not depend on the BatchNorm statistics of single batches.
    with client.model.loaded(weights.params, weights.buffers, train=False) as params:
        leaves = list(params.values())
        for batch in data.in_order():
            loss = task.mean_loss(client.model(params, batch.x), batch.y) * (float(task.weights(batch.y).sum()) / whole)
            gradient = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
            flat += torch.cat([g.reshape(-1) for g in gradient])
    values = project(flat, request.coordinates, config.seed).numpy()
    centres, codes = quantize(values, request.centres) if request.centres else (values, np.empty(0, dtype=np.uint8))
    return CompressReply(torch.from_numpy(centres), torch.from_numpy(pack(codes, len(centres))), len(values))


class _TrainsLike(CrossEntropy):
    """The task's loss, for training only those parameters which a given objective trains and clients send.

    Therefore, sketches of models trained with this loss can be compared with sketches of models trained with the given
    objective.
    """

    _other: Objective = PrivateAttr(default_factory=CrossEntropy)

    @classmethod
    def of(cls, objective: Objective) -> Objective:
        """Return a cross-entropy objective for the parameters that ``objective`` trains and clients send."""
        if not objective.freezes:
            return CrossEntropy()
        cross_entropy = cls()
        cross_entropy._other = objective
        return cross_entropy

    def trains(self, name: str, model: Model) -> bool:
        """Return True if the given objective trains the parameter ``name`` and clients send this parameter."""
        return self._other.trains(name, model) and not self._other.stays(name, model)


@handles(Sketch)
def send_sketch(client: Client, request: Sketch) -> SketchReply:
    """Train the model for a round with cross-entropy, and return a sketch (random projection) of the model.

    The client's state does not change.
    """
    client.authorize_update(len(client))
    data = LocalData(client, np.arange(len(client)))
    objective = _TrainsLike.of(client.context.objective)
    outcome = train(client, request.weights, data, round=request.round, message={}, objective=objective)
    values = sketch(outcome.weights.params, request.coordinates, client.context.config.seed)
    return SketchReply(torch.from_numpy(values))


@handles(LossReport)
@torch.no_grad()
def report_loss(client: Client, request: LossReport) -> LossReply:
    """Return the mean loss of the global model over the client's samples; 0 if the client has no samples."""
    client.authorize_release(len(client))
    data, weights = LocalData(client, np.arange(len(client))), starting_point(client, request)
    total, task = 0.0, client.context.config.task
    with client.model.loaded(weights.params, weights.buffers, train=False) as params:
        for batch in data.in_order():
            total += task.total_loss(client.model(params, batch.x), batch.y)
    return LossReply(total / (data.weight() or 1.0))
