"""Sums of replies to training requests: they give the model and the states that individual replies give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedstrata as fs
from fedstrata.base import records
from fedstrata.base.errors import WithheldError
from fedstrata.data.tasks.tokens import NextToken
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.messages import Extra, Fit, FitReply, Params, WeightedFitReply, Weights
from fedstrata.federation.secure.fit import Sums
from fedstrata.federation.secure.ring import add
from fedstrata.methods.recipe import Recipe
from fedstrata.methods.secure import fit_form
from fedstrata.sampling.base import Selection

CLIENTS, INVITED, LARGEST_SIZE, CLASSES, FEATURES = 6, [1, 2, 4, 5], 50, 10, 4


def network() -> nn.Module:
    """Return a model with a body, BatchNorm and a head."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, FEATURES), nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES))


def prepared(method: Any, **tables: Any) -> tuple[Recipe, FederationConfig]:
    """Return a method, and the settings of a federation with six clients."""
    privacy = {"sums": "secure", "largest": LARGEST_SIZE} | tables.pop("privacy", {})
    training = {"clients_per_round": len(INVITED), "batch_size": 8, "local_epochs": 2} | tables.pop("training", {})
    table = {"method": method, "privacy": privacy, "training": training, "partition": {"name": "iid", "clients": 6}}
    made = fs.prepare(fs.Experiment.from_table(table | tables), model=network())
    assert isinstance(made.spec.method, Recipe)
    return made.spec.method, made.config


def moved(tensors: Params, generator: torch.Generator, size: float) -> Params:
    """Return tensors with random changes of at most ``size``; integers grow by one."""
    return {
        name: t + size * (2 * torch.rand(t.shape, generator=generator) - 1) if t.is_floating_point() else t + 1
        for name, t in tensors.items()
    }


def random_replies(config: FederationConfig, message: Mapping[str, Mapping[str, Tensor]]) -> dict[int, FitReply]:
    """Return replies with random changes of the model, and messages with the shapes of ``message``."""
    generator, start = torch.Generator().manual_seed(5), Weights(config.model.params(), config.model.buffers())
    replies = {}
    for place, client in enumerate(INVITED):
        sent = Extra()
        for group, tensors in message.items():
            sent[group] = {name: torch.randn(t.shape, generator=generator) for name, t in tensors.items()}
        if "prototypes" in sent:
            counts = torch.randint(0, 5, (CLASSES,), generator=generator).float() * (torch.arange(CLASSES) != 7)
            sent["prototypes"] = {"means": sent["prototypes"]["means"] * (counts > 0)[:, None], "samples": counts}
        weights = Weights(moved(start.params, generator, 0.1), moved(start.buffers, generator, 3.0))
        size, steps = 10 * (place + 1), 3 * (place + 1)
        replies[client] = FitReply(weights, size, steps, 2 * size, 0.5 * place, sent, True)
    return replies


def summed(method: Recipe, config: FederationConfig, sent: Weights, replies: Mapping[int, FitReply]) -> Sums:
    """Return the opened sum of replies."""
    form = fit_form(method, config)
    words = [form.encode(Fit(1, sent, {}, 1.0), reply, client) for client, reply in replies.items()]
    return Sums(form.summands, len(replies), form.ring.decode(add(words), len(replies)))


def start_of(method: Recipe, config: FederationConfig) -> tuple[Weights, Any, Any]:
    """Return the first model, and the first states of the aggregator and the objective."""
    weights = Weights(config.model.params(), config.model.buffers())
    return weights, method.aggregator.init(config), method.objective.init(weights, config)


def by_replies(method: Recipe, config: FederationConfig, replies: Mapping[int, FitReply]) -> dict[str, Any]:
    """Return the model, the states and the metrics after a round in which the server sees individual replies."""
    weights, aggregator_state, objective_state = start_of(method, config)
    selection, answers = Selection.plain(np.array(INVITED), CLIENTS), list(replies.values())
    combined, aggregator_state = method.aggregator.combine(weights, aggregator_state, selection, replies)
    state, after = method.objective.server_update(objective_state, weights, combined, answers, CLIENTS)
    return {
        "model": after,
        "aggregator": aggregator_state,
        "objective": state,
        "metrics": method.objective.metrics(answers),
    }


def by_sums(method: Recipe, config: FederationConfig, replies: Mapping[int, FitReply]) -> dict[str, Any]:
    """Return the model, the states and the metrics after a round in which the server sees only sums."""
    weights, aggregator_state, objective_state = start_of(method, config)
    sums, selection = summed(method, config, weights, replies), Selection.plain(np.array(INVITED), CLIENTS)
    combined, aggregator_state = method.aggregator.combine_sums(weights, aggregator_state, selection, sums)
    state, after = method.objective.server_update_sums(objective_state, weights, combined, sums, CLIENTS)
    return {
        "model": after,
        "aggregator": aggregator_state,
        "objective": state,
        "metrics": method.objective.metrics_of_sums(sums),
    }


def distance(one: Any, other: Any) -> float:
    """Return the largest difference between the floats of two nested records."""
    if isinstance(one, Weights):
        return max(distance(one.params, other.params), distance(one.buffers, other.buffers))
    if isinstance(one, Mapping):
        assert one.keys() == other.keys()
        return max((distance(value, other[name]) for name, value in one.items()), default=0.0)
    if isinstance(one, list):
        return max((distance(*pair) for pair in zip(one, other, strict=True)), default=0.0)
    if isinstance(one, Tensor):
        return float((one - other).abs().max()) if one.is_floating_point() else 0.0
    return 0.0 if one is None and other is None else abs(one - other)


PARTS: dict[str, Any] = {
    "fedavg": "fedavg",
    "equal weights": {"name": "fedavg", "aggregator": "mean"},
    "server momentum": {"name": "fedavgm", "server_lr": 0.5},
    "fedexp": "fedexp",
    "fednova": "fednova",
    "scaffold": "scaffold",
    "scaffold, by size": {"name": "scaffold", "aggregator": "size"},
    "feddyn": "feddyn",
    "feddyn, by size": {"name": "feddyn", "aggregator": "size"},
    "rebafl": "rebafl",
    "rebafl without smoothing": {"name": "rebafl", "epsilon": 0.0},
    "rebafl without augmentation": {"name": "rebafl", "mu": 0.0},
    "bsm": "bsm-fedavg",
    "fedlc": "fedlc",
}


@pytest.mark.parametrize("parts", PARTS)
def test_sums_give_what_single_replies_give_up_to_rounding(parts: str) -> None:
    method, config = prepared(PARTS[parts])
    weights, _, _ = start_of(method, config)
    replies = random_replies(config, method.objective.expected(weights, config))
    plain, secure = by_replies(method, config, replies), by_sums(method, config, replies)
    # FedDyn divides rounded sums by α = 0.01.
    assert distance(plain, secure) < (1e-4 if method.name == "feddyn" else 5e-6)
    assert distance(plain["model"], weights) > 1e-3
    assert secure["model"].buffers["2.num_batches_tracked"] == weights.buffers["2.num_batches_tracked"]
    assert distance(secure["model"].buffers, weights.buffers) > 0.1


def test_momentum_counts_in_the_steps_of_fednova() -> None:
    method, config = prepared("fednova", training={"momentum": 0.9})
    replies = random_replies(config, {})
    assert distance(by_replies(method, config, replies), by_sums(method, config, replies)) < 5e-6


@pytest.mark.parametrize("parts", ["fedavg", "equal weights", "fednova", "scaffold", "feddyn", "rebafl"])
def test_the_difference_is_in_proportion_to_the_range(parts: str) -> None:
    errors = []
    for wide in (1e2, 1e4):
        privacy = dict.fromkeys(["range", "buffer_range", "message_range"], wide)
        method, config = prepared(PARTS[parts], privacy=privacy)
        weights, _, _ = start_of(method, config)
        replies = random_replies(config, method.objective.expected(weights, config))
        errors.append(distance(by_replies(method, config, replies), by_sums(method, config, replies)))
    assert 30 < errors[1] / errors[0] < 300


def test_samples_of_different_weights() -> None:
    """The mean is weighted by the sums of the samples' weights, such as tokens, instead of the numbers of samples."""
    method, config = prepared("fedavg")
    sent = Weights(config.model.params(), config.model.buffers())
    config = replace(config, task=NextToken(), places=7)
    plain = random_replies(config, {})
    heavy = {
        client: WeightedFitReply(**vars(reply), weight=60.5 * (5 - place))
        for place, (client, reply) in enumerate(plain.items())
    }
    assert distance(by_replies(method, config, heavy), by_sums(method, config, heavy)) < 5e-6
    assert distance(by_sums(method, config, heavy), by_sums(method, config, plain)) > 1e-3
    too_heavy = WeightedFitReply(**vars(plain[1]), weight=7 * LARGEST_SIZE + 1.0)
    with pytest.raises(WithheldError, match=r"its number of samples is above privacy\.largest"):
        summed(method, config, sent, {1: too_heavy})


def test_scaffold_by_hand_with_three_clients() -> None:
    method, config = prepared("scaffold")
    sent = Weights(config.model.params(), {})
    buffers = config.model.buffers()
    replies = {}
    for client, (update, delta_c) in {1: (0.1, 3.0), 2: (0.2, -1.0), 5: (0.6, 4.0)}.items():
        after = {name: w + update for name, w in sent.params.items()}
        message = {"delta_c": {name: torch.full_like(w, delta_c) for name, w in sent.params.items()}}
        replies[client] = FitReply(Weights(after, buffers), 10, 2, 20, 1.0, message, True)
    result = by_sums(method, config, replies)
    for name, w in sent.params.items():
        assert torch.allclose(result["model"].params[name], w + 0.3, atol=1e-6)  # (0.1 + 0.2 + 0.6) / 3
        assert torch.allclose(result["objective"][name], torch.ones_like(w), atol=1e-6)  # (3 − 1 + 4) / 6 clients


@pytest.mark.parametrize(
    ("momentum", "expected"),
    [
        (0.0, [2.0, 7.0, 9.0]),  # (3 · 1 + 1 · 5) / 4
        (0.75, [7.25, 8.5, 9.0]),  # (3 · 9 + 2) / 4 and (3 · 9 + 7) / 4
    ],
)
def test_rebafl_by_hand_with_three_clients(momentum: float, expected: list[float]) -> None:
    """Prototypes of three classes: one of two clients, one of one client, and one of nobody."""
    method, config = prepared({"name": "rebafl", "prototype_momentum": momentum})
    weights = Weights(config.model.params(), config.model.buffers())
    tables = {1: {0: (3, 1.0)}, 2: {0: (1, 5.0)}, 5: {1: (2, 7.0)}}
    replies = {}
    for client, known in tables.items():
        table = {"means": torch.zeros(CLASSES, FEATURES), "samples": torch.zeros(CLASSES)}
        for label, (samples, mean) in known.items():
            table["means"][label], table["samples"][label] = mean, samples
        replies[client] = FitReply(weights, 10, 2, 20, 1.0, {"prototypes": table}, True)
    sums = summed(method, config, weights, replies)
    before = {"means": torch.full((CLASSES, FEATURES), 9.0), "samples": torch.ones(CLASSES)}
    state, after = method.objective.server_update_sums(before, weights, weights, sums, CLIENTS)
    assert state["samples"].tolist()[:3] == [4, 2, 1]
    assert torch.allclose(state["means"][:3], torch.tensor(expected)[:, None].expand(3, FEATURES), atol=1e-5)
    assert after is weights


def test_layers_that_no_client_trains_are_not_summed() -> None:
    lengths = [fit_form(method, config).ring.length for method, config in map(prepared, ("fedavg", "fedbabu"))]
    assert lengths[0] - lengths[1] == CLASSES * (FEATURES + 1)  # the head


def test_a_client_above_a_bound_does_not_answer() -> None:
    method, config = prepared("rebafl")
    weights, _, _ = start_of(method, config)
    (reply,) = list(random_replies(config, method.objective.expected(weights, config)).values())[:1]
    reply.message["prototypes"]["samples"][3] = LARGEST_SIZE + 1
    with pytest.raises(WithheldError, match="class 3 is not between 0 and 50"):
        summed(method, config, weights, {1: reply})


def test_a_round_in_which_nobody_has_samples_does_not_change_the_model() -> None:
    method, config = prepared("fednova")
    weights, _, _ = start_of(method, config)
    replies = {client: FitReply(weights, 0, 0, 0, 0.0, {}, False) for client in INVITED}
    assert records.encode(by_sums(method, config, replies)["model"]) == records.encode(weights)
