"""Run a round with client-level differential privacy (``privacy.clients``).

The server adds a noisy mean of the clients' updates to the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from fedstrata.aggregation.private import clipped_sum, noisy_mean
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import Fit, Params, Weights
from fedstrata.federation.secure.noisy import UPDATE, NoisyForm
from fedstrata.federation.vectors import split

if TYPE_CHECKING:
    from fedstrata.methods.recipe import Recipe, RecipeState


def noisy_form(recipe: Recipe, config: FederationConfig) -> NoisyForm:
    """Return the rule with which a secure sum adds up a recipe's updates and the clients' noise."""
    return NoisyForm(config, recipe.most_summed(config), _trained(recipe, config, config.model.params()))


def private_round(recipe: Recipe, federation: Federation, state: RecipeState) -> tuple[RecipeState, dict[str, Any]]:
    """Select clients, train them, and add the noisy mean of their clipped updates to the model.

    The server optimiser gets only the noisy mean, so the optimiser does not affect ε. If the secure sum fails, only the
    client sampler's state changes.
    """
    config, weights, dp = federation.config, state.weights, federation.config.privacy.clients
    assert dp is not None
    selection, clients_state = recipe.client_sampler.select(federation, state.clients, weights)
    request = Fit(federation.round, weights, recipe.objective.message(state.objective), 1.0)
    before = _trained(recipe, config, weights.params)
    mean = _mean_at_server if dp.noise_from == "server" else _mean_of_noisy_updates
    update, metrics = mean(recipe, federation, selection.clients.tolist(), request, before)
    state, metrics = replace(state, clients=clients_state), {**metrics, **selection.metrics}
    if update is None:
        return state, metrics
    server, rounds = recipe.aggregator.server, config.training.rounds
    params, aggregator = server.apply(before, update, state.aggregator, federation.round, rounds)
    after = Weights(weights.params | params, weights.buffers)
    return replace(state, weights=after, aggregator=aggregator), metrics


def _mean_at_server(
    recipe: Recipe, federation: Federation, clients: Sequence[int], request: Fit, before: Params
) -> tuple[Params, dict[str, Any]]:
    """Train clients. Return the mean of the clients' updates plus the server's noise, and the metrics of the round.

    The server adds noise even if no client replied, because an update without noise would reveal that no client
    replied.
    """
    dp = federation.config.privacy.clients
    assert dp is not None
    answers = list(recipe.train_clients(federation, clients, request).values())
    total, scaled = clipped_sum(before, (reply.weights.params for reply in answers), dp.clip)
    normal = federation.rng("client-noise").standard_normal(len(total))
    update = noisy_mean(total, before, dp.noise * dp.clip, _cohort(recipe, federation), normal)
    samples = sum(reply.seen for reply in answers)
    return update, {"clients_trained": len(answers), "samples": samples, "train_loss": None, "clipped": scaled}


def _mean_of_noisy_updates(
    recipe: Recipe, federation: Federation, clients: Sequence[int], request: Fit, before: Params
) -> tuple[Params | None, dict[str, Any]]:
    """Let clients train, clip their own updates and add noise to them.

    Return the mean (computed by a secure sum; None if too few clients replied) and the metrics. The server does not
    learn the clients' numbers of samples.
    """
    from fedstrata.federation.secure.simulated import ask_sum

    form = noisy_form(recipe, federation.config)
    summed = ask_sum(federation, clients, request, form.ring, work=recipe.work(federation.config, request.keep))
    if summed is None:
        return None, {"clients_trained": 0, "samples": 0, "train_loss": None}
    total = torch.from_numpy(summed.total.parts[UPDATE])
    update = split(total / _cohort(recipe, federation), before)
    return update, {"clients_trained": len(summed.clients), "samples": 0, "train_loss": None}


def _cohort(recipe: Recipe, federation: Federation) -> int:
    """Return the expected number of clients per round."""
    return recipe.client_sampler.cohort(federation.config)


def _trained(recipe: Recipe, config: FederationConfig, params: Params) -> Params:
    """Return the parameters that clients train and send."""
    frozen = recipe.frozen(config)
    return {name: w for name, w in params.items() if name not in frozen}
