"""What server and clients say to each other: frozen records of tensors and plain values.

All tensors are on the CPU. ``Params`` maps a parameter's name to its value. A method that needs to ask something else
declares a ``Request`` and a ``Reply`` of its own, and how a client answers (``fedstrata.handlers.fit``).
"""

from __future__ import annotations

from torch import Tensor

from fedstrata.records import Message, record

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


def sample_gradients(samples: float, passes: float, steps: int, batch_size: int) -> float:
    """How many sample-gradients a client computes: in passes over its data, or in steps where there are any."""
    return steps * min(batch_size, samples) if steps else samples * passes


@record
class Fit(Request):
    """Train locally, starting at ``weights``.

    Args:
        round: The round, counted from 1.
        weights: The global model.
        message: What the objective's server side sends.
        keep: Probability with which each sample is used this round (data-level sampling).
        passes: How often the whole data are gone through, for simulated time only.
        steps: Mini-batch steps taken instead, of ``batch_size`` each; 0 for passes. Again for simulated time only.
        batch_size: Of these steps.
        counts: Whether the reply may tell how many samples were used. Under local differential privacy of the
            clients' sizes it must not: with the public ``keep`` it would give them away.
    """

    round: int
    weights: Weights
    message: Extra
    keep: float
    passes: float
    steps: int = 0
    batch_size: int = 0
    counts: bool = True

    def work(self, samples: int) -> float:
        """Samples seen: all kept ones, in every pass."""
        return sample_gradients(samples * self.keep, self.passes, self.steps, self.batch_size)


@record
class FitReply(Reply):
    """A locally trained model.

    Args:
        weights: After local training.
        samples: Samples that were used (n_k, or those kept); 0, as ``steps`` and ``seen``, where ``Fit`` wanted no
            counts.
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
