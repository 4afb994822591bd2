"""Run local training: the loop over mini-batches, for all objectives and devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstrata.base.inputs import Inputs, each, single, split
from fedstrata.base.records import Tree
from fedstrata.base.rng import torch_seeded
from fedstrata.clients.client import Client, ClientContext
from fedstrata.clients.training.augmenting import augmented_batches
from fedstrata.clients.training.devices import CPU, on_device, to_device
from fedstrata.clients.training.displaced import BatchGradient, DisplacedGradient
from fedstrata.clients.training.private import NoisyGradient, descend_privately, poisson_draws
from fedstrata.clients.training.sgd import ManualSGD
from fedstrata.clients.training.steps import OPTIMIZER, Tensors, steps_of
from fedstrata.data.tasks.base import Task
from fedstrata.federation.messages import Extra, Params, Weights
from fedstrata.federation.settings import DEFAULT_EPOCHS, Training
from fedstrata.models.model import Model
from fedstrata.objectives.base import Batch, Context, Objective, Trained, is_plain

OBJECTIVE = "objective"
"""The key under which a client's state stores the state of the objective."""

GATHER_LIMIT = 128 << 20
"""If a client's inputs have at most this size (in bytes, as floats), they are converted to floats once per round.
Larger inputs are converted batch by batch.
"""


class LocalData:
    """The samples that a client uses in a round, as batches of tensors.

    Args:
        client: The client.
        chosen: Positions of the n chosen samples among the client's own samples, shape (n,).
        device: The device of the returned batches.
    """

    def __init__(self, client: Client, chosen: NDArray[np.int64], device: torch.device = CPU) -> None:
        self.device, self._data, self._size = device, client.context.data, len(chosen)
        self._indices = torch.from_numpy(client.indices[chosen])
        self.y = self._data.y_train[self._indices].to(device)
        """The targets of the chosen samples, shape (n, …)."""
        self._fits = self._data.sample_bytes * len(chosen) <= GATHER_LIMIT
        self._gathered: Inputs | None = None

    def __len__(self) -> int:
        return self._size

    def weight(self) -> float:
        """Return the sum of the samples' weights: for example, the number of tokens."""
        return float(self._data.task.weights(self.y).sum())

    def batch(self, positions: NDArray[np.int64] | slice) -> Batch:
        """Return one batch with the samples at the given positions in ``chosen``."""
        where = positions if isinstance(positions, slice) else torch.from_numpy(positions)
        if self._fits:
            return Batch(self._inputs(), self.y)[where]
        return Batch(self._read(self._indices[where]), self.y[where])

    def _read(self, indices: Tensor) -> Inputs:
        x = self._data.inputs(indices)
        return x if self.device == CPU else each(x, lambda tensor: tensor.to(self.device))

    def _inputs(self) -> Inputs:
        """Return the inputs of all chosen samples. The inputs are read at the first call."""
        if self._gathered is None:
            with torch.inference_mode(False):  # autograd refuses tensors that were made in inference mode
                self._gathered = self._read(self._indices)
        return self._gathered

    def in_order(self, size: int = 512) -> Iterator[Batch]:
        """Yield all samples once, in the order of ``chosen``, as batches of at most ``size`` samples."""
        for begin in range(0, self._size, size):
            yield self.batch(slice(begin, begin + size))

    def shuffled(self, training: Training, generator: np.random.Generator, pairs: bool) -> Iterator[Batch]:
        """Yield one batch per step of a round.

        With ``training.accumulate``, all mini-batches of a step form one batch.

        Each epoch uses the samples in a new random order. With ``training.local_steps``, there are exactly
        ``local_steps`` batches of equal size.

        Args:
            training: The settings of local training, such as the batch size and the number of epochs.
            generator: The random generator that shuffles the samples.
            pairs: Whether a step needs at least two samples, for example because of BatchNorm. With ``pairs``, a single
                sample at the end of an epoch joins the previous batch, and a client with one sample takes no step.
        """
        n = self._size
        size = min(training.batch_size * training.accumulate, n)
        if n < (2 if pairs else 1):
            return
        ends = [*range(size, n, size), n]
        if pairs and size > 1 and n % size == 1:
            del ends[-2]  # the last sample joins the previous batch
        steps = training.local_steps or (training.local_epochs or DEFAULT_EPOCHS) * len(ends)
        once = steps <= len(ends)
        if training.local_steps is not None:
            ends = list(range(size, n + 1, size))  # with local_steps, all batches are full
        for done in range(0, steps, len(ends)):
            order = generator.permutation(n)
            bounds = pairwise([0, *ends[: steps - done]])
            if not self._fits or steps - done <= n // size // 2:
                yield from (self.batch(order[begin:end]) for begin, end in bounds)
                continue
            # Reorder all samples at once, which is faster if the remaining steps use at least half of them. Each batch
            # is then a slice, without a copy. If the round has only this epoch, read the inputs directly in the new
            # order. Otherwise, read them in their original order, and store them for the other epochs.
            where = torch.from_numpy(order)
            there = where.to(self.device)
            x = self._read(self._indices[where]) if once and self._gathered is None else selected(self._inputs(), there)
            whole = Batch(x, self.y.index_select(0, there))
            yield from [whole[begin:end] for begin, end in bounds]


def selected(x: Inputs, where: Tensor) -> Inputs:
    """Return the samples at the positions ``where``, in the memory format of the inputs."""
    if not isinstance(x, Tensor):
        return {name: single(selected(tensor, where)) for name, tensor in x.items()}
    if x.dim() != 4 or not x.is_contiguous(memory_format=torch.channels_last):
        return x.index_select(0, where)
    # index_select alone would return the default memory format. Permute the axes before and after it to keep
    # channels-last.
    return x.permute(0, 2, 3, 1).index_select(0, where).permute(0, 3, 1, 2)


@dataclass(frozen=True)
class Outcome:
    """The result of local training.

    Args:
        weights: The model after the last step.
        steps: Number K of steps.
        seen: Number of per-sample gradients: the total number of samples in all batches, including repetitions.
        loss: Mean loss over the steps.
        message: The objective's message to the server.
        kept: The objective's new state, which the client keeps.
    """

    weights: Weights
    steps: int
    seen: int
    loss: float
    message: Extra
    kept: Tree


@dataclass(frozen=True)
class TrainingSetup:
    """The properties of local training that depend only on the model and the objective, not on the client.

    Args:
        objective: The objective.
        chain: The model as a chain of layers with handwritten gradients; None to compute gradients with autograd.
        trained: Names of the parameters that the objective trains.
        pairs: Whether a step needs at least two samples, for example because of BatchNorm.
        prepares: Whether the objective overrides ``client_prepare`` or ``client_init``, which are called before
            training.
        corrects: Whether the objective overrides ``correction``, which is added to each gradient.
        displaces: Whether the objective overrides ``displacement``, which moves the point at which each gradient is
            computed.
        finishes: Whether the objective overrides ``client_final``, which is called after the last step.
    """

    objective: Objective
    chain: ManualSGD | None
    trained: frozenset[str]
    pairs: bool
    prepares: bool
    corrects: bool
    displaces: bool
    finishes: bool

    @classmethod
    def of(cls, context: ClientContext, objective: Objective) -> TrainingSetup:
        """Determine which parameters an objective trains, and whether autograd computes the gradients."""
        config, training = context.config, context.config.training
        named = config.model.module.named_parameters()
        on_cpu = context.cached(on_device).device == CPU
        simple = training.precision == "float32" and training.optimizer.is_sgd and training.accumulate == 1
        simple = simple and config.privacy.dp is None
        by_hand = on_cpu and simple and is_plain(objective, "loss", "trains")
        return cls(
            objective=objective,
            chain=context.cached(manual_sgd_of) if by_hand else None,
            trained=frozenset(name for name, _ in named if objective.trains(name, config.model)),
            pairs=config.model.has_batchnorm,
            prepares=not is_plain(objective, "client_prepare", "client_init"),
            corrects=not is_plain(objective, "correction"),
            displaces=not is_plain(objective, "displacement"),
            finishes=not is_plain(objective, "client_final"),
        )


def shared_setup(context: ClientContext) -> TrainingSetup:
    """Return the training setup that all clients of a process share, for the run's objective."""
    return TrainingSetup.of(context, context.objective)


def train(
    client: Client, weights: Weights, data: LocalData, *, round: int, message: Extra, objective: Objective | None = None
) -> Outcome:
    """Train on a client's data for one round, starting at ``weights``.

    Args:
        client: The client.
        weights: The model to start with.
        data: The samples to train on.
        round: The round, counted from 1.
        message: The server's message to the objective.
        objective: An objective without a state. Default: the run's objective, with the states that the client
            stored for the objective and the optimiser.
    """
    shared, device, model = client.context, data.device, client.model
    config, training = shared.config, shared.config.training
    setup = shared.cached(shared_setup) if objective is None else TrainingSetup.of(shared, objective)
    state = client.state if objective is None else {}
    kept, optimizer_state = state.get(OBJECTIVE), state.get(OPTIMIZER)
    if device != CPU:
        model = shared.cached(on_device).model
        weights, message, kept = to_device((weights, message, kept), device)
    counts = torch.bincount(data.y, minlength=config.outputs).float() if config.task.has_classes else torch.zeros(0)
    context = Context(weights.params, counts, message, kept, training.lr_at(round), task=config.task)
    precision = partial(torch.autocast, device.type, torch.bfloat16, enabled=training.precision == "bf16")
    if setup.prepares:
        with precision():
            # ``data.in_order`` returns the samples without augmentation.
            received = setup.objective.client_prepare(model, weights, data.in_order, message)
            context = setup.objective.client_init(model, replace(context, received=received))
    with ExitStack() as stack:
        if setup.chain is None or setup.corrects or setup.finishes:
            stack.enter_context(torch_seeded(client.seed, "layers", round, client.number, device))
        if setup.chain is None:
            params = stack.enter_context(model.loaded(weights.params, weights.buffers, train=True))
        else:  # handwritten gradients do not use the module
            params = {name: w.clone(memory_format=torch.contiguous_format) for name, w in weights.params.items()}
        losses, seen, optimizer_state = _take_steps(client, setup, model, params, data, context, round, optimizer_state)
        after = Weights(params, weights.buffers)
        if setup.chain is None:
            after = Weights({n: p.detach().clone() for n, p in params.items()}, model.current_buffers())
        extra, kept = Extra(), context.kept
        if setup.finishes:
            model.module.eval()
            done = Trained(after.params, len(losses), model, data.in_order, shared.privacy.min_samples)
            with torch.no_grad(), precision():
                extra, kept = setup.objective.client_final(done, context)
    if device != CPU:
        after, extra, kept, optimizer_state = to_device((after, extra, kept, optimizer_state), CPU)
    if objective is None and optimizer_state is not None:
        client.state[OPTIMIZER] = optimizer_state
    mean_loss = float(torch.stack(losses).mean()) if losses and config.privacy.dp is None else 0.0
    return Outcome(after, len(losses), seen, mean_loss, extra, kept)


def _take_steps(
    client: Client,
    setup: TrainingSetup,
    model: Model,
    params: Params,
    data: LocalData,
    context: Context,
    round: int,
    optimizer_state: Tree,
) -> tuple[list[Tensor], int, Tree]:
    """Take the steps of a round; the parameters change in place.

    A step of SGD is d = clip(g + r) + λ w; v ← μ v + d; w ← w − η v. The parameters are w, the velocity is v, and the
    gradient of the objective's loss is g. The objective's correction is r, the learning rate is η, the momentum is μ,
    and the weight decay is λ. Other optimisers (``training.optimizer``) compute their steps from the gradient clip(g +
    r). If the objective has a ``displacement`` δ, the gradient is computed at w + δ. All other terms are computed at w.

    The batches are augmented (``data.augment``). With ``privacy.dp``, the client takes steps of DP-SGD; see
    ``NoisyGradient``.

    Returns:
        The loss before each step, the number of per-sample gradients, and the optimiser's new state (None if not kept).
        With ``privacy.dp``, the losses must not leave the client, and the number of gradients is an expected value.
    """
    config = client.context.config
    batches = data.shuffled(config.training, client.rng("batches", round), setup.pairs)
    descend = partial(_descend, setup, model, params)
    if config.privacy.dp is not None:
        batches = map(data.batch, poisson_draws(client, config.training, round, len(data)))
        noisy = NoisyGradient.of(client, model, setup.objective, context, round, len(data))
        descend = partial(descend_privately, noisy, params, setup.trained)
    if config.augment is not None:
        batches = augmented_batches(client, batches, round)
    return descend(context, config.training, batches, optimizer_state)


def manual_sgd_of(context: ClientContext) -> ManualSGD | None:
    """Return the model as a chain of layers with handwritten gradients of the cross-entropy.

    The result is None if the model takes several inputs or is not a chain of linear layers, or if the task's loss is
    not cross-entropy.
    """
    fits = context.config.task.plain and isinstance(context.data.x_train, Tensor)
    return ManualSGD.of(context.config.model.module) if fits else None


def _descend(
    setup: TrainingSetup,
    model: Model,
    params: Params,
    context: Context,
    training: Training,
    batches: Iterable[Batch],
    optimizer_state: Tree,
) -> tuple[list[Tensor], int, Tree]:
    """Take one step on each batch; the parameters change in place.

    Returns:
        The loss before each step, the number of per-sample gradients, and the optimiser's new state (None if not kept).
    """
    objective = setup.objective
    chain, losses, seen = setup.chain, list[Tensor](), 0
    if chain is not None and not (training.momentum or training.clip or setup.corrects or setup.displaces):
        with torch.inference_mode():
            for batch in batches:
                losses.append(chain.step(params, batch, context.lr, training.weight_decay))
                seen += batch.y.shape[0]
        return losses, seen, None
    names = list(filter(setup.trained.__contains__, params))
    trained = [params[name] for name in names]
    device = next(iter(params.values())).device
    # autocast caches converted copies of parameters, so parameters must not change inside ``with precision``.
    precision = torch.autocast(device.type, torch.bfloat16, enabled=training.precision == "bf16")

    def loss_and_gradient(batch: Batch) -> tuple[Tensor, Tensors]:
        with precision:
            loss = objective.loss(model, params, batch, context)
        # For parameters that the loss does not use, ``materialize_grads`` returns zeros, so that the objective's
        # correction and weight decay still apply to these parameters.
        return loss.detach(), torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True)

    of_batch: BatchGradient = loss_and_gradient if chain is None else partial(chain.gradient, params)
    if training.accumulate > 1:
        of_batch = partial(
            accumulated, loss_and_gradient, size=training.batch_size, pairs=setup.pairs, task=context.task
        )
    if setup.displaces:
        loaded = model if chain is None else None
        of_batch = DisplacedGradient(of_batch, objective, dict(zip(names, trained, strict=True)), context, loaded)
    steps = steps_of(training, context.lr, trained, optimizer_state)
    for batch in batches:
        loss, gradient = of_batch(batch)
        if setup.corrects and (correction := objective.correction(params, context)) is not None:
            with torch.no_grad():
                gradient = torch._foreach_add(gradient, [correction[name] for name in names])
        steps.step(trained, gradient)
        losses.append(loss)
        seen += batch.y.shape[0] * objective.gradients_per_step
    return losses, seen, steps.state() if training.optimizer_state == "keep" else None


def accumulated(
    loss_and_gradient: Callable[[Batch], tuple[Tensor, Tensors]], batch: Batch, size: int, pairs: bool, task: Task
) -> tuple[Tensor, Tensors]:
    """Return the mean loss over a batch and the gradient of this loss, both computed mini-batch by mini-batch.

    Args:
        loss_and_gradient: A function that returns the mean loss over a mini-batch, and the gradient of this loss.
        batch: The batch.
        size: The maximum number of samples in a mini-batch.
        pairs: Whether a mini-batch needs at least two samples. With ``pairs``, mini-batches may be larger than
            ``size``.
        task: The task, which defines the weights of the samples.
    """
    n = batch.y.shape[0]
    parts = -(-n // size)
    parts = max(1, min(parts, n // 2)) if pairs else parts
    total, mean = torch.zeros((), device=batch.y.device), list[Tensor]()
    whole = float(task.weights(batch.y).sum()) or 1.0
    for x, y in zip(split(batch.x, parts), batch.y.tensor_split(parts), strict=True):
        loss, gradient = loss_and_gradient(Batch(x, y))
        share = float(task.weights(y).sum()) / whole
        weighted = torch._foreach_mul(gradient, share)
        total += loss * share
        if mean:
            torch._foreach_add_(mean, weighted)
        else:
            mean = list(weighted)
    return total, mean
