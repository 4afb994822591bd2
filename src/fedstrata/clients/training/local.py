"""Local training: the loop over mini-batches, for every objective and device."""

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
from fedstrata.clients.client import Client, ClientContext
from fedstrata.clients.training.devices import CPU, on_device, to_device
from fedstrata.clients.training.sgd import SGD, ManualSGD, Tensors
from fedstrata.federation.messages import Extra, Params, Weights
from fedstrata.federation.settings import DEFAULT_EPOCHS, Training
from fedstrata.models.batchnorm import has_batchnorm
from fedstrata.models.model import Model
from fedstrata.objectives.base import Batch, Context, Objective, Trained

GATHER_LIMIT = 128 << 20
"""Bytes of inputs up to which a client's samples are converted to floats once per round, not once per batch."""


class LocalData:
    """The samples that a client uses this round, as batches of tensors.

    Args:
        client: The client.
        chosen: Positions of the samples among the client's own.
        device: Device of the batches.
    """

    def __init__(self, client: Client, chosen: NDArray[np.int64], device: torch.device = CPU) -> None:
        self.client, self.chosen, self.device = client, chosen, device
        features = client.context.data.x_train.shape[1:].numel()
        self._samples = self._gathered(chosen) if 4 * features * len(chosen) <= GATHER_LIMIT else None

    def __len__(self) -> int:
        return len(self.chosen)

    def batch(self, positions: NDArray[np.int64] | slice) -> Batch:
        """Return samples by their positions among the chosen samples."""
        if self._samples is None:
            return Batch(*self._gathered(self.chosen[positions]))
        x, y = self._samples
        where = positions if isinstance(positions, slice) else torch.from_numpy(positions)
        return Batch(x[where], y[where])

    def _gathered(self, chosen: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        x, y = self.client.samples(chosen)
        return x.to(self.device), y.to(self.device)

    def in_order(self, size: int = 512) -> Iterator[Batch]:
        """Yield all samples once, in their own order."""
        for begin in range(0, len(self), size):
            yield self.batch(slice(begin, begin + size))

    def shuffled(self, training: Training, generator: np.random.Generator, pairs: bool) -> Iterator[Batch]:
        """Yield the mini-batches of a round: local epochs in a new random order each, or ``local_steps`` batches.

        Args:
            training: The settings.
            generator: Draws the orders.
            pairs: Whether a step needs two samples, as BatchNorm does. A single sample at the end of an epoch then
                joins the batch before it, and a client with a single sample takes no step.
        """
        n = len(self.chosen)
        size = min(training.batch_size, n)
        if n < (2 if pairs else 1):
            return
        full_batches = training.local_steps is not None
        batches = -(-n // size) - (pairs and size > 1 and n % size == 1)
        steps = training.local_steps or (training.local_epochs or DEFAULT_EPOCHS) * batches
        done = 0
        while done < steps:
            order = generator.permutation(n)
            # If less than half of the samples are used, they are read batch by batch.
            shuffled = self._permuted(order) if steps - done > n // size // 2 else None
            for begin in range(0, n - size + 1 if full_batches else n, size):
                if done == steps:
                    return
                end = begin + size
                if pairs and size > 1 and n - end == 1 and not full_batches:
                    end = n
                if shuffled is None:
                    yield self.batch(order[begin:end])
                else:
                    yield Batch(shuffled.x[begin:end], shuffled.y[begin:end])
                done += 1
                if end == n:
                    break

    def _permuted(self, order: NDArray[np.int64]) -> Batch | None:
        """Return all samples in a new order, so that batches are views; None if they are too many for one copy."""
        if self._samples is None:
            return None
        x, y = self._samples
        where = torch.from_numpy(order).to(self.device)
        if x.dim() != 4:
            return Batch(x.index_select(0, where), y.index_select(0, where))
        # Images keep the memory format of the data set, in which the channels of a pixel lie together.
        pixels = x.permute(0, 2, 3, 1).index_select(0, where)
        return Batch(pixels.permute(0, 3, 1, 2), y.index_select(0, where))


@dataclass(frozen=True)
class Outcome:
    """The result of local training.

    Args:
        weights: The model after the last step.
        steps: Number of steps, K.
        seen: Number of sample-gradients computed.
        loss: Mean loss over the steps.
        message: The objective's message to the server.
        kept: The objective's new state at the client.
    """

    weights: Weights
    steps: int
    seen: int
    loss: float
    message: Extra
    kept: Tree


@dataclass(frozen=True)
class TrainingSetup:
    """How the clients of a process train on one objective; computed once for all clients.

    Args:
        chain: The model as a chain of layers with handwritten gradients; None if autograd trains it.
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
        on_cpu = context.cached(on_device).device == CPU
        by_hand = on_cpu and config.training.precision == "float32" and is_plain(objective, "loss", "trains")
        return cls(
            chain=context.cached(manual_sgd_of) if by_hand else None,
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

    Each step is SGD with momentum μ and weight decay λ, on the objective's gradient g plus its correction r:
    d = clip(g + r) + λ w; v ← μ v + d; w ← w − η v.

    Args:
        client: The client.
        weights: The model to start with.
        data: The samples to train on.
        round: The round, counted from 1.
        message: The message of the objective's server side.
        kept: The objective's state at the client.
        objective: The objective to minimise. Default: that of the context.
    """
    shared, device = client.context, data.device
    training, precision = shared.config.training, computing(shared.config.training, device.type)
    setup = shared.cached(shared_setup) if objective is None else TrainingSetup.of(shared, objective)
    objective = objective or shared.objective
    model = client.model
    counts = torch.from_numpy(np.bincount(client.labels[data.chosen], minlength=shared.config.classes)).float()
    if device != CPU:
        model = shared.cached(on_device).model
        weights = Weights(to_device(weights.params, device), to_device(weights.buffers, device))
        counts, message, kept = to_device((counts, message, kept), device)
    context = Context(weights.params, counts, message, kept, training.lr_at(round))
    with precision:
        context = objective.client_init(model, context)
    seeded: AbstractContextManager[None] = nullcontext()
    # A chain of layers uses neither random numbers nor the module itself.
    if setup.chain is None or setup.corrects or setup.finishes:
        seeded = torch_seeded(shared.config.seed, "layers", round, client.number, device)
    loaded = model.loaded(weights.params, weights.buffers, train=True) if setup.chain is None else None
    with seeded, loaded or nullcontext(model.laid_out(weights.params)) as params:
        step = _step_of(setup, model, params, objective, context, training)
        losses, seen = list[Tensor](), 0
        for batch in data.shuffled(training, client.rng("batches", round), setup.pairs):
            losses.append(step(batch))
            seen += batch.y.shape[0]
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
        after = Weights(to_device(after.params, CPU), to_device(after.buffers, CPU))
        extra, kept = to_device((extra, kept), CPU)
    mean_loss = float(torch.stack(losses).mean()) if losses else 0.0
    return Outcome(after, len(losses), seen, mean_loss, extra, kept)


def computing(training: Training, device: str = "cpu") -> AbstractContextManager[None]:
    """Return a context manager for passes in the precision of the settings.

    Parameters must not change inside it, because autocast caches converted copies of them.

    Args:
        training: The settings.
        device: Type of the device that computes.
    """
    return torch.autocast(device, torch.bfloat16) if training.precision == "bf16" else nullcontext()


def manual_sgd_of(context: ClientContext) -> ManualSGD | None:
    """Return the model as a chain of layers with handwritten gradients, or None if it is not such a chain."""
    return ManualSGD.of(context.config.model.module)


def _step_of(
    setup: TrainingSetup, model: Model, params: Params, objective: Objective, context: Context, training: Training
) -> Callable[[Batch], Tensor]:
    """Return a function that takes one step on a batch, in place, and returns the loss before the step."""
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
            # A parameter that the loss does not use has gradient zero: correction and weight decay still apply.
            gradient = torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True)
        correction = objective.correction(params, context) if setup.corrects else None
        sgd.step(trained, gradient, None if correction is None else [correction[name] for name in names])
        return loss.detach()

    return step


def is_plain(objective: Objective, *hooks: str) -> bool:
    """Return True if an objective does not override any of these hooks."""
    return all(getattr(type(objective), hook) is getattr(Objective, hook) for hook in hooks)
