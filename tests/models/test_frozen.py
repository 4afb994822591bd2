"""Frozen parameters and constant buffers: they do not travel, are shared by clones, and are part of the identity."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fedstrata as fs
from fedstrata.base.errors import SpecError
from fedstrata.models.model import Model
from fedstrata.models.probe import draws_random_numbers


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter, and a constant buffer."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(64, 10).to(dtype).requires_grad_(False)
        torch.manual_seed(7)
        self.a, self.b = nn.Parameter(torch.randn(4, 64) * 0.1), nn.Parameter(torch.zeros(10, 4))
        self.register_buffer("scale", torch.full((10,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.base(x.to(self.base.weight.dtype)).float() + self.scale * (x @ self.a.t() @ self.b.t())


SPEC = fs.Experiment(method="fedavg", partition=fs.IID(clients=4), training={"rounds": 1, "local_epochs": 1})


def test_clones_share_frozen_tensors_and_nothing_else():
    model = Model(Adapted())
    draws_random_numbers(model, torch.ones(2, 64))
    twin = model.clone()
    assert list(twin.untrained.frozen) == ["base.weight", "base.bias", "scale"]
    for name, tensor in model.untrained.frozen.items():
        assert tensor.data_ptr() == twin.untrained.frozen[name].data_ptr()
    assert model.module.a.data_ptr() != twin.module.a.data_ptr()
    assert model.module.base.weight is not twin.module.base.weight  # ``Module.to`` changes parameters in place


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_adapters_travel(dtype, tmp_path: Path):
    history = fs.run(SPEC, model=Adapted(dtype=dtype), out=tmp_path / "run")
    assert set(history.params) == {"a", "b"}
    adapters = 4 * (4 * 64 + 10 * 4)
    assert history[-1]["bytes_up"] / 4 < adapters + 600  # and the names and counts of a reply
    predictor = fs.load(tmp_path / "run", model=Adapted(dtype=dtype))
    data = SPEC.data.load()
    assert (predictor.predict(data.x_test) == data.y_test.numpy()).mean() == history.final_accuracy
    with pytest.raises(SpecError, match=r"base\.weight differs: its checksum is \w+… here, but \w+… in the run"):
        fs.load(tmp_path / "run", model=Adapted(seed=1, dtype=dtype))
    with pytest.raises(SpecError, match=r"the frozen tensor base\.weight"):
        fs.run(SPEC, model=Adapted(seed=1, dtype=dtype), out=tmp_path / "run", resume=True)


def test_buffers_that_a_trial_changes_travel_also_if_it_changes_their_data():
    class Counting(Adapted):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.scale.data += 1
            return super().forward(x)

    model = Model(Counting())
    draws_random_numbers(model, torch.ones(2, 64))
    assert list(model.buffers()) == ["scale"]


def test_a_later_change_of_a_constant_buffer_and_a_change_of_a_frozen_parameter_are_refused():
    model = Model(Adapted())
    draws_random_numbers(model, torch.ones(2, 64))
    with pytest.raises(SpecError, match=r"^model: scale was constant"), model.loaded(model.params()):
        model.module.scale.add_(1)

    class Moving(Adapted):
        def forward(self, x: Tensor) -> Tensor:
            self.base.weight.data *= 0.9
            return super().forward(x)

    with pytest.raises(SpecError, match=r"^model: base\.weight is frozen"):
        draws_random_numbers(Model(Moving()), torch.ones(2, 64))


def test_trainable_parameters_are_float32():
    with pytest.raises(SpecError, match=r"^model = 'Linear': weight is bfloat16, bias is bfloat16, but trainable"):
        Model(nn.Linear(2, 3).bfloat16())
