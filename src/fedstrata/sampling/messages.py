"""Requests from samplers to clients: for numbers of samples, compressed gradients, sketches of models, and losses."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.base.arrays import Floats32
from fedstrata.base.errors import ReplyRefusedError
from fedstrata.base.records import record
from fedstrata.federation.messages import ModelRequest, Params, Reply, Request, RequestRule, Weights
from fedstrata.federation.reply_checks import require_shape
from fedstrata.sampling.quantization import restore

MOST_SAMPLES = 2**31
"""The maximum number of samples that a client may report. The sum over a million clients still fits into 64 bits."""


def sketch_length(params: Params, coordinates: int) -> int:
    """Return the length of a sketch (random projection) of a model.

    The length is the smaller of ``coordinates`` and the number of parameters. If ``coordinates`` is 0, the length is
    the number of parameters.
    """
    d = sum(map(torch.numel, params.values()))
    return min(d, coordinates or d)


@record("SizeReply")
class SizeReply(Reply):
    """A client's number of samples, or a random number in place of the true number.

    Args:
        samples: The number of samples, or the random number.
    """

    samples: int


@record("SizeReport")
class SizeReport(Request):
    """A request for a client's number of samples, with local differential privacy if ``bound`` is positive.

    Args:
        round: The round, counted from 1.
        bound: The public bound M on the number of samples; 0 to request the exact number.
        alpha: The probability that the client reports its true number (at most M − 1) instead of a random number; see
            ``fedstrata.sampling.client_sizes``.
    """

    reply_type: ClassVar[type[Reply]] = SizeReply
    rule = RequestRule("its number of samples", discloses=frozenset({"sizes"}))

    round: int
    bound: int
    alpha: float

    def check(self, reply: SizeReply) -> None:
        """Raise ``ReplyRefusedError`` if the number of samples is outside the possible range."""
        if not 0 <= reply.samples <= MOST_SAMPLES or (self.bound and not 1 <= reply.samples < self.bound):
            raise ReplyRefusedError(f"the number of samples {reply.samples} is impossible")


@record("CompressReply")
class CompressReply(Reply):
    """The gradient of a client's loss, which may be quantized.

    Args:
        centres: The d' values X that occur in the quantized gradient, shape (d',), float32. Without quantization, X
            contains all coordinates of the gradient.
        codes: The index λ into X for every coordinate, uint8. If d' ≤ 16, each byte contains two indices, with the
            first index in the high four bits. Without quantization, the array is empty.
        length: The number of coordinates.
    """

    centres: Tensor
    codes: Tensor
    length: int

    @cached_property
    def restored(self) -> Floats32:
        """The gradient as floats, shape (length,).

        Raises:
            ValueError: The codes do not match the length or the centres.
        """
        centres: Floats32 = self.centres.numpy()
        whole = len(centres) == self.length and not len(self.codes)
        return centres if whole else restore(centres, self.codes.numpy(), self.length)


@record("Compress")
class Compress(ModelRequest):
    """A request for the quantized gradient of a client's loss at the global model (FedSTaS, "information squeeze").

    Args:
        round: The round, counted from 1.
        weights: The global model.
        centres: The maximum number d' of different values in the quantized gradient. With 0, the gradient is not
            quantized.
        coordinates: The length to which a random projection reduces the gradient before quantization (K_desired in the
            paper). With 0, the gradient is not projected.
    """

    reply_type: ClassVar[type[Reply]] = CompressReply
    rule = RequestRule("the gradient of the loss over its samples")

    round: int
    weights: Weights
    centres: int
    coordinates: int

    def check(self, reply: CompressReply) -> None:
        """Raise ``ReplyRefusedError`` if the centres and codes do not represent a gradient of the requested length."""
        require_shape(reply.centres, (-1,), torch.float32, "centres")
        require_shape(reply.codes, (-1,), torch.uint8, "codes")
        length = sketch_length(self.weights.params, self.coordinates)
        most = self.centres or length
        if reply.length != length or len(reply.centres) > most:
            raise ReplyRefusedError(
                f"the reply has {reply.length} coordinates and {len(reply.centres)} centres, but must have {length} "
                f"coordinates and at most {most} centres"
            )
        try:
            _ = reply.restored
        except (ValueError, IndexError, TypeError) as error:
            raise ReplyRefusedError(str(error)) from error


@record("SketchReply")
class SketchReply(Reply):
    """A sketch (random projection) of a locally trained model.

    Args:
        values: The sketch, shape (K,), float32; see ``fedstrata.sampling.sketches``.
    """

    values: Tensor


@record("Sketch")
class Sketch(ModelRequest):
    """A request to train once from the global model, and to send a sketch of the trained parameters (FedSSAR).

    The client trains with plain cross-entropy on all its samples. It does not use the method's objective, because the
    objective's state must change only in rounds in which the client takes part.

    Args:
        round: The round, counted from 1.
        weights: The global model.
        coordinates: The length K of the sketch. With 0, the client sends the parameters themselves.
    """

    reply_type: ClassVar[type[Reply]] = SketchReply
    rule = RequestRule("the parameters of a model that it trained on its samples")

    round: int
    weights: Weights
    coordinates: int

    def check(self, reply: SketchReply) -> None:
        """Raise ``ReplyRefusedError`` if the sketch does not have the requested shape."""
        length = sketch_length(self.weights.params, self.coordinates)
        require_shape(reply.values, (length,), torch.float32, "the sketch")


@record("LossReply")
class LossReply(Reply):
    """The loss of the global model on a client's samples.

    Args:
        loss: Mean cross-entropy over the client's samples.
    """

    loss: float


@record("LossReport")
class LossReport(ModelRequest):
    """A request for the loss of the global model on a client's samples.

    Args:
        round: The round, counted from 1.
        weights: The global model.
    """

    reply_type: ClassVar[type[Reply]] = LossReply
    rule = RequestRule("the mean loss of the global model on its training samples")

    round: int
    weights: Weights

    def check(self, reply: LossReply) -> None:
        """Raise ``ReplyRefusedError`` if the loss is negative."""
        if reply.loss < 0:
            raise ReplyRefusedError(f"the loss {reply.loss} is negative")
