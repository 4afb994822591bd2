"""The client's part of Stratify's single-sample mode: one SGD step on one sample for each placeholder of a task."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedstrata.base.arrays import Ints
from fedstrata.base.records import record
from fedstrata.base.rng import torch_seeded
from fedstrata.clients.client import Client, ClientContext
from fedstrata.clients.handling import handles_hop, handles_relay
from fedstrata.clients.training.sgd import SGD
from fedstrata.clients.training.traced_sgd import TracedSGD
from fedstrata.federation.engine import Failure
from fedstrata.federation.messages import Params, Reply, Weights
from fedstrata.federation.reply_checks import finite
from fedstrata.models.model import Model
from fedstrata.objectives.base import Batch, Context
from fedstrata.stratify.client_batch import STATE, Pool, opened
from fedstrata.stratify.messages import Steps, StepsReply

TRIAL = 3
"""The steps in which a traced stepper must agree with autograd before it is used."""

BLOCK_BYTES = 16 << 20
"""Bytes of inputs that are converted at once; after each such block, a fused relay checks that the model is finite."""


@record("Stepped")
class Stepped:
    """The state of a client within an epoch of single samples.

    Args:
        round: The epoch.
        pools: The pools by placeholder.
        steps: The number of samples that it has trained.
    """

    round: int
    pools: dict[int, Pool]
    steps: int


def draw_samples(client: Client, request: Steps) -> tuple[Ints, int, StepsReply]:
    """Draw one sample for each placeholder of a task as long as its pool lasts.

    Returns:
        The data set's indices of the samples, in order; the number of steps that the client took before; and the reply,
        whose loss is not known yet.
    """
    client.authorize_release(1)  # the model travels on after a step on a single sample
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
    """Take the steps of one task on the travelling model."""
    indices, steps, reply = draw_samples(client, request)
    if len(indices) == 0:
        return weights, reply
    stepper = stepper_of(client.context, client.model)
    stepper.load(weights)
    losses = _run(client.context, stepper, [(client.number, steps, indices)], request.round)
    return stepper.weights(), replace(reply, loss=losses.sum())


@handles_relay(Steps)
class FusedSteps:
    """All tasks of a relay in one pass: clients only draw samples, and the steps run in blocks.

    Each step is the same as at its client, so that the model is the same to the bit. A block after which the model is
    not finite is repeated task by task, without the tasks at fault.

    Args:
        context: The context of the clients.
        weights: The model before the relay.
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
        self._block = max(1, BLOCK_BYTES // (4 * int(np.prod(context.data.shape))))

    def hop(self, client: Client, task: Steps) -> StepsReply:
        """Draw the samples of a task."""
        indices, steps, reply = draw_samples(client, task)
        self._last = (client.number, steps, indices), reply, task.round
        return reply

    def keep(self, accepted: bool) -> None:
        """Accept the last task, or drop it."""
        if accepted and self._last is not None:
            part, reply, self._round = self._last
            self._parts.append(part)
            self._replies.append(reply)
            self._waiting += len(part[2])
            if self._waiting >= self._block:
                self._flush()
        self._last = None

    def finish(self) -> tuple[Weights, list[Reply | Failure]]:
        """Return the model after all tasks, and the replies with their losses."""
        self._flush()
        # If no task counted, the model is returned as it was.
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
        """Return the losses of some tasks, or the failure if the model is not finite after them."""
        try:
            losses = _run(self._shared, self._stepper, parts, self._round)
        except Exception as error:
            return Failure(f"{type(error).__name__}: {error}", error)
        if all(map(finite, [losses, *self._stepper.weights().params.values()])):
            return losses
        return Failure("its steps left a tensor with NaN or infinity")


def stepper_of(context: ClientContext, model: Model) -> Stepper:
    """Return the fastest stepper for the model; it is made once per process."""
    last = context.cached(_Last)
    if last.stepper is None or last.model is not model:
        last.model, last.stepper = model, _make_stepper(context, model)
    return last.stepper


class _Last:
    """The last stepper, and its model."""

    def __init__(self, _: ClientContext) -> None:
        self.model: Model | None = None
        self.stepper: Stepper | None = None


def _make_stepper(context: ClientContext, model: Model) -> Stepper:
    plain = AutogradStepper(context, model)
    # Clipping needs the norm of all gradients, and BatchNorm changes buffers: both need autograd.
    if context.config.training.clip is None and not model.buffers():
        try:
            traced = TracedStepper(context, model)
            if _agree(traced, plain, context, model):
                return traced
        except Exception:  # the tracer may raise anything for a model that it cannot trace
            pass
    return plain


def _agree(traced: Stepper, plain: Stepper, context: ClientContext, model: Model) -> bool:
    """Return whether two steppers take the same steps, which a trace only assumes."""
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


def _loss(shared: ClientContext, model: Model, params: Params, x: Tensor, y: Tensor) -> Tensor:
    context = Context(params, torch.zeros(shared.config.classes), {}, None, shared.config.training.lr)
    return shared.objective.loss(model, params, Batch(x, y), context)


class TracedStepper:
    """Steps without autograd; see ``fedstrata.clients.training.traced_sgd``."""

    def __init__(self, context: ClientContext, model: Model) -> None:
        x, y = context.data.inputs(slice(0, 1)), context.data.labels(slice(0, 1))
        before = model.module.training
        model.train_mode(True)
        try:
            self._sgd = TracedSGD(
                lambda params, x, y: _loss(context, model, params, x, y),
                model.params(),
                x,
                y,
                context.config.training.weight_decay,
            )
        finally:
            model.train_mode(before)
        self.random = self._sgd.random

    def load(self, weights: Weights) -> None:
        """Continue from this model."""
        self._sgd.load(weights.params)

    def run(self, x: Tensor, y: Tensor, lr: float) -> Tensor:
        """Take one step per sample, in order, on at least one sample; return the losses, (n,)."""
        return self._sgd.run(x, y, lr)

    def weights(self) -> Weights:
        """Return a copy of the current model."""
        return Weights(self._sgd.params(), {})


class AutogradStepper:
    """Steps of any model, through autograd."""

    random = True

    def __init__(self, context: ClientContext, model: Model) -> None:
        self._shared, self._model = context, model
        self._weights = Weights(model.params(), model.buffers())

    def load(self, weights: Weights) -> None:
        """Continue from this model."""
        self._weights = weights

    def run(self, x: Tensor, y: Tensor, lr: float) -> Tensor:
        """Take one step per sample, in order."""
        model, training = self._model, self._shared.config.training
        losses = []
        with model.loaded(self._weights.params, self._weights.buffers, train=True) as params:
            leaves, sgd = list(params.values()), SGD(training, lr)
            for sample, label in zip(torch.split(x, 1), torch.split(y, 1), strict=True):
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
"""Takes one SGD step per sample, on a model of its own."""


def _run(context: ClientContext, stepper: Stepper, parts: list[tuple[int, int, Ints]], round: int) -> Tensor:
    """Take the steps of some tasks, each (client, its earlier steps, indices); return the losses of all samples."""
    lr = context.config.training.lr_at(round)
    if not parts:
        return torch.zeros(0)
    if not stepper.random:
        return _steps(context, stepper, np.concatenate([indices for _, _, indices in parts]), lr)
    losses = []
    for client, before, indices in parts:
        # Layers that draw random numbers are seeded by client, so that the other tasks do not matter.
        with torch_seeded(context.config.seed, f"layers/{before}", round, client):
            losses.append(_steps(context, stepper, indices, lr))
    return torch.cat(losses)


def _steps(context: ClientContext, stepper: Stepper, indices: Ints, lr: float) -> Tensor:
    if len(indices) == 0:
        return torch.zeros(0)
    where = torch.from_numpy(indices)
    return stepper.run(context.data.inputs(where), context.data.y_train[where], lr)
