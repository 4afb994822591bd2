"""A head that is trained at the server, on samples that no client holds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fedstrata as fs
from fedstrata.base.errors import SpecError
from fedstrata.base.rng import rng


def test_a_head_with_statistics_of_its_own_is_tuned_with_them(start):
    class Headed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 6))
            self.head = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 10))
            self.head[0].running_mean += 2.0

        def forward(self, x):
            return self.head(self.body(x))

    spec = fs.Experiment(
        partition={"name": "classes", "clients": 5, "per_client": 2, "size": 60},
        method={"name": "fedavg-ft", "per_class": 4, "steps": 1},
    )
    started = start(spec, None, Headed())
    weights, loss = spec.method.tuned(started.config, started.state.weights)
    x, y = started.config.server_data.balanced(4, rng(spec.seed, "server-samples"))
    expected = torch.nn.functional.cross_entropy(Headed().eval()(x), y).item()
    assert loss == pytest.approx(expected, rel=1e-5)
    assert not torch.equal(weights.params["head.1.weight"], started.state.weights.params["head.1.weight"])


class Headless(nn.Module):
    """Logits straight from a convolution, without a linear layer."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 10, 3)

    def forward(self, x):
        return self.conv(x).mean((2, 3))


@pytest.mark.parametrize(
    "method",
    [
        "moon",
        {"name": "fedavg", "objective": "moon"},
        {"name": "fedavg-ft", "per_class": 4},
        {"name": "fedbabu", "fine_tune": {"per_class": 4}},
        "rebafl",
    ],
    ids=str,
)
def test_a_model_without_a_head_is_refused_before_the_first_round(method):
    spec = fs.Experiment(partition={"name": "classes", "clients": 5, "per_client": 2, "size": 60}, method=method)
    with pytest.raises(SpecError) as caught:
        fs.prepare(spec, model=Headless)
    assert str(caught.value) == (
        "model.head: Headless has neither a submodule 'head' nor a trained nn.Linear. Name the classifier "
        "'head', or pass its name: Model(module, head='dotted.name')."
    )
    fs.prepare(spec.replace(method="fedavg"), model=Headless)
