"""What samplers ask clients: sizes, compressed gradients, sketches of models, losses."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstrata.base.errors import ReplyRefusedError
from fedstrata.base.records import record
from fedstrata.federation.messages import ModelRequest, Reply, Request, RequestRule, Weights
from fedstrata.federation.reply_checks import require_shape
from fedstrata.sampling.quantization import restore

MOST_SAMPLES = 2**31
"""Nobody holds more, and the sizes of a million clients still add up in 64 bits."""


@record("SizeReply")
class SizeReply(Reply):
    """The size, or its randomised response.

    Args:
        samples: The answer.
    """

    samples: int


@record("SizeReport")
class SizeReport(Request):
    """How many samples do you hold? With ``bound``, answered under local differential privacy.

    Args:
        round: The round, counted from 1.
        bound: M, the public bound on the number of samples; 0 asks for the plain number.
        alpha: The probability of the true (clipped) answer; see ``fedstrata.sampling.client_sizes``.
    """

    reply_type: ClassVar[type[Reply]] = SizeReply
    rule = RequestRule("how many samples it holds", discloses=frozenset({"sizes"}))

    round: int
    bound: int
    alpha: float

    def check(self, reply: SizeReply) -> None:
        """A size that can be."""
        if not 0 <= reply.samples <= MOST_SAMPLES or (self.bound and not 1 <= reply.samples < self.bound):
            raise ReplyRefusedError(f"size {reply.samples} is impossible")


@record("CompressReply")
class CompressReply(Reply):
    """A quantized gradient.

    Args:
        centres: X, shape (d',), float32.
        codes: λ, the centre of every coordinate, uint8; two coordinates a byte (high half first) where d' ≤ 16.
        length: The number of coordinates.
    """

    centres: Tensor
    codes: Tensor
    length: int

    def restored(self) -> NDArray[np.float32]:
        """The gradient that it stands for, shape (length,).

        Raises:
            ValueError: The codes do not fit the length or the centres.
        """
        return restore(self.centres.numpy(), self.codes.numpy(), self.length)


@record("Compress")
class Compress(ModelRequest):
    """Send the gradient of the local loss at ``weights``, quantized to ``centres`` values (FedSTaS, IS).

    Args:
        round: The round, counted from 1.
        weights: The global model.
        centres: d', how many different values are left.
        coordinates: K_desired, what a seeded random projection reduces the gradient to first; 0 for none.
    """

    reply_type: ClassVar[type[Reply]] = CompressReply
    rule = RequestRule("the gradient over its samples")

    round: int
    weights: Weights
    centres: int
    coordinates: int

    def check(self, reply: CompressReply) -> None:
        """Centres and codes that give a gradient of the right length."""
        require_shape(reply.centres, (-1,), torch.float32, "centres")
        require_shape(reply.codes, (-1,), torch.uint8, "codes")
        d = sum(tensor.numel() for tensor in self.weights.params.values())
        length = min(d, self.coordinates or d)
        if reply.length != length or len(reply.centres) > self.centres:
            raise ReplyRefusedError(
                f"{reply.length} coordinates and {len(reply.centres)} centres, expected {length} and {self.centres}"
            )
        try:
            reply.restored()
        except (ValueError, IndexError, TypeError) as error:
            raise ReplyRefusedError(str(error)) from error


@record("SketchReply")
class SketchReply(Reply):
    """A sketch of a locally trained model.

    Args:
        values: Shape (K,), float32; see ``fedstrata.sampling.sketches``.
    """

    values: Tensor


@record("Sketch")
class Sketch(ModelRequest):
    """Train once, starting at ``weights``, and send a sketch of the parameters that this leads to (FedSSAR).

    Plain cross-entropy, on all samples: an objective's own state belongs to the rounds that a client takes part in.

    Args:
        round: The round, counted from 1.
        weights: The global model.
        coordinates: K, the length of the sketch; 0 for the parameters themselves.
    """

    reply_type: ClassVar[type[Reply]] = SketchReply
    rule = RequestRule("the parameters of a model that it trained on its samples")

    round: int
    weights: Weights
    coordinates: int

    def check(self, reply: SketchReply) -> None:
        """A sketch of the right length."""
        d = sum(tensor.numel() for tensor in self.weights.params.values())
        require_shape(reply.values, (min(d, self.coordinates or d),), torch.float32, "the sketch")


@record("LossReply")
class LossReply(Reply):
    """The answer.

    Args:
        loss: Mean cross-entropy over a client's samples.
    """

    loss: float


@record("LossReport")
class LossReport(ModelRequest):
    """How bad is the global model for you?

    Args:
        round: The round, counted from 1.
        weights: The global model.
    """

    reply_type: ClassVar[type[Reply]] = LossReply
    rule = RequestRule("the mean loss of the global model on its training samples")

    round: int
    weights: Weights

    def check(self, reply: LossReply) -> None:
        """Cross-entropy is not negative."""
        if reply.loss < 0:
            raise ReplyRefusedError(f"loss {reply.loss} is impossible")
