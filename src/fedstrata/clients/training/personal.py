"""Add personal parts to local training: local layers, a first training stage, personal models, and fine-tuning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from fedstrata.base.rng import rng
from fedstrata.clients.client import Client, ClientContext
from fedstrata.clients.training.devices import on_device
from fedstrata.clients.training.local import LocalData, Outcome, train
from fedstrata.federation.messages import Fit, Weights
from fedstrata.objectives.base import is_plain

LAYERS = "layers"
"""The key under which a client's state stores the layers that stay at the client (``Objective.stays``)."""

PERSONAL = "personal"
"""The key under which a client's state stores the client's personal model: a mapping from names to tensors."""


def with_kept_layers(client: Client, weights: Weights) -> Weights:
    """Return the model ``weights``, but with the client's own values in layers that stay at the client.

    If the client stores no layers, return the model unchanged.
    """
    kept = client.state.get(LAYERS)
    # Checkpoints do not store the memory format of tensors. Restore it, because it affects rounding in convolutions.
    return Weights(weights.params | client.model.laid_out(kept), weights.buffers) if isinstance(kept, dict) else weights


def train_in_stages(client: Client, weights: Weights, data: LocalData, request: Fit) -> Outcome:
    """Train all stages of a round with ``train``, and store the layers that stay at the client.

    Args:
        client: The client.
        weights: The model to start with.
        data: The samples to train on.
        request: The request.

    Returns:
        The outcome of training with the run's objective. The number of samples is the sum over all stages. In the
        returned model, layers that stay at the client have the server's values, not the trained values.
    """
    start, before = first_trained(client, weights, data, request.round)
    outcome = train(client, start, data, round=request.round, message=request.message)
    after = train_personal(client, start, data, request.round)
    result = keep_layers(client, outcome.weights, request.weights)
    return replace(outcome, weights=result, seen=before + outcome.seen + after)


def keep_layers(client: Client, trained: Weights, received: Weights) -> Weights:
    """Store the layers that stay at the client. Return the trained model with these layers as the server sent them.

    Args:
        client: The client.
        trained: The model after training.
        received: The model that the server sent.
    """
    objective, model = client.context.objective, client.model
    if is_plain(objective, "stays"):
        return trained
    names = [name for name in trained.params if objective.stays(name, model)]
    client.state[LAYERS] = {name: trained.params[name] for name in names}
    return Weights(trained.params | {name: received.params[name] for name in names}, trained.buffers)


def first_trained(client: Client, weights: Weights, data: LocalData, round: int) -> tuple[Weights, int]:
    """Train the first stage of a round (``Objective.first_stage``), if there is one.

    Args:
        client: The client.
        weights: The model to start with.
        data: The samples to train on.
        round: The round, counted from 1.

    Returns:
        The model, in which only the stage's parameters have changed, and the total number of samples in all batches.
    """
    stage = client.context.objective.first_stage()
    if stage is None:
        return weights, 0
    alone = apart(client, "first-stage", stage.epochs)
    outcome = train(alone, weights, data, round=round, message={}, objective=stage.objective)
    trained = {n: w for n, w in outcome.weights.params.items() if stage.objective.trains(n, client.model)}
    return Weights(weights.params | trained, weights.buffers), outcome.seen


def train_personal(client: Client, weights: Weights, data: LocalData, round: int) -> int:
    """Train and store the client's personal model, if the objective has a ``personal_stage``.

    The message to the stage's objective contains the parameters of the global model under the key ``global``.
    A client's first personal model starts from the global model.

    Args:
        client: The client.
        weights: The global model.
        data: The samples to train on.
        round: The round, counted from 1.

    Returns:
        The total number of samples in all batches.
    """
    stage = client.context.objective.personal_stage()
    if stage is None:
        return 0
    alone, own = apart(client, "personal-stage", stage.epochs), personal_model(client, weights)
    message = {"global": weights.params}
    outcome = train(alone, own, data, round=round, message=message, objective=stage.objective)
    if outcome.steps:
        client.state[PERSONAL] = {**outcome.weights.params, **outcome.weights.buffers}
    return outcome.seen


def personal_model(client: Client, weights: Weights) -> Weights:
    """Return the client's personal model, or the model ``weights`` if the client has no personal model yet."""
    kept = client.state.get(PERSONAL)
    if not isinstance(kept, dict):
        return weights
    values = client.model.laid_out(kept)
    return Weights({name: values[name] for name in weights.params}, {name: values[name] for name in weights.buffers})


def apart(client: Client, purpose: str, epochs: int | None) -> Client:
    """Return a copy of the client with different random numbers, for additional training such as fine-tuning.

    Args:
        client: The client.
        purpose: A name for the additional training. Different names give different random numbers.
        epochs: Number of epochs. Default: the number of epochs or steps in ``training``.
    """
    return Client(client.number, client.context.cached(_apart(purpose, epochs)), client.state, model=client.model)


@cache
def _apart(purpose: str, epochs: int | None) -> Callable[[ClientContext], ClientContext]:
    """Return a function that replaces a context's seed and number of epochs."""

    def make(context: ClientContext) -> ClientContext:
        config = context.config
        training = config.training.lasting(epochs)
        seed = int(rng(config.seed, purpose).integers(2**63))
        # The new context shares the model and the data with ``context``, so that a GPU does not store them twice.
        prepared: dict[Callable[[ClientContext], Any], Any] = {on_device: context.cached(on_device)}
        return replace(context, config=replace(config, training=training, seed=seed), prepared=prepared)

    return make
