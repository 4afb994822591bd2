from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import fedstrata as fs
from fedstrata.base.errors import SpecError
from fedstrata.base.rng import torch_seeded
from fedstrata.models.model import Model
from fedstrata.models.resnet import ResNet9, ResNet18, ResNet20
from fedstrata.models.zoo import CNN, CNN64, MLP, MODELS, Custom, ModelSpec, Tabular, make_model


def two_layers(shape: tuple[int, ...], classes: int, width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(torch.Size(shape).numel(), width), nn.Linear(width, classes))


class OwnNet(nn.Module):
    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(shape[0], classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


class OwnSpec(ModelSpec):
    width: int = 3

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        return two_layers(shape, classes, self.width)


def no_module(shape: tuple[int, ...], classes: int) -> str:
    return "no module"


def wrong_outputs(shape: tuple[int, ...], classes: int) -> nn.Module:
    return two_layers(shape, classes + 1)


def too_large(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Linear(2**20, 2**40)


def failing(shape: tuple[int, ...], classes: int) -> nn.Module:
    raise KeyError("weights")


class FailingSpec(ModelSpec):
    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        raise ZeroDivisionError("division by zero")


def count(spec: ModelSpec, shape: tuple[int, ...], classes: int) -> int:
    return sum(parameter.numel() for parameter in spec.build(shape, classes).parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "shape", "classes", "expected"),
    [
        # 784·200 + 200, 200·100 + 100, 100·10 + 10
        (MLP(), (1, 28, 28), 10, 178_110),
        (MLP(hidden=()), (1, 28, 28), 10, 7_850),
        # 54·128 + 128, 128·64 + 64, 64·7 + 7
        (Tabular(), (54,), 7, 15_751),
        # 25·16 + 16, 25·16·32 + 32, 7·7·32·128 + 128, 128·10 + 10
        (CNN(), (1, 28, 28), 10, 215_370),
        # 75·16 + 16, 25·16·32 + 32, 25·32·64 + 64, 4·4·64·128 + 128, 1290
        (CNN(channels=(16, 32, 64)), (3, 32, 32), 10, 1_216 + 12_832 + 51_264 + 131_200 + 1_290),
        # 75·64 + 64, 25·64·64 + 64, 8·8·64·394 + 394, 394·192 + 192, 192·10 + 10
        (CNN64(), (3, 32, 32), 10, 4_864 + 102_464 + 1_614_218 + 75_840 + 1_930),
        (ResNet9(), (3, 32, 32), 10, 6_573_130),
        (ResNet18(), (3, 32, 32), 10, 11_173_962),
        (ResNet20(), (3, 32, 32), 10, 272_474),
        (ResNet20(norm="gn"), (3, 32, 32), 10, 272_474),
    ],
)
def test_parameter_counts(spec, shape, classes, expected):
    assert count(spec, shape, classes) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name != "custom"])
def test_every_name_makes_a_model_with_features_and_round_trips(name):
    spec = MODELS.parse(name)
    assert spec.to_spec()["name"] == name
    assert MODELS.parse(spec.to_spec()) == spec
    shape = (5,) if name == "tabular" else (1, 8, 8)
    model = make_model(spec, shape, 3, seed=0)
    features, logits = model.with_features(model.params(), torch.randn(2, *shape))
    assert logits.shape == (2, 3)
    assert features.shape == (2, model.params()["head.weight"].shape[1])
    assert model.head_names == {"head.weight", "head.bias"}


def test_the_seed_decides_the_weights_to_the_bit():
    spec = CNN()
    first = make_model(spec, (1, 8, 8), 10, seed=3).params()
    torch.manual_seed(99)
    torch.rand(7)
    again, other = (make_model(spec, (1, 8, 8), 10, seed=seed).params() for seed in (3, 4))
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_making_a_model_draws_nothing_from_the_global_generator():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    make_model(MLP(), (4,), 2, seed=0)
    assert torch.equal(torch.rand(3), expected)


def test_pooling_before_relu_is_the_same_function():
    model = CNN().build((3, 16, 16), 10)
    usual = copy.deepcopy(model)
    layers = list(usual.body)
    for i in [i for i, layer in enumerate(layers) if isinstance(layer, nn.MaxPool2d)]:
        layers[i], layers[i + 1] = layers[i + 1], layers[i]
    usual.body = nn.Sequential(*layers)
    assert [type(layer) for layer in usual.body[:3]] == [nn.Conv2d, nn.ReLU, nn.MaxPool2d]
    x = torch.randn(4, 3, 16, 16)
    for net in (model, usual):
        net(x).square().sum().backward()
    assert torch.equal(model(x), usual(x))
    for mine, theirs in zip(model.parameters(), usual.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_convolutions_are_channels_last():
    weight = CNN().build((3, 8, 8), 10).body[3].weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert not weight.is_contiguous()


@pytest.mark.slow
def test_group_norm_takes_the_place_of_every_batch_norm():
    for cls in (ResNet9, ResNet18, ResNet20):
        assert Model(cls(norm="bn").build((3, 8, 8), 2)).has_batchnorm
        assert not Model(cls(norm="gn").build((3, 8, 8), 2)).has_batchnorm


@pytest.mark.slow
@pytest.mark.parametrize("spec", [ResNet9(), ResNet20(), ResNet20(norm="gn")])
def test_residual_networks_train(spec):
    # In-place ReLUs next to shortcuts: autograd would complain here if one overwrote what the backward needs.
    module = make_model(spec, (3, 8, 8), 4, seed=0).module.train()
    loss = module(torch.randn(4, 3, 8, 8)).square().sum()
    loss.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in module.parameters())


@pytest.mark.parametrize(
    ("spec", "shape", "message"),
    [
        (CNN(), (54,), r"model.name = 'cnn': takes images.*\(54,\)"),
        (CNN(channels=(16, 32, 64)), (1, 8, 7), "at least 8x8, but the images are 8x7"),
        (ResNet9(), (3, 4, 4), "at least 8x8"),
        (ResNet18(), (10,), "takes images"),
        (Tabular(), (1, 8, 8), r"takes vectors.*\(1, 8, 8\)"),
        (Custom(factory=f"{__name__}:OwnNet"), (1, 8, 8), r"fails on a batch of shape \(B, 1, 8, 8\)"),
        (Custom(factory=f"{__name__}:no_module"), (4,), "returned str"),
        (
            Custom(factory=f"{__name__}:wrong_outputs"),
            (4,),
            r"for a batch of shape \(B, 4\)\. Return logits of shape \(B, 3\)",
        ),
        (Custom(factory=f"{__name__}:two_layers", arguments={"depth": 2}), (4,), "depth"),
    ],
)
def test_a_model_that_does_not_fit_the_data_says_so(spec, shape, message):
    with pytest.raises(SpecError, match=message):
        make_model(spec, shape, 3, seed=0)


def test_a_factory_of_the_users_own_round_trips_with_its_arguments():
    table = {"name": f"{__name__}:two_layers", "width": 7}
    spec = MODELS.parse(table)
    assert isinstance(spec, Custom)
    assert spec.to_spec() == table
    assert MODELS.parse(spec.to_spec()) == spec
    assert make_model(spec, (3,), 2, seed=0).params()["1.weight"].shape == (7, 3)


def test_a_module_class_and_a_spec_class_of_the_users_own():
    assert make_model(MODELS.parse(f"{__name__}:OwnNet"), (3,), 2, seed=0).head_names == {
        "head.weight",
        "head.bias",
    }
    spec = MODELS.parse({"name": f"{__name__}:OwnSpec", "width": 9})
    assert isinstance(spec, OwnSpec)
    assert MODELS.parse(spec.to_spec()) == spec


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("mpl", "did you mean 'mlp'"),
        ({"name": "mlp", "hiden": [3]}, "hiden.*did you mean 'hidden'"),
        ({"name": "mlp", "hidden": [0]}, "hidden.0 = 0"),
        ({"name": "cnn", "channels": []}, "channels"),
        (f"{__name__}:__name__", r"is a str\. Give a class derived from ModelSpec or nn\.Module, or a function\."),
        (f"{__name__}:missing", r"the module 'tests\.models\.test_zoo' does not define 'missing'\. Check the"),
        ({"hidden": [3]}, "is required, but not set. Use one of: mlp"),
    ],
)
def test_bad_specs(value, message):
    with pytest.raises(SpecError, match=message):
        MODELS.parse(value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            MLP(hidden=(10**6, 10**6)),
            "model.name = 'mlp': cannot be built for samples of .*RuntimeError: .*alloc",
        ),
        (
            Tabular(hidden=(2**31 - 1,) * 2),
            "model.name = 'tabular': cannot be built for samples of .*RuntimeError: .*alloc",
        ),
        (CNN(channels=(2**31 - 1,) * 2), "model.name = 'cnn': cannot be built for samples of shape .*RuntimeError"),
        (Custom(factory=f"{__name__}:too_large"), "too_large': cannot be built for samples of .*RuntimeError: .*alloc"),
        (Custom(factory=f"{__name__}:failing"), "failing': cannot be built for samples of .*KeyError: 'weights'"),
        (FailingSpec(), "FailingSpec': cannot be built for samples of .*ZeroDivisionError: division by zero"),
    ],
)
def test_a_model_that_cannot_be_built_or_held_is_refused(spec, message):
    shape = (64,) if isinstance(spec, Tabular) else (1, 8, 8)
    with pytest.raises(SpecError, match=message):
        make_model(spec, shape, 10, seed=0)


def test_asking_for_a_models_size_draws_no_numbers():
    before = torch.get_rng_state()
    model = make_model(MLP(), (1, 8, 8), 10, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    with torch_seeded(3, "model"):
        alone = MLP().build((1, 8, 8), 10)
    assert all(torch.equal(a, b) for a, b in zip(model.module.parameters(), alone.parameters(), strict=True))


class Plain(nn.Module):
    """A module that is made without arguments."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        return self.head(x.flatten(1))


def shaped(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))


def initial(model, seed):
    return fs.prepare(fs.Experiment(seed=seed), model=model).config.model.params()


@pytest.mark.parametrize("model", [Plain, lambda: Plain(), shaped])
def test_the_seed_decides_the_weights_of_a_class_or_function(model):
    first, again, other = initial(model, 0), initial(model, 0), initial(model, 1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_a_class_in_python_starts_like_the_same_class_in_a_spec():
    named = fs.prepare(fs.Experiment.from_table({"model": f"{__name__}:shaped"})).config.model.params()
    assert all(torch.equal(weights, named[name]) for name, weights in initial(shaped, 0).items())


def test_a_module_keeps_its_own_weights():
    module = Plain()
    assert torch.equal(initial(module, 1)["head.weight"], module.head.weight)


@pytest.mark.parametrize("model", ["net", 3, lambda: "net"])
def test_what_is_no_model_is_named(model):
    with pytest.raises(SpecError, match=r"must be an nn\.Module, a fedstrata Model, or a class or function that"):
        initial(model, 0)
