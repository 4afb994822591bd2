"""Run a round of a recipe in which the server sees only sums over the clients (``privacy.sums``)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import Fit
from fedstrata.federation.secure.fit import Bounds, ModelForm, Sums

if TYPE_CHECKING:
    from fedstrata.methods.recipe import Recipe, RecipeState


def fit_form(recipe: Recipe, config: FederationConfig) -> ModelForm:
    """Return the rule by which a secure sum adds up the replies to a recipe's training requests."""
    objective, frozen = recipe.objective, recipe.frozen(config)
    params = {name: w for name, w in config.model.params().items() if name not in frozen}
    bounds = Bounds(config, params, partial(objective.sample_gradients, config.training))
    summands = recipe.aggregator.summands(bounds) | objective.summands(bounds) | bounds.progress()
    return ModelForm(config, recipe.most_summed(config), summands)


def secure_round(recipe: Recipe, federation: Federation, state: RecipeState) -> tuple[RecipeState, dict[str, Any]]:
    """Select clients, train them, and update the model with the sums of the clients' replies.

    If too few clients reply, only the states of the samplers change.
    """
    from fedstrata.federation.secure.simulated import ask_sums

    config, weights = federation.config, state.weights
    sampler, data, objective, aggregator = recipe.choices()
    selection, clients_state = sampler.select(federation, state.clients, weights)
    selection = replace(selection, round=federation.round, rounds=config.training.rounds)
    invited = selection.clients.tolist()
    keep, data_state, data_metrics = data.keep(federation, state.data, invited)
    state, metrics = replace(state, clients=clients_state, data=data_state), {**selection.metrics, **data_metrics}

    form, request = fit_form(recipe, config), Fit(federation.round, weights, objective.message(state.objective), keep)
    summed = ask_sums(federation, invited, request, form, work=recipe.work(config, keep))
    if summed is None:
        return state, {"clients_trained": 0, "samples": 0, "train_loss": None, "scaled": 0, **metrics}
    sums = Sums(form.summands, len(summed.clients), summed.total)
    combined, aggregator_state = aggregator.combine_sums(weights, state.aggregator, selection, sums)
    combined = recipe.restored(config, weights, combined)
    objective_state, after = objective.server_update_sums(state.objective, weights, combined, sums, config.clients)
    seen = sums.count("seen")
    return replace(state, weights=after, objective=objective_state, aggregator=aggregator_state), {
        "clients_trained": sums.clients,
        "samples": seen,
        "train_loss": sums.number("loss") / seen if seen and config.privacy.dp is None else None,
        "scaled": summed.total.scaled,
        **metrics,
        **objective.metrics_of_sums(sums),
    }
