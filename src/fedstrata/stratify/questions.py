"""What Stratify asks, declared: of an epoch only what was set aside for it, and batch after batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedstrata.federation.questions import Bound, Fact, Questions, RequestRule, Rule
from fedstrata.stratify.masking.messages import (
    Assign,
    Compare,
    CountReport,
    Enlist,
    OpenKeys,
    OpenTotals,
    SealLabels,
    ShareReport,
    TagReport,
)
from fedstrata.stratify.messages import Gradient, GradientSteps, LabelReport, Reserve, Steps

SIZES: frozenset[Fact] = frozenset({"sizes"})


class Epoch(Rule):
    """Samples are set aside first, for batches that are to come; each batch trains once, in order."""

    def __init__(self) -> None:
        self._begun = False
        self._set_aside: set[int] = set()
        self._last = -1

    def refusal(self, request: Any) -> str:
        """Positions of batches that are over, a batch out of order, or one that nothing was set aside for."""
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
        """The epoch has begun; a batch is over once it is trained."""
        if isinstance(request, Gradient):
            self._last = request.batch
        else:
            self._begun = True

    def answered(self, request: Any, reply: Any) -> None:
        """What was really set aside."""
        if isinstance(request, Reserve):
            batches = getattr(reply, "batches", request.batches)
            self._set_aside.update(torch.unique(batches[~reply.missing]).tolist())


def _numbers(tensor: Tensor) -> bool:
    return tensor.dim() == 1 and tensor.dtype == torch.int64


def batch_questions(size: int, window: Bound, lr: Bound | None, local_steps: int, **when: Any) -> Questions:
    """What union batches ask.

    Args:
        size: Samples in a batch.
        window: Of each label's samples, which part is there.
        lr: With which clients step; None for one step a batch.
        local_steps: Steps of a client on its part of a batch.
        when: In which rounds; see ``RequestRule``.
    """
    common: dict[str, Any] = {"times": None, "rule": Epoch, **when}
    description = "for which of the positions that it was asked to fill it has no sample left"
    reserve = RequestRule(Reserve, description, where={"window": window}, discloses=SIZES, **common)
    description = (
        "the summed gradient over its samples in a batch, perhaps a single one, with their number and summed loss"
    )
    because = f"is over a part of a batch of {size} sample{'s' * (size > 1)}"
    few: dict[str, Any] = {"most": size, "because": because, "merges": True}
    if lr is None:
        return reserve, RequestRule(Gradient, description, together=True, **few, **common)
    description = f"{description}; along {local_steps} steps on them"
    where = {"steps": local_steps, "lr": lr}
    return reserve, RequestRule(GradientSteps, description, together=True, where=where, **few, **common)


def single_question(window: Bound, longest: int, **when: Any) -> RequestRule:
    """What training sample by sample asks.

    Args:
        window: Of each label's samples, which part is there.
        longest: Samples of a task at most.
        when: In which rounds; see ``RequestRule``.
    """
    where = {"window": window, "labels": Bound(f"at most {longest} of them", lambda value, _: len(value) <= longest)}
    description = "the travelling model after a step on each of a few samples, one by one, with their summed loss"
    few: dict[str, Any] = {"most": 1, "because": "trains a model on one sample at a time"}
    return RequestRule(
        Steps, description, times=None, rule=Epoch, relay=True, where=where, discloses=SIZES, **few, **when
    )


def enrolment_questions(masking: str, *, weighted: bool, classes: int | None) -> Questions:
    """What clients are asked before the first round.

    Args:
        masking: The mode.
        weighted: Whether clients are chosen by how many samples they have.
        classes: C; None where it is not known.
    """

    def once(kind: Any, description: str, **more: Any) -> RequestRule:
        return RequestRule(kind, description, phase="enrolment", **more)

    assign = once(Assign, "how many labels it holds")
    if masking == "none":
        description = "which labels it holds and how many samples of each, in the clear"
        return once(LabelReport, description, discloses=frozenset({"labels", "sizes"})), assign
    compares = masking != "prf"
    keys = once(OpenKeys, "the public keys that all clients share", where={"comparing": compares})
    description = "sums over all clients, label by label under random names, which it decrypts"
    totals = once(OpenTotals, description)
    counts = once(CountReport, "how many samples of each label it holds, encrypted")
    description = "its share of all samples of each of its labels, under random names"
    shares = (once(ShareReport, description, discloses=SIZES),) if weighted else ()
    agreed: dict[str, Any] = {} if classes is None else {"where": {"classes": classes}}
    if masking == "prf":
        own: Questions = (once(TagReport, "a keyed hash of each of its labels"), counts)
    else:
        own = (
            once(SealLabels, "its labels, encrypted", **agreed),
            once(Compare, "which of its labels are on the encrypted list of all labels", **agreed),
            once(Enlist, "those that are not, encrypted for the list", **agreed),
            counts,
        )
    return keys, *own, totals, *shares
