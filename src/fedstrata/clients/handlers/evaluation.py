"""Answer requests to evaluate a model on the client's own samples."""

from __future__ import annotations

import numpy as np

from fedstrata.base.errors import FedstrataError
from fedstrata.clients.client import Client
from fedstrata.clients.handlers.fit import BUFFERS, starting_point, statistics
from fedstrata.clients.handling import handles
from fedstrata.clients.training.devices import on_device
from fedstrata.clients.training.local import LocalData, train
from fedstrata.clients.training.personal import apart, personal_model
from fedstrata.evaluation.messages import Evaluate, Evaluated, EvaluateTask, TaskEvaluated
from fedstrata.evaluation.metrics import values_of
from fedstrata.evaluation.predictions import Predictions, Rows, collect, predict
from fedstrata.evaluation.sums import sums_of, task_sums
from fedstrata.federation.messages import Weights


@handles(EvaluateTask)
def evaluate_task(client: Client, request: EvaluateTask) -> TaskEvaluated:
    """Evaluate a model as ``evaluate`` does, for tasks other than plain classification."""
    rows = _measured(client, request)
    assert isinstance(rows, Rows)
    return TaskEvaluated(task_sums(rows, client.context.config.task.tables), _values(client, rows))


@handles(Evaluate)
def evaluate(client: Client, request: Evaluate) -> Evaluated:
    """Evaluate a model on the client's own test or validation samples. The client's state does not change."""
    predictions = _measured(client, request)
    assert isinstance(predictions, Predictions)
    sums = sums_of(predictions, request.score_bins, request.confidence_bins)
    return Evaluated(sums, _values(client, predictions))


def _measured(client: Client, request: Evaluate) -> Predictions | Rows:
    """Return the model's predictions for the client's test or validation samples.

    Raises:
        FedstrataError: No samples were held out for ``request.part``.
    """
    context = client.context
    held, settings, device = context.held, context.evaluation, context.cached(on_device)
    parts, split = (
        (held.own_validation, "train") if request.part == "validation" else (held.own_test, held.own_test_split)
    )
    if parts is None:
        raise FedstrataError(f"this client does not have {request.part} samples")
    client.authorize_release(len(parts[client.number]))
    local = context.config.training.batch_norm == "local" and bool(context.cached(statistics))
    weights = personal(client, request) if request.personal else request.weights
    # If clients keep their own BatchNorm statistics, the global model does not have statistics. Normalise with the
    # statistics of each batch then.
    batch_statistics = local and not (request.personal and BUFFERS in client.state)
    return (predict if context.config.task.has_classes else collect)(
        device.model,
        weights,
        device.data,
        "test" if split == "test" else "train",
        parts[client.number],
        batch_size=settings.batch_size,
        batch_statistics=batch_statistics,
    )


def _values(client: Client, predictions: Predictions | Rows) -> dict[str, float] | None:
    """Return the values of all metrics that are defined; None if the client's site does not disclose these values."""
    if not client.context.tells_values:
        return None
    measured = values_of(client.context.evaluation.metrics, predictions) if len(predictions) else {}
    return {label: value for label, value in measured.items() if value is not None}


def personal(client: Client, request: Evaluate) -> Weights:
    """Return the client's personal model: the global model with the client's own parts, after fine-tuning.

    The client's own parts may be BatchNorm statistics, layers, or a whole model. Fine-tuning takes ``request.epochs``
    epochs on the client's training samples.
    """
    weights = personal_model(client, starting_point(client, request))
    if not request.epochs or not len(client):
        return weights
    tuner = apart(client, "fine-tune", request.epochs)
    data = LocalData(tuner, np.arange(len(client)), tuner.context.cached(on_device).device)
    return train(tuner, weights, data, round=request.round, message={}, objective=tuner.context.personal).weights
