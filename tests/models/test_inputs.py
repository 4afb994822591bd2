"""Batches of several tensors, and modules that return more than their logits."""

from __future__ import annotations

from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad

import fedstrata as fs
from fedstrata.base.errors import SpecError
from fedstrata.models.memory_format import lay_out
from fedstrata.models.model import Model
from fedstrata.models.probe import draws_random_numbers

BATCH = {
    "input_ids": torch.tensor([[1, 2, 3, 0], [4, 5, 0, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]),
}
Pair = namedtuple("Pair", ("hidden", "logits"))


class Encoder(nn.Module):
    """A small transformer that takes arguments, and returns an object, as those of the library ``transformers`` do."""

    def __init__(self, dropout: float = 0.0, wrap: Any = lambda z, logits: SimpleNamespace(hidden=z, logits=logits)):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.wrap = nn.Embedding(7, 8), wrap
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)
        self.classifier = nn.Linear(8, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        z = self.layer(self.embed(input_ids), src_key_padding_mask=attention_mask == 0)
        weight = attention_mask.unsqueeze(2).float()
        pooled = (z * weight).sum(1) / weight.sum(1)
        return self.wrap(z, self.classifier(pooled))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda z, logits: logits,
        lambda z, logits: SimpleNamespace(logits=logits),
        lambda z, logits: (logits, z),
        Pair,  # a tuple whose first item is something else
    ],
)
def test_the_logits_are_taken_from_the_output_on_both_paths(wrap):
    model = Model(Encoder(wrap=wrap))
    expected = Encoder(wrap=lambda z, logits: logits).eval()(**BATCH)
    with model.loaded(model.params()) as installed:
        for params in (installed, model.params()):
            logits = model(params, BATCH)
            torch.testing.assert_close(logits, expected)
            features, logits = model.with_features(params, BATCH)
            torch.testing.assert_close(model.head(params, features), logits)
    assert model.head_names == {"classifier.weight", "classifier.bias"}


def test_gradients_with_a_mapping_are_those_of_autograd():
    model, y = Model(Encoder()), torch.tensor([2, 0])
    expected = grad(lambda p: F.cross_entropy(model(p, BATCH), y))(model.params())
    with model.loaded(model.params(), train=True) as installed:
        F.cross_entropy(model(installed, BATCH), y).backward()
        assert not installed["embed.weight"].grad[0].any(), "the mask hides padding"
        assert installed["embed.weight"].grad[1].any()
        for name, tensor in installed.items():
            torch.testing.assert_close(tensor.grad, expected[name], rtol=1e-4, atol=1e-6)


def test_padding_that_the_mask_hides_changes_no_logit():
    model = Model(Encoder())
    other = {**BATCH, "input_ids": torch.tensor([[1, 2, 3, 6], [4, 5, 6, 6]])}
    torch.testing.assert_close(model(model.params(), other), model(model.params(), BATCH))


@pytest.mark.parametrize("count", [0, 1, 2])
def test_layers_that_draw_random_numbers_are_found_in_modules_of_mappings(count):
    x = {name: tensor[:count] for name, tensor in BATCH.items()}
    if count == 0:
        x["attention_mask"] = x["attention_mask"].float()
    before = torch.get_rng_state()
    assert [draws_random_numbers(Model(Encoder(p)), x) for p in (0.0, 0.1)] == [False, True]
    assert torch.equal(torch.get_rng_state(), before)


def test_a_module_that_fails_only_in_training_is_refused_before_the_run():
    class Fails(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                raise ZeroDivisionError("no pupils")
            return super().forward(x.flatten(1))

    expected = (
        r"^model = 'Fails': fails in training mode on a batch of shape \(2, 1, 8, 8\): ZeroDivisionError: no pupil"
    )
    with pytest.raises(SpecError, match=expected):
        fs.prepare(fs.Experiment(), model=Fails(64, 10))
    with pytest.raises(SpecError, match=r"^model = 'Encoder': fails .*\{'input_ids': \(2, 4\)\}: TypeError: .*mask"):
        draws_random_numbers(Model(Encoder()), {"input_ids": BATCH["input_ids"]})


@pytest.mark.slow
def test_a_run_with_a_module_that_returns_an_object():
    class Wrapped(nn.Module):
        def __init__(self, wrap: Any) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.conv, self.fc, self.wrap = nn.Conv2d(1, 4, 3), nn.Linear(144, 10), wrap

        def forward(self, x: Tensor) -> Any:
            return self.wrap(self.fc(self.conv(x).flatten(1)))

    spec = fs.Experiment(partition=fs.IID(clients=4), training={"rounds": 2, "local_epochs": 1})
    wraps = (lambda z: z, lambda z: SimpleNamespace(logits=z), lambda z: (z, None))
    runs = [fs.run(spec, model=Wrapped(wrap)) for wrap in wraps]
    assert len({run.final_accuracy for run in runs}) == 1
    for run in runs[1:]:
        assert all(torch.equal(tensor, run.params[name]) for name, tensor in runs[0].params.items())


@pytest.mark.slow
def test_a_model_without_a_head_trains_until_a_method_needs_it():
    class Headless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(10, 64) * 0.1)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x.flatten(1), self.weight)

    model, x = Model(Headless()), torch.ones(2, 64)
    clone = model.clone()
    for use in (
        lambda: model.head_names,
        lambda: model.with_features(model.params(), x),
        lambda: clone.head(clone.params(), x),
    ):
        with pytest.raises(SpecError, match=r"^model\.head: Headless has neither .*Model\(module, head="):
            use()
    spec = fs.Experiment(method="fedavg", partition=fs.IID(clients=4), training={"rounds": 1})
    assert fs.run(spec, model=Headless)[-1]["clients_trained"] == 4
    with pytest.raises(SpecError, match=r"^model\.head: Headless has neither"):
        fs.prepare(spec.model_copy(update={"method": fs.Experiment(method="fedbabu").method}), model=Headless)


class LoRALinear(nn.Module):
    """A layer W x + B A x, in which W is frozen."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def test_the_head_is_not_among_frozen_or_adapter_layers():
    adapted = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3), LoRALinear(nn.Linear(3, 3)), nn.Linear(3, 3))
    adapted[3].requires_grad_(False)
    assert Model(adapted).head_names == {"1.weight", "1.bias"}
    named = nn.ModuleDict({"classifier": nn.Linear(4, 3), "x_lora_A": nn.ModuleDict({"default": nn.Linear(4, 2)})})
    assert Model(named).head_names == {"classifier.weight", "classifier.bias"}
    everyday = nn.Sequential()
    everyday.exploration = nn.Linear(4, 3)  # a name that only contains these letters
    assert Model(everyday).head_names == {"exploration.weight", "exploration.bias"}
    with pytest.raises(SpecError, match=r"^model\.head"):
        _ = Model(nn.Sequential(LoRALinear(nn.Linear(3, 3)))).head_names


def test_modules_of_mappings_are_not_laid_out():
    module = nn.Sequential(nn.Conv2d(1, 2, 3))
    shapes = {"image": (1, 6, 6), "mask": (6, 6), "age": ()}
    assert lay_out(module, shapes) is module
    assert module[0].weight.is_contiguous()
    assert not module._forward_pre_hooks
