"""The layout of labels in slots, and what scrambling leaves of a difference: arithmetic without encryption."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from fedstrata.base.errors import FedstrataError
from fedstrata.stratify.masking.slot_layout import SlotLayout, below, shuffled

Floats = NDArray[np.float64]


def scrambled(grid: SlotLayout, differences: Floats) -> NDArray[np.int64]:
    """What a client reads off."""
    factors, mask = grid.blind()
    z = differences * factors + mask
    assert np.abs(z - np.rint(z)).max() <= 1 / 16 + 1e-3
    return np.rint(z).astype(np.int64)


@pytest.mark.slow
@settings(deadline=None)
@given(st.data())
def test_every_label_finds_its_entry_and_no_other(data: st.DataObject) -> None:
    classes = data.draw(st.integers(1, 40))
    grid = SlotLayout(classes, slots=16)  # more classes than slots: several pages
    listed = data.draw(st.lists(st.integers(0, classes - 1), unique=True))
    held = np.array(data.draw(st.lists(st.integers(0, classes - 1), unique=True)), dtype=np.int64)
    places = shuffled(classes)[: len(listed)]
    entries = grid.entries(np.array(listed, dtype=np.int64), places)
    pages = sorted(entries)
    sheets = grid.sheets_of(held)
    assert len(sheets) == grid.sheets(len(held))
    order = [(sheet, page) for sheet in range(len(sheets)) for page in pages]
    opened = [scrambled(grid, sheets[sheet] - entries[page]) for sheet, page in order]

    found = grid.find(opened, np.array([sheet for sheet, _ in order], dtype=np.int64), len(held))

    for label, place in zip(held.tolist(), found.tolist(), strict=True):
        if label not in listed:
            assert place == -1
        else:
            number, column = divmod(place, grid.width)
            assert order[number][1] * grid.width + column == places[listed.index(label)]


def test_entries_of_several_clients_add_up_to_one_list() -> None:
    grid = SlotLayout(10)
    first = grid.entries(np.array([3, 9]), np.array([4, 0]))[0]
    second = grid.entries(np.array([0]), np.array([7]))[0]
    row = (first + second)[:10]
    assert row.tolist() == [10, 0, 0, 0, 4, 0, 0, 1, 0, 0]
    assert (first + second)[: grid.rows * 10].reshape(grid.rows, 10).tolist() == [row.tolist()] * grid.rows


def test_a_label_that_is_listed_twice_is_an_error() -> None:
    grid = SlotLayout(10)
    entries = grid.entries(np.array([3, 3]), np.array([4, 5]))[0]
    opened = scrambled(grid, grid.sheets_of(np.array([3]))[0] - entries)
    with pytest.raises(FedstrataError, match="the server's list of labels is invalid"):
        grid.find([opened], np.array([0]), 1)


def test_an_entry_that_equals_an_unused_row_is_an_error() -> None:
    """A client with two labels uses the first two rows of its sheet."""
    grid = SlotLayout(10)
    opened = np.ones(grid.slots, dtype=np.int64)
    opened[1 * 10 + 7] = 0
    assert grid.find([opened], np.array([0]), 2).tolist() == [-1, 7]
    opened[2 * 10 + 4] = 0
    with pytest.raises(FedstrataError, match="the server's list of labels is invalid"):
        grid.find([opened], np.array([0]), 2)


@pytest.mark.parametrize("classes", [1, 2, 10, 100, 4095, 5000])
def test_codes_differ_modulo_the_prime(classes: int) -> None:
    p = SlotLayout(classes).prime
    assert p > classes + 1
    assert all(p % d for d in range(2, int(p**0.5) + 1))


def leaks(samples: dict[int, NDArray[np.int64]], prime: int) -> bool:
    """Whether what a client decrypts depends on the difference, or is not uniform: at a level of 1e-6."""
    p_values = []
    for values in samples.values():
        residues = values % prime
        if (residues == 0).any():
            return True
        observed = np.bincount(residues, minlength=prime)[1:]
        p_values.append(stats.chisquare(observed).pvalue)
    first, *rest = samples.values()
    p_values += [stats.ks_2samp(first, other).pvalue for other in rest]
    return min(p_values) < 1e-6


DIFFERENCES = (1, -1, 2, 50, -99)


def test_what_is_left_of_a_difference_is_uniform_whatever_it_was() -> None:
    grid = SlotLayout(100)
    samples = {
        d: np.concatenate([scrambled(grid, np.full(grid.slots, float(d))) for _ in range(5)]) for d in DIFFERENCES
    }
    assert not leaks(samples, grid.prime)


def test_the_printed_protocol_and_a_plain_random_factor_fail_the_same_test() -> None:
    grid = SlotLayout(100)
    printed = {d: np.full(5 * grid.slots, d) for d in DIFFERENCES}
    assert leaks(printed, grid.prime)
    factor_only = {d: d * (1 + below(grid.prime - 1, 5 * grid.slots)) for d in DIFFERENCES}
    assert leaks(factor_only, grid.prime)


def test_zero_stays_zero_and_shows_nothing_else() -> None:
    grid = SlotLayout(100)
    zeros = np.concatenate([scrambled(grid, np.zeros(grid.slots)) for _ in range(5)])
    others = np.concatenate([scrambled(grid, np.full(grid.slots, 7.0)) for _ in range(5)])
    assert (zeros % grid.prime == 0).all()
    assert stats.ks_2samp(zeros // grid.prime, others // grid.prime).pvalue > 1e-6


@pytest.mark.parametrize("classes", [2, 100, 5000, 60_000])
def test_numbers_stay_where_doubles_are_exact(classes: int) -> None:
    grid = SlotLayout(classes)
    factors, mask = grid.blind()
    assert factors.min() >= 1
    assert factors.max() < grid.prime
    assert np.abs(mask).max() + classes * factors.max() < 2**44
    p, spread = grid.prime, np.ptp(mask) / grid.prime
    assert p / spread < (2**-11 if classes == 60_000 else 2**-18)  # how much the multiple of p may tell


def test_below_is_uniform() -> None:
    assert stats.chisquare(np.bincount(below(7, 70_000), minlength=7)).pvalue > 1e-6
    assert sorted(shuffled(50).tolist()) == list(range(50))
    assert shuffled(50).tolist() != shuffled(50).tolist()
