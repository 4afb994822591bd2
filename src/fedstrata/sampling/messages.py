"""What samplers ask clients: sizes, compressed gradients, sketches of models, losses."""

from __future__ import annotations

from torch import Tensor

from fedstrata.federation.messages import Reply, Request, Weights
from fedstrata.records import record


@record
class SizeReport(Request):
    """How many samples do you hold? With ``bound``, answered under local differential privacy.

    Args:
        round: The round, counted from 1.
        bound: M, the public bound on the number of samples; 0 asks for the plain number.
        alpha: The probability of the true (clipped) answer; see ``fedstrata.sampling.ldp``.
    """

    round: int
    bound: int
    alpha: float


@record
class SizeReply(Reply):
    """The size, or its randomised response.

    Args:
        samples: The answer.
    """

    samples: int


@record
class Compress(Request):
    """Send the gradient of the local loss at ``weights``, squeezed into ``centres`` values (FedSTaS, IS).

    Args:
        round: The round, counted from 1.
        weights: The global model.
        centres: d', how many different values are left.
        coordinates: K_desired, what a seeded random projection reduces the gradient to first; 0 for none.
    """

    round: int
    weights: Weights
    centres: int
    coordinates: int

    def work(self, samples: int) -> float:
        """One gradient over all samples."""
        return float(samples)


@record
class CompressReply(Reply):
    """A squeezed gradient.

    Args:
        centres: X, shape (d',), float32.
        codes: λ, the centre of every coordinate, uint8; two coordinates a byte (high half first) where d' ≤ 16.
        length: The number of coordinates.
    """

    centres: Tensor
    codes: Tensor
    length: int


@record
class Sketch(Request):
    """Train once, starting at ``weights``, and send a sketch of the parameters that this leads to (FedSSAR).

    Plain cross-entropy, on all samples: an objective's own state belongs to the rounds that a client takes part in.

    Args:
        round: The round, counted from 1.
        weights: The global model.
        coordinates: K, the length of the sketch; 0 for the parameters themselves.
    """

    round: int
    weights: Weights
    coordinates: int

    def work(self, samples: int) -> float:
        """One pass over all samples."""
        return float(samples)


@record
class SketchReply(Reply):
    """A sketch of a locally trained model.

    Args:
        values: Shape (K,), float32; see ``fedstrata.sampling.sketches``.
    """

    values: Tensor


@record
class LossReport(Request):
    """How bad is the global model for you?

    Args:
        round: The round, counted from 1.
        weights: The global model.
    """

    round: int
    weights: Weights

    def work(self, samples: int) -> float:
        """A forward pass over all samples: a third of a gradient."""
        return samples / 3


@record
class LossReply(Reply):
    """The answer.

    Args:
        loss: Mean cross-entropy over a client's samples.
    """

    loss: float
