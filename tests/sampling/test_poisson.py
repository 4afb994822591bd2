"""Poisson sampling: each client is drawn on its own."""

from __future__ import annotations

import numpy as np
import pytest

from fedstrata.sampling.poisson import Poisson


def drawn(federation, rounds: int) -> np.ndarray:
    """Which clients were drawn in each round, shape (rounds, N)."""
    table = np.zeros((rounds, federation.config.clients), dtype=bool)
    for round in range(1, rounds + 1):
        federation.begin(round)
        selection, _ = Poisson().select(federation, None, federation.weights)
        assert selection.draws.tolist() == [1] * len(selection.clients)
        table[round - 1, selection.clients] = True
    return table


@pytest.mark.slow
def test_each_client_is_drawn_with_its_probability_and_on_its_own(tiny):
    rounds, clients, rate = 4000, 10, 0.3
    table = drawn(tiny(clients, clients_per_round=3), rounds)
    # All limits are 4.5 standard errors, for 10 clients and 45 pairs of clients.
    assert np.abs(table.mean(0) - rate).max() < 4.5 * (rate * (1 - rate) / rounds) ** 0.5
    correlation = np.corrcoef(table.T)[np.triu_indices(clients, 1)]
    assert np.abs(correlation).max() < 4.5 / rounds**0.5
    # The number of clients is binomial, with the variance N q (1 − q).
    assert table.sum(1).var() == pytest.approx(clients * rate * (1 - rate), rel=0.1)


def test_all_clients_are_drawn_with_the_rate_one(tiny):
    assert drawn(tiny(4, clients_per_round=4), 5).all()


def test_other_excluded_clients_do_not_change_the_draw_of_a_client(tiny):
    federation = tiny(10, clients_per_round=5)
    whole = drawn(federation, 20)
    federation.excluded = np.array([0, 3, 9])
    part = drawn(federation, 20)
    assert not part[:, federation.excluded].any()
    rest = np.delete(np.arange(10), federation.excluded)
    assert (part[:, rest] == whole[:, rest]).all()
