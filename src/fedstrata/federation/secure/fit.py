"""Local training in secure sums: the numbers that a client sends, and what the server computes from their sum."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from fedstrata.base.errors import SpecError
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.messages import FitReply, Params, Weights
from fedstrata.federation.secure.ring import Part, Ring, Total, Words, rounding
from fedstrata.federation.vectors import changes, split

LOSS_RANGE = 64.0
"""Largest training loss; a larger one is reduced to it, and counts as scaled."""


@dataclass(frozen=True)
class FitSum:
    """The sum of the clients' replies to a training request.

    Args:
        update: The mean update, weighted by the clients' numbers of samples.
        samples: Number of samples of all clients.
        seen: Number of sample-gradients of all clients.
        loss: The mean training loss, weighted by the clients' sample-gradients; None if no client took a step.
        scaled: Number of updates and losses that were out of range.
    """

    update: Params
    samples: int
    seen: int
    loss: float | None
    scaled: int


class FitForm:
    """The linear form of replies to training requests.

    Args:
        config: The settings that server and clients share.

    Raises:
        SpecError: A sum could be too large for the ring.
    """

    def __init__(self, config: FederationConfig) -> None:
        privacy, training = config.privacy, config.training
        self.seed = config.seed
        self.largest = privacy.largest or (0 if config.sizes is None else int(config.sizes.max(initial=0)))
        """W, the largest number of samples of a client."""
        self.most_seen = math.ceil(training.sample_gradients(self.largest))
        size = sum(tensor.numel() for tensor in config.model.params().values())
        parts = {"update": Part(size, privacy.range), "loss": Part(1, LOSS_RANGE)}
        try:
            self.ring = Ring(training.invited(config.clients), parts, {"samples": self.largest, "seen": self.most_seen})
        except SpecError as error:
            problem = f"the sums do not fit into 32 bits: {error}"
            raise SpecError("privacy.sums", problem, privacy.sums) from None

    def encode(self, sent: Weights, reply: FitReply, round: int, client: int) -> Words:
        """Return the vector that a client adds to the sum.

        Args:
            sent: The model that the client received.
            reply: The result of its training.
            round: The round.
            client: The client's id.

        Raises:
            WithheldError: A value is not finite, or the client has too many samples.
        """
        weights = {
            "update": reply.samples / max(self.largest, 1),
            "loss": reply.seen / max(self.most_seen, 1),
        }
        return self.ring.encode(
            {"update": changes(sent.params, reply.weights.params).numpy(), "loss": [reply.loss]},
            {"samples": reply.samples, "seen": reply.seen},
            rounding(self.seed, round, client, 0),
            weights=weights,
        )

    def decode(self, total: Total, like: Params) -> FitSum:
        """Return the result of a sum.

        Args:
            total: The sum.
            like: The parameters of the model, for their names and shapes.
        """
        samples, seen = total.counts["samples"], total.counts["seen"]
        mean = total.parts["update"] * (self.largest / max(samples, 1))
        loss = float(total.parts["loss"][0]) * self.most_seen / seen if seen else None
        update = split(torch.from_numpy(mean.astype(np.float32)), like)
        return FitSum(update, samples, seen, loss, total.scaled)
