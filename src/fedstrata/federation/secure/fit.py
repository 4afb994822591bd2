"""Select the numbers in a reply that a secure sum adds up, and read the resulting sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fedstrata.base.errors import SpecError
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.messages import ClientId, FitReply, Params, Request, Weights
from fedstrata.federation.secure.ring import Part, Ring, Total, Words, rounding
from fedstrata.federation.vectors import split

LOSS_RANGE = 64.0
"""The maximum training loss in a secure sum. Larger losses are scaled down and counted in ``Total.scaled``."""


@dataclass(frozen=True)
class Weight:
    """The factor by which a client's numbers are multiplied before they are added up.

    Args:
        name: The name under which the sum of all factors is stored. For equal weights, the name is ``"clients"``.
        of: A function that computes the factor from the client's reply.
        largest: The maximum factor. A client with a larger factor does not reply.
    """

    name: str
    of: Callable[[Any], float]
    largest: float


EQUAL = Weight("clients", lambda reply: 1.0, 1.0)
"""The weight 1 for each client."""


@dataclass(frozen=True)
class Update:
    """A description of the updates in a sum. A codec may compress the updates.

    Args:
        prefix: The prefix of the names that ``Reply.split_update`` gives to the update's tensors.
        range: Largest absolute value of an element of an update.
        weight: The weight of each client's update in the sum.
    """

    prefix: str
    range: float
    weight: Weight


@dataclass(frozen=True)
class Numbers:
    """Real numbers that each client computes from its reply. The server learns a weighted sum over the clients.

    Args:
        values: A function that computes the numbers from the client's reply and the model that the client received.
        like: Tensors with the names, shapes and dtypes of the numbers.
        range: Largest absolute value of a number. Larger numbers are scaled down; see ``Ring.encode``.
        weight: The weight of each client in the sum.
        update: The description of the updates, if the numbers are updates that a codec may compress; otherwise None.
        needs_model: Whether ``values`` needs the model. Numbers that are computed from the model cannot be in the same
            sum as a compressed update.
    """

    values: Callable[[Weights, Any], Params]
    like: Params
    range: float
    weight: Weight = EQUAL
    update: Update | None = None
    needs_model: bool = True

    @property
    def part(self) -> Part:
        """The layout of these numbers within a client's vector."""
        return Part(sum(tensor.numel() for tensor in self.like.values()), self.range)


@dataclass(frozen=True)
class Count:
    """An integer that each client computes from its reply. The server learns the sum over the clients.

    Args:
        value: A function that computes the number (at least 0) from the client's reply.
        most: The maximum count that a client may report. A client with a larger count does not reply.
    """

    value: Callable[[Any], int]
    most: int


Summands = dict[str, Numbers | Count]
"""A mapping from names to descriptions of numbers. The server learns only the sums of these numbers over the
clients."""


def largest_size(config: FederationConfig) -> int:
    """Return W, the maximum number of samples that a client in a secure sum may have."""
    return config.privacy.largest or (0 if config.sizes is None else int(config.sizes.max(initial=0)))


def weight_by_size(config: FederationConfig, largest: int) -> Weight:
    """Return a client weight that is proportional to the number of samples, or to the sum of the samples' weights.

    Args:
        config: The settings that server and clients share.
        largest: An upper bound for the number of samples of any replying client.
    """
    return Weight("samples", lambda reply: reply.size, largest * config.places)


def size_of_weights(weight: Weight) -> Summands:
    """Describe the sum of real-valued weights."""
    one = {"samples": torch.ones(1)}
    return {weight.name: Numbers(lambda sent, reply: one, one, 1.0, weight, needs_model=False)}


@dataclass(frozen=True)
class Bounds:
    """Bounds, known before the first round, on the values in replies to training requests.

    Args:
        config: The settings that server and clients share.
        params: The parameters that clients train, with their names and shapes.
        sample_gradients: A function that takes a client's number of samples, and returns the number of per-sample
            gradients that the client computes.
    """

    config: FederationConfig
    params: Params
    sample_gradients: Callable[[int], float]

    @property
    def largest(self) -> int:
        """The maximum number W of samples that a client may have."""
        return largest_size(self.config)

    @property
    def steps(self) -> int:
        """The maximum number of training steps that a client takes in a round."""
        training = self.config.training
        return training.local_steps or training.epochs * -(-self.largest // training.samples_per_step)

    @property
    def by_size(self) -> Weight:
        """A client weight that is proportional to the number of samples, or to the sum of the samples' weights."""
        return weight_by_size(self.config, self.largest)

    def size(self) -> Summands:
        """Describe the sum of the weights ``by_size``. The sum is an integer unless samples have different weights."""
        if self.config.task.weighted:
            return size_of_weights(self.by_size)
        return {"samples": Count(lambda reply: reply.samples, self.largest)}

    def updates(self, weight: Weight) -> Summands:
        """Describe the sum of the clients' parameter updates w_k − w_t."""

        def values(sent: Weights, reply: FitReply) -> Params:
            return {name: reply.weights.params[name] - sent.params[name] for name in self.params}

        wide = self.config.privacy.range
        update = Update("params/", wide, weight)
        return {f"updates by {weight.name}": Numbers(values, self.params, wide, weight, update)}

    def buffers(self, weight: Weight) -> Summands:
        """Describe the sum of the changes to floating-point buffers; the result is empty without such buffers."""
        like = {name: b for name, b in self.config.model.buffers().items() if b.is_floating_point()}

        def values(sent: Weights, reply: FitReply) -> Params:
            return {name: reply.weights.buffers[name] - sent.buffers[name] for name in like}

        return {"buffers": Numbers(values, like, self.config.privacy.buffer_range, weight)} if like else {}

    def progress(self) -> Summands:
        """Describe two sums over clients: the number of per-sample gradients, and the loss weighted by this number.

        A loss above ``LOSS_RANGE`` is scaled down.
        """
        most = math.ceil(self.sample_gradients(self.largest))
        # With DP-SGD, a client reports more gradients: the expected size of an epoch's last batch is the size of the
        # other batches; see ``Training.poisson``.
        if self.config.privacy.dp is not None:
            most = self.steps * self.config.training.batch_size
        by_seen = Weight("seen", lambda reply: reply.seen, most)

        def loss(sent: Weights, reply: FitReply) -> Params:
            return {"loss": torch.tensor([reply.loss], dtype=torch.float64)}

        like = {"loss": torch.zeros(1, dtype=torch.float64)}
        return {
            "loss": Numbers(loss, like, LOSS_RANGE, by_seen, needs_model=False),
            "seen": Count(lambda reply: reply.seen, most),
        }


@dataclass(frozen=True)
class Sums:
    """The sums over the clients that answered a request.

    Args:
        summands: The numbers that were summed.
        clients: Number of clients.
        total: The weighted sum. Each weight is divided by the largest value that it can take.
    """

    summands: Summands
    clients: int
    total: Total

    def count(self, name: str) -> int:
        """Return the sum of the count ``name`` over the clients."""
        return self.total.counts[name]

    def of(self, name: str, by: float = 1.0) -> Params:
        """Return the weighted sum of the tensors ``name`` over the clients, divided by ``by``."""
        numbers = self.summands[name]
        assert isinstance(numbers, Numbers)
        row = self.total.parts[name] * (numbers.weight.largest / by)
        double = any(tensor.dtype == torch.float64 for tensor in numbers.like.values())
        return split(torch.from_numpy(row if double else row.astype(np.float32)), numbers.like)

    def number(self, name: str) -> float:
        """Return the weighted sum, over the clients, of the number called ``name``."""
        numbers = self.summands[name]
        assert isinstance(numbers, Numbers)
        return float(self.total.parts[name][0]) * numbers.weight.largest

    def weight(self, name: str) -> float:
        """Return the sum of the weight ``name`` over the clients; see ``Weight.name``."""
        if name == "clients":
            return self.clients
        return self.count(name) if isinstance(self.summands[name], Count) else self.number(name)

    def updates(self, weight: str, params: Params, by: float = 1.0) -> Params:
        """Return the weighted sum of the updates, divided by ``by``.

        If no client changes a parameter, the parameter's update is zero.

        Args:
            weight: The name of the weight.
            params: The parameters of the model.
            by: The divisor.
        """
        zeros = {name: torch.zeros_like(w) for name, w in params.items()}
        return zeros | self.of(f"updates by {weight}", by)


class Form(Protocol):
    """A rule that converts replies to the vectors of a secure sum.

    Each Python class of requests has one form.
    """

    ring: Ring
    """The layout of the vectors that are summed."""

    def encode(self, request: Any, reply: Any, client: ClientId) -> Words:
        """Return the vector of integers that a client adds to the secure sum.

        Raises:
            WithheldError: A value is not finite, or a weight or a count is above its maximum.
        """


Forms = Mapping[type[Request], Form]
"""A mapping from the Python classes of requests to the layouts (``Form``) of their replies."""


class ModelForm:
    """The layout of replies to requests with a model. It lists the values that a secure sum adds up.

    Args:
        config: The settings that server and clients share.
        clients: The maximum number of clients in a sum.
        summands: The numbers that are summed.

    Raises:
        SpecError: A sum could be too large for integers modulo 2³².
    """

    def __init__(self, config: FederationConfig, clients: int, summands: Summands) -> None:
        self.config, self.summands = config, summands
        try:
            self.ring = Ring(
                clients,
                {name: each.part for name, each in self._numbers.items()},
                {name: each.most for name, each in summands.items() if isinstance(each, Count)},
            )
        except SpecError as error:
            problem = f"the sums do not fit into 32 bits: {error}"
            raise SpecError("privacy.sums", problem, config.privacy.sums) from None

    @cached_property
    def _numbers(self) -> Mapping[str, Numbers]:
        return {name: each for name, each in self.summands.items() if isinstance(each, Numbers)}

    def exchange(self, request: Any) -> int:
        """Return the index of a request within its round, which selects the random numbers for rounding."""
        return 0

    def encode(self, request: Any, reply: Any, client: ClientId) -> Words:
        """Return the vector of integers that a client adds to the secure sum."""
        generator = rounding(self.config.seed, request.round, client, self.exchange(request))
        return self.words(request.weights, reply, generator)

    def words(self, sent: Weights, reply: Any, generator: np.random.Generator) -> Words:
        """Compute a client's vector of integers from the received model, the reply and the generator for rounding.

        Raises:
            WithheldError: A value is not finite, or a weight or a count is above its maximum.
        """
        return self.ring.encode(
            {name: _row(each.values(sent, reply), each.like).numpy() for name, each in self._numbers.items()},
            {name: each.value(reply) for name, each in self.summands.items() if isinstance(each, Count)},
            generator,
            weights={name: each.weight.of(reply) / (each.weight.largest or 1) for name, each in self._numbers.items()},
        )


def _row(tensors: Params, like: Params) -> Tensor:
    """Return tensors as one vector, in the order of ``like``, in float32 or a wider dtype."""
    row = torch.cat([tensors[name].reshape(-1) for name in like])
    return row.to(torch.promote_types(row.dtype, torch.float32))
