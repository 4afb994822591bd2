"""The settings of local training and of privacy, which all methods share."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, field_validator, model_validator

from fedstrata.base.config import MayChange, Setting

DEFAULT_EPOCHS = 5

Threads = Annotated[PositiveInt, Field(le=1024)]
"""A number of threads. It is limited because PyTorch ends the process if the system cannot start another thread."""


def scheduled(lr: float, schedule: str | None, round: int, rounds: int) -> float:
    """Return a learning rate on a schedule.

    Args:
        lr: The learning rate η of the first round.
        schedule: ``inverse``, ``cosine`` or another name for a constant rate; see ``Training``.
        round: The round, counted from 1.
        rounds: The number of rounds of the run.
    """
    t = round - 1
    if schedule == "inverse":
        return lr / (1 + t)
    if schedule == "cosine":
        return lr * 0.5 * (1 + math.cos(math.pi * min(t, rounds) / rounds))
    return lr


class Privacy(Setting):
    """The smallest number of samples that may contribute to anything that a client sends.

    A client with fewer samples for an update, a count, a loss or a measurement does not answer. Prototypes and labels
    of classes with fewer samples are left out. A site may require more samples than the spec.

    Args:
        min_samples: Smallest number of samples that may contribute to an update, to a client's part of Stratify's
            batch, to the prototype or the count of a class, or to the mean of a column. The value is refused if no
            client could ever answer: if ``local_steps`` use fewer samples, or if the model travels from sample to
            sample.
        below: Treatment of a part of Stratify's batch with fewer samples. ``hold-back``: the client merges it into its
            next part (the last one into the part before), so that no sample is lost. ``refuse``: the client does not
            answer, and is absent for the rest of the epoch.
    """

    min_samples: PositiveInt = 1
    below: Literal["hold-back", "refuse"] = "hold-back"

    @property
    def gathers(self) -> bool:
        """Whether small parts of batches are merged."""
        return self.min_samples > 1 and self.below == "hold-back"


class Training(Setting):
    """The settings of a round's training.

    Args:
        rounds: Number of rounds. A resumed run may have more rounds than before.
        clients_per_round: Clients invited per round. Default: 10, or all clients if there are fewer.
        local_epochs: Passes over its data that a client makes per round, E. Default: 5.
        local_steps: Mini-batch steps per round, instead of epochs.
        batch_size: Samples in a mini-batch. A client with fewer samples puts all of them into one.
        lr: Learning rate η.
        momentum: Momentum of the clients' SGD; its velocity starts at zero in each round.
        weight_decay: L2 penalty, added to the gradient.
        schedule: Learning rate over the rounds t = 0, 1, …: ``constant``, ``inverse`` (η / (1 + t)) or ``cosine``
            (zero after the last round).
        clip: Largest norm of a gradient; a longer gradient is scaled down to it.
        batch_norm: Treatment of BatchNorm's running statistics. ``average``: they are averaged like the parameters
            (for counters: the largest). ``local``: each client keeps its own, and the global model is evaluated with
            the statistics of the test batches. Stratify, SFL and FedTAN need ``average``.
        execution: ``fused``: an engine may compute the sum over clients in one pass. ``per-client``: each client's part
            is computed alone, which is slower but gives the same bits on every engine.
        threads: Threads with which PyTorch computes one operation. The last bits of results may depend on it.
        workers: Processes that train clients on this machine, with one thread each. Default: one per core, if that is
            faster. Results do not depend on it.
        precision: Precision of the forward and backward passes of local training: ``float32``, or ``bf16`` for the
            operations for which PyTorch's autocast considers it safe. Parameters and updates stay float32. Stratify and
            FedTAN always train in float32.
        device: Device on which the local engine trains and the global model is evaluated: ``cpu``, ``cuda``,
            ``cuda:N``, or ``auto`` (a GPU if there is one). Results differ between devices in the last bits.
    """

    rounds: Annotated[PositiveInt, MayChange(upwards=True)] = 20
    clients_per_round: PositiveInt | None = None
    local_epochs: PositiveInt | None = None
    local_steps: PositiveInt | None = None
    batch_size: PositiveInt = 32
    lr: PositiveFloat = 0.1
    momentum: float = Field(default=0.0, ge=0, lt=1)
    weight_decay: NonNegativeFloat = 0.0
    schedule: Literal["constant", "inverse", "cosine"] = "constant"
    clip: PositiveFloat | None = None
    batch_norm: Literal["average", "local"] = "average"
    execution: Literal["fused", "per-client"] = "fused"
    threads: Threads = 1
    workers: Annotated[Threads | None, MayChange()] = None
    precision: Literal["float32", "bf16"] = "float32"
    device: str = "cpu"

    @field_validator("device")
    @classmethod
    def _known_device(cls, value: str) -> str:
        if not re.fullmatch(r"cpu|auto|cuda(:\d+)?", value):
            raise ValueError("expected cpu, cuda, cuda:N or auto")
        return value

    @model_validator(mode="after")
    def _epochs_or_steps(self) -> Training:
        if self.local_steps is not None and self.local_epochs is not None:
            raise ValueError("local_epochs and local_steps exclude each other; give one")
        return self

    @property
    def epochs(self) -> int:
        """Number of epochs E; the default if clients train for ``local_steps``."""
        return self.local_epochs or DEFAULT_EPOCHS

    def sample_gradients(self, samples: float, keep: float = 1.0) -> float:
        """Return how many sample-gradients a client computes in a round of local training.

        Args:
            samples: The client's number of samples.
            keep: The expected share of them that is used.

        >>> Training(local_epochs=2).sample_gradients(30), Training(local_steps=3, batch_size=32).sample_gradients(30)
        (60.0, 90.0)
        """
        if self.local_steps is None:
            return samples * keep * (self.local_epochs or DEFAULT_EPOCHS)
        return self.local_steps * min(self.batch_size, samples * keep)

    def lr_at(self, round: int) -> float:
        """Return the learning rate η of a round, counted from 1.

        >>> Training(lr=0.1, schedule="inverse").lr_at(2)
        0.05
        """
        return self.lr if self.schedule == "constant" else scheduled(self.lr, self.schedule, round, self.rounds)

    def invited(self, clients: int) -> int:
        """Return how many of ``clients`` a round invites."""
        return min(10, clients) if self.clients_per_round is None else self.clients_per_round
