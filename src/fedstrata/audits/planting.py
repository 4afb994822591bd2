"""Create canaries (artificial samples), and let one client train on canaries in addition to its own samples.

The loss of a canary is a multiple of one parameter, so the canary's gradient is zero for all other parameters. If a
canary is not in the data, all entries of its gradient are zero. The client's number of samples does not reveal which
canaries are in the data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from fedstrata.audits.server_view import UpdateTap
from fedstrata.base.inputs import single
from fedstrata.base.rng import rng
from fedstrata.clients.client import ClientContext, StateStore
from fedstrata.data.dataset import Dataset
from fedstrata.data.partitions.base import Assignment
from fedstrata.engines.local import LocalEngine
from fedstrata.federation.engine import Failure
from fedstrata.federation.messages import ClientId, Fit, FitReply, Params, Reply
from fedstrata.models.model import Model
from fedstrata.objectives.base import Batch, Context, CrossEntropy

MARK = 1e6
"""The value of a canary's first pixel in the model's input. The loss recognises canaries by this value.

The second pixel is the index of the canary's parameter, and the third pixel says whether the canary is in the data.
"""
MOST = 2**24
"""The maximum number of canaries. Integers above this number are not exact in float32."""
STRENGTH = 10.0
"""The norm of a canary's gradient as a multiple of ``privacy.dp.clip``.

If the multiple exceeds 1, the audit also tests the clipping.
"""


@dataclass(frozen=True, eq=False)
class Canaries:
    """The canaries of an audit.

    Args:
        places: The index of each canary's parameter among all parameters of the model. The indices are distinct.
        present: Whether each canary is in the data.
    """

    places: NDArray[np.int64]
    present: NDArray[np.bool_]

    @classmethod
    def drawn(cls, number: int, params: Params, seed: int) -> Canaries:
        """Choose a random parameter for each canary, and decide at random which canaries are in the data."""
        generator = rng(seed, "audit-canaries")
        places = generator.permutation(min(sum(w.numel() for w in params.values()), MOST))[:number]
        return cls(places, generator.random(number) < 0.5)

    def entries(self, update: Params) -> Tensor:
        """Return, for each canary, the value of its parameter in an update."""
        return torch.cat([w.flatten() for w in update.values()])[torch.from_numpy(self.places)]

    def beside(self, data: Dataset, own: NDArray[np.int64]) -> Dataset:
        """Return a data set that consists of a client's own samples and the canaries.

        Args:
            data: The data set of the run.
            own: The indices of the client's samples.
        """
        samples = torch.from_numpy(own)
        inputs = single(data.inputs(samples)).permute(0, 2, 3, 1)
        canaries = inputs.new_zeros(len(self.places), *inputs.shape[1:])
        canaries[:, 0, 0, 0] = MARK
        canaries[:, 0, 1, 0] = torch.from_numpy(self.places).float()
        canaries[:, 0, 2, 0] = torch.from_numpy(self.present).float()
        labels = torch.cat([data.y_train[samples], data.y_train.new_zeros(len(self.places))])
        x = torch.cat([inputs, canaries]).contiguous()
        return replace(data, x_train=x, y_train=labels, shift=None, scale=None, domain_train=None, client_train=None)


class CanaryLoss(CrossEntropy):
    """The loss of a client with canaries.

    For the client's own samples, the loss is the cross-entropy. For each canary in the data, the loss is a multiple of
    one parameter.

    Args:
        strength: The norm of a canary's gradient.
    """

    strength: float

    @override
    def loss(self, model: Model, params: Params, batch: Batch, context: Context) -> Tensor:
        x = single(batch.x)
        canary = x[:, 0, 0, 0] == MARK
        samples = torch.where(canary[:, None, None, None], 0.0, x)
        losses = F.cross_entropy(model(params, samples), batch.y, reduction="none")
        values = torch.cat([w.reshape(-1) for w in params.values()])
        places = torch.where(canary, x[:, 0, 0, 1], 0.0).long()
        linear = self.strength * x[:, 0, 0, 2] * values[places]
        return torch.where(canary, linear, losses).mean()


class CanaryTap(UpdateTap):
    """A local engine in which one client trains on its samples and on canaries; see ``UpdateTap``."""

    def plant(self, canaries: Canaries, client: ClientId, divide_noise: float) -> None:
        """Give canaries to a client. Call this method before the client trains.

        Args:
            canaries: The canaries.
            client: The client.
            divide_noise: See ``audit_canaries``.
        """
        self.client, self.asked = client, 0
        self.audited = LocalEngine(audited(self.context, canaries, client, divide_noise), StateStore())

    @override
    def train(self, requests: Mapping[ClientId, Fit]) -> Mapping[ClientId, Reply | Failure]:
        outcomes = dict(super().train({client: each for client, each in requests.items() if client != self.client}))
        if self.client in requests:
            self.asked += 1
            outcome = self.audited.ask({self.client: requests[self.client]}, together=False)[self.client]
            if isinstance(outcome, FitReply):
                # Report the numbers of samples without canaries, as in the audited run, because the aggregation may use
                # these numbers as weights.
                samples = len(self.context.assignment[self.client])
                outcome = replace(outcome, samples=samples, seen=min(outcome.seen, samples * outcome.steps))
            outcomes[self.client] = outcome
        return {client: outcomes[client] for client in sorted(outcomes)}

    @override
    def commit(self, accepted: Iterable[ClientId]) -> None:
        used = list(accepted)
        self.audited.commit(used)
        super().commit(used)


def audited(context: ClientContext, canaries: Canaries, client: ClientId, divide_noise: float) -> ClientContext:
    """Return a context for the client with canaries.

    The sampling rate, the number of steps and the noise are the same as in the run.

    Without ``privacy.dp``, a canary changes the update as much as an ordinary sample whose gradient has norm 1.

    Args:
        context: The run's context.
        canaries: The canaries.
        client: The client that trains on the canaries.
        divide_noise: See ``audit_canaries``.
    """
    config, own = context.config, context.assignment[client]
    whole = len(own) + len(canaries.places)
    rate, steps = config.training.poisson(len(own))
    batch = max(1, round(rate * whole))
    training = config.training.model_copy(
        update={"batch_size": batch, "accumulate": 1, "local_steps": steps, "local_epochs": None}
    )
    dp, strength = config.privacy.dp, whole / len(own)
    if dp is not None:
        strength = STRENGTH * dp.clip
        dp = dp.model_copy(update={"noise": dp.noise / divide_noise})
    privacy = config.privacy.model_copy(update={"dp": dp})
    nobody = [np.empty(0, dtype=np.int64)] * len(context.assignment)
    lists = [np.arange(whole) if number == client else none for number, none in enumerate(nobody)]
    return replace(
        context,
        config=replace(config, training=training, privacy=privacy),
        data=canaries.beside(context.data, own),
        assignment=Assignment.from_lists(lists),
        objective=CanaryLoss(strength=strength),
        prepared={},
    )
