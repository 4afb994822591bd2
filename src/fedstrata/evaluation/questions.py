"""What clients are asked where a model is measured on samples of their own, declared."""

from __future__ import annotations

from typing import Any

from fedstrata.evaluation.messages import Evaluate, Part
from fedstrata.evaluation.settings import Evaluation
from fedstrata.federation.questions import Questions, RequestRule


def evaluation_questions(evaluation: Evaluation, rounds: int, *, elsewhere: bool) -> Questions:
    """What is asked after a round.

    Args:
        evaluation: The settings.
        rounds: The last round.
        elsewhere: Whether the clients' samples are at sites that bring their own, so that all is measured there.
    """
    metrics = evaluation.metrics
    bins = {key: max(getattr(metric, key) for metric in metrics) for key in ("score_bins", "confidence_bins")}

    def asked(part: Part, description: str, *, personal: bool = False, epochs: int = 0) -> RequestRule:
        where: dict[str, Any] = {"part": part, "personal": personal, "epochs": epochs, **bins}
        return RequestRule(
            Evaluate,
            "how often the model takes samples of one class for another, and sums of its losses and scores, "
            f"{description}",
            phase="evaluation",
            where=where,
            due=lambda round: evaluation.due(round, rounds),
            discloses=frozenset({"labels", "sizes"}),
        )

    found: list[RequestRule] = []
    if elsewhere:
        unless = "" if evaluation.client_test is not None else " (unless the server has test samples)"
        found.append(asked("test", f"over its test samples{unless}"))
        if evaluation.validation is not None:
            found.append(asked("validation", "over its validation samples"))
    if evaluation.fine_tune is not None and evaluation.client_test is not None:
        description = "over its test samples, of a model tuned on its own"
        found.append(asked("test", description, personal=True, epochs=evaluation.fine_tune))
    return tuple(found)
