"""Steps of SGD by hand."""

from __future__ import annotations

import pytest
import torch

from fedstrata.clients.training.steps import SGD, clipped
from fedstrata.federation.settings import Training


def test_the_gradient_is_clipped_and_the_decay_is_not():
    """g = (3, 4) has norm 5 and becomes (0.6, 0.8) under a clip of 1; λ w = (0.5, 0) comes on top of it."""
    w = [torch.tensor([1.0, 0.0])]
    training = Training(clip=1.0, weight_decay=0.5)
    SGD(training, lr=0.1).step(w, [torch.tensor([3.0, 4.0])])
    torch.testing.assert_close(w[0], torch.tensor([1.0 - 0.1 * (0.6 + 0.5), -0.1 * 0.8]))


def test_momentum_by_hand():
    """v = 1, then 0.5 · 1 + 2; each is taken off whole."""
    w, sgd = [torch.tensor([0.0])], SGD(Training(momentum=0.5), lr=1.0)
    for gradient in (1.0, 2.0):
        sgd.step(w, [torch.tensor([gradient])])
    assert w[0].item() == -(1 + 2.5)


@pytest.mark.parametrize(("limit", "expected"), [(10.0, [[3.0], [4.0]]), (2.5, [[1.5], [2.0]])])
def test_a_clip_is_of_the_norm_over_all_tensors_and_lengthens_nothing(limit, expected):
    found = clipped([torch.tensor([3.0]), torch.tensor([4.0])], limit)
    torch.testing.assert_close(found, [torch.tensor(part) for part in expected])
