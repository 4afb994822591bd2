"""What server and clients say to each other: frozen records of tensors and plain values.

All tensors are on the CPU. ``Params`` maps a parameter's name to its value. A method that needs to ask something else
declares a ``Request`` and a ``Reply`` of its own, and how a client answers (``fedstrata.clients.answers``).
"""

from __future__ import annotations

from torch import Tensor

from fedstrata.records import Message, record, same

ClientId = int
Params = dict[str, Tensor]
Extra = dict[str, dict[str, Tensor]]
"""What an objective sends along: a name for each group of tensors."""


class Request(Message):
    """A question to a client."""

    def work(self, samples: int) -> float:
        """How many sample-gradients answering takes a client that holds ``samples``, for simulated time."""
        return 0.0


class Reply(Message):
    """A client's answer."""


@record
class Weights(Message):
    """A model's parameters and buffers.

    Args:
        params: What is trained.
        buffers: What is not, such as BatchNorm's running statistics.
    """

    params: Params
    buffers: Params


@record
class Fit(Request):
    """Train locally, starting at ``weights``.

    Args:
        round: The round, counted from 1.
        weights: The global model.
        message: What the objective's server side sends.
        keep: Probability with which each sample is used this round (data-level sampling).
        passes: How often the whole data are gone through, for simulated time only.
    """

    round: int
    weights: Weights
    message: Extra
    keep: float
    passes: float

    def work(self, samples: int) -> float:
        """Samples seen: all kept ones, in every pass."""
        return samples * self.keep * self.passes


@record
class FitReply(Reply):
    """A locally trained model.

    Args:
        weights: After local training.
        samples: Samples that were used (n_k, or those kept).
        steps: Mini-batch steps really taken, K.
        seen: Sample-gradients computed.
        loss: Mean training loss over the steps.
        message: What the objective's client side sends.
    """

    weights: Weights
    samples: int
    steps: int
    seen: int
    loss: float
    message: Extra


@record
class SizeReport(Request):
    """How many samples do you hold? With ``bound``, answered under local differential privacy.

    Args:
        round: The round, counted from 1.
        bound: M, the public bound on the number of samples; 0 asks for the plain number.
        alpha: The probability of the true (clipped) answer; see ``fedstrata.sampling.privacy``.
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
class LabelReport(Request):
    """Which labels do you hold, and how many samples of each?"""


@record
class LabelReply(Reply):
    """A client's labels.

    Args:
        labels: The labels it holds, int64, ascending.
        counts: How many samples of each, int64.
    """

    labels: Tensor
    counts: Tensor


@record
class Reserve(Request):
    """Set samples aside for the batches to come (Stratify, Algorithm 4: training request).

    Args:
        round: The epoch, counted from 1.
        batches: The batch of every position asked of this client, int64, ascending.
        labels: The placeholder wanted at every position, int64.
        refill: Placeholders whose pools start anew, int64.
        fresh: Whether an earlier reservation of this epoch is forgotten first.
    """

    round: int
    batches: Tensor
    labels: Tensor
    refill: Tensor
    fresh: bool


@record
class ReserveReply(Reply):
    """What could not be set aside.

    Args:
        missing: One bool a position: True where the pool was empty (``not_trained``).
        exhausted: Placeholders whose pool is empty now, int64.
    """

    missing: Tensor
    exhausted: Tensor


@record
class Gradient(Request):
    """The gradient of the summed loss over what was set aside for one batch (Stratify, Algorithm 4).

    Args:
        round: The epoch, counted from 1.
        batch: Which batch of the epoch.
        weights: The global model.
    """

    round: int
    batch: int
    weights: Weights


@record
class GradientReply(Reply):
    """Sums over a client's part of a batch.

    Args:
        gradient: Of the summed loss, by parameter.
        samples: How many samples.
        loss: The summed loss.
        buffers: Buffers after the union batch, alike at every client of it.
    """

    gradient: Params
    samples: int
    loss: float
    buffers: Params = same()
