"""What Stratify asks clients: their labels, samples set aside, gradients and steps."""

from __future__ import annotations

from torch import Tensor

from fedstrata.federation.messages import Params, Reply, Request, Weights
from fedstrata.records import record, same


@record
class LabelReport(Request):
    """Which labels do you hold, and how many samples of each?"""


@record
class LabelReply(Reply):
    """A client's labels.

    Args:
        labels: The labels it holds, int64, in an order of the client's own.
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
        window: The part of each label's samples, in the order in which they arrive, that is there: from and to, in
            [0, 1].
    """

    round: int
    batches: Tensor
    labels: Tensor
    refill: Tensor
    fresh: bool
    window: tuple[float, float] = (0.0, 1.0)


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


@record
class Steps(Request):
    """One SGD step on one sample for each placeholder, on the travelling model (Stratify, Algorithm 3).

    Args:
        round: The epoch, counted from 1.
        labels: The placeholders to train, in order, int64.
        refill: Placeholders whose pools start anew, int64.
        fresh: Whether what was drawn earlier in this epoch is forgotten first.
        window: See ``Reserve``.
    """

    round: int
    labels: Tensor
    refill: Tensor
    fresh: bool
    window: tuple[float, float] = (0.0, 1.0)

    def work(self, samples: int) -> float:
        """A sample for each placeholder."""
        return float(len(self.labels))


@record
class StepsReply(Reply):
    """What could not be trained.

    Args:
        missing: One bool a placeholder: True where the pool was empty (``not_trained``).
        exhausted: Placeholders whose pool is empty now, int64.
        loss: The summed loss of the samples, each before its step; a scalar, float32.
    """

    missing: Tensor
    exhausted: Tensor
    loss: Tensor
