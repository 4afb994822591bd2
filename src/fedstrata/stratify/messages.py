"""What Stratify asks clients: their labels, samples set aside, gradients and steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from fedstrata.base.errors import ReplyRefusedError
from fedstrata.base.records import record, same
from fedstrata.federation.messages import (
    Extra,
    ModelRequest,
    Order,
    Params,
    Reply,
    Request,
    RequestRule,
    Weights,
    require_like,
)
from fedstrata.federation.reply_checks import require_shape
from fedstrata.stratify.masking.messages import CountReport

MOST_SAMPLES = 2**40
"""The most samples of one label at one client, so that the sum over millions of clients fits into 64 bits."""

ALL = (0.0, 1.0)
"""The window in which all samples have arrived."""

NO_SUCH_BATCH = "a position in a batch that is over, or that there is not"
"""The reason for refusing a reply to ``Reserve``."""


class Epoch(Order):
    """Samples are set aside first, for batches that are still to come; each batch trains once, in order."""

    def __init__(self) -> None:
        self._begun = False
        self._set_aside: set[int] = set()
        self._last = -1

    def refusal(self, request: Any) -> str:
        """Refuse positions of batches that are over, a batch out of order, and a batch without samples set aside."""
        if isinstance(request, Gradient):
            if request.batch <= self._last:
                return f"batch {request.batch} comes after batch {self._last}; accepted: each batch once, in order"
            return "" if request.batch in self._set_aside else f"nothing was set aside for batch {request.batch}"
        if not (_numbers(request.labels) and _numbers(request.refill) and len(request.labels)):
            return "labels and refill must be lists of whole numbers, with a label at least"
        if request.fresh == self._begun:
            again = "began already" if self._begun else "has not begun"
            return f"fresh = {request.fresh}, and the epoch {again}"
        if isinstance(request, Reserve):
            if not _numbers(request.batches) or len(request.batches) != len(request.labels):
                return "one batch is needed for each label"
            if (first := int(request.batches.min())) <= self._last:
                return f"positions in batch {first}, after batch {self._last} was trained"
        return ""

    def asked(self, request: Any) -> None:
        """Note that the epoch has begun, and that a batch is over once it is trained."""
        if isinstance(request, Gradient):
            self._last = request.batch
        else:
            self._begun = True

    def answered(self, request: Any, reply: Any) -> None:
        """Note the batches for which samples were set aside."""
        if isinstance(request, Reserve):
            batches = getattr(reply, "batches", request.batches)
            self._set_aside.update(torch.unique(batches[~reply.missing]).tolist())


def _numbers(tensor: Tensor) -> bool:
    return tensor.dim() == 1 and tensor.dtype == torch.int64


@record("LabelReply")
class LabelReply(Reply):
    """A client's labels.

    Args:
        labels: The labels that it holds, int64, in an order of the client's own.
        counts: The number of samples of each, int64.
    """

    labels: Tensor
    counts: Tensor


@record("LabelReport")
class LabelReport(Request):
    """Report the labels that the client holds, and the number of samples of each."""

    reply_type: ClassVar[type[Reply]] = LabelReply
    rule = RequestRule(
        "which labels it holds and how many samples of each, in the clear",
        phase="enrolment",
        discloses=frozenset({"labels", "sizes"}),
    )

    def check(self, reply: LabelReply) -> None:
        """Refuse a label that comes twice, and an impossible number of samples."""
        require_shape(reply.labels, (-1,), torch.int64, "labels")
        require_shape(reply.counts, (len(reply.labels),), torch.int64, "counts")
        if len(torch.unique(reply.labels)) != len(reply.labels):
            raise ReplyRefusedError("a label twice")
        if bool(((reply.counts < 1) | (reply.counts > MOST_SAMPLES)).any()):
            raise ReplyRefusedError(f"a count outside 1 … {MOST_SAMPLES}")


@record("ReserveReply")
class ReserveReply(Reply):
    """The positions for which a client could not reserve a sample.

    Args:
        missing: One bool per position: True if the pool was empty (``not_trained``).
        exhausted: Placeholders whose pools are empty now, int64.
    """

    missing: Tensor
    exhausted: Tensor


@record("GatheredReply")
class GatheredReply(ReserveReply):
    """The reply of a client that sends no part of a batch with fewer samples than ``privacy.min_samples``.

    Args:
        batches: The batch in which each position is trained now, int64; any number for positions that are not trained.
        held: One bool per position: True if it was held back, because its part of the batch would have too few samples.
            These positions are ``missing`` too, and their samples are still in the pool.
    """

    batches: Tensor
    held: Tensor


@record("Reserve")
class Reserve(Request):
    """Reserve samples for the batches of an epoch (Stratify, Algorithm 4: training request).

    Args:
        round: The epoch, counted from 1.
        batches: The batch of each of the client's positions, int64, ascending.
        labels: The placeholder wanted at each position, int64.
        refill: Placeholders whose pools are refilled first, int64.
        fresh: Whether an earlier reservation of this epoch is discarded first.
        window: The part of each label's samples that has arrived, in the order of arrival: from and to, in [0, 1].
    """

    reply_type: ClassVar[type[Reply]] = ReserveReply
    rule = RequestRule(
        "for which of the positions that it was asked to fill it has no sample left",
        order=Epoch,
        after=CountReport,
        discloses=frozenset({"sizes"}),
    )

    round: int
    batches: Tensor
    labels: Tensor
    refill: Tensor
    fresh: bool
    window: tuple[float, float] = ALL

    def check(self, reply: ReserveReply) -> None:
        """Refuse a reply without one answer per position, or with an impossible batch."""
        require_shape(reply.missing, (len(self.labels),), torch.bool, "missing")
        require_shape(reply.exhausted, (-1,), torch.int64, "exhausted")
        if isinstance(reply, GatheredReply):
            require_shape(reply.batches, (len(self.labels),), torch.int64, "batches")
            require_shape(reply.held, (len(self.labels),), torch.bool, "held")
            moved = reply.batches[~reply.missing]
            if bool((reply.held & ~reply.missing).any()):
                raise ReplyRefusedError("a position that is held back and served")
            # A batch that was trained already cannot grow.
            if len(moved) and int(moved.min()) < int(self.batches.min()):
                raise ReplyRefusedError(NO_SUCH_BATCH)


@record("GradientReply")
class GradientReply(Reply):
    """Sums over a client's part of a batch.

    Args:
        gradient: The gradient of the summed loss, by parameter.
        samples: The number of samples.
        loss: The summed loss.
        buffers: The buffers after the union batch, the same at all its clients.
    """

    gradient: Params
    samples: int
    loss: float
    buffers: Params = same()

    @override
    def split_update(self, sent: Weights) -> tuple[Params, GradientReply]:
        return self.gradient, replace(self, gradient={})

    @override
    def merge_update(self, sent: Weights, change: Params) -> GradientReply:
        return replace(self, gradient=change)


@record("Gradient")
class Gradient(ModelRequest):
    """Compute the gradient of the summed loss over the samples reserved for one batch (Stratify, Algorithm 4).

    Args:
        round: The epoch, counted from 1.
        batch: The number of the batch in the epoch.
        weights: The global model.
    """

    reply_type: ClassVar[type[Reply]] = GradientReply
    rule = RequestRule(
        "the summed gradient over its samples in a batch, perhaps a single one, with their number and summed loss",
        order=Epoch,
        after=CountReport,
        together=True,
        merges=True,
    )

    round: int
    batch: int
    weights: Weights

    @override
    def changes(self, message: Extra) -> Params:
        return self.weights.params

    def check(self, reply: GradientReply) -> None:
        """Refuse other shapes than those of the model, and a batch without samples."""
        require_like(reply.gradient, self.weights.params, "gradient")
        require_like(reply.buffers, self.weights.buffers, "buffers")
        if reply.samples < 1:
            raise ReplyRefusedError(f"{reply.samples} samples in a batch")


@record("GradientSteps")
class GradientSteps(Gradient):
    """Compute the sum of the gradients along several steps of a client on its own part of a batch.

    Args:
        steps: The number of steps, at least 2.
        lr: The server's learning rate, which clients use for their steps too.
    """

    steps: int = 2
    lr: float = 0.0


@record("StepsReply")
class StepsReply(Reply):
    """The placeholders that a client could not train.

    Args:
        missing: One bool per placeholder: True if the pool was empty (``not_trained``).
        exhausted: Placeholders whose pools are empty now, int64.
        loss: The summed loss of the samples, each before its step; a scalar, float32.
    """

    missing: Tensor
    exhausted: Tensor
    loss: Tensor


@record("Steps")
class Steps(Request):
    """Take one SGD step on one sample for each placeholder, on the travelling model (Stratify, Algorithm 3).

    Args:
        round: The epoch, counted from 1.
        labels: The placeholders to train, in order, int64.
        refill: Placeholders whose pools are refilled first, int64.
        fresh: Whether the client forgets first what it drew earlier in this epoch.
        window: See ``Reserve``.
    """

    reply_type: ClassVar[type[Reply]] = StepsReply
    rule = RequestRule(
        "the travelling model after a step on each of a few samples, one by one, with their summed loss",
        order=Epoch,
        after=CountReport,
        relay=True,
        discloses=frozenset({"sizes"}),
    )

    round: int
    labels: Tensor
    refill: Tensor
    fresh: bool
    window: tuple[float, float] = ALL

    def check(self, reply: StepsReply) -> None:
        """Refuse a reply without one answer per label, or without the loss as one number."""
        require_shape(reply.missing, (len(self.labels),), torch.bool, "missing")
        require_shape(reply.exhausted, (-1,), torch.int64, "exhausted")
        if reply.loss.ndim != 0 or not reply.loss.is_floating_point():
            raise ReplyRefusedError("the loss must be one number")
