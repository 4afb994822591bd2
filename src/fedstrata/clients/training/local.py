"""Local training: the plain fast loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstrata.base.records import Tree
from fedstrata.base.rng import torch_seeded
from fedstrata.clients.client import Client
from fedstrata.clients.context import ClientContext
from fedstrata.clients.training.devices import CPU, moved, placed
from fedstrata.clients.training.sgd import SGD, ManualSGD, Tensors
from fedstrata.federation.messages import Extra, Params, Weights
from fedstrata.federation.settings import DEFAULT_EPOCHS, Training
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
        features = client.context.data.x_train.shape[1:].numel()
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

    def shuffled(self, training: Training, generator: np.random.Generator, pairs: bool) -> Iterator[Batch]:
        """Yield the mini-batches of a round: epochs of a fresh permutation each, or as many steps as asked.

        If a step needs ``pairs``, as BatchNorm does, a last sample alone joins the batch before it, and a client with
        a single sample takes no step.
        """
        n = len(self.chosen)
        size = min(training.batch_size, n)
        if n < (2 if pairs else 1):
            return
        whole = training.local_steps is not None
        batches = -(-n // size) - (1 if pairs and n > 1 and size > 1 and n % size == 1 else 0)
        steps = (
            (training.local_epochs or DEFAULT_EPOCHS) * batches
            if training.local_steps is None
            else training.local_steps
        )
        done = 0
        while done < steps:
            order = generator.permutation(n)
            shuffled = self._in_new_order(order) if steps - done > n // size // 2 else None
            for begin in range(0, n - size + 1 if whole else n, size):
                if done == steps:
                    return
                end = begin + size
                if pairs and size > 1 and n - end == 1 and not whole:
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


@dataclass(frozen=True)
class TrainingSetup:
    """How the clients of a process train on one objective; found once for all of them.

    Args:
        chain: The model as a chain of layers that is trained by hand; None if it is trained with autograd.
        trained: Names of the parameters that the objective trains.
        pairs: Whether a step needs two samples, as BatchNorm does.
        corrects: Whether the objective corrects the gradient.
        finishes: Whether the objective has work to do after the last step.
    """

    chain: ManualSGD | None
    trained: frozenset[str]
    pairs: bool
    corrects: bool
    finishes: bool

    @classmethod
    def of(cls, context: ClientContext, objective: Objective) -> TrainingSetup:
        """Return the setup for an objective."""
        config = context.config
        named = config.model.module.named_parameters()
        on_cpu = context.once(placed).device == CPU
        by_hand = on_cpu and config.training.precision == "float32" and is_plain(objective, "loss", "trains")
        return cls(
            chain=context.once(manual_sgd_of) if by_hand else None,
            trained=frozenset(name for name, _ in named if objective.trains(name, config.model)),
            pairs=has_batchnorm(config.model.module),
            corrects=not is_plain(objective, "correction"),
            finishes=not is_plain(objective, "client_final"),
        )


def shared_setup(context: ClientContext) -> TrainingSetup:
    """Return the setup for the objective that all clients of the process share."""
    return TrainingSetup.of(context, context.objective)


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
    shared, device = client.context, data.device
    training, precision = shared.config.training, computing(shared.config.training, device.type)
    setup = shared.once(shared_setup) if objective is None else TrainingSetup.of(shared, objective)
    objective = objective or shared.objective
    model = client.model
    counts = torch.from_numpy(np.bincount(client.labels[data.chosen], minlength=shared.config.classes)).float()
    if device != CPU:
        model = shared.once(placed).model
        weights = Weights(moved(weights.params, device), moved(weights.buffers, device))
        counts, message, kept = moved((counts, message, kept), device)
    context = Context(weights.params, counts, message, kept, training.lr_at(round))
    with precision:
        context = objective.client_init(model, context)
    seeded: AbstractContextManager[None] = nullcontext()
    # A chain of layers draws no random numbers, and needs no module while it is trained.
    if setup.chain is None or setup.corrects or setup.finishes:
        seeded = torch_seeded(shared.config.seed, "layers", round, client.number, device)
    loaded = model.loaded(weights.params, weights.buffers, train=True) if setup.chain is None else None
    with seeded, loaded or nullcontext(model.laid_out(weights.params)) as params:
        step = _step_of(setup, model, params, objective, context, training)
        losses, seen = list[Tensor](), 0
        for batch in data.shuffled(training, client.rng("batches", round), setup.pairs):
            losses.append(step(batch))
            seen += len(batch.y)
        after = Weights(params, weights.buffers)
        finishing: AbstractContextManager[object] = nullcontext()
        if setup.chain is None:
            after = Weights({n: p.detach().clone() for n, p in params.items()}, model.current_buffers())
        elif setup.finishes:
            finishing = model.loaded(after.params, after.buffers, train=True)
        with torch.no_grad(), precision, finishing:
            done = Trained(after.params, len(losses), model, data.in_order, shared.privacy.min_samples)
            extra, kept = objective.client_final(done, context)
    if device != CPU:
        after = Weights(moved(after.params, CPU), moved(after.buffers, CPU))
        extra, kept = moved((extra, kept), CPU)
    mean_loss = float(torch.stack(losses).mean()) if losses else 0.0
    return Outcome(after, len(losses), seen, mean_loss, extra, kept)


def computing(training: Training, device: str = "cpu") -> AbstractContextManager[None]:
    """Return a context for passes in the precision of the settings.

    Parameters may not change inside: autocast keeps them converted.

    Args:
        training: The settings.
        device: The type of device that computes.
    """
    return torch.autocast(device, torch.bfloat16) if training.precision == "bf16" else nullcontext()


def manual_sgd_of(context: ClientContext) -> ManualSGD | None:
    """Return the model as a chain of layers that is trained by hand; None if it is not such a chain."""
    return ManualSGD.of(context.config.model.module)


def _step_of(
    setup: TrainingSetup, model: Model, params: Params, objective: Objective, context: Context, training: Training
) -> Callable[[Batch], Tensor]:
    """Return a function that trains ``params`` on a batch and returns the loss before that."""
    chain = setup.chain
    if chain is not None and not (training.momentum or training.clip or setup.corrects):
        return partial(chain.step, params, lr=context.lr, weight_decay=training.weight_decay)
    names = list(filter(setup.trained.__contains__, params))
    trained = [params[name] for name in names]
    sgd = SGD(training, context.lr)

    def step(batch: Batch) -> Tensor:
        gradient: Tensors
        if chain is not None:
            loss, gradient = chain.gradient(params, batch.x, batch.y)
        else:
            with computing(training, batch.x.device.type):
                loss = objective.loss(model, params, batch, context)
            # A parameter that the loss does not reach has no gradient; correction and decay still move it.
            gradient = torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True)
        correction = objective.correction(params, context) if setup.corrects else None
        sgd.step(trained, gradient, None if correction is None else [correction[name] for name in names])
        return loss.detach()

    return step


def is_plain(objective: Objective, *hooks: str) -> bool:
    """Return True if an objective leaves these hooks as they are."""
    return all(getattr(type(objective), hook) is getattr(Objective, hook) for hook in hooks)
