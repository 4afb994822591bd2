"""Local training: the plain fast loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstrata.base.records import Tree
from fedstrata.base.rng import torch_seeded
from fedstrata.clients.client import Client
from fedstrata.clients.context import ClientContext
from fedstrata.clients.training.devices import CPU, moved, placed
from fedstrata.clients.training.manual_sgd import ManualSGD
from fedstrata.clients.training.sgd import SGD
from fedstrata.federation.messages import Extra, Params, Weights
from fedstrata.federation.settings import Training
from fedstrata.models.batchnorm import has_batchnorm
from fedstrata.models.model import Model
from fedstrata.objectives.base import Batch, Context, Objective, Trained

GATHER_LIMIT = 128 << 20
"""Bytes of inputs up to which a client's samples are made floats once a round, and not once a batch."""


class LocalData:
    """The samples that a client uses this round, as batches of tensors.

    Args:
        client: Whose.
        chosen: Which of its samples, by their place among its own.
        device: Where the batches are wanted.
    """

    def __init__(self, client: Client, chosen: NDArray[np.int64], device: torch.device = CPU) -> None:
        self.client, self.chosen, self.device = client, chosen, device
        features = int(np.prod(client.context.data.shape))
        # BatchNorm has no statistics of a single sample: a last one alone joins the batch before it.
        self.pairs = client.context.once(normalises)
        self._all = self._gathered(chosen) if 4 * features * len(chosen) <= GATHER_LIMIT else None

    def __len__(self) -> int:
        return len(self.chosen)

    def batch(self, places: NDArray[np.int64] | slice) -> Batch:
        """Samples by their place among the chosen."""
        if self._all is None:
            return Batch(*self._gathered(self.chosen[places]))
        x, y = self._all
        where = places if isinstance(places, slice) else torch.from_numpy(places)
        return Batch(x[where], y[where])

    def _gathered(self, chosen: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        x, y = self.client.samples(chosen)
        return x.to(self.device), y.to(self.device)

    def in_order(self, size: int = 512) -> Iterator[Batch]:
        """All samples once, in their own order."""
        for begin in range(0, len(self), size):
            yield self.batch(slice(begin, begin + size))

    def shuffled(self, training: Training, generator: np.random.Generator) -> Iterator[Batch]:
        """The mini-batches of a round: epochs of a fresh permutation each, or as many steps as asked."""
        n, size = len(self), min(training.batch_size, len(self))
        # BatchNorm has no statistics of a single sample: who has no other one takes no step.
        if n < (2 if self.pairs else 1):
            return
        whole = training.local_steps is not None
        batches = -(-n // size) - (1 if self.pairs and n > 1 and size > 1 and n % size == 1 else 0)
        steps = training.local_steps if whole else training.epochs * batches
        assert steps is not None
        done = 0
        while done < steps:
            order = generator.permutation(n)
            shuffled = self._in_new_order(order) if steps - done > n // size // 2 else None
            for begin in range(0, n - size + 1 if whole else n, size):
                if done == steps:
                    return
                end = begin + size
                if self.pairs and size > 1 and n - end == 1 and not whole:
                    end = n
                if shuffled is None:
                    yield self.batch(order[begin:end])
                else:
                    yield Batch(shuffled.x[begin:end], shuffled.y[begin:end])
                done += 1
                if end == n:
                    break

    def _in_new_order(self, order: NDArray[np.int64]) -> Batch | None:
        """All samples in another order, so that a batch is a mere view; None where they are read batch by batch."""
        if self._all is None:
            return None
        x, y = self._all
        where = torch.from_numpy(order).to(self.device)
        if x.dim() != 4:
            return Batch(x.index_select(0, where), y.index_select(0, where))
        # Pixel by pixel, as the data set gives them.
        pixels = x.permute(0, 2, 3, 1).index_select(0, where)
        return Batch(pixels.permute(0, 3, 1, 2), y.index_select(0, where))


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
    training, device = client.context.config.training, data.device
    model = client.model if device == CPU else client.context.once(placed).model
    objective = objective or client.context.objective
    counts = np.bincount(client.labels[data.chosen], minlength=client.context.config.classes)
    lr = training.lr_at(round)
    if device != CPU:
        weights = Weights(moved(weights.params, device), moved(weights.buffers, device))
        message, kept = moved(message, device), moved(kept, device)
    context = Context(
        start=weights.params,
        counts=torch.from_numpy(counts).float().to(device),
        received=message,
        kept=kept,
        lr=lr,
    )
    with computing(training, device.type):
        context = objective.client_init(model, context)
    by_hand = device == CPU and training.precision == "float32" and is_plain(objective, "loss", "trains")
    chain = client.context.once(manual_sgd_of) if by_hand else None
    losses: list[Tensor] = []
    seen = 0
    seeded = torch_seeded(client.context.config.seed, "layers", round, client.number, device)
    with _workbench(model, weights, chain, objective, seeded) as params:
        step = _stepper(model, params, objective, context, training, chain)
        for batch in data.shuffled(training, client.rng("batches", round)):
            losses.append(step(batch))
            seen += len(batch.y)
        if chain is None:
            after = Weights({n: p.detach().clone() for n, p in params.items()}, model.current_buffers())
        else:
            after = Weights(params, weights.buffers)
        with torch.no_grad(), computing(training, device.type), _finishing(model, after, objective, chain):
            least = client.context.privacy.min_samples
            done = Trained(after.params, len(losses), model, data.in_order, least)
            extra, kept = objective.client_final(done, context)
    if device != CPU:
        after = Weights(moved(after.params, CPU), moved(after.buffers, CPU))
        extra, kept = moved(extra, CPU), moved(kept, CPU)
    mean_loss = float(torch.stack(losses).mean()) if losses else 0.0
    return Outcome(after, len(losses), seen, mean_loss, extra, kept)


def computing(training: Training, device: str = "cpu") -> AbstractContextManager[None]:
    """Passes in the precision of the settings; parameters may not change in the block, which keeps them converted.

    Args:
        training: The settings.
        device: The type of device that computes.
    """
    return torch.autocast(device, torch.bfloat16, enabled=training.precision == "bf16")


def manual_sgd_of(context: ClientContext) -> ManualSGD | None:
    """The model as a chain of layers that is trained by hand, where it is one."""
    return ManualSGD.of(context.config.model.module)


def normalises(context: ClientContext) -> bool:
    """Whether the model has BatchNorm layers."""
    return has_batchnorm(context.config.model.module)


@contextmanager
def _workbench(
    model: Model,
    weights: Weights,
    chain: ManualSGD | None,
    objective: Objective,
    seeded: AbstractContextManager[None],
) -> Iterator[Params]:
    """Parameters to train: those of the module, or for a chain, which needs no module, plain tensors."""
    if chain is None:
        with seeded, model.loaded(weights.params, weights.buffers, train=True) as params:
            yield params
    else:
        # Such layers draw no random numbers.
        with nullcontext() if is_plain(objective, "correction", "client_final") else seeded:
            yield model.laid_out(weights.params)


def _finishing(
    model: Model, after: Weights, objective: Objective, chain: ManualSGD | None
) -> AbstractContextManager[object]:
    """The model loaded for the end of training, which a chain does not need before."""
    by_hand = chain is not None and not is_plain(objective, "client_final")
    return model.loaded(after.params, after.buffers, train=True) if by_hand else nullcontext()


def _stepper(
    model: Model, params: Params, objective: Objective, context: Context, training: Training, chain: ManualSGD | None
) -> Callable[[Batch], Tensor]:
    """What trains ``params`` on a batch and returns the loss before that."""
    names = [name for name in params if objective.trains(name, model)]
    trained = [params[name] for name in names]
    sgd = SGD(training, context.lr)

    def correction(params: Params) -> list[Tensor] | None:
        found = objective.correction(params, context)
        return None if found is None else [found[name] for name in names]

    if chain is None:

        def by_autograd(batch: Batch) -> Tensor:
            with computing(training, batch.x.device.type):
                loss = objective.loss(model, params, batch, context)
            # A parameter that the loss does not reach has no gradient; correction and decay still move it.
            gradient = torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True)
            sgd.step(trained, gradient, correction(params))
            return loss.detach()

        return by_autograd

    if not (training.momentum or training.clip) and is_plain(objective, "correction"):
        return lambda batch: chain.step(params, batch.x, batch.y, context.lr, training.weight_decay)

    def by_hand(batch: Batch) -> Tensor:
        loss, gradient = chain.gradient(params, batch.x, batch.y)
        sgd.step(trained, gradient, correction(params))
        return loss

    return by_hand


def is_plain(objective: Objective, *hooks: str) -> bool:
    """Whether an objective leaves these hooks as they are."""
    return all(getattr(type(objective), hook) is getattr(Objective, hook) for hook in hooks)
