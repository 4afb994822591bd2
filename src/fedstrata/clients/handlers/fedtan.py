"""Answer FedTAN's requests, for which all clients of a round train at the same time.

In the first step of a round, BatchNorm normalises with statistics that are averaged over the batches of all clients. In
later steps, BatchNorm normalises with the running statistics, which only the first step updates.
"""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedstrata.base.records import record
from fedstrata.base.rng import torch_seeded
from fedstrata.clients.client import Client
from fedstrata.clients.handlers.fit import weighted
from fedstrata.clients.handling import handles
from fedstrata.clients.training.augmenting import augmented_batches
from fedstrata.clients.training.local import LocalData
from fedstrata.clients.training.steps import SGD
from fedstrata.federation.messages import (
    Extra,
    FitReply,
    Params,
    RequestRule,
    TrainingRequest,
    Weights,
    check_message,
    fit_changes,
)
from fedstrata.models.averagednorm import averaged
from fedstrata.objectives.base import Context


@record("FitTogether")
class FitTogether(TrainingRequest):
    """A request for the same training as ``Fit``, except that all clients of the round take the first step together.

    The reply is a ``FitReply``.

    Args:
        round: The round, counted from 1.
        weights: The global model.
    """

    rule = RequestRule(
        "the model after its local training, with how many samples it used and their mean loss; and sums over "
        "its first batch, layer by layer",
        together=True,
        discloses=frozenset({"sizes"}),
    )

    round: int
    weights: Weights

    def changes(self, message: Extra) -> Params:
        """Return tensors with the same names and shapes as the tensors of the reply's update."""
        return fit_changes(self.weights, {})

    def check(self, reply: FitReply) -> None:
        """Raise an error if the checks of ``TrainingRequest`` fail, or if the reply contains values of an objective."""
        super().check(reply)
        check_message(reply, {})


@handles(FitTogether)
def fit_together(client: Client, request: FitTogether) -> FitReply:
    """Train for one round. In the first step, BatchNorm's statistics are averaged over all clients of the round."""
    first_batch = min(len(client), client.context.config.training.batch_size)
    client.authorize_release(first_batch)  # besides the reply, the client sends sums over this batch
    shared, model, group = client.context, client.model, client.group
    training = shared.config.training
    data = LocalData(client, np.arange(len(client)))
    lr = training.lr_at(request.round)
    context = Context(request.weights.params, torch.zeros(shared.config.strata), {}, None, lr, task=shared.config.task)
    sgd = SGD(training, lr)
    losses: list[Tensor] = []
    seen = 0
    with (
        torch_seeded(shared.config.seed, "layers", request.round, client.number),
        model.loaded(request.weights.params, request.weights.buffers, train=True) as params,
    ):
        leaves = list(params.values())
        batches = data.shuffled(training, client.rng("batches", request.round), pairs=True)
        for batch in augmented_batches(client, batches, request.round):
            first = not losses
            together = averaged(model.module, group, len(client)) if first and group is not None else nullcontext()
            with together:
                loss = shared.objective.loss(model, params, batch, context)
                gradient = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
            sgd.step(leaves, gradient)
            losses.append(loss.detach())
            seen += len(batch.y)
            _freeze(model.module)
        if not losses and group is not None:
            # A client with fewer than two samples takes no step. It adds zeros to the sums that other clients wait for.
            with averaged(model.module, group, 0.0):
                torch.autograd.grad(model(params, data.batch(slice(0, 0)).x).sum(), leaves, allow_unused=True)
        after = Weights({name: p.detach().clone() for name, p in params.items()}, model.current_buffers())
    mean = float(torch.stack(losses).mean()) if losses else 0.0
    reply = FitReply(after, len(client), len(losses), seen, mean, {}, bool(losses))
    return weighted(reply, data) if shared.config.task.weighted else reply


def _freeze(module: nn.Module) -> None:
    """Make all BatchNorm layers normalise with their running statistics."""
    for layer in module.modules():
        if isinstance(layer, _BatchNorm):
            layer.train(False)
