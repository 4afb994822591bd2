"""Check before the first round whether a run can guarantee client-level differential privacy (``privacy.clients``)."""

from __future__ import annotations

import warnings
from typing import Any

from fedstrata.aggregation.base import Mean
from fedstrata.base.errors import SpecError
from fedstrata.federation.communication.codecs import PowerSGD
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.messages import Weights
from fedstrata.methods.base import Method
from fedstrata.methods.recipe import Recipe
from fedstrata.objectives.base import is_plain
from fedstrata.runs.client_accountant import client_accountant_of
from fedstrata.sampling.base import AllData, Uniform
from fedstrata.sampling.fedsampling import Everyone
from fedstrata.sampling.poisson import Poisson
from fedstrata.spec.experiment import Experiment

FEW = 100
"""A run with fewer clients causes a warning: with few clients and a small ε, a model usually cannot learn."""

USE = "Use a method such as fedavg, fedprox or moon."


def check_client_privacy(spec: Experiment, config: FederationConfig) -> None:
    """Check that the method, the model and the settings allow ``privacy.clients``. Warn if there are few clients.

    Raises:
        SpecError: The bound on a client's update would not cover all values that the client sends, or would depend on
            other clients.
        ExtraMissingError: The extra ``dp`` is not installed.
    """
    dp, privacy, tensors = spec.privacy.clients, spec.privacy, config.model.params().values()
    assert dp is not None
    at_sites = "is only for simulations, because the noise follows from the spec's seed. Use noise_from = 'sites'."
    single = (
        "the server must clip each update, but it sees only sums of updates. Use privacy.sums = 'plain', or "
        "privacy.clients.noise_from = 'sites'."
    )
    online = "the choice of clients would depend on which clients are online, so ε is not valid. Remove the setting."
    colluding = (
        "attackers may use the updates of other clients, so ε is not valid. Use the attack 'label-flip', or remove "
        "the section."
    )
    buffers = "has buffers or integer parameters, to which noise cannot be added. Use a model without BatchNorm."
    refusals: list[tuple[bool, str, Any, str]] = [
        (config.sizes is None and dp.noise_from == "server", "privacy.clients.noise_from", "server", at_sites),
        (privacy.dp is not None, "privacy.dp", ..., "cannot be used with privacy.clients. Remove one of the sections."),
        (privacy.sums != "plain" and dp.noise_from == "server", "privacy.sums", privacy.sums, single),
        (spec.availability.announced, "availability.announced", True, online),
        (
            spec.attack is not None and spec.attack.alters_replies,
            "attack",
            getattr(spec.attack, "name", ""),
            colluding,
        ),
        (
            spec.evaluation.weight_diversity,
            "evaluation.weight_diversity",
            True,
            "is recorded without noise, so ε is not valid. Remove the setting.",
        ),
        (
            isinstance(spec.communication.up, PowerSGD),
            "communication.up",
            "powersgd",
            "decodes each update together with other clients' updates, so ε is not valid. Use another codec.",
        ),
        (
            bool(config.model.buffers()) or not all(tensor.is_floating_point() for tensor in tensors),
            "model",
            spec.model.name,
            buffers,
        ),
    ]
    for refused, key, value, problem in refusals:
        if refused:
            raise SpecError(key, problem, value)
    _check_method(spec.method, config)
    if dp.noise_from == "sites" and isinstance(getattr(spec.method, "client_sampler", None), Poisson):
        problem = (
            "invites a random number of clients, sometimes too few for a secure sum. Use client_sampler = 'uniform' or "
            "'all'."
        )
        raise SpecError("method.client_sampler", problem, "poisson")
    accountant = client_accountant_of(spec, config)
    if accountant.ending({}):
        problem = f"the first round would spend ε = {accountant.epsilon(1):.3g}. Use a larger budget, or more noise."
        raise SpecError("privacy.clients.budget", problem, dp.budget)
    if config.clients < FEW:
        warnings.warn(
            f"privacy.clients: the run has {config.clients} clients. With fewer than {FEW} clients and a small ε, the "
            "model will probably not learn. To protect single samples instead of clients, use privacy.dp.",
            stacklevel=2,
        )


def _check_method(method: Method, config: FederationConfig) -> None:
    """Raise ``SpecError`` if clients send more than one update per round, or if the server needs individual updates."""
    own_rounds = not isinstance(method, Recipe) or type(method).train_clients is not Recipe.train_clients
    if own_rounds or type(method).run_round is not Recipe.run_round:
        problem = f"asks clients for more than one update per round, but ε covers only one. {USE}"
        raise SpecError("method.name", problem, method.name)
    assert isinstance(method, Recipe)
    sampler, data, objective, aggregator = method.choices()
    if type(sampler) not in (Uniform, Poisson, Everyone) or getattr(sampler, "replacement", False):
        problem = (
            "ε is valid only for draws without replacement that do not depend on what clients send. Use "
            "client_sampler = 'poisson' or 'all', or 'uniform' without replacement."
        )
        raise SpecError("method.client_sampler", problem, sampler.name)
    if type(data) is not AllData:
        problem = "asks clients for their numbers of samples, but ε does not cover these. Use data_sampler = 'all'."
        raise SpecError("method.data_sampler", problem, data.name)
    if objective.expected(Weights(config.model.params(), {}), config):
        problem = f"lets clients send more than an update, but ε covers only the update. {USE}"
        raise SpecError("method.objective", problem, objective.name)
    if not is_plain(objective, "server_update"):
        problem = f"uses the updates of individual clients, but ε covers only their sum. {USE}"
        raise SpecError("method.objective", problem, objective.name)
    if type(aggregator) is not Mean:
        problem = "does not give all clients the same weight. Use aggregator = 'mean', with any server optimiser."
        raise SpecError("method.aggregator", problem, aggregator.name)
