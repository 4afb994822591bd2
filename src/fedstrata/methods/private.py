"""Run a round in which the server clips the clients' updates and adds noise to their sum (``privacy.clients``)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fedstrata.aggregation.private import clipped_sum, noisy_mean
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import Fit, Weights

if TYPE_CHECKING:
    from fedstrata.methods.recipe import Recipe, RecipeState


def private_round(recipe: Recipe, federation: Federation, state: RecipeState) -> tuple[RecipeState, dict[str, Any]]:
    """Select clients, train them, and add the noisy mean of their clipped updates to the model.

    The server adds noise even if no client answered, because missing noise would reveal that no client answered. The
    server optimiser gets only the noisy mean, so the optimiser does not affect ε.
    """
    config, weights, dp = federation.config, state.weights, federation.config.privacy.clients
    assert dp is not None
    selection, clients_state = recipe.client_sampler.select(federation, state.clients, weights)
    request = Fit(federation.round, weights, recipe.objective.message(state.objective), 1.0)
    answers = list(recipe.train_clients(federation, selection.clients.tolist(), request).values())
    frozen = recipe.frozen(config)
    before = {name: w for name, w in weights.params.items() if name not in frozen}
    total, scaled = clipped_sum(before, (reply.weights.params for reply in answers), dp.clip)
    normal = federation.rng("client-noise").standard_normal(len(total))
    cohort = recipe.client_sampler.cohort(config)
    update = noisy_mean(total, before, dp.noise * dp.clip, cohort, normal)
    server, rounds = recipe.aggregator.server, config.training.rounds
    params, aggregator = server.apply(before, update, state.aggregator, federation.round, rounds)
    after = Weights(weights.params | params, weights.buffers)
    metrics = {
        "clients_trained": len(answers),
        "samples": sum(reply.seen for reply in answers),
        "train_loss": None,
        "clipped": scaled,
    }
    return replace(state, weights=after, clients=clients_state, aggregator=aggregator), {**metrics, **selection.metrics}
