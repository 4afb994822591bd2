"""Run Stratify's single-sample mode on a client: take one SGD step on one sample for each label in a task.

A *task* is one ``Steps`` request, which lists *placeholders* (numbers that stand for labels). In a *relay*, the model
travels from client to client, and each client executes one task.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedstrata.base.arrays import Ints
from fedstrata.base.inputs import Inputs, single, split
from fedstrata.base.records import record
from fedstrata.base.rng import torch_seeded
from fedstrata.clients.client import Client, ClientContext
from fedstrata.clients.handling import handles_hop, handles_relay
from fedstrata.clients.training.augmenting import augmented
from fedstrata.clients.training.steps import SGD
from fedstrata.clients.training.traced_sgd import TracedSGD
from fedstrata.federation.engine import Failure
from fedstrata.federation.messages import Params, Reply, Weights
from fedstrata.federation.reply_checks import DIVERGED, finite
from fedstrata.models.model import Model
from fedstrata.objectives.base import Batch, Context
from fedstrata.stratify.client_batch import STATE, Pool, opened
from fedstrata.stratify.messages import Steps, StepsReply

TRIAL = 3
"""The number of trial steps. ``TracedStepper`` is used only if it trains the same model as autograd in these steps."""

BLOCK_BYTES = 16 << 20
"""The size of a block of inputs in bytes. ``FusedSteps`` checks after each block that the model is finite."""


@record("Stepped")
class Stepped:
    """A client's used and unused samples of each label in an epoch, and the number of steps that the client took.

    Args:
        round: The epoch, counted from 1.
        pools: A mapping from each placeholder (a number that stands for a label) to the client's samples of this label.
        steps: The number of samples on which the client has trained in this epoch.
    """

    round: int
    pools: dict[int, Pool]
    steps: int


def draw_samples(client: Client, request: Steps) -> tuple[Ints, int, StepsReply]:
    """Draw one unused sample for each label in a task, except for labels without unused samples.

    Returns:
        Three values: the indices of the samples in the data set, the number of steps that the client took earlier in
        this epoch, and the reply. The loss in the reply is 0, because the client has not trained on the samples yet.
    """
    client.authorize_release(1)  # the model that leaves the client may depend on a single sample
    before = client.state.get(STATE)
    if request.fresh or not isinstance(before, Stepped) or before.round != request.round:
        before = Stepped(request.round, {}, 0)
    wanted = request.labels.tolist()
    pools = opened(client, before.pools, request, wanted)
    places: list[int] = []
    missing, exhausted = [], []
    for p in wanted:
        pool = pools[p]
        left = len(pool.order) - pool.used
        missing.append(left == 0)
        if left:
            places.append(int(pool.order[pool.used]))
        if left <= 1 and p not in exhausted:
            exhausted.append(p)
        pools[p] = Pool(pool.order, pool.used + min(left, 1), pool.refills)
    client.n_contributing = len(places)
    client.state[STATE] = Stepped(request.round, pools, before.steps + len(places))
    reply = StepsReply(torch.tensor(missing), torch.tensor(exhausted, dtype=torch.int64), torch.zeros(()))
    return client.indices[places], before.steps, reply


@handles_hop(Steps)
def step(client: Client, request: Steps, weights: Weights) -> tuple[Weights, StepsReply]:
    """Take one SGD step per sample of a task, starting from the model ``weights``. Return the new model and a reply."""
    indices, steps, reply = draw_samples(client, request)
    if len(indices) == 0:
        return weights, reply
    stepper = stepper_of(client.context, client.model)
    stepper.load(weights)
    losses = _run(client.context, stepper, [(client.number, steps, indices)], request.round)
    return stepper.weights(), replace(reply, loss=losses.sum())


@handles_relay(Steps)
class FusedSteps:
    """Trains the model that travels from client to client in a *relay*, if all clients share one process.

    At first, each client only draws the samples of its task. The SGD steps are taken later, together for many tasks (a
    *block*). The result is bit-identical to separate steps at each client. If the model contains NaN or infinity after
    a block, the block is repeated task by task. If a task leads to NaN or infinity, its steps are undone.

    Args:
        context: The context that the clients share.
        weights: The model with which the relay begins.
    """

    def __init__(self, context: ClientContext, weights: Weights) -> None:
        self._shared = context
        self._stepper = stepper_of(context, context.config.model)
        self._stepper.load(weights)
        self._like = weights
        self._last: tuple[tuple[int, int, Ints], StepsReply, int] | None = None
        self._parts: list[tuple[int, int, Ints]] = []
        self._replies: list[StepsReply] = []
        self._done: list[Reply | Failure] = []
        self._waiting = 0
        self._round = 0
        self._block = max(1, BLOCK_BYTES // context.data.sample_bytes)

    def hop(self, client: Client, task: Steps) -> StepsReply:
        """Let a client draw the samples of its task. The SGD steps on these samples are taken later."""
        indices, steps, reply = draw_samples(client, task)
        self._last = (client.number, steps, indices), reply, task.round
        return reply

    def keep(self, accepted: bool) -> None:
        """Keep the latest task for training, or drop it if its reply was refused."""
        if accepted and self._last is not None:
            part, reply, self._round = self._last
            self._parts.append(part)
            self._replies.append(reply)
            self._waiting += len(part[2])
            if self._waiting >= self._block:
                self._flush()
        self._last = None

    def finish(self) -> tuple[Weights, list[Reply | Failure]]:
        """Take the remaining steps. Return the model, and a reply with the loss (or a failure) for each task."""
        self._flush()
        moved = any(not isinstance(outcome, Failure) for outcome in self._done)
        return self._stepper.weights() if moved else self._like, self._done

    def _flush(self) -> None:
        parts, replies = self._parts, self._replies
        self._parts, self._replies, self._waiting = [], [], 0
        before = self._stepper.weights()
        losses = self._try(parts)
        if isinstance(losses, Tensor):
            ends = np.cumsum([len(indices) for _, _, indices in parts])
            shares = losses.tensor_split(torch.from_numpy(ends)) if parts else ()
            self._done += [replace(reply, loss=share.sum()) for reply, share in zip(replies, shares, strict=False)]
            return
        self._stepper.load(before)
        for part, reply in zip(parts, replies, strict=True):
            good = self._stepper.weights()
            outcome = self._try([part])
            if isinstance(outcome, Failure):
                self._stepper.load(good)
                self._done.append(outcome)
            else:
                self._done.append(replace(reply, loss=outcome.sum()))

    def _try(self, parts: list[tuple[int, int, Ints]]) -> Tensor | Failure:
        """Take the steps of several tasks, and return the samples' losses, or a failure if the model is not finite."""
        try:
            losses = _run(self._shared, self._stepper, parts, self._round)
        except Exception as error:
            return Failure(f"{type(error).__name__}: {error}", error)
        if all(map(finite, [losses, *self._stepper.weights().params.values()])):
            return losses
        return Failure(f"the client's SGD steps led to NaN or infinity. {DIVERGED}")


def stepper_of(context: ClientContext, model: Model) -> Stepper:
    """Return the fastest object that can take SGD steps on a model, and cache the object for later calls."""
    last = context.cached(_Last)
    if last.stepper is None or last.model is not model:
        last.model, last.stepper = model, _make_stepper(context, model)
    return last.stepper


class _Last:
    """A cache of the most recent stepper (an object that takes SGD steps) and of the model that this stepper trains."""

    def __init__(self, _: ClientContext) -> None:
        self.model: Model | None = None
        self.stepper: Stepper | None = None


def _make_stepper(context: ClientContext, model: Model) -> Stepper:
    plain = AutogradStepper(context, model)
    # Traced steps support neither clipping (which needs the norm over all gradients) nor buffers that change (as in
    # BatchNorm).
    if context.config.training.clip is None and not model.buffers():
        try:
            traced = TracedStepper(context, model)
            if _agree(traced, plain, context, model):
                return traced
        except Exception:  # The tracer may raise any exception for a model that it cannot trace.
            pass
    return plain


def _agree(traced: Stepper, plain: Stepper, context: ClientContext, model: Model) -> bool:
    """Return True if two steppers give the same losses and the same model on a few samples.

    For some models, a traced stepper is wrong, because it repeats the operations of its first step in every step.
    """
    start = Weights(model.params(), model.buffers())
    where = torch.linspace(0, len(context.data.y_train) - 1, TRIAL).long()
    x, y, after = context.data.inputs(where), context.data.y_train[where], []
    for stepper in (traced, plain):
        stepper.load(start)
        with torch_seeded(0, "trial"):
            losses = stepper.run(x, y, context.config.training.lr)
        after.append([losses, *stepper.weights().params.values()])
        stepper.load(start)
    return all(torch.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True) for a, b in zip(*after, strict=True))


def _loss(shared: ClientContext, model: Model, params: Params, x: Inputs, y: Tensor) -> Tensor:
    config = shared.config
    context = Context(params, torch.zeros(config.strata), {}, None, config.training.lr, task=config.task)
    return shared.objective.loss(model, params, Batch(x, y), context)


class TracedStepper:
    """Takes SGD steps without autograd; see ``fedstrata.clients.training.traced_sgd``."""

    def __init__(self, context: ClientContext, model: Model) -> None:
        x, y = single(context.data.inputs(slice(0, 1))), context.data.targets(slice(0, 1))
        before = model.module.training
        model.module.train()
        try:
            self._sgd = TracedSGD(
                lambda params, x, y: _loss(context, model, params, x, y),
                model.params(),
                x,
                y,
                context.config.training.weight_decay,
            )
        finally:
            model.module.train(before)
        self.random = self._sgd.random

    def load(self, weights: Weights) -> None:
        """Set the model from which the next steps start."""
        self._sgd.load(weights.params)

    def run(self, x: Inputs, y: Tensor, lr: float) -> Tensor:
        """Take one step per sample, in order. Return the loss before each step.

        Args:
            x: The inputs of n ≥ 1 samples, shape (n, …).
            y: The labels, shape (n,).
            lr: The learning rate.

        Returns:
            The losses, shape (n,).
        """
        return self._sgd.run(single(x), y, lr)

    def weights(self) -> Weights:
        """Return a copy of the current model."""
        return Weights(self._sgd.params(), {})


class AutogradStepper:
    """Takes SGD steps with autograd, for models that cannot be traced."""

    random = True

    def __init__(self, context: ClientContext, model: Model) -> None:
        self._shared, self._model = context, model
        self._weights = Weights(model.params(), model.buffers())

    def load(self, weights: Weights) -> None:
        """Set the model from which the next steps start."""
        self._weights = weights

    def run(self, x: Inputs, y: Tensor, lr: float) -> Tensor:
        """Take one step per sample, in order; see ``TracedStepper.run``."""
        model, training = self._model, self._shared.config.training
        losses = []
        with model.loaded(self._weights.params, self._weights.buffers, train=True) as params:
            leaves, sgd = list(params.values()), SGD(training, lr)
            for sample, label in zip(split(x, len(y)), torch.split(y, 1), strict=True):
                loss = _loss(self._shared, model, params, sample, label)
                gradient = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
                sgd.step(leaves, gradient)
                losses.append(loss.detach())
            after = {name: tensor.detach().clone() for name, tensor in params.items()}
            self._weights = Weights(after, model.current_buffers())
        return torch.stack(losses)

    def weights(self) -> Weights:
        """Return the current model."""
        return self._weights


Stepper = TracedStepper | AutogradStepper
"""An object that contains a model and trains the model with one SGD step per sample."""


def _run(context: ClientContext, stepper: Stepper, parts: list[tuple[int, int, Ints]], round: int) -> Tensor:
    """Take the SGD steps of several tasks, one task after another.

    Args:
        context: The context that the clients share.
        stepper: The stepper, which contains the model.
        parts: For each task: the client's id, the number of its earlier steps in this epoch, and the indices of its
            samples in the data set.
        round: The epoch, counted from 1.

    Returns:
        The losses of all samples, in order.
    """
    lr = context.config.training.lr_at(round)
    if not parts:
        return torch.zeros(0)
    data = context.data
    if not stepper.random and context.config.augment is None:
        where = torch.from_numpy(np.concatenate([indices for _, _, indices in parts]))
        return stepper.run(data.inputs(where), data.y_train[where], lr) if len(where) else torch.zeros(0)
    losses = [torch.zeros(0)]
    for client, before, indices in parts:
        if len(indices) == 0:
            continue
        where = torch.from_numpy(indices)
        # Each task has its own seeds for random layers and for augmentation, so that its random numbers do not depend
        # on other tasks.
        x = augmented(context, data.inputs(where), client=client, round=round, step=before)
        with torch_seeded(context.config.seed, f"layers/{before}", round, client):
            losses.append(stepper.run(x, data.y_train[where], lr))
    return torch.cat(losses)
