"""A round of FedAvg in which the server sees only the sum of the clients' updates (``privacy.sums``)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import Fit, Weights
from fedstrata.federation.secure.fit import FitForm

if TYPE_CHECKING:
    from fedstrata.methods.base import Recipe, RecipeState


def secure_round(recipe: Recipe, federation: Federation, state: RecipeState) -> tuple[RecipeState, dict[str, Any]]:
    """Select clients, train them, and add the mean of their updates to the model.

    If too few clients answer, the state stays as it is.
    """
    from fedstrata.federation.secure.simulated import ask_sum

    config, weights = federation.config, state.weights
    form, training = FitForm(config), config.training
    selection, clients_state = recipe.client_sampler.select(federation, state.clients, weights)
    request = Fit(federation.round, weights, {}, 1.0)
    work = partial(training.sample_gradients, keep=1.0)
    summed = ask_sum(federation, selection.clients.tolist(), request, form.ring, work=work)
    state = replace(state, clients=clients_state)
    if summed is None:
        return state, {"clients_trained": 0, "samples": 0, "train_loss": None, "scaled": 0, **selection.metrics}
    result = form.decode(summed.total, weights.params)
    if result.samples:
        server, rounds = recipe.aggregator.server, training.rounds
        params, aggregator = server.apply(weights.params, result.update, state.aggregator, federation.round, rounds)
        state = replace(state, weights=Weights(params, weights.buffers), aggregator=aggregator)
    return state, {
        "clients_trained": len(summed.clients),
        "samples": result.seen,
        "train_loss": result.loss,
        "scaled": result.scaled,
        **selection.metrics,
    }
