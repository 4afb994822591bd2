from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fedstrata as fs
from fedstrata.models.memory_format import lay_out


class Flat(nn.Module):
    """A network of one's own; ``view`` needs the usual order, ``flatten`` takes any."""

    def __init__(self, channels=3, view=False):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.fc, self.flat_by_view = nn.Conv2d(channels, 4, 3, padding=1), nn.Linear(4 * 36, 3), view

    def forward(self, x):
        z = torch.relu(self.conv(x))
        return self.fc(z.view(len(z), -1) if self.flat_by_view else z.flatten(1))


def images(channels, n=8):
    x = np.random.default_rng(0).normal(size=(n, 6, 6, channels)).astype(np.float32)
    return torch.from_numpy(x).permute(0, 3, 1, 2)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("view", [False, True])
def test_the_same_logits_and_gradients_in_the_order_that_works(channels, view):
    x = images(channels)
    expected = Flat(channels)(x.contiguous())
    module = lay_out(Flat(channels, view), (channels, 6, 6))
    assert module.conv.weight.is_contiguous(memory_format=torch.channels_last) or view
    assert bool(module._forward_pre_hooks) == view
    logits = module(x)
    torch.testing.assert_close(logits, expected)
    logits.sum().backward()
    assert all(p.grad is not None for p in module.parameters())


def test_what_convolves_no_images_stays():
    for module, shape in ((nn.Linear(5, 3), (5,)), (nn.Sequential(nn.Flatten(), nn.Linear(36, 3)), (1, 6, 6))):
        assert lay_out(module, shape) is module
        assert not module._forward_pre_hooks


@pytest.mark.parametrize("view", [False, True])
def test_a_run_with_a_module_of_ones_own(view):
    x, y = images(3, 60).permute(0, 2, 3, 1).numpy(), np.arange(60) % 3
    spec = fs.Experiment(partition=fs.IID(clients=3), training=fs.Training(rounds=1, local_epochs=1, batch_size=8))
    history = fs.run(spec, data=(x, y, x, y), model=Flat(3, view))
    assert history[-1]["accuracy"] is not None
