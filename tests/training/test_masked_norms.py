"""Norms that leave padding out of account: without padding PyTorch's own, with it those of the real samples."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fedstrata.training.masked_norms import mask_norms

LAYERS = {
    "batch 1d": (nn.BatchNorm1d(3), (7, 3)),
    "batch 1d, long": (nn.BatchNorm1d(3), (7, 3, 4)),
    "batch 2d": (nn.BatchNorm2d(3), (7, 3, 4, 5)),
    "cumulative": (nn.BatchNorm2d(3, momentum=None), (7, 3, 2, 2)),
    "no statistics": (nn.BatchNorm2d(3, track_running_stats=False), (7, 3, 2, 2)),
    "not affine": (nn.BatchNorm2d(3, affine=False), (7, 3, 2, 2)),
    "group": (nn.GroupNorm(2, 6), (7, 6, 4, 5)),
    "group of vectors": (nn.GroupNorm(3, 6), (7, 6)),
}


@pytest.mark.parametrize(("layer", "shape"), LAYERS.values(), ids=list(LAYERS))
def test_without_padding_it_is_pytorchs_layer(layer, shape):
    torch.manual_seed(0)
    expected = nn.Sequential(copy.deepcopy(layer))
    for p in expected.parameters():
        nn.init.normal_(p)
    ours = copy.deepcopy(expected)
    mask_norms(ours)
    for training in (True, True, False):
        expected.train(training)
        ours.train(training)
        x = torch.randn(shape) * 3 + 2
        torch.testing.assert_close(ours(x), expected(x), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(dict(ours.named_buffers()), dict(expected.named_buffers()))


@pytest.mark.parametrize(("layer", "shape"), LAYERS.values(), ids=list(LAYERS))
def test_padding_is_not_seen(layer, shape):
    torch.manual_seed(0)
    ours = nn.Sequential(copy.deepcopy(layer)).train()
    expected = copy.deepcopy(ours)
    mask = mask_norms(ours)
    x = torch.randn(shape)
    mask.real = torch.tensor([True] * 4 + [False] * 3)
    padded = torch.cat([x[:4], torch.full_like(x[4:], 1e4)])
    torch.testing.assert_close(ours(padded)[:4], expected(x[:4]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dict(ours.named_buffers()), dict(expected.named_buffers()))


def test_each_client_of_a_vmap_has_statistics_of_its_own():
    torch.manual_seed(0)
    layer = nn.BatchNorm1d(3)
    ours = copy.deepcopy(nn.Sequential(layer)).train()
    mask_norms(ours)
    buffers = {name: torch.stack([b, b]) for name, b in ours.named_buffers()}
    x = torch.randn(2, 5, 3) * torch.tensor([1.0, 10.0])[:, None, None]

    def one(buffers, x):
        after = {name: b.clone() for name, b in buffers.items()}
        return torch.func.functional_call(ours, after, (x,)), after

    found, after = torch.func.vmap(one)(buffers, x)
    for k in range(2):
        alone = copy.deepcopy(layer).train()
        torch.testing.assert_close(found[k], alone(x[k]), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(after["0.running_var"][k], alone.running_var)
        assert int(after["0.num_batches_tracked"][k]) == 1
