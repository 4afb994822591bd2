"""Trees in shared memory: what was written is what is read, and memory comes back."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from fedstrata.engines import sharing
from fedstrata.engines.sharing import SharedMemory
from fedstrata.federation.messages import FitReply, Weights


@pytest.fixture
def memory():
    return SharedMemory()


@pytest.mark.parametrize("copy", [True, False])
def test_a_tree_comes_through(memory, copy):
    image = torch.arange(24.0).reshape(1, 2, 3, 4).permute(0, 3, 1, 2)
    w = torch.randn(5, 3)
    tree = {
        "reply": FitReply(Weights({"w": w}, {"n": torch.tensor(3)}), 1, 2, 3, 0.5, {}),
        "again": w,
        "image": image,
        "part": w[:, :2],
        "array": np.arange(6).reshape(2, 3),
        "names": np.array(["a", "b"]),
        "none": torch.empty(0, 3),
        7: (True, None, b"x", "y"),
    }
    found = memory.read(memory.write(tree), copy=copy)
    assert torch.equal(found["reply"].weights.params["w"], w)
    assert (found["reply"].samples, found["reply"].loss) == (1, 0.5)
    assert found["again"] is found["reply"].weights.params["w"]
    assert torch.equal(found["image"], image)
    assert found["image"].stride() == image.stride()
    assert torch.equal(found["part"], w[:, :2])
    assert found["array"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found["names"].tolist() == ["a", "b"]
    assert found["none"].shape == (0, 3)
    assert found[7] == (True, None, b"x", "y")
    assert all(t.data_ptr() % 64 == 0 for t in (found["again"], found["image"])) or copy


@pytest.mark.slow
def test_a_block_is_free_when_its_last_tensor_is_gone(memory):
    data = memory.write({"a": torch.ones(100), "b": torch.zeros(100)})
    tree = memory.read(data)
    kept = tree["a"][3:5]
    del tree
    gc.collect()
    assert memory.free == []
    del kept
    gc.collect()
    assert memory.free == [(0, 1024 - 128)]
    memory.reuse(memory.free)
    again = memory.write({"a": torch.full((200,), 7.0), "b": torch.zeros(8)})
    assert memory.read(again)["a"].sum() == 1400


def test_copies_outlive_the_block(memory):
    data = memory.write(torch.ones(10))
    found = memory.read(data, copy=True)
    memory.done(data)
    memory.write(torch.zeros(10))
    assert found.sum() == 10


def test_no_room_is_an_error_that_the_writer_sees(monkeypatch):
    monkeypatch.setattr(sharing, "LARGEST", 1 << 12)
    monkeypatch.setattr(sharing, "SMALLEST", 1 << 12)
    small = SharedMemory()
    small.write(torch.ones(100))
    with pytest.raises(MemoryError, match="is too small for"):
        small.write(torch.ones(10_000))


@pytest.mark.slow
def test_memory_does_not_grow_with_every_new_size(memory):
    """A block was only used again for a message of its very size: 989 MB after 60 rounds of at most 65."""
    draw = np.random.default_rng(0)
    largest = 0
    for _ in range(300):
        size = int(draw.integers(1, 5000))
        largest = max(largest, size)
        data = memory.write(torch.ones(size))
        assert memory.read(data, copy=True).sum() == size
        memory.done(data)
    assert memory.reach == 0
    kept = [memory.write(torch.ones(int(size))) for size in draw.integers(1, 5000, size=20)]
    for _ in range(300):
        memory.done(kept.pop(int(draw.integers(len(kept)))))
        kept.append(memory.write(torch.ones(int(draw.integers(1, 5000)))))
    assert memory.reach < 2 * 20 * 4 * 5000
    for data in kept:
        memory.done(data)
    assert memory.reach == 0
