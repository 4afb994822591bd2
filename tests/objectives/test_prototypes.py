"""Prototypes: local, merged, averaged; by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from fedstrata.base.errors import SpecError
from fedstrata.models.model import Model
from fedstrata.objectives.base import Batch
from fedstrata.objectives.rebafl import averaged, class_means, no_prototypes, updated


def table(means: list[list[float]], samples: list[float]) -> dict[str, Tensor]:
    return {"means": torch.tensor(means), "samples": torch.tensor(samples)}


def test_the_mean_by_samples_and_what_nobody_reports_stays():
    before = table([[9.0, 9.0], [8.0, 8.0], [0.0, 0.0], [6.0, 6.0]], [4, 4, 0, 4])
    one = table([[1.0, 2.0], [0.0, 0.0], [3.0, 3.0], [0.0, 0.0]], [3, 0, 2, 0])
    two = table([[5.0, -2.0], [0.0, 0.0], [0.0, 0.0], [1.0, 7.0]], [1, 0, 0, 5])
    found = averaged(before, [one, two])
    assert found["means"].tolist() == [[2.0, 1.0], [8.0, 8.0], [3.0, 3.0], [1.0, 7.0]]
    assert found["samples"].tolist() == [4, 4, 2, 5]
    assert averaged(before, [])["means"].tolist() == before["means"].tolist()


def test_a_moving_average_over_three_rounds_by_hand():
    rounds = [
        [table([[1.0], [0.0], [0.0]], [3, 0, 0]), table([[5.0], [2.0], [0.0]], [1, 4, 0])],
        [table([[6.0], [0.0], [8.0]], [2, 0, 1])],  # class 1 is absent, and class 2 is new
        [table([[0.0], [6.0], [4.0]], [0, 1, 3]), table([[4.0], [0.0], [0.0]], [2, 0, 1])],
    ]
    stored, means = no_prototypes(3, 1), []
    for tables in rounds:
        stored = averaged(stored, tables, momentum=0.75)
        means.append(stored["means"].flatten().tolist())
    # Means of the rounds: class 0: 2, 6, 4; class 1: 2, none, 6; class 2: none, 8, (3 · 4 + 0) / 4 = 3.
    assert means == [[2.0, 2.0, 0.0], [3.0, 2.0, 8.0], [3.25, 3.0, 6.75]]
    assert stored["samples"].tolist() == [2, 1, 4]


def test_a_moving_average_of_constant_prototypes_equals_them():
    constant = table(torch.randn(5, 3, generator=torch.Generator().manual_seed(3)).tolist(), [4] * 5)
    stored = no_prototypes(5, 3)
    for _ in range(50):
        stored = updated(stored, constant, 0.9)
        assert torch.equal(stored["means"], constant["means"])


def test_a_moving_average_has_a_smaller_variance():
    """Of independent prototypes with variance 1, the moving average has the variance (1 − β) / (1 + β)."""
    beta, classes, size = 0.9, 10, 400
    generator, stored = torch.Generator().manual_seed(0), no_prototypes(classes, size)
    for _ in range(100):  # the first prototype then has the weight 0.9^99
        new = {"means": torch.randn(classes, size, generator=generator), "samples": torch.ones(classes)}
        replaced, stored = updated(stored, new, 0.0), updated(stored, new, beta)
    for found, variance in ((replaced, 1.0), (stored, (1 - beta) / (1 + beta))):
        error = variance * math.sqrt(2 / (classes * size))
        assert abs(found["means"].var().item() - variance) < 4 * error


def test_a_negative_count_counts_as_none():
    before = table([[9.0]], [1])
    assert averaged(before, [table([[4.0]], [-3]), table([[2.0]], [1])])["means"].tolist() == [[2.0]]


def test_a_clients_own_prototypes_go_first():
    own = table([[1.0], [0.0], [0.0]], [3, 0, 0])
    theirs = table([[5.0], [7.0], [0.0]], [9, 9, 0])
    found = updated(theirs, own)
    assert found["means"].tolist() == [[1.0], [7.0], [0.0]]
    assert found["samples"].tolist() == [3, 9, 0]


def test_class_means_over_several_batches():
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.BatchNorm1d(2), nn.Linear(2, 3))
    with torch.no_grad():
        module[0].weight.copy_(torch.tensor([[1.0, 1.0], [0.0, 2.0]]))
        module[0].bias.zero_()
        module[2].running_var.fill_(1 - module[2].eps)
    model = Model(module)
    batches = [
        Batch(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 2])),
        Batch(torch.tensor([[3.0, 4.0]]), torch.tensor([0])),
    ]
    with model.loaded(model.params()) as params:
        before = model.current_buffers()
        found = class_means(model, params, lambda: batches, 3)
        # Neither dropout nor batch statistics, and no statistics learnt.
        torch.testing.assert_close(found["means"], torch.tensor([[4.0, 4.0], [0.0, 0.0], [1.0, 2.0]]))
        assert found["samples"].tolist() == [2, 0, 1]
        assert all(torch.equal(before[name], now) for name, now in model.current_buffers().items())
        empty = class_means(model, params, lambda: [], 3)
        assert all(torch.equal(empty[key], value) for key, value in no_prototypes(3, 2).items())


def test_the_length_of_features_is_the_heads():
    assert Model(nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 3))).feature_size == 7
    headed = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sequential(nn.Flatten(), nn.Linear(18, 3)))
    model = Model(headed, head="1")
    assert model.feature_size == 18
    x = torch.randn(4, 1, 5, 5)
    found = class_means(model, model.params(), lambda: [Batch(x, torch.zeros(4, dtype=torch.int64))], 3)
    torch.testing.assert_close(found["means"][0], headed[0](x).flatten(1).mean(0).detach())
    with pytest.raises(SpecError, match=r"^model\.head: the head '0' does not have an nn\.Linear"):
        _ = Model(nn.Sequential(nn.Conv2d(1, 3, 1), nn.Flatten()), head="0").feature_size
