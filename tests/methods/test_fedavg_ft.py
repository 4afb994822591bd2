"""FedAvg with its head tuned at the server: the upper reference."""

from __future__ import annotations

import pytest
import torch
from skewed import LEFT_OVER
from torch import nn

import fedstrata as fs
from fedstrata.base.errors import SpecError
from fedstrata.base.rng import rng
from fedstrata.methods.fedavg_ft import FedAvgFT
from fedstrata.runs.preparation import assemble


def test_the_head_is_trained_at_the_server_and_the_body_is_not(start):
    started = start(fs.Experiment.from_table(LEFT_OVER))
    weights, method = started.state.weights, started.method
    after, loss = method.tuned(started.config, weights)
    x, y = started.config.server_data.balanced(5, rng(started.config.seed, "server-samples"))
    model = started.config.model.clone().module
    head = model.get_submodule("head")
    optimizer = torch.optim.SGD(head.parameters(), lr=0.2, momentum=0.5, weight_decay=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        last = nn.functional.cross_entropy(model(x), y)
        last.backward()
        optimizer.step()
    assert loss == pytest.approx(last.item(), rel=1e-5)
    for name, w in model.named_parameters():
        torch.testing.assert_close(after.params[name], w.detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(after.params[name], weights.params[name]) == (not name.startswith("head"))
    assert started.step()["server_loss"] > 0


@pytest.mark.slow
def test_the_reference_is_better_than_fedavg_where_labels_are_skewed():
    plain, tuned = fs.run({**LEFT_OVER, "method": "fedavg"}), fs.run({**LEFT_OVER, "method": FedAvgFT(per_class=5)})
    assert tuned.best_accuracy > plain.best_accuracy + 0.1
    assert not any(tensor.requires_grad for tensor in tuned.params.values())


def test_without_samples_left_over_it_is_refused():
    with pytest.raises(SpecError, match="only 0 of the rarest class are left"):
        fs.run({**LEFT_OVER, "partition": {"name": "classes", "clients": 10}})
    with pytest.raises(SpecError, match=r"^method\.per_class = 100: .* of the rarest class"):
        fs.run({**LEFT_OVER, "method": {"name": "fedavg-ft", "per_class": 100}})


def test_a_round_in_which_nobody_returns_leaves_the_head_alone(start, trace):
    table = {**LEFT_OVER, "availability": trace({0: [2]})}
    started = start(fs.Experiment.from_table(table))
    before = started.state.weights.params
    metrics = started.step()
    assert "server_loss" not in metrics
    assert all(torch.equal(w, before[name]) for name, w in started.state.weights.params.items())
    assert "server_loss" in started.step()


def test_the_servers_features_are_those_that_are_evaluated():
    normalised = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 10))
    table = {**LEFT_OVER, "training": {**LEFT_OVER["training"], "batch_norm": "local"}}
    with pytest.raises(
        SpecError,
        match=r"^training\.batch_norm = 'local': the server trains the head with shared BatchNorm statistics\. Set",
    ):
        fs.run(table, model=normalised)


def test_without_samples_known_to_the_server_the_partition_is_not_to_blame():
    spec = fs.Experiment.from_table(LEFT_OVER)
    data = spec.data.load(0)
    with pytest.raises(
        SpecError,
        match=r"method\.per_class = 5: the server trains the head on its own samples, but in a deployment,",
    ):
        assemble(spec, data, spec.partition.split(data, 0), sizes_known=False)
