"""The noisy mean of clipped updates: three clients by hand, the bound on one client, and the noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedstrata.aggregation.private import clipped_sum, noisy_mean

VECTORS = st.lists(st.floats(-1e4, 1e4, width=32), min_size=3, max_size=3)


def model_of(vector: list[float]) -> dict[str, torch.Tensor]:
    """A model of two tensors, and a third that clients do not train."""
    w = torch.tensor(vector)
    return {"w": w[:2].reshape(2, 1), "b": w[2:], "frozen": torch.full((5,), 1e6)}


def start_at(vector: list[float]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in model_of(vector).items() if name != "frozen"}


def test_three_clients_by_hand():
    # The updates are (3, 4, 0) with the norm 5, (0, 0, 2) with the norm 2, and (0.3, 0, 0.4) with the norm 0.5. With
    # C = 2, only the first is scaled, by 2 / 5. The sum is (1.2, 1.6, 0) + (0, 0, 2) + (0.3, 0, 0.4) = (1.5, 1.6, 2.4).
    before = start_at([1.0, 1.0, 1.0])
    models = [model_of(w) for w in ([4.0, 5.0, 1.0], [1.0, 1.0, 3.0], [1.3, 1.0, 1.4])]
    total, scaled = clipped_sum(before, models, 2.0)
    torch.testing.assert_close(total, torch.tensor([1.5, 1.6, 2.4], dtype=torch.float64), atol=1e-6, rtol=0)
    assert scaled == 1
    # The noise is zC = 6 times (1, 0, −1), and the expected number of clients is 4, although three answered.
    update = noisy_mean(total, before, 3.0 * 2.0, 4, np.array([1.0, 0.0, -1.0]))
    torch.testing.assert_close(update, {"w": torch.tensor([[7.5 / 4], [0.4]]), "b": torch.tensor([-0.9])})


def test_without_answers_the_sum_is_zero_and_the_noise_remains():
    before = start_at([1.0, 2.0, 3.0])
    total, scaled = clipped_sum(before, [], 1.0)
    assert total.tolist() == [0, 0, 0]
    assert scaled == 0
    assert noisy_mean(total, before, 1.0, 2, np.ones(3))["b"].tolist() == [0.5]


@pytest.mark.slow
@given(st.lists(VECTORS, min_size=1, max_size=6), VECTORS, st.floats(0.01, 100), st.data())
def test_one_client_changes_the_sum_by_at_most_the_largest_norm(clients, start, clip, data):
    left = data.draw(st.integers(0, len(clients) - 1))
    before = start_at(start)
    whole, _ = clipped_sum(before, map(model_of, clients), clip)
    without, _ = clipped_sum(before, map(model_of, clients[:left] + clients[left + 1 :]), clip)
    assert float((whole - without).norm()) <= clip * (1 + 1e-9)


@pytest.mark.slow
@given(st.lists(VECTORS, min_size=1, max_size=6), VECTORS)
def test_with_a_large_bound_the_sum_is_exact(clients, start):
    before = start_at(start)
    total, scaled = clipped_sum(before, map(model_of, clients), 1e9)
    expected = sum(np.float32(w).astype(float) - np.float32(start) for w in clients)
    assert total.numpy() == pytest.approx(expected, rel=1e-5, abs=1e-2)
    assert scaled == 0


def test_the_noise_is_normal_with_the_right_deviation():
    d = 40_000
    before = {"w": torch.zeros(d)}
    normal = np.random.default_rng(0).standard_normal(d)
    noise = noisy_mean(torch.zeros(d, dtype=torch.float64), before, 3.0, 6, normal)["w"].double().numpy()
    # The deviation is 3 / 6. The limits are 4 standard errors.
    assert abs(noise.mean()) < 4 * 0.5 / d**0.5
    assert abs(noise.std() / 0.5 - 1) < 4 / (2 * d) ** 0.5
    assert stats.kstest(noise / 0.5, "norm").pvalue > 0.01
