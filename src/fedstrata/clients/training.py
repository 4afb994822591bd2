"""Local training: the plain fast loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstrata.clients.client import Client
from fedstrata.federation.messages import Extra, Params, Weights
from fedstrata.nn.batchnorm import has_batchnorm
from fedstrata.objectives.base import Batch, Context, Objective, Trained
from fedstrata.records import Tree
from fedstrata.rng import torch_seeded
from fedstrata.settings import Training

GATHER_LIMIT = 128 << 20
"""Bytes of inputs up to which a client's samples are made floats once a round, and not once a batch."""


class LocalData:
    """The samples that a client uses this round, as batches of tensors.

    Args:
        client: Whose.
        chosen: Which of its samples, by their place among its own.
    """

    def __init__(self, client: Client, chosen: NDArray[np.int64]) -> None:
        self.client, self.chosen = client, chosen
        features = int(np.prod(client.world.data.shape))
        # BatchNorm has no statistics of a single sample: a last one alone joins the batch before it.
        self.pairs = has_batchnorm(client.model.module)
        self._all = client.samples(chosen) if 4 * features * len(chosen) <= GATHER_LIMIT else None

    def __len__(self) -> int:
        return len(self.chosen)

    def batch(self, places: NDArray[np.int64] | slice) -> Batch:
        """Samples by their place among the chosen."""
        if self._all is None:
            return Batch(*self.client.samples(self.chosen[places]))
        x, y = self._all
        where = places if isinstance(places, slice) else torch.from_numpy(places)
        return Batch(x[where], y[where])

    def in_order(self, size: int = 512) -> Iterator[Batch]:
        """All samples once, in their own order."""
        for begin in range(0, len(self), size):
            yield self.batch(slice(begin, begin + size))

    def shuffled(self, training: Training, draw: np.random.Generator) -> Iterator[Batch]:
        """The mini-batches of a round: epochs of a fresh permutation each, or as many steps as asked."""
        n, size = len(self), min(training.batch_size, len(self))
        if n == 0:
            return
        whole = training.local_steps is not None
        batches = -(-n // size) - (1 if self.pairs and n > 1 and size > 1 and n % size == 1 else 0)
        steps = training.local_steps if whole else training.epochs * batches
        assert steps is not None
        done = 0
        while done < steps:
            order = draw.permutation(n)
            for begin in range(0, n - size + 1 if whole else n, size):
                if done == steps:
                    return
                end = begin + size
                if self.pairs and size > 1 and n - end == 1 and not whole:
                    end = n
                yield self.batch(order[begin:end])
                done += 1
                if end == n:
                    break


@dataclass(frozen=True)
class Outcome:
    """The result of local training.

    Args:
        weights: After the last step.
        steps: K.
        seen: Sample-gradients computed.
        loss: Mean loss over the steps.
        message: For the objective's server side.
        kept: The client's new state of the objective.
    """

    weights: Weights
    steps: int
    seen: int
    loss: float
    message: Extra
    kept: Tree


def train(
    client: Client,
    weights: Weights,
    data: LocalData,
    *,
    round: int,
    message: Extra,
    kept: Tree = None,
    objective: Objective | None = None,
) -> Outcome:
    """Train on a client's data for one round, starting at ``weights``.

    SGD with momentum μ and weight decay λ on the objective's gradient g plus its correction r (each step):
    d = clip(g + r) + λ w; v ← μ v + d; w ← w − η v.
    """
    training, model = client.world.job.training, client.model
    objective = objective or client.world.objective
    counts = np.bincount(client.labels[data.chosen], minlength=client.world.job.classes)
    lr = training.lr_at(round)
    context = Context(
        start=weights.params,
        counts=torch.from_numpy(counts).float(),
        received=message,
        kept=kept,
        lr=lr,
    )
    context = objective.begin(model, context)
    step = _Step(training, lr)
    losses: list[Tensor] = []
    seen = 0
    with (
        torch_seeded(client.world.job.seed, "layers", round, client.number),
        model.loaded(weights.params, weights.buffers, train=True) as params,
    ):
        names = [name for name in params if objective.trains(name, model)]
        trained = [params[name] for name in names]
        for batch in data.shuffled(training, client.rng("batches", round)):
            loss = objective.loss(model, params, batch, context)
            # A parameter that the loss does not reach has no gradient; correction and decay still move it.
            gradient = torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True)
            step(trained, list(gradient), objective.correction(params, context), names)
            losses.append(loss.detach())
            seen += len(batch.y)
        after = Weights({n: p.detach().clone() for n, p in params.items()}, model.current_buffers())
        with torch.no_grad():
            extra, kept = objective.finish(Trained(after.params, len(losses), model, data.in_order), context)
    mean_loss = float(torch.stack(losses).mean()) if losses else 0.0
    return Outcome(after, len(losses), seen, mean_loss, extra, kept)


class _Step:
    """One fused SGD step after another, with its momentum."""

    def __init__(self, training: Training, lr: float) -> None:
        self.training, self.lr = training, lr
        self.velocity: list[Tensor] | None = None

    @torch.no_grad()
    def __call__(
        self, params: list[Tensor], gradient: list[Tensor], correction: Params | None, names: list[str]
    ) -> None:
        # Never in place on what autograd returned: two parameters' gradients may be the same tensor.
        if correction is not None:
            gradient = list(torch._foreach_add(gradient, [correction[name] for name in names]))
        if self.training.clip is not None:
            gradient = list(torch._foreach_mul(gradient, _shrinkage(gradient, self.training.clip)))
        if self.training.weight_decay:
            gradient = list(torch._foreach_add(gradient, params, alpha=self.training.weight_decay))
        if self.training.momentum:
            if self.velocity is None:
                self.velocity = [g.clone() for g in gradient]
            else:
                torch._foreach_mul_(self.velocity, self.training.momentum)
                torch._foreach_add_(self.velocity, gradient)
            gradient = self.velocity
        torch._foreach_add_(params, gradient, alpha=-self.lr)


def clip_(gradient: list[Tensor], limit: float) -> None:
    """Scale a gradient in place so that its norm over all tensors is at most ``limit``."""
    torch._foreach_mul_(gradient, _shrinkage(gradient, limit))


def _shrinkage(gradient: list[Tensor], limit: float) -> float:
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradient)))
    return float(torch.clamp(limit / (norm + 1e-12), max=1.0))


def mean_of(values: list[Any]) -> float:
    """The mean, 0 for nothing."""
    return float(np.mean(values)) if values else 0.0
