"""Attacks that remain possible with secure sums: each succeeds, although the protocol is followed with real masks.

Two further attacks are in ``test_secure_sums.py``: two questions whose sets differ by one site, and false vectors.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("cryptography")

from secure_attacks import Attacker, with_invented_sites
from secure_world import World

import fedstrata as fs
from fedstrata.audits.gradients import EXACT, inputs_from
from fedstrata.federation.messages import Fit, Params, Weights
from fedstrata.federation.secure.fit import Sums
from fedstrata.federation.secure.simulated import ask_sum
from fedstrata.methods.secure import fit_form
from fedstrata.runs.preparation import Prepared

pytestmark = pytest.mark.slow
RATE = 1.0


def prepared_of(*sizes: int) -> Prepared:
    """Return a federation in which a client takes one step on all its samples, and masks its update."""
    ends = np.cumsum([0, *sizes]).tolist()
    lists = [list(range(begin, end)) for begin, end in pairwise(ends)]
    table: dict[str, Any] = {
        "data": {"name": "digits"},
        "partition": {"name": "given", "indices": lists},
        "model": {"name": "mlp", "hidden": [64]},
        "training": {"rounds": 3, "local_steps": 1, "batch_size": 100, "lr": RATE, "workers": 1},
        "privacy": {"sums": "secure", "simulate_masks": True, "range": 10.0},
    }
    return fs.prepare(fs.Experiment.from_table(table))


def gradient_of_sum(simulation: fs.Simulation, clients: list[int], round: int, weights: Weights) -> Params:
    """Ask clients for the sum of their updates, and return the gradient of the loss, summed over all their samples."""
    method: Any = simulation.spec.method
    form = fit_form(method, simulation.prepared.config)
    simulation.federation.begin(round)
    summed = ask_sum(simulation.federation, clients, Fit(round, weights, {}, 1.0), form.ring)
    assert summed is not None
    assert summed.clients == clients
    sums = Sums(form.summands, len(clients), summed.total)
    return {name: w / -RATE for name, w in sums.updates("samples", weights.params).items()}


def share_seen(candidates: Tensor, prepared: Prepared, clients: list[int]) -> float:
    """Return the fraction of the clients' samples that are among the candidates."""
    samples = torch.from_numpy(np.concatenate([prepared.assignment[client] for client in clients]))
    inputs = prepared.data.inputs(samples).flatten(1)
    distances = torch.cdist(inputs, candidates).square().min(dim=1).values / inputs.shape[1]
    return float((distances < EXACT).float().mean())


def made_to_leak(weights: Weights, brightness: np.ndarray) -> Weights:
    """Return a model whose unit i is active for inputs that are brighter than its threshold (Fowl et al. 2022)."""
    params = {name: torch.zeros_like(w) for name, w in weights.params.items()}
    first, bias, last, _ = params
    units, features = params[first].shape
    params[first] += 1 / features
    params[bias] -= torch.from_numpy(np.quantile(brightness, np.linspace(0, 1, units + 2)[1:-1])).float()
    params[last][0] = 0.1
    return Weights(params, weights.buffers)


def test_a_model_made_to_leak_reveals_samples_of_a_sum_of_three_clients() -> None:
    """The difference of the rows of two neighbouring units is the samples between their thresholds."""
    prepared, clients = prepared_of(10, 10, 10), [0, 1, 2]
    brightness = prepared.data.inputs(slice(None), "test").flatten(1).mean(dim=1).numpy()
    with fs.Simulation(prepared) as simulation:
        honest = simulation.state.weights
        weight, bias, *_ = gradient_of_sum(simulation, clients, 1, made_to_leak(honest, brightness)).values()
        between = inputs_from(weight[:-1] - weight[1:], bias[:-1] - bias[1:])
        assert share_seen(between, prepared, clients) > 0.3
        weight, bias, *_ = gradient_of_sum(simulation, clients, 2, honest).values()
        assert share_seen(inputs_from(weight, bias), prepared, clients) < 0.2


def test_two_rounds_whose_cohorts_differ_by_one_client_reveal_its_samples() -> None:
    """At the same model, the difference of the two sums is the gradient of the client that is in only one of them."""
    prepared = prepared_of(100, 100, 100, 1)
    with fs.Simulation(prepared) as simulation:
        weights = simulation.state.weights
        whole = gradient_of_sum(simulation, [0, 1, 2, 3], 1, weights)
        rest = gradient_of_sum(simulation, [0, 1, 2], 2, weights)
    difference = [whole[name] - rest[name] for name in whole]
    samples, model, data = torch.from_numpy(prepared.assignment[3]), prepared.config.model, prepared.data
    with model.loaded(weights.params, weights.buffers) as params:
        logits = model(params, data.inputs(samples))
        loss = torch.nn.functional.cross_entropy(logits, data.y_train[samples], reduction="sum")
        wanted = torch.autograd.grad(loss, list(params.values()))
    for found, gradient in zip(difference, wanted, strict=True):
        torch.testing.assert_close(found, gradient, rtol=0, atol=1e-4)
    weight, bias = difference[:2]
    active = bias.abs() > 0.01
    assert share_seen(weight[active] / bias[active, None], prepared, [3]) == 1.0
    weight, bias, *_ = whole.values()
    assert share_seen(inputs_from(weight, bias), prepared, [3]) == 0.0


def test_the_owner_of_the_root_key_invents_sites_if_a_site_has_no_list_of_peers() -> None:
    """All sites follow the protocol, but two of three belong to the server, so it knows their vectors."""
    world = World("ayz")
    assert world.sites["a"].peers is None
    found, wanted = with_invented_sites(Attacker(world, "yz"))
    assert world.refusals == []
    assert found is not None
    assert (found == wanted).all()
