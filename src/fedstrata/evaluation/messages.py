"""What a client is asked when a model is to be measured where the data are."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch

from fedstrata.errors import ReplyRefusedError
from fedstrata.evaluation.tally import Tally
from fedstrata.federation.messages import Reply, Request, Weights
from fedstrata.federation.reply_checks import require_shape
from fedstrata.records import record, unsent

Part = Literal["test", "validation"]


@record
class Evaluated(Reply):
    """How good a model is on a client's own samples.

    Args:
        tally: Sums.
        values: Metrics by their label, exact, those that have a value; None where the site does not tell them.
    """

    tally: Tally
    values: dict[str, float] | None


@record
class Evaluate(Request):
    """Measure a model on samples of the client's own that it does not train on.

    Args:
        round: The round.
        weights: The global model.
        part: Which samples.
        personal: Whether the client puts in what it keeps of its own (BatchNorm's statistics) and tunes the model.
        epochs: Of that tuning, on the samples that it trains on.
        score_bins: Bins of each class's scores in the tally.
        confidence_bins: Bins of the confidence.
        classes: C; stays at the server.
    """

    reply_type: ClassVar[type[Reply]] = Evaluated

    round: int
    weights: Weights
    part: str
    personal: bool
    epochs: int
    score_bins: int
    confidence_bins: int
    classes: int = unsent(0)

    def work(self, samples: int) -> float:
        """Sample-gradients: those of the tuning."""
        return float(samples * self.epochs)

    def check(self, reply: Evaluated) -> None:
        """Counts that can be, of as many bins as were asked for."""
        tally, classes = reply.tally, self.classes
        require_shape(tally.confusion, (classes, classes), torch.int64, "confusion")
        require_shape(tally.scores, (classes, 2, self.score_bins), torch.int64, "scores")
        require_shape(tally.calibration, (self.confidence_bins, 2), torch.float64, "calibration")
        counts = (tally.confusion, tally.scores, tally.calibration)
        if any(bool((count < 0).any()) for count in counts) or tally.samples < 0 or tally.loss < 0:
            raise ReplyRefusedError("a negative count")
        if int(tally.confusion.sum()) != tally.samples:
            raise ReplyRefusedError(f"{int(tally.confusion.sum())} samples in the confusion matrix of {tally.samples}")
        members = tally.scores[:, 1].sum(dim=1)
        if self.score_bins and not torch.equal(members, tally.confusion.sum(dim=1)):
            raise ReplyRefusedError("scores of other samples than those in the confusion matrix")
