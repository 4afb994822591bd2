"""Trees through a pipe: what was sent is what is received."""

from __future__ import annotations

import multiprocessing
from threading import Thread

import numpy as np
import pytest
import torch

from fedstrata.engines.sharing import pack, receive, send
from fedstrata.federation.messages import FitReply, Weights


def through_a_pipe(tree):
    here, there = multiprocessing.Pipe()
    sender = Thread(target=send, args=(there, pack(tree)))
    sender.start()
    received = receive(here)
    sender.join()
    return received


def test_a_tree_comes_through():
    image = torch.arange(24.0).reshape(1, 2, 3, 4).permute(0, 3, 1, 2)
    w = torch.randn(5, 3)
    large = torch.randn(1000, 1000)
    tree = {
        "reply": FitReply(Weights({"w": w}, {"n": torch.tensor(3)}), 1, 2, 3, 0.5, {}),
        "again": w,
        "image": image,
        "part": w[:, :2],
        "row": large[3],
        "half": torch.ones(3, dtype=torch.bfloat16),
        "array": np.arange(6).reshape(2, 3),
        "names": np.array(["a", "b"]),
        "none": torch.empty(0, 3),
        "large": large,
        7: (True, None, b"x", "y"),
    }
    received = through_a_pipe(tree)
    assert torch.equal(received["reply"].weights.params["w"], w)
    assert (received["reply"].samples, received["reply"].loss) == (1, 0.5)
    assert received["again"] is received["reply"].weights.params["w"]
    for name in ("image", "part", "row", "half", "none", "large"):
        assert torch.equal(received[name], tree[name])
        assert received[name].dtype == tree[name].dtype
    assert received["image"].stride() == image.stride()
    assert received["array"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert received["names"].tolist() == ["a", "b"]
    assert received[7] == (True, None, b"x", "y")
    assert all(received[name].data_ptr() % 64 == 0 for name in ("again", "image", "part", "row"))


def test_what_is_received_can_be_changed():
    array, tensor = through_a_pipe((np.zeros(3), torch.zeros(3)))
    array[0] = tensor[0] = 1
    assert array.sum() == tensor.sum() == 1


def test_a_part_travels_without_the_rest_of_its_memory():
    data, memory = pack(torch.zeros(1000, 1000)[3])
    assert len(data) + sum(block.raw().nbytes for block in memory) < 5000


def test_what_cannot_be_pickled_is_an_error_before_anything_is_sent():
    with pytest.raises(AttributeError):
        pack(lambda: None)


def test_the_end_of_a_pipe_is_an_error():
    here, there = multiprocessing.Pipe()
    there.close()
    with pytest.raises(EOFError):
        receive(here)
