"""Define the requests to evaluate a model on a client's samples, and the replies to these requests."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch

from fedstrata.base.errors import ReplyRefusedError
from fedstrata.base.records import record
from fedstrata.evaluation.sums import EvaluationSums, TaskSums
from fedstrata.federation.messages import Reply, Request, RequestRule, Weights
from fedstrata.federation.reply_checks import require_shape

Part = Literal["test", "validation"]


@record("Evaluated")
class Evaluated(Reply):
    """The result of an evaluation on a client's own samples.

    Args:
        sums: The sums over the client's samples, from which metrics can be computed.
        values: A mapping from each metric to its value on the client's samples; None if the site withholds the values.
            Metrics with undefined values are left out.
    """

    sums: EvaluationSums
    values: dict[str, float] | None

    def require(self, classes: int) -> None:
        """Raise an error if the number of classes in the sums is not ``classes``.

        Raises:
            ReplyRefusedError: The sums have the wrong number of classes.
        """
        require_shape(self.sums.confusion, (classes, classes), torch.int64, "confusion")
        require_shape(self.sums.scores, (classes, 2, -1), torch.int64, "scores")


@record("Evaluate")
class Evaluate(Request):
    """A request to evaluate a model on the client's own test or validation samples.

    Args:
        round: The round after which the model is evaluated.
        weights: The global model.
        part: The samples to evaluate on: ``"test"`` or ``"validation"``.
        personal: Whether the client first personalises the model: the client loads its own BatchNorm statistics, and
            fine-tunes the model.
        epochs: The number of epochs of fine-tuning on the client's training samples.
        score_bins: The number of bins in each class's histogram of scores; see ``EvaluationSums``.
        confidence_bins: The number of bins in the histogram of confidence; see ``EvaluationSums``.
    """

    reply_type: ClassVar[type[Reply]] = Evaluated
    rule = RequestRule(
        "how often the model confuses each pair of classes, and sums of its losses and scores",
        phase="evaluation",
        discloses=frozenset({"labels", "sizes"}),
    )

    round: int
    weights: Weights
    part: str
    personal: bool
    epochs: int
    score_bins: int
    confidence_bins: int

    def check(self, reply: Evaluated) -> None:
        """Raise an error if a reply has impossible counts or the wrong number of bins."""
        sums = reply.sums
        require_shape(sums.confusion, (-1, -1), torch.int64, "confusion")
        require_shape(sums.scores, (-1, 2, self.score_bins), torch.int64, "scores")
        require_shape(sums.calibration, (self.confidence_bins, 2), torch.float64, "calibration")
        counts = (sums.confusion, sums.scores, sums.calibration)
        if any(bool((count < 0).any()) for count in counts) or sums.samples < 0 or sums.loss < 0:
            raise ReplyRefusedError("the reply contains a negative count")
        if int(sums.confusion.sum()) != sums.samples:
            raise ReplyRefusedError(
                f"the confusion matrix contains {int(sums.confusion.sum())} samples, but 'samples' is {sums.samples}"
            )
        members = sums.scores[:, 1].sum(dim=1)
        if self.score_bins and not torch.equal(members, sums.confusion.sum(dim=1)):
            raise ReplyRefusedError("the number of scores differs from the number of samples in the confusion matrix")


@record("TaskEvaluated")
class TaskEvaluated(Reply):
    """The result of an evaluation on a client's own samples, for tasks other than plain classification.

    Args:
        sums: The sums over the client's samples, from which metrics can be computed.
        values: See ``Evaluated``.
    """

    sums: TaskSums
    values: dict[str, float] | None

    def require(self, outputs: int) -> None:
        """Do nothing, because ``EvaluateTask.check`` has checked the sums."""


@record("EvaluateTask")
class EvaluateTask(Evaluate):
    """A request to evaluate a model, as in ``Evaluate``, for tasks other than plain classification."""

    reply_type: ClassVar[type[Reply]] = TaskEvaluated
    rule = RequestRule(
        "sums of the model's losses and errors on its samples",
        phase="evaluation",
        discloses=frozenset({"sizes"}),
    )

    def check(self, reply: TaskEvaluated) -> None:  # type: ignore[override]
        """Raise an error if a reply contains a negative count, or sums that are not floating-point numbers."""
        sums = reply.sums
        if sums.samples < 0 or sums.weight < 0:
            raise ReplyRefusedError("the reply contains a negative count")
        if any(not table.is_floating_point() for table in sums.tables.values()):
            raise ReplyRefusedError("the reply contains sums that are not floating-point numbers")
