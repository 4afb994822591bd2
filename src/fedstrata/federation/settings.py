"""The settings that every method shares: how clients train."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, field_validator, model_validator

from fedstrata.base.config import MayChange, Setting

DEFAULT_EPOCHS = 5

Threads = Annotated[PositiveInt, Field(le=1024)]
"""More than any machine has cores: the system refuses many more, and PyTorch's threads then end the process."""


class Privacy(Setting):
    """The fewest samples behind anything that a client sends.

    A client that has fewer for an update, a count, a loss or a measurement does not answer; of prototypes and labels it
    leaves out classes with fewer. A site may ask for more than the spec does.

    Args:
        min_samples: How many: in a client's part of Stratify's batch, in an update, in a class of which a client sends
            a prototype or a count, in a column of which it tells the mean. Refused where nobody could ever answer: with
            models that travel from sample to sample, and with ``local_steps`` that see fewer.
        below: What becomes of a smaller part of Stratify's batch: ``hold-back`` merges it into the client's next part
            (or the last one before it, where none follows), so that no sample is lost; ``refuse`` gives no answer, and
            the client is absent for the rest of the epoch.
    """

    min_samples: PositiveInt = 1
    below: Literal["hold-back", "refuse"] = "hold-back"

    @property
    def gathers(self) -> bool:
        """Whether small parts of batches are merged."""
        return self.min_samples > 1 and self.below == "hold-back"

    def at_least(self, min_samples: int) -> Privacy:
        """The same with a minimum that is at least this one, such as a site's own."""
        return self.model_copy(update={"min_samples": max(self.min_samples, min_samples)})


class Training(Setting):
    """How a round trains.

    Args:
        rounds: Rounds to run. A run that is resumed may be given more of them.
        clients_per_round: Clients invited each round; 10 (or all, where there are fewer) unless given.
        local_epochs: Passes over its data that a client makes in a round, E; 5 unless given.
        local_steps: Mini-batch steps instead of epochs.
        batch_size: Samples in a mini-batch; all of a client's where it has fewer.
        lr: Learning rate η.
        momentum: Of a client's SGD, started anew each round.
        weight_decay: L2 penalty, added to the gradient.
        schedule: How η falls over the rounds t = 0, 1, …: ``constant``, ``inverse`` (η / (1 + t)) or ``cosine``
            (to zero after the last round).
        clip: Largest norm of a gradient; longer ones are scaled down to it.
        batch_norm: What becomes of BatchNorm's running statistics: ``average`` (with the parameters' weights;
            counters take the largest, never a mean) or ``local`` (each client keeps its own; the global model is
            evaluated with the statistics of the test batches). Stratify, SFL and FedTAN take ``average`` alone.
        execution: ``fused`` lets an engine compute sums over clients in one pass, ``per-client`` never does: slower,
            and the same bits on every engine.
        threads: Threads inside one operation. Results may depend on it in the last bit.
        workers: Processes of one thread each that clients are spread over on this machine; as many as there are cores,
            and only where that pays, unless given. Results do not depend on it.
        precision: Of local training's forward and backward passes: ``float32``, or ``bf16`` where PyTorch's autocast
            says that it is safe; parameters, updates and everything else stay float32. Stratify and FedTAN always
            train in float32.
        device: Where the local engine trains and the global model is evaluated: ``cpu``, ``cuda``, ``cuda:N``, or
            ``auto``, a GPU if there is one. Another device rounds differently.
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
        """E; for what is counted in epochs even where clients take steps."""
        return self.local_epochs or DEFAULT_EPOCHS

    def sample_gradients(self, samples: float) -> float:
        """How many sample-gradients local training on so many samples computes.

        >>> Training(local_epochs=2).sample_gradients(30), Training(local_steps=3, batch_size=32).sample_gradients(30)
        (60, 90)
        """
        if self.local_steps is None:
            return samples * (self.local_epochs or DEFAULT_EPOCHS)
        return self.local_steps * min(self.batch_size, samples)

    def lr_at(self, round: int) -> float:
        """η of a round, counted from 1.

        >>> Training(lr=0.1, schedule="inverse").lr_at(2)
        0.05
        """
        t = round - 1
        if self.schedule == "inverse":
            return self.lr / (1 + t)
        if self.schedule == "cosine":
            return self.lr * 0.5 * (1 + math.cos(math.pi * min(t, self.rounds) / self.rounds))
        return self.lr

    def invited(self, clients: int) -> int:
        """How many of ``clients`` a round invites."""
        return min(10, clients) if self.clients_per_round is None else self.clients_per_round
