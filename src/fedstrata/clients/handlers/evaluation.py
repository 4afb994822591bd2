"""How a client measures a model on samples of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from fedstrata.base.errors import FedstrataError
from fedstrata.base.rng import rng
from fedstrata.clients.client import Client
from fedstrata.clients.context import ClientContext
from fedstrata.clients.handlers.fit import BUFFERS, starting_point, statistics
from fedstrata.clients.handling import handles
from fedstrata.clients.training.devices import placed
from fedstrata.clients.training.local import LocalData, train
from fedstrata.evaluation.messages import Evaluate, Evaluated
from fedstrata.evaluation.predictions import predict
from fedstrata.evaluation.sums import sums_of
from fedstrata.federation.messages import Weights


@handles(Evaluate)
def evaluate(client: Client, request: Evaluate) -> Evaluated:
    """Its own part's sums and metrics; nothing of the client's changes.

    Raises:
        FedstrataError: No such part was held out.
    """
    context = client.context
    held, settings, place = context.held, context.evaluation, context.once(placed)
    parts, split = (
        (held.own_validation, "train") if request.part == "validation" else (held.own_test, held.own_test_split)
    )
    if parts is None:
        raise FedstrataError(f"no samples were held out for {request.part!r}")
    client.release(len(parts[client.number]))
    local = context.config.training.batch_norm == "local" and bool(context.once(statistics))
    weights = personal(client, request) if request.personal else request.weights
    # Without statistics of its own, those of the samples at hand are the only ones.
    lacks = local and not (request.personal and BUFFERS in client.state)
    found = predict(
        place.model,
        weights,
        place.data,
        "test" if split == "test" else "train",
        parts[client.number],
        batch_size=settings.batch_size,
        batch_statistics=lacks,
    )
    values = None
    if context.tells_values:
        measured = {metric.label: metric.of(found) if len(found) else None for metric in settings.metrics}
        values = {label: value for label, value in measured.items() if value is not None}
    return Evaluated(sums_of(found, request.score_bins, request.confidence_bins), values)


def personal(client: Client, request: Evaluate) -> Weights:
    """The global model with what the client keeps of its own, tuned on the samples that it trains on."""
    weights = starting_point(client, request)
    if not request.epochs or not len(client):
        return weights
    tuner = client.context.once(tuning(request.epochs))
    twin = Client(client.number, tuner, client.state)
    data = LocalData(twin, np.arange(len(client)), tuner.once(placed).device)
    return train(twin, weights, data, round=request.round, message={}, objective=tuner.personal).weights


@cache
def tuning(epochs: int) -> Callable[[ClientContext], ClientContext]:
    """What makes the world in which clients tune a model: other epochs, and random numbers of its own.

    Args:
        epochs: Of a client's tuning.
    """

    def make(context: ClientContext) -> ClientContext:
        config = context.config
        training = config.training.model_copy(update={"local_epochs": epochs, "local_steps": None})
        seed = int(rng(config.seed, "fine-tune").integers(2**63))
        # Model and data stay where they are: a GPU would hold them twice.
        prepared: dict[Callable[[ClientContext], Any], Any] = {placed: context.once(placed)}
        return replace(context, config=replace(config, training=training, seed=seed), prepared=prepared)

    return make
