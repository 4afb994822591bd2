"""Groups of clients: everybody is in one, padding wastes less than a fifth, memory suffices."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.training.batching import WASTE, grouped

PROFILES = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=12), min_size=1, max_size=25)


def padding(profiles: list[np.ndarray], group: list[int]) -> float:
    """The share of padding, client by client and step by step."""
    real = slots = 0
    for step in range(max(len(profiles[k]) for k in group)):
        sizes = [int(profiles[k][step]) for k in group if len(profiles[k]) > step]
        real, slots = real + sum(sizes), slots + len(sizes) * max(sizes)
    return 1 - real / slots


@given(PROFILES, st.floats(0, WASTE), st.sampled_from([None, 1, 3]), st.floats(1, 30))
def test_groups_keep_their_bounds(lists, waste, most, budget):
    profiles = [np.array(sizes) for sizes in lists]
    costs = [float(len(sizes)) for sizes in lists]
    groups = grouped(profiles, costs, budget=budget, most=most, waste=waste)
    assert sorted(place for group in groups for place in group) == list(range(len(profiles)))
    for group in groups:
        assert padding(profiles, group) <= waste + 1e-12
        assert most is None or len(group) <= most
        assert len(group) == 1 or sum(costs[place] for place in group) <= budget
        steps = [len(profiles[place]) for place in group]
        assert steps == sorted(steps, reverse=True)


@given(st.lists(st.integers(1, 200), min_size=2, max_size=60), st.integers(1, 32), st.integers(1, 3))
def test_clients_of_any_sizes_pad_less_than_a_fifth(sizes, batch, epochs):
    profiles = []
    for n in sizes:
        size = min(batch, n)
        whole, rest = divmod(n, size)
        profiles.append(np.array(([size] * whole + ([rest] if rest else [])) * epochs))
    groups = grouped(profiles, [0.0] * len(sizes), budget=1.0)
    assert all(padding(profiles, group) <= WASTE for group in groups)


def test_equal_clients_are_one_group():
    assert grouped([np.array([20, 20, 20])] * 100, [1.0] * 100, budget=100.0) == [list(range(100))]


def test_without_padding_only_equal_batches_go_together():
    profiles = [np.array(sizes) for sizes in ([4, 4, 1], [4, 4], [4, 3], [4])]
    assert grouped(profiles, [1.0] * 4, budget=9.0, waste=0.0) == [[0, 1, 3], [2]]


@pytest.mark.parametrize("budget", [0.0, 1.0])
def test_a_client_that_is_too_large_is_alone(budget):
    assert grouped([np.array([2])] * 3, [2.0] * 3, budget=budget) == [[0], [1], [2]]
