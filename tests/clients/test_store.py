from __future__ import annotations

import numpy as np
import pytest
import torch

from fedstrata.base.records import encode
from fedstrata.clients.client import StateStore
from fedstrata.stratify.client_batch import Pool


def state(client: int, floats: int = 1000):
    """About four kilobytes."""
    return {
        "objective": {"w": torch.full((floats // 2,), float(client))},
        "pool": (Pool(np.arange(floats // 4, dtype=np.int64) + client, client, 0), [None, "x", 0.1 * client]),
    }


def same(a, b):
    return encode(dict(a)) == encode(dict(b))


def files(folder):
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_states_beyond_the_memory_go_to_disk_and_come_back_equal(tmp_path):
    store = StateStore(memory=20_000, folder=tmp_path / "spill")
    for client in range(20):
        store.put(client, state(client))
    assert len(files(tmp_path / "spill")) >= 14
    assert store.clients == set(range(20))
    assert len(store.clients) == 20
    for client in (0, 19, 7, 7, 12, 0):
        assert same(store.get(client), state(client)), client
    assert store.clients == set(range(20))


def test_what_was_used_last_stays_in_memory(tmp_path):
    store = StateStore(memory=14_000, folder=tmp_path / "spill")
    for client in range(3):
        store.put(client, state(client))
    store.get(0)
    store.put(3, state(3))
    assert files(tmp_path / "spill") == ["1.state"]


def test_arrays_count_as_memory(tmp_path):
    store = StateStore(memory=20_000, folder=tmp_path / "spill")
    for client in range(4):
        store.put(client, {"order": np.zeros(1000)})
    assert files(tmp_path / "spill") == ["0.state", "1.state"]


def test_one_state_that_is_larger_than_the_memory_is_kept(tmp_path):
    store = StateStore(memory=1, folder=tmp_path / "spill")
    store.put(0, state(0))
    assert files(tmp_path / "spill") == []
    store.put(1, state(1))
    assert files(tmp_path / "spill") == ["0.state"]
    assert same(store.get(0), state(0))


def test_a_new_state_replaces_one_on_disk(tmp_path):
    store = StateStore(memory=1, folder=tmp_path / "spill")
    for client in range(3):
        store.put(client, state(client))
    store.put(0, state(7))
    assert same(store.get(0), state(7))
    store.put(2, state(2))
    assert same(store.get(0), state(7))
    assert len(store.clients) == 3


def test_changed_lists_whose_state_was_put_and_nobody_that_was_only_read(tmp_path):
    store = StateStore(memory=1, folder=tmp_path / "spill")
    for client in range(3):
        store.put(client, state(client))
    assert store.changed == {0, 1, 2}
    store.changed.clear()
    store.get(0)
    store.get(9)
    store.put(9, {})  # nothing to keep, and nothing was
    assert store.changed == set()
    assert len(store.clients) == 3
    store.put(1, state(4))
    assert store.changed == {1}


def test_a_temporary_folder_goes_when_the_store_is_closed():
    store = StateStore(memory=1)
    store.put(0, state(0))
    store.put(1, state(1))
    folder = store._folder
    assert files(folder) == ["0.state"]
    store.close()
    assert not folder.exists()
    StateStore().close()


@pytest.mark.slow
def test_a_run_that_spills_gives_the_same_states_as_one_that_does_not(tiny, tmp_path):
    def states(store):
        from fedstrata.objectives.scaffold import Scaffold

        federation = tiny(6, objective=Scaffold(), store=store)
        zero = {"c": {name: torch.zeros_like(w) for name, w in federation.weights.params.items()}}
        for round in range(1, 4):
            federation.begin(round)
            fit = federation.fits(0)[0]
            request = type(fit)(round, fit.weights, zero, 1.0)
            federation.ask(range(6), request)
        return {client: encode(dict(store.get(client))) for client in sorted(store.clients)}

    spilling = StateStore(memory=1000, folder=tmp_path / "spill")
    assert states(spilling) == states(StateStore())
    assert len(files(tmp_path / "spill")) >= 5


@pytest.mark.parametrize("client", [0, 3])
def test_who_has_no_state_gets_an_empty_one(client):
    assert StateStore().get(client) == {}
