"""The settings of local training and of privacy, which all methods share."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from fedstrata.base.config import MayChange, Setting
from fedstrata.base.errors import SpecError
from fedstrata.federation.optimizers import SGD, AnyOptimizer

DEFAULT_EPOCHS = 5

Threads = Annotated[PositiveInt, Field(le=1024)]
"""A number of threads. The limit is 1024, because PyTorch ends the process if the system cannot start all threads."""


def scheduled(lr: float, schedule: str | None, round: int, rounds: int) -> float:
    """Return the learning rate of a round according to a schedule.

    Args:
        lr: The learning rate η of the first round.
        schedule: The schedule (see ``Training``): ``inverse`` or ``cosine``; other values keep the rate constant.
        round: The round, counted from 1.
        rounds: The number of rounds of the run.
    """
    t = round - 1
    if schedule == "inverse":
        return lr / (1 + t)
    if schedule == "cosine":
        return lr * 0.5 * (1 + math.cos(math.pi * min(t, rounds) / rounds))
    return lr


class DPSGD(Setting):
    """Differential privacy of individual samples: DP-SGD (Abadi et al. 2016).

    In each step, a client draws each of its samples with the same probability. The client scales down gradients whose
    norm exceeds ``clip``, and adds Gaussian noise to the sum of the gradients. Two data sets are neighbours if they
    differ by one additional sample. Data are protected only in a deployment, because anybody can compute a simulation's
    noise from the seed.

    Args:
        clip: Maximum L2 norm C of one sample's gradient. Larger gradients are scaled down.
        noise: Noise multiplier: the noise in the sum of gradients has the standard deviation ``noise`` × ``clip``.
        delta: Value of δ in (ε, δ)-differential privacy. For a client with n samples, choose a value below 1 / n.
        budget: Maximum ε of a client. The run ends before a round in which a client could exceed this budget. In
            deployments, the server checks the budget only from round 2 on. With secure sums, each site sets the budget
            in its policy instead.
    """

    clip: PositiveFloat
    noise: PositiveFloat
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    budget: PositiveFloat | None = None


class ClientDP(Setting):
    """Differential privacy of whole clients.

    With ``noise_from = "server"``, the server limits the norm of each update to ``clip``, and adds Gaussian noise to
    the sum of the updates (McMahan et al. 2018). Two runs are neighbours if their only difference is that one client
    never replies in one of the runs. ε limits what users of the models learn about a client, but not what the server
    learns, because the server sees each update.

    With ``noise_from = "sites"``, each client scales down its update, and adds a share of the noise from a Skellam
    distribution (Agarwal et al. 2021). The server sees only the noisy sum, so ε also limits what the server learns.
    Two runs are neighbours if their only difference is that one client sends zeros with noise instead of updates in one
    of the runs. Client sampling does not lower ε, because the server knows which clients take part.

    If a sum needs t of n clients, ``colluding`` can be at most t − 2 and at most 2t − n − 1.

    With either value of ``noise_from``, the sum is divided by the expected number of clients per round.

    Args:
        clip: Maximum L2 norm C of a client's update. Larger updates are scaled down.
        noise: Noise multiplier: the noise in the sum of updates has the standard deviation ``noise`` × ``clip``. If
            clients add the noise, the standard deviation can be larger.
        delta: Value of δ in (ε, δ)-differential privacy. With N clients, choose a value below 1 / N.
        budget: Maximum ε of a client. The run ends before a round in which a client could exceed this budget.
        participations: Maximum number of rounds to which a client is invited. With this setting, ε is computed
            without privacy amplification by client sampling.
        noise_from: Parties that add the noise: the ``server``, or the clients (``sites``). The value ``sites`` needs
            ``privacy.sums = "secure"``.
        colluding: Number of clients that may reveal their noise to the server without making ε invalid. With 0, ε does
            not limit what other clients learn, because each client can subtract its own noise.
    """

    clip: PositiveFloat
    noise: PositiveFloat
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    budget: PositiveFloat | None = None
    participations: PositiveInt | None = None
    noise_from: Literal["server", "sites"] = "server"
    colluding: NonNegativeInt = 0


class Privacy(Setting):
    """The protection of the clients' data.

    A client with too few samples does not answer a request for an update, a count, a loss or a measurement. Replies
    leave out the prototypes, labels and counts of classes with too few samples. Sites may require more samples than the
    spec does.

    Args:
        min_samples: Minimum number of samples that a client must use for each value that it sends, such as an update
            or a column's mean.
        below: Behaviour of a client with fewer than ``min_samples`` samples in a batch of Stratify. ``hold-back``: the
            client adds these samples to a neighbouring batch. ``refuse``: the client does not reply until the epoch
            ends.
        dp: Settings for differential privacy of individual samples.
        clients: Settings for differential privacy of whole clients. Deployments require ``noise_from = "sites"``.
        sums: Whether the server sees the update of every client (``plain``), or only the sum over a round's clients
            (``secure``). The value ``secure`` needs the optional packages of the extra ``secure``.
        simulate_masks: Whether simulated clients really mask their updates. Masks do not change results, but slow down
            the run.
        range: Maximum absolute value of an update's elements in a secure sum. An update with a larger element is scaled
            down.
        buffer_range: With secure sums, the maximum absolute change of a BatchNorm statistic during a client's training.
        message_range: Maximum absolute value of a prototype's elements (ReBaFL) or of a control variate's change
            (SCAFFOLD) in a secure sum.
        largest: With secure sums, the maximum number of samples that a client may have. Larger clients do not reply.
            Default: the maximum over all clients. Required if sites use their own data.
        parties: Minimum number of clients in a secure sum.
    """

    min_samples: PositiveInt = 1
    below: Literal["hold-back", "refuse"] = "hold-back"
    dp: DPSGD | None = None
    clients: ClientDP | None = None
    sums: Literal["plain", "secure"] = "plain"
    simulate_masks: bool = False
    range: PositiveFloat = 1.0
    buffer_range: PositiveFloat = 100.0
    message_range: PositiveFloat = 100.0
    largest: PositiveInt | None = None
    parties: Annotated[int, Field(ge=3)] = 3

    @model_validator(mode="after")
    def _refuse_settings_without_effect(self) -> Privacy:
        secure = ("simulate_masks", "range", "buffer_range", "message_range", "largest", "parties")
        for key in secure if self.sums == "plain" else ():
            if getattr(self, key) != type(self).model_fields[key].default:
                problem = "has an effect only with sums = 'secure'. Remove the key, or set privacy.sums = 'secure'."
                raise SpecError(key, problem, getattr(self, key))
        return self

    @model_validator(mode="after")
    def _check_noise_from_sites(self) -> Privacy:
        clients = self.clients
        if clients is None:
            return self
        if clients.noise_from == "server":
            if clients.colluding:
                problem = "has an effect only with noise_from = 'sites'. Remove the key, or set noise_from = 'sites'."
                raise SpecError("clients.colluding", problem, clients.colluding)
            return self
        if self.sums == "plain":
            problem = "the server would see individual updates with too little noise. Set privacy.sums = 'secure'."
            raise SpecError("clients.noise_from", problem, "sites")
        for key in ("range", "buffer_range", "message_range", "largest"):
            if getattr(self, key) != type(self).model_fields[key].default:
                problem = "has no effect with clients.noise_from = 'sites', because clients.clip limits updates. "
                raise SpecError(key, f"{problem}Remove the key.", getattr(self, key))
        return self

    @property
    def colluding(self) -> int:
        """The number of clients that may collude with the server: ``clients.colluding``, or 0 if this is not set."""
        return 0 if self.clients is None else self.clients.colluding

    @property
    def gathers(self) -> bool:
        """Whether a client adds its part of a batch to another batch if the part is too small (``hold-back``)."""
        return self.min_samples > 1 and self.below == "hold-back"


class Training(Setting):
    """The settings of rounds, local training and hardware.

    Args:
        rounds: Number of rounds. You may increase this number when you resume a run.
        clients_per_round: Number of clients that the server invites per round. Default: 10, or all clients if there are
            fewer.
        local_epochs: Number of epochs that each client trains per round. Default: 5.
        local_steps: Number of mini-batch steps that each client takes per round. Set either ``local_steps`` or
            ``local_epochs``.
        batch_size: Number of samples in a mini-batch. Clients with fewer samples use all their samples in each
            mini-batch.
        accumulate: Number of mini-batches per step. Each step uses the mean gradient over ``batch_size`` ×
            ``accumulate`` samples.
        optimizer: The clients' optimiser: ``sgd``, ``adamw``, or another PyTorch optimiser as ``"module:Class"``.
        optimizer_state: Whether a client's optimiser begins each round with an empty state (``reset``), or with the
            state after the client's latest round (``keep``). With ``keep`` and ``adamw``, each client stores two
            numbers per model parameter.
        lr: Learning rate η of the clients.
        momentum: Momentum of the clients' optimiser ``sgd``.
        weight_decay: Weight decay factor. ``sgd`` adds the decay to the gradient, and ``adamw`` applies it separately.
        schedule: Learning rate in round t, counted from 0. ``constant``: η. ``inverse``: η / (1 + t). ``cosine``: from
            η to zero along half a cosine wave.
        warmup: Number W of initial rounds with a reduced learning rate. In the k-th of these rounds, the rate is
            multiplied by k / (W + 1).
        clip: Maximum norm of a gradient. Larger gradients are scaled down.
        batch_norm: Treatment of BatchNorm's running statistics. ``average``: the server averages the clients'
            statistics. ``local``: each client keeps its own statistics, and evaluations of the global model use the
            test batches' statistics.
        execution: How sums over clients are computed. ``fused``: one pass covers several clients, if possible.
            ``per-client``: Stratify, too, is bit-identical in all engines, but several times slower.
        threads: Number of threads per PyTorch operation. Results may depend on this number, due to rounding.
        workers: Number of processes that train clients on this machine. Results do not depend on this number. Default:
            one process per core if this is faster, otherwise one process.
        precision: Floating-point format in which clients train. With ``bf16``, PyTorch's autocast uses bfloat16 for
            some operations. Parameters and updates stay float32. Stratify and FedTAN always train in float32.
        device: Device for training and evaluation: ``cpu``, ``cuda``, ``cuda:N``, or ``auto`` (a GPU if available).
            Results on different devices can differ in their last bits.
    """

    later_settings = ("accumulate", "optimizer", "optimizer_state", "warmup")

    rounds: Annotated[PositiveInt, MayChange(upwards=True)] = 20
    clients_per_round: PositiveInt | None = None
    local_epochs: PositiveInt | None = None
    local_steps: PositiveInt | None = None
    batch_size: PositiveInt = 32
    accumulate: PositiveInt = 1
    optimizer: AnyOptimizer = SGD()
    optimizer_state: Literal["reset", "keep"] = "reset"
    lr: PositiveFloat = 0.1
    momentum: float = Field(default=0.0, ge=0, lt=1)
    weight_decay: NonNegativeFloat = 0.0
    schedule: Literal["constant", "inverse", "cosine"] = "constant"
    warmup: NonNegativeInt = 0
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
            raise ValueError("is not a device. Use one of: cpu, cuda, cuda:N, auto.")
        return value

    @model_validator(mode="after")
    def _epochs_or_steps(self) -> Training:
        if self.local_steps is not None and self.local_epochs is not None:
            problem = "cannot be set together with local_epochs. Set only one of the two keys."
            raise SpecError("local_steps", problem, self.local_steps)
        return self

    @model_validator(mode="after")
    def _state_to_keep(self) -> Training:
        if self.optimizer_state == "keep" and self.optimizer.is_sgd and not self.momentum:
            problem = "sgd without momentum does not have a state. Use 'reset', or set training.momentum."
            raise SpecError("optimizer_state", problem, self.optimizer_state)
        return self

    @property
    def samples_per_step(self) -> int:
        """Number of samples in a client's step: ``batch_size`` × ``accumulate``, or all samples if there are fewer."""
        return self.batch_size * self.accumulate

    @property
    def epochs(self) -> int:
        """Number of local epochs, E: ``local_epochs``, or 5 if ``local_epochs`` is not set."""
        return self.local_epochs or DEFAULT_EPOCHS

    def sample_gradients(self, samples: float, keep: float = 1.0) -> float:
        """Return the number of per-sample gradients that a client computes per round.

        Args:
            samples: The client's number of samples.
            keep: The expected fraction of its samples that the client uses.

        >>> Training(local_epochs=2).sample_gradients(30), Training(local_steps=3, batch_size=32).sample_gradients(30)
        (60.0, 90.0)
        """
        if self.local_steps is None:
            return samples * keep * (self.local_epochs or DEFAULT_EPOCHS)
        return self.local_steps * min(self.samples_per_step, samples * keep)

    def poisson(self, samples: int) -> tuple[float, int]:
        """Return the sampling probability and the number of steps per round, for training with ``privacy.dp``.

        Args:
            samples: The client's number of samples.

        Returns:
            The probability that a sample is used in a step, and the number of steps per round.

        >>> Training(local_epochs=2, batch_size=20).poisson(50)
        (0.4, 6)
        """
        if samples == 0:
            return 0.0, 0
        size = min(self.batch_size, samples)
        return size / samples, self.local_steps or self.epochs * -(-samples // size)

    def lasting(self, epochs: int | None) -> Training:
        """Return the settings with ``epochs`` local epochs instead of local steps.

        With None, return the settings unchanged.
        """
        return self if epochs is None else self.model_copy(update={"local_epochs": epochs, "local_steps": None})

    def lr_at(self, round: int) -> float:
        """Return the learning rate η of a round. Rounds are counted from 1.

        >>> Training(lr=0.1, schedule="inverse").lr_at(2)
        0.05
        """
        lr = self.lr if self.schedule == "constant" else scheduled(self.lr, self.schedule, round, self.rounds)
        return lr if round > self.warmup else lr * (round / (self.warmup + 1))

    def invited(self, clients: int) -> int:
        """Return the number of clients that the server invites per round, given the total number of clients."""
        return min(10, clients) if self.clients_per_round is None else self.clients_per_round
