"""No shortcut through local training may take one objective for another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fedstrata as fs
from fedstrata.objectives.base import OBJECTIVES


class Opaque(nn.Module):
    """The same layers, in a forward pass that nothing but PyTorch can follow."""

    def __init__(self, inner: nn.Sequential) -> None:
        super().__init__()
        self.inner, self.head = inner[:-1], inner[-1]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x) + 0 * x.sum())


@pytest.mark.slow
@pytest.mark.parametrize("objective", list(OBJECTIVES))
def test_dense_layers_train_like_any_others(objective):
    torch.manual_seed(0)
    y = torch.arange(36) % 4
    x = torch.randn(36, 5) + torch.eye(4, 5)[y]
    data = fs.from_arrays(x, y, x, y, normalize="none")
    layers = nn.Sequential(nn.Flatten(), nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4))
    state = {name: tensor.clone() for name, tensor in layers.state_dict().items()}
    spec = fs.Experiment(
        partition={"name": "classes", "clients": 4, "per_client": 2},
        method={"name": "fedavg", "objective": objective},
        training={"rounds": 2, "clients_per_round": 4, "local_epochs": 2, "batch_size": 4, "lr": 0.1},
    )
    found = list(fs.run(spec, data=data, model=layers).params.values())
    layers = nn.Sequential(nn.Flatten(), nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4))
    layers.load_state_dict(state)
    expected = list(fs.run(spec, data=data, model=Opaque(layers)).params.values())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
