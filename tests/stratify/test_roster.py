"""The roster of an epoch: available clients by placeholder, refills, and clients that fall out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedstrata as fs
from fedstrata.stratify.roster import Roster
from fedstrata.stratify.schedule import Holders


@pytest.fixture
def roster(start) -> Roster:
    """Placeholder 7 is held by clients 0, 1 and 2, and placeholder 3 by client 1."""
    table = {"partition": {"name": "iid", "clients": 3}, "method": {"name": "stratify"}}
    data = fs.from_arrays(np.zeros((6, 1)), np.arange(6) % 2, [[0.0]], [0])
    federation = start(fs.Experiment.from_table(table), data).federation
    federation.begin(1)
    holders = Holders(np.array([7, 3]), np.array([0, 3, 4]), np.array([0, 1, 2, 1]), np.array([2, 2, 2, 5]))
    return Roster(federation, holders)


def test_a_reply_names_empty_pools_by_place_and_by_number(roster: Roster) -> None:
    none = np.empty(0, dtype=np.int64)
    assert roster.empty_rows(1, np.array([0]), torch.tensor([3])).tolist() == [1, 3]
    assert roster.empty_rows(1, none, torch.tensor([7])).tolist() == [1]
    assert roster.empty_rows(0, none, torch.tensor([3])).tolist() == []  # client 0 does not hold it


def test_a_refill_brings_back_all_holders_but_those_that_fell_out(roster: Roster) -> None:
    roster.available[:] = False
    roster.remove([2])
    assert roster.refill(0, 4)
    assert roster.available.tolist() == [True, True, False, False]
    assert roster.refills == {0: {0}, 1: {0}}
    assert roster.federation.events == []


def test_a_placeholder_without_holders_is_an_event(roster: Roster) -> None:
    roster.remove([1])
    assert not roster.refill(1, 4)
    (event,) = roster.federation.events
    assert (event["kind"], event["reason"]) == (
        "label skipped",
        "4 positions of placeholder 1: no client with this label is present",
    )


def test_a_request_names_placeholders_by_their_numbers(roster: Roster) -> None:
    roster.answered.add(1)
    fields = roster.request(1, np.array([1, 0, 1]), {1, 0})
    assert fields["labels"].tolist() == [3, 7, 3]
    assert fields["refill"].tolist() == [7, 3]
    assert (fields["fresh"], roster.request(0, np.array([0]), ())["fresh"]) == (False, True)
