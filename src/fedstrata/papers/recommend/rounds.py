"""Simulate rounds without training, to find which clients are online and which are invited."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fedstrata.base.arrays import Bools
from fedstrata.base.config import under
from fedstrata.clients.client import StateStore
from fedstrata.engines.local import LocalEngine
from fedstrata.federation.availability import Population
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import Weights
from fedstrata.methods.recipe import Recipe
from fedstrata.runs.preparation import Prepared
from fedstrata.runs.simulation import make_context
from fedstrata.sampling.base import ClientSampler, Uniform


class Simulated(NamedTuple):
    """The result of simulating all rounds with one seed: which clients are online, and which clients are invited.

    Args:
        online: Whether each client is online in each round, shape (rounds, N).
        invited: Whether each client is invited in each round, shape (rounds, N).
    """

    online: Bools
    invited: Bools


def simulate(prepared: Prepared, seed: int) -> Simulated:
    """Simulate, for each round, which clients are online and which clients are invited.

    The spec's client sampler invites the clients. If this sampler needs results of training, ``Uniform`` replaces it.

    Args:
        prepared: The prepared experiment.
        seed: Seed of the simulation. The partition depends on the spec's seed, not on this seed.
    """
    spec, config = prepared.spec, replace(prepared.config, seed=seed)
    clients, weights = np.arange(config.clients), Weights(config.model.params(), config.model.buffers())
    availability = spec.availability.model_copy()
    population = Population(config.clients, config.strata, prepared.assignment, prepared.data.strata, seed)
    under("availability", lambda: availability.check(population))
    sampler = sampler_of(prepared)
    engine = LocalEngine(make_context(replace(prepared, config=config)), StateStore())
    federation = Federation(engine, config, availability, spec.method.name)
    federation.begin(0)
    state = sampler.init(federation)
    shape = spec.training.rounds, config.clients
    simulated = Simulated(np.ones(shape, dtype=bool), np.zeros(shape, dtype=bool))
    for row in range(spec.training.rounds):
        federation.begin(row + 1)
        if not availability.always_online:
            simulated.online[row] = availability.online(clients, row + 1, seed)
        selection, state = sampler.select(federation, state, weights)
        simulated.invited[row, selection.clients] = True
    return simulated


def sampler_of(prepared: Prepared) -> ClientSampler:
    """Return the client sampler of a spec, or ``Uniform`` if the spec's sampler needs replies of clients."""
    method, config = prepared.spec.method, prepared.config
    if not isinstance(method, Recipe) or method.client_sampler.learns(config):
        return Uniform()
    requests = method.client_sampler.allowed(config)
    if requests is None or any(each.rule.phase != "enrolment" for each in requests):
        return Uniform()
    return method.client_sampler
