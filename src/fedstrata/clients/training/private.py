"""Train locally with DP-SGD, for differential privacy of samples (Abadi et al. 2016, Algorithm 1)."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import grad_and_value, vmap

from fedstrata.base.inputs import Inputs, each
from fedstrata.base.records import Tree
from fedstrata.clients.client import Client
from fedstrata.clients.training.steps import Tensors, steps_of
from fedstrata.federation.messages import Params
from fedstrata.federation.settings import DPSGD, Training
from fedstrata.models.model import Model
from fedstrata.objectives.base import Batch, Context, Objective

CHUNK = 32
"""The maximum number of samples whose gradients are in memory at the same time."""


def poisson_draws(client: Client, training: Training, round: int, samples: int) -> Iterator[NDArray[np.int64]]:
    """Yield the positions of the samples for each step of a round. A step may have 0 samples.

    Args:
        client: The client; its random numbers determine which samples are drawn. In a deployment, the seed of these
            numbers is secret.
        training: The settings of local training. These settings determine the number of steps, and the probability that
            a step uses a sample.
        round: The round, counted from 1.
        samples: The client's number of samples.
    """
    generator = client.rng("batches", round)
    rate, steps = training.poisson(samples)
    for _ in range(steps):
        yield np.flatnonzero(generator.random(samples) < rate)


Noise = Callable[[torch.Size], Tensor]
"""A function that returns a tensor of the given shape with random standard normal numbers, on the CPU."""


def noise_of(client: Client, round: int) -> Noise:
    """Return the function that draws a client's noise in a round.

    In a simulation, the noise depends on the spec's seed. At a site of a deployment, the noise comes from a secret key.

    Args:
        client: The client.
        round: The round, counted from 1.
    """
    if client.context.secret:
        return secret_noise
    seed = int(client.rng("noise", round).integers(2**63))
    return partial(torch.randn, generator=torch.Generator().manual_seed(seed))


def secret_noise(shape: torch.Size) -> Tensor:
    """Draw standard normal numbers that cannot be reproduced.

    The numbers come from ChaCha20 with a new key from the operating system. Each number is the normal quantile of a
    uniform random number with 53 bits. Attacks on floating-point noise (Mironov 2012) remain possible,
    because all numbers are rounded to float32.

    Args:
        shape: The shape of the returned tensor.
    """
    from scipy.special import ndtri

    from fedstrata.federation.secure.primitives import KEY_BYTES, mask

    words = mask(secrets.token_bytes(KEY_BYTES), 2 * shape.numel()).view(np.uint64)
    uniform = ((words >> np.uint64(11)) + 0.5) * 2.0**-53
    return torch.from_numpy(ndtri(uniform)).float().reshape(shape)


@dataclass(frozen=True)
class NoisyGradient:
    """The gradient of DP-SGD: (Σ_i g_i · min(1, C / ‖g_i‖) + z C ξ) / b.

    In this formula, g_i is the gradient for sample i, C is the clipping norm, and z is the noise multiplier. The
    entries of ξ are standard normal numbers, and b is the expected number of samples in a step.

    Args:
        model: The model, into which the trained parameters are loaded.
        objective: The objective. A sample's loss must not depend on other samples.
        context: The context that the objective's loss gets as an argument.
        dp: The clipping norm C and the noise multiplier z.
        expected: The expected number b of samples in a step.
        noise: The function that draws ξ. Because ξ is drawn on the CPU, the noise does not depend on the device.
    """

    model: Model
    objective: Objective
    context: Context
    dp: DPSGD
    expected: float
    noise: Noise

    @classmethod
    def of(
        cls, client: Client, model: Model, objective: Objective, context: Context, round: int, samples: int
    ) -> NoisyGradient:
        """Create a ``NoisyGradient`` for a client's round.

        The argument ``samples`` is the client's number of samples.
        """
        config = client.context.config
        assert config.privacy.dp is not None
        expected = min(config.training.batch_size, samples)
        return cls(model, objective, context, config.privacy.dp, expected, noise_of(client, round))

    def __call__(self, params: Params, names: list[str], batch: Batch) -> tuple[Tensor, Tensors]:
        """Return the mean loss over a batch, and the noisy gradient. The loss must not leave the client.

        Args:
            params: All parameters by name.
            names: The names of the parameters that are trained.
            batch: The samples of the step. There may be 0 samples.

        Returns:
            The loss (a scalar; 0 without samples), and the gradient for each of ``names``.
        """
        trained = {name: params[name].detach() for name in names}
        total = {name: torch.zeros_like(w) for name, w in trained.items()}
        loss = batch.y.new_zeros((), dtype=torch.float32)
        samples = batch.y.shape[0]
        for begin in range(0, samples, CHUNK):
            part = batch[begin : begin + CHUNK]
            gradients, losses = self._of_samples(trained, part)
            squares = [g.flatten(1).square().sum(1) for g in gradients.values()]
            norms = torch.stack(squares).sum(0).sqrt()
            shrinkage = (self.dp.clip / norms).clamp(max=1.0)
            for name, g in gradients.items():
                total[name] += torch.tensordot(shrinkage, g, 1)
            loss = loss + losses.sum() / samples
        scale = self.dp.noise * self.dp.clip
        for w in total.values():
            w += scale * self.noise(w.shape).to(w.device)
            w /= self.expected
        return loss, list(total.values())

    def _of_samples(self, trained: Params, part: Batch) -> tuple[Params, Tensor]:
        """Return per-sample gradients, shape (B, …) for each parameter, and the samples' losses, shape (B,)."""

        def loss(params: Params, x: Inputs, y: Tensor) -> Tensor:
            one = Batch(each(x, lambda tensor: tensor[None]), y[None])
            return self.objective.loss(self.model, params, one, self.context)

        gradients, losses = vmap(grad_and_value(loss), in_dims=(None, 0, 0), randomness="different")(
            trained, part.x, part.y
        )
        return gradients, losses


def descend_privately(
    gradient: NoisyGradient,
    params: Params,
    trained: Collection[str],
    context: Context,
    training: Training,
    batches: Iterable[Batch],
    optimizer_state: Tree,
) -> tuple[list[Tensor], int, Tree]:
    """Take one step of DP-SGD on each batch.

    The parameters change in place. The noise is added before the objective's correction and before terms of the
    optimiser, such as weight decay.

    Args:
        gradient: The noisy gradient.
        params: All parameters by name.
        trained: The names of the parameters that are trained.
        context: The context that the objective's loss gets as an argument.
        training: The settings of local training.
        batches: The samples of each step.
        optimizer_state: The initial state of the optimiser.

    Returns:
        The losses before the steps, the expected total number of samples in all batches, and the optimiser's new state
        (None if it is not kept). The losses must not leave the client.
    """
    names = [name for name in params if name in trained]
    values, losses = [params[name] for name in names], list[Tensor]()
    steps = steps_of(training, context.lr, values, optimizer_state)
    for batch in batches:
        loss, noisy = gradient(params, names, batch)
        if (correction := gradient.objective.correction(params, context)) is not None:
            with torch.no_grad():
                noisy = torch._foreach_add(noisy, [correction[name] for name in names])
        steps.step(values, noisy)
        losses.append(loss)
    state = steps.state() if training.optimizer_state == "keep" else None
    return losses, int(len(losses) * gradient.expected), state
