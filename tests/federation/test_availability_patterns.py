"""Spells, cycles and the time of day: by hand, and as laws over many rounds."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest

import fedstrata as fs
from fedstrata.base.errors import SpecError
from fedstrata.base.rng import uniforms
from fedstrata.federation.availability_patterns import in_cycles, in_spells

CLIENTS = np.arange(400)


def drawn(model, rounds, clients=CLIENTS, seed=0):
    """Which clients are online, (rounds, clients)."""
    return np.array([model.online(clients, round, seed) for round in rounds])


def simulated(goes_online, goes_offline, p, clients, rounds, seed):
    """The chain of each client, step by step from round 1."""
    states = [uniforms(seed, "online", 1, clients) < p]
    for round in range(2, rounds + 1):
        draws = uniforms(seed, "online", round, clients)
        states.append(np.where(states[-1], draws < 1 - goes_offline, draws < goes_online))
    return np.array(states)


def patched(monkeypatch, draws):
    """Replace the uniform numbers of purpose "online" by ``draws[round][client]``."""
    replaced = lambda seed, purpose, round, clients: np.array([draws[round][client] for client in clients])  # noqa: E731
    monkeypatch.setattr("fedstrata.federation.availability_patterns.uniforms", replaced)


def test_spells_by_hand(monkeypatch):
    # Goes online with 1/4, stays online with 1/2, so that 1/3 is online: below 0.25 on, from 0.5 off, else unchanged.
    model = fs.Markov(online_rounds=2, offline_rounds=4)
    patched(monkeypatch, {1: [0.3, 0.4], 2: [0.3, 0.3], 3: [0.9, 0.1], 4: [0.4, 0.4]})
    assert drawn(model, range(1, 5), np.arange(2)).tolist() == [
        [True, False],
        [True, False],
        [False, True],
        [False, True],
    ]


def test_short_spells_by_hand(monkeypatch):
    # Goes online with 3/4, stays online with 1/4: below 0.25 on, from 0.75 off, else the opposite of before.
    patched(monkeypatch, {1: [0.4], 2: [0.5], 3: [0.5], 4: [0.8], 5: [0.3], 6: [0.3]})
    states = [in_spells(np.array([0.5]), 4 / 3, np.arange(1), round, 0).tolist() for round in range(1, 7)]
    assert states == [[True], [False], [True], [False], [True], [False]]


@pytest.mark.slow
@pytest.mark.parametrize(("online", "offline"), [(5.0, 20.0), (1.0, 1.0), (1.2, 1.0), (1.0, 30.0), (50.0, 3.0)])
def test_spells_are_the_chain_step_by_step(online, offline):
    p = online / (online + offline)
    expected = simulated(1 / offline, 1 / online, p, CLIENTS, 60, seed=3)
    assert (drawn(fs.Markov(online_rounds=online, offline_rounds=offline), range(1, 61), seed=3) == expected).all()


@pytest.mark.parametrize("p", [0.1, 0.02, 0.9])
def test_the_chain_of_fedau(p):
    """Largest probability of going online 0.05, and the limits of the two probabilities that follow from it."""
    goes_online, goes_offline = 0.05, 0.05 * (1 / p - 1)
    if goes_offline > 1:
        goes_online, goes_offline = goes_online / goes_offline, 1.0
    expected = simulated(goes_online, goes_offline, p, CLIENTS, 60, seed=0)
    found = np.array([in_spells(np.full(400, p), 20, CLIENTS, round, 0) for round in range(1, 61)])
    assert (found == expected).all()


@pytest.mark.parametrize("p", [0.0, 5e-324, 1.0])
def test_limits_of_the_probability(p):
    online = [in_spells(np.full(3, p), 20, np.arange(3), round, 0) for round in (1, 50)]
    assert (np.array(online) == (p == 1)).all()


@pytest.mark.slow
@pytest.mark.parametrize(("online", "offline"), [(4.0, 12.0), (2.0, 1.5)])
def test_spells_are_stationary_and_have_their_mean_lengths(online, offline):
    there = drawn(fs.Markov(online_rounds=online, offline_rounds=offline), range(1, 401))
    p, clients = online / (online + offline), len(CLIENTS)
    for round in (0, 1, 57, 399):
        assert abs(there[round].mean() - p) < 4 * math.sqrt(p * (1 - p) / clients)
    # The share of rounds online has a larger variance than of independent draws: rounds are correlated by ``memory``.
    memory = 1 - 1 / online - 1 / offline
    variance = p * (1 - p) * (1 + memory) / (1 - memory) / there.size
    assert abs(there.mean() - p) < 4 * math.sqrt(variance)
    # Each round online ends the spell with probability 1 / online, and each round offline with 1 / offline.
    before, after = there[:-1], there[1:]
    for state, length in ((True, online), (False, offline)):
        ends = (after != before)[before == state]
        assert abs(ends.mean() - 1 / length) < 4 * math.sqrt((1 - 1 / length) / length / len(ends))


def test_cycles_by_hand(monkeypatch):
    offsets = lambda seed, purpose, round, clients: np.array([0.0, 0.5, 0.75])[clients]  # noqa: E731
    monkeypatch.setattr("fedstrata.federation.availability_patterns.uniforms", offsets)
    there = drawn(fs.Cyclic(p=0.5, period=4), range(1, 9), np.arange(3))
    assert there.T.astype(int).tolist() == [
        [1, 1, 0, 0, 1, 1, 0, 0],
        [0, 0, 1, 1, 0, 0, 1, 1],
        [0, 1, 1, 0, 0, 1, 1, 0],
    ]


@pytest.mark.parametrize(("p", "rounds"), [(0.1, 10), (0.001, 1), (0.996, 100), (1.0, 100)])
def test_each_period_has_the_same_rounds_online(p, rounds):
    there = drawn(fs.Cyclic(p=p, period=100), range(1, 201))
    assert (there[:100] == there[100:]).all()
    assert (there[:100].sum(axis=0) == rounds).all()
    # The rounds are consecutive, if a period is a circle.
    assert ((there[1:101] != there[:100]).sum(axis=0) <= 2).all()
    share = rounds / 100
    assert all(abs(row.mean() - share) <= 4 * math.sqrt(share * (1 - share) / 400) for row in there[::9])


def test_cycles_of_clients_differ_in_length():
    p = np.array([0.1, 0.5])
    there = np.array([in_cycles(p, 10, np.arange(2), round, 0) for round in range(1, 11)])
    assert there.sum(axis=0).tolist() == [1, 5]


def test_the_time_of_day_by_hand(monkeypatch):
    draws = {"zone": [0.0, 0.25], "online": [0.55, 0.55]}
    replaced = lambda seed, purpose, round, clients: np.array(draws[purpose])[clients]  # noqa: E731
    monkeypatch.setattr("fedstrata.federation.availability_patterns.uniforms", replaced)
    # The probability is 0.9 at noon, a quarter of a day after the start, and 0.1 at midnight. Client 1 is two rounds
    # ahead.
    model = fs.Diurnal(lowest=0.1, highest=0.9, period=8)
    assert drawn(model, range(2, 10), np.arange(2)).T.astype(int).tolist() == [
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 0, 0, 0, 0, 0, 1, 1],
    ]


@pytest.mark.slow
def test_the_frequency_follows_the_time_of_day():
    model = fs.Diurnal(lowest=0.2, highest=0.8, period=10, spread=0)
    there = drawn(model, range(1, 1001)).reshape(100, 10, -1)
    for hour, frequency in enumerate(there.mean(axis=(0, 2))):
        p = 0.5 + 0.3 * math.sin(2 * math.pi * hour / 10)
        assert abs(frequency - p) < 4 * math.sqrt(p * (1 - p) / (100 * 400))
    spread = drawn(fs.Diurnal(lowest=0.2, highest=0.8, period=10), range(1, 11))
    assert all(abs(row.mean() - 0.5) < 4 * math.sqrt(0.25 / 400) for row in spread)


def test_a_day_that_is_darkest_at_noon():
    with pytest.raises(SpecError, match=r"highest = 0\.2: is less than availability\.lowest, which is 0\.3\."):
        fs.Diurnal(lowest=0.3, highest=0.2)


MODELS = [fs.Markov(online_rounds=3, offline_rounds=6), fs.Cyclic(p=0.3, period=10), fs.Diurnal(period=7)]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_a_round_depends_neither_on_earlier_calls_nor_on_other_clients(model):
    there = drawn(model, range(1, 81))
    fresh = type(model)(**dict(model))
    some = np.array([399, 0, 17])
    assert (fresh.online(some, 80, 0) == there[79, some]).all()
    assert (fresh.online(some, 7, 0) == there[6, some]).all()
    assert (fresh.online(some, 7, 1) != fresh.online(some, 7, 0)).any() or (drawn(fresh, [7], seed=1) != there[6]).any()


@pytest.mark.slow
def test_another_process_draws_the_same():
    code = """
import numpy as np, fedstrata as fs
for model in (fs.Markov(online_rounds=3, offline_rounds=6), fs.Cyclic(p=0.3, period=10), fs.Diurnal(period=7)):
    print("".join(str(int(x)) for x in model.online(np.arange(400), 80, 5)))
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert printed == ["".join(str(int(x)) for x in model.online(CLIENTS, 80, 5)) for model in MODELS]
