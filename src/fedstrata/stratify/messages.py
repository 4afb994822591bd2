"""Requests of Stratify to reserve samples, compute gradients and take SGD steps, and the replies to these requests.

The server fixes the sequence of labels of an epoch (the schedule). A *position* is one entry of the schedule: one
client trains on one sample of the entry's label. A *placeholder* is a number that stands for a label, so that the
server does not need to know the label. The *pool* of a placeholder contains the client's unused samples of this label.
"""

from __future__ import annotations

from dataclasses import field, replace
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

ALL = (0.0, 1.0)
"""The value of ``Reserve.window`` that lets a client use all its samples."""

NO_SUCH_BATCH = "the reply moves a sample to a batch that is finished or does not exist"
"""The reason for refusing a reply that moves a sample to a finished or unknown batch."""


class Epoch(Order):
    """The order of requests within an epoch, enforced by the client.

    Clients must reserve samples for a batch before they train on the batch. Clients train on batches in ascending
    order, and on each batch at most once.
    """

    def __init__(self) -> None:
        self._begun = False
        self._set_aside: set[int] = set()
        self._last = -1

    def refusal(self, request: Any) -> str:
        """Return the reason why a request is refused; an empty string if the request is accepted.

        The client refuses malformed requests. It also refuses requests for batches that have no reserved samples, were
        already used, or come in the wrong order.
        """
        if isinstance(request, Gradient):
            if request.batch <= self._last:
                return f"batches must be in strictly ascending order, but batch {request.batch} came after {self._last}"
            return "" if request.batch in self._set_aside else f"no samples were reserved for batch {request.batch}"
        if not (_numbers(request.labels) and _numbers(request.refill) and len(request.labels)):
            return "labels and refill must be lists of integers (int64), and labels must not be empty"
        if request.fresh == self._begun:
            again = "has already begun" if self._begun else "has not begun"
            return f"fresh = {request.fresh}, but the epoch {again}"
        if isinstance(request, Reserve):
            if not _numbers(request.batches) or len(request.batches) != len(request.labels):
                return "batches must contain one batch index for each label"
            if (first := int(request.batches.min())) <= self._last:
                return f"samples are requested for batch {first}, but batch {self._last} was already trained"
        return ""

    def asked(self, request: Any) -> None:
        """Record that the epoch has begun, or that the batch of a ``Gradient`` request has now been used."""
        if isinstance(request, Gradient):
            self._last = request.batch
        else:
            self._begun = True

    def answered(self, request: Any, reply: Any) -> None:
        """Record the batches for which the client reserved samples."""
        if isinstance(request, Reserve):
            batches = getattr(reply, "batches", request.batches)
            self._set_aside.update(torch.unique(batches[~reply.missing]).tolist())


def _numbers(tensor: Tensor) -> bool:
    return tensor.dim() == 1 and tensor.dtype == torch.int64


@record("ReserveReply")
class ReserveReply(Reply):
    """The reply to ``Reserve``: the entries of the request for which the client could not reserve a sample.

    Args:
        missing: True for each entry for which the client could not reserve a sample, because it has already used all
            its samples of the label.
        exhausted: The placeholders (numbers that stand for labels) for which the client has no unused samples left
            after this request, int64.
    """

    missing: Tensor
    exhausted: Tensor


@record("GatheredReply")
class GatheredReply(ReserveReply):
    """A client's reply to ``Reserve``, if the client may move its samples to other batches.

    Samples are moved to other batches so that each gradient covers at least ``privacy.min_samples`` samples.

    Args:
        batches: For each entry of the request, the batch in which the client now trains on the sample, int64. If
            ``missing`` is True for an entry, its batch has no meaning.
        held: True for each entry whose sample the client holds back. A client holds back a sample that it cannot move
            to a batch with enough of its samples. ``missing`` is then also True, and the sample stays unused.
    """

    batches: Tensor
    held: Tensor


@record("Reserve")
class Reserve(Request):
    """A request to reserve samples for the batches of an epoch (Stratify, Algorithm 4: training request).

    Args:
        round: The epoch, counted from 1.
        batches: For each sample to reserve, the index of its batch, int64, ascending.
        labels: The placeholder (a number that stands for a label) of each sample to reserve, int64.
        refill: Placeholders of labels (int64). From now on, the client may use all its samples with these labels again.
        fresh: True for the client's first request of the epoch. The client then discards its reservations from an
            earlier, interrupted attempt at this epoch.
        window: For each label, the range of samples that the client may use: two fractions (from, to) in [0, 1]. The
            samples are sorted by their time of arrival.
    """

    reply_type: ClassVar[type[Reply]] = ReserveReply
    rule = RequestRule(
        "the requested positions for which it has no sample left",
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
        """Raise ``ReplyRefusedError`` if the reply omits a requested sample, or moves a sample to a wrong batch."""
        require_shape(reply.missing, (len(self.labels),), torch.bool, "missing")
        require_shape(reply.exhausted, (-1,), torch.int64, "exhausted")
        if isinstance(reply, GatheredReply):
            require_shape(reply.batches, (len(self.labels),), torch.int64, "batches")
            require_shape(reply.held, (len(self.labels),), torch.bool, "held")
            moved = reply.batches[~reply.missing]
            if bool((reply.held & ~reply.missing).any()):
                raise ReplyRefusedError("the reply marks a sample both as held back and as used")
            # A batch that was already trained cannot get more samples.
            if len(moved) and int(moved.min()) < int(self.batches.min()):
                raise ReplyRefusedError(NO_SUCH_BATCH)


@record("GradientReply")
class GradientReply(Reply):
    """The gradient and the loss of a client, summed over the samples that the client reserved for a batch.

    Args:
        gradient: A mapping from each parameter's name to the gradient of the summed loss with respect to this
            parameter.
        samples: The number of samples.
        loss: The sum of the samples' losses.
        buffers: The model's buffers after the batch. They are equal at all clients of the batch.
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

    @property
    def size(self) -> float:
        """The number by which the server divides the summed gradient before it takes a step."""
        return self.samples


@record("WeightedGradientReply")
class WeightedGradientReply(GradientReply):
    """The summed gradient and loss for a batch, for tasks in which samples have different weights.

    Args:
        weight: The sum of the weights of the samples, such as the total number of tokens.
    """

    weight: float = 0.0

    @property
    def size(self) -> float:
        """The sum of the samples' weights."""
        return self.weight


@record("Gradient")
class Gradient(ModelRequest):
    """A request for the gradient of the loss, summed over the reserved samples of a batch (Stratify, Algorithm 4).

    Args:
        round: The epoch, counted from 1.
        batch: The index of the batch in the epoch, counted from 0.
        weights: The global model.
    """

    reply_type: ClassVar[type[Reply]] = GradientReply
    rule = RequestRule(
        "the summed gradient over its samples in a batch (possibly only one), their number and their summed loss",
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
        """Raise ``ReplyRefusedError`` if a shape differs from the model's, or if the number of samples is 0."""
        require_like(reply.gradient, self.weights.params, "gradient")
        require_like(reply.buffers, self.weights.buffers, "buffers")
        if reply.samples < 1:
            raise ReplyRefusedError(
                f"the reply covers {reply.samples} samples, but a gradient needs at least one sample"
            )


@record("GradientSteps")
class GradientSteps(Gradient):
    """A request for several SGD steps on the client's samples in a batch, and for the sum of the steps' gradients.

    Args:
        steps: The number of steps, at least 2.
        lr: The learning rate, both of the server's step and of the clients' local steps.
    """

    steps: int = 2
    lr: float = 0.0


@record("LabelWeightedGradient")
class LabelWeightedGradient(Gradient):
    """A request for the gradient of a weighted sum of losses, in which a sample's weight depends on its label.

    Args:
        factors: The weight of each label, in the order of the placeholders 0 … C − 1, shape (C,), float32.
    """

    factors: Tensor = field(default_factory=lambda: torch.ones(0))


@record("StepsReply")
class StepsReply(Reply):
    """The reply to ``Steps``: the labels on which the client could not train, and the sum of the samples' losses.

    Args:
        missing: True for each requested label on which the client did not train, because it had no unused sample of the
            label.
        exhausted: The placeholders (numbers that stand for labels) for which the client has no unused samples left
            after this request, int64.
        loss: The sum of the samples' losses as a scalar (float32). Each loss is computed before the step on the sample.
    """

    missing: Tensor
    exhausted: Tensor
    loss: Tensor


@record("Steps")
class Steps(Request):
    """A request to take one SGD step for each label in a list, on one sample of this label (Stratify, Algorithm 3).

    The client takes the steps on the model that travels from client to client.

    Args:
        round: The epoch, counted from 1.
        labels: The labels to train on, in order, as placeholders (numbers that stand for labels), int64.
        refill: Placeholders of labels (int64). From now on, the client may use all its samples with these labels again.
        fresh: True for the client's first request of the epoch. The client then forgets which samples it drew in an
            earlier, interrupted attempt at this epoch.
        window: For each label, the range (from, to) of samples that the client may use; see ``Reserve``.
    """

    reply_type: ClassVar[type[Reply]] = StepsReply
    rule = RequestRule(
        "the travelling model after SGD steps on a few single samples, and the sum of their losses",
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
        """Raise ``ReplyRefusedError`` if the reply omits a label of the request, or if the loss is not a scalar."""
        require_shape(reply.missing, (len(self.labels),), torch.bool, "missing")
        require_shape(reply.exhausted, (-1,), torch.int64, "exhausted")
        if reply.loss.ndim != 0 or not reply.loss.is_floating_point():
            raise ReplyRefusedError("the loss must be a scalar of a floating-point type")
