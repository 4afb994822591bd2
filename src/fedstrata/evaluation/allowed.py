"""List the requests that ask clients to evaluate a model on their own samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedstrata.data.tasks.base import Task
from fedstrata.evaluation.messages import Evaluate, EvaluateTask, Part
from fedstrata.evaluation.settings import Evaluation
from fedstrata.federation.allowed import Allowed


def request_of(task: Task | None) -> type[Evaluate]:
    """Return the Python class of the evaluation requests for a task. For plain classification, the task is None."""
    return Evaluate if task is None or task.has_classes else EvaluateTask


def allowed_in_evaluation(
    evaluation: Evaluation, rounds: int, *, elsewhere: bool, request: type[Evaluate] = Evaluate
) -> list[Allowed]:
    """Return the requests that evaluations may send to clients, with the allowed values of each request's fields.

    Args:
        evaluation: The evaluation settings.
        rounds: The number of rounds of the run. The model of the last round is always evaluated.
        request: The Python class of the requests, which depends on the task.
        elsewhere: Whether the samples are at the sites of a deployment. In this case, the sites evaluate all models.
    """
    metrics, evaluated = evaluation.metrics, evaluation.evaluated_rounds(rounds)
    bins = {key: max(getattr(metric, key) for metric in metrics) for key in ("score_bins", "confidence_bins")}

    def measures(part: Part, samples: str, *, personal: bool = False, epochs: int = 0) -> Allowed:
        where: dict[str, Any] = {"part": part, "personal": personal, "epochs": epochs, **bins}
        rule = replace(request.rule, description=f"{request.rule.description}, {samples}")
        return Allowed(request, where=where, rounds=evaluated.__contains__, rule=rule)

    requests = []
    if elsewhere:
        unless = "" if evaluation.client_test is not None else " (unless the server has test samples)"
        requests.append(measures("test", f"over its test samples{unless}"))
        if evaluation.validation is not None:
            requests.append(measures("validation", "over its validation samples"))
    if evaluation.fine_tune is not None and evaluation.client_test is not None:
        samples = "over its test samples, of a model tuned on its own samples"
        requests.append(measures("test", samples, personal=True, epochs=evaluation.fine_tune))
    return requests
