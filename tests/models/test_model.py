from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap

from fedstrata.base.errors import SpecError
from fedstrata.models.model import Model
from fedstrata.models.zoo import CNN, MLP, make_model


class OwnModule(nn.Module):
    """A user's module: two classifiers' worth of names, BatchNorm, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc_out = nn.Linear(4, 3)
        self.frozen = nn.Linear(5, 6).requires_grad_(False)
        self.bn = nn.BatchNorm1d(6)
        self.squeeze = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc_out(torch.tanh(self.squeeze(self.bn(self.frozen(x)))))


def own() -> Model:
    torch.manual_seed(0)
    return Model(OwnModule(), head="fc_out")


def other_params(model: Model, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    # In the memory format of the model's own: another one may round differently.
    return {name: torch.empty_like(own).normal_(generator=generator) for name, own in model.params().items()}


def test_the_installed_dictionary_and_any_other_give_the_same_logits():
    model = make_model(CNN(), (1, 8, 8), 10, seed=0)
    params, x = other_params(model), torch.randn(3, 1, 8, 8)
    with model.loaded(params) as installed:
        fast = model(installed, x)
    torch.testing.assert_close(model(params, x), fast, rtol=0, atol=0)
    assert not torch.equal(model(model.params(), x), fast)


def test_gradients_of_the_fast_path_are_those_of_torch_func():
    model = make_model(MLP(hidden=(5,)), (3,), 2, seed=0)
    params, x, y = other_params(model), torch.randn(7, 3), torch.tensor([0, 1, 1, 0, 1, 0, 0])
    expected = grad(lambda p: F.cross_entropy(model(p, x), y))(params)
    with model.loaded(params, train=True) as installed:
        loss = F.cross_entropy(model(installed, x), y)
        got = dict(zip(installed, torch.autograd.grad(loss, list(installed.values())), strict=True))
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, expected[name])


def test_an_in_place_update_changes_the_module_and_the_given_tensors_stay():
    model = make_model(MLP(hidden=()), (3,), 2, seed=0)
    params, x = model.params(), torch.ones(1, 3)
    kept = {name: tensor.clone() for name, tensor in params.items()}
    with model.loaded(params) as installed:
        before = model(installed, x).detach()
        with torch.no_grad():
            torch._foreach_add_(list(installed.values()), [torch.ones_like(p) for p in installed.values()])
        after = model(installed, x).detach()
    torch.testing.assert_close(after, before + 4)  # three weights of input 1, and the bias
    assert all(torch.equal(params[name], kept[name]) for name in params)


def test_after_loaded_the_initial_values_the_mode_and_empty_grads_are_back():
    model = own()
    params, buffers = model.params(), model.buffers()
    with model.loaded(other_params(model), train=True) as installed:
        assert model.module.training
        model(installed, torch.randn(8, 5)).sum().backward()
        moved = model.current_buffers()
    assert int(moved["bn.num_batches_tracked"]) == 1
    assert not torch.equal(moved["bn.running_mean"], buffers["bn.running_mean"])
    assert not model.module.training
    assert installed == {}
    state = model.module.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in {**params, **buffers}.items())
    assert all(p.grad is None for p in model.module.parameters())


def test_given_buffers_are_installed_and_the_rest_is_initial():
    model = own()
    mean = torch.arange(6.0)
    with model.loaded(model.params(), {"bn.running_mean": mean}):
        inside = model.current_buffers()
    assert torch.equal(inside["bn.running_mean"], mean)
    assert torch.equal(inside["bn.running_var"], torch.ones(6))
    with pytest.raises(RuntimeError, match="inside"):
        model.current_buffers()
    assert Model(nn.Linear(1, 2)).current_buffers() == {}


def test_a_call_with_other_parameters_leaves_the_running_statistics_alone():
    model = own()
    x = torch.randn(8, 5)
    with model.loaded(model.params(), train=True):
        model(other_params(model), x)
        after = model.current_buffers()
    assert int(after["bn.num_batches_tracked"]) == 0
    assert torch.equal(after["bn.running_mean"], torch.zeros(6))


def test_buffers_given_among_the_parameters_are_used():
    model = own()
    x, mean = torch.randn(8, 5), torch.arange(6.0)
    with model.loaded(model.params(), {"bn.running_mean": mean}) as installed:
        expected = model(installed, x)
    torch.testing.assert_close(model({**model.params(), "bn.running_mean": mean}, x), expected)


def test_frozen_parameters_are_neither_trained_nor_buffers():
    model = own()
    assert list(model.params()) == [
        "fc_out.weight",
        "fc_out.bias",
        "bn.weight",
        "bn.bias",
        "squeeze.weight",
        "squeeze.bias",
    ]
    assert list(model.buffers()) == [
        "bn.running_mean",
        "bn.running_var",
        "bn.num_batches_tracked",
    ]
    assert list(model.untrained.frozen) == ["frozen.weight", "frozen.bias"]


def test_features_of_a_users_module_on_both_paths():
    model = own()
    params, x = other_params(model), torch.randn(6, 5)
    features, logits = model.with_features(params, x)
    hidden = F.batch_norm(
        F.linear(x, model.module.frozen.weight, model.module.frozen.bias),
        torch.zeros(6),
        torch.ones(6),
        params["bn.weight"],
        params["bn.bias"],
    )
    expected = torch.tanh(F.linear(hidden, params["squeeze.weight"], params["squeeze.bias"]))
    torch.testing.assert_close(features, expected)
    torch.testing.assert_close(logits, model(params, x))
    torch.testing.assert_close(model.head(params, features), logits)
    with model.loaded(params) as installed:
        features, logits = model.with_features(installed, x)
        torch.testing.assert_close(features, expected)
        torch.testing.assert_close(model.head(installed, features), logits)
    assert not model.module.fc_out._forward_pre_hooks


def test_the_head_is_attribute_head_else_the_last_linear_else_named():
    class WithHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
            self.body = nn.Linear(2, 2)

    assert Model(WithHead()).head_names == {"head.0.weight", "head.0.bias", "head.1.weight", "head.1.bias"}
    assert Model(OwnModule()).head_names == {"squeeze.weight", "squeeze.bias"}
    assert own().head_names == {"fc_out.weight", "fc_out.bias"}
    assert Model(nn.Linear(2, 2)).head_names == {"weight", "bias"}
    with pytest.raises(SpecError, match=r"Model\(module, head="):
        _ = Model(nn.Sequential(nn.Conv2d(1, 1, 1))).head_names
    with pytest.raises(SpecError, match=r"model\.head = 'fc_uot': .*; did you mean 'fc_out'\? Use one of: \w+, .*\.$"):
        Model(OwnModule(), head="fc_uot")


def test_a_head_under_two_names_and_a_head_that_is_the_module():
    class Alias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 3)
            self.head = self.fc

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x)

    for model in (Model(Alias()), Model(nn.Linear(2, 3))):
        params, x = other_params(model), torch.randn(4, 2)
        features, logits = model.with_features(params, x)
        assert torch.equal(features, x)
        assert len(model.head_names) == 2
        torch.testing.assert_close(model.head(params, x), logits)


def test_a_head_that_forward_does_not_call_is_an_error():
    class Bypass(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.head.weight)

    model = Model(Bypass())
    with pytest.raises(RuntimeError, match="did not call the head 'head'"):
        model.with_features(model.params(), torch.ones(1, 2))


def test_wrong_tensors_and_nesting_are_refused_and_leave_the_model_usable():
    model = own()
    params = model.params()
    cases = [
        ({k: v for k, v in params.items() if k != "fc_out.bias"}, {}, "missing: fc_out.bias"),
        ({**params, "nobody": torch.ones(1)}, {}, "'nobody' is not a parameter"),
        ({**params, "fc_out.bias": torch.ones(1)}, {}, r"'fc_out.bias' has shape \(1,\), but must have shape \(3,\)"),
        (params, {"bn.mean": torch.ones(6)}, "'bn.mean' is not a buffer"),
    ]
    for given, buffers, message in cases:
        with pytest.raises(ValueError, match=message), model.loaded(given, buffers):
            pass
    with model.loaded(params):
        with pytest.raises(RuntimeError, match="clone"), model.loaded(params):
            pass
        with pytest.raises(RuntimeError, match="cloned"):
            model.clone()
        with pytest.raises(RuntimeError, match="moved"):
            model.to("cpu")
    with model.loaded(params) as again:
        assert again


def test_nothing_to_train_is_refused():
    with pytest.raises(SpecError, match="no parameter"):
        Model(nn.Linear(2, 2).requires_grad_(False))


def test_a_clone_is_equal_and_independent():
    model = own()
    twin = model.clone()
    assert twin.head_name == "fc_out"
    with twin.loaded(other_params(twin)), model.loaded(model.params()) as installed:
        assert torch.equal(installed["fc_out.weight"], model.params()["fc_out.weight"])
    assert all(torch.equal(tensor, twin.params()[name]) for name, tensor in model.params().items())
    assert all(twin.module.get_parameter(n) is not model.module.get_parameter(n) for n in model.params())


def test_to_keeps_the_values_and_the_links_to_the_module():
    model = own()
    before = model.buffers()
    assert model.to("cpu") is model
    assert list(model.buffers()) == list(before)
    with model.loaded(model.params(), {"bn.running_mean": torch.ones(6)}):
        assert torch.equal(model.module.bn.running_mean, torch.ones(6))


@pytest.mark.parametrize(
    ("spec", "shape"), [(MLP(hidden=(6,)), (1, 8, 8)), (CNN(channels=(2, 3), hidden=6), (1, 8, 8))]
)
def test_vmap_over_stacked_parameters(spec, shape):
    model = make_model(spec, shape, 3, seed=0)
    clients = [other_params(model, seed) for seed in range(3)]
    stacked = {name: torch.stack([client[name] for client in clients]) for name in model.params()}
    x, y = torch.randn(3, 5, *shape), torch.randint(3, (3, 5))

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        features, logits = model.with_features(params, x)
        return F.cross_entropy(logits, y) + features.square().mean()

    together = vmap(grad(loss))(stacked, x, y)
    for k, client in enumerate(clients):
        alone = grad(loss)(client, x[k], y[k])
        for name, tensor in alone.items():
            torch.testing.assert_close(together[name][k], tensor, rtol=1e-4, atol=1e-5)


def test_buffers_that_are_not_saved_do_not_travel():
    module = nn.Sequential(nn.Linear(2, 2))
    module.register_buffer("table", torch.ones(3), persistent=False)
    module.register_buffer("saved", torch.ones(3))
    assert list(Model(module).buffers()) == ["saved"]


def test_a_model_that_stays_loaded():
    made = Model(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)))
    params = made.load_for_good(train=True)
    assert made.module.training
    with pytest.raises(RuntimeError, match="while it is loaded"):
        made.load_for_good()
    other = {name: tensor + 1 for name, tensor in made.params().items()}
    buffers = {name: tensor + 1 for name, tensor in made.buffers().items()}
    made.share(other, buffers)
    assert all(torch.equal(params[name], tensor) for name, tensor in other.items())
    assert all(torch.equal(made.current_buffers()[name], tensor) for name, tensor in buffers.items())
    assert all(tensor.requires_grad for tensor in params.values())


def test_shared_parameters_are_read_where_they_lie_and_left_alone_afterwards():
    model = Model(
        nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(3, 2)).to(memory_format=torch.channels_last)
    )
    with pytest.raises(RuntimeError, match="inside"):
        model.share(model.params())
    initial = model.params()
    given = {name: tensor + 1 for name, tensor in model.params().items()}
    given["0.weight"] = given["0.weight"].contiguous()  # as it comes from a wire
    before = {name: tensor.clone() for name, tensor in given.items()}
    x = torch.randn(4, 2, 2, 2)
    with model.loaded(initial) as params:
        for _ in range(2):
            model.share(given)
            assert torch.equal(model(params, x), model(model.laid_out(given), x))  # formats differ in last bits
            assert params["2.weight"].data_ptr() == given["2.weight"].data_ptr()
            assert params["0.weight"].is_contiguous(memory_format=torch.channels_last)
        given["2.weight"] += 1
        before["2.weight"] += 1
        assert torch.equal(params["2.weight"], given["2.weight"])
    with model.loaded(initial) as params:
        assert all(torch.equal(params[name], tensor) for name, tensor in initial.items())
        for tensor in params.values():
            tensor.data.zero_()
    assert all(torch.equal(given[name], tensor) for name, tensor in before.items())


class Aliased(nn.Module):
    """Two layers in a list, the second under a name of its own too; their weights may be tied besides."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        if tied:
            self.layers[2].weight = self.layers[0].weight
        self.head = self.layers[2]

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.parametrize("tied", [False, True])
def test_a_call_with_other_parameters_leaves_a_submodule_of_two_names_alone(tied):
    """Inside ``loaded``, as MOON and ReBaFL call it: gradients of the installed parameters are still theirs."""
    model, x = Model(Aliased(tied)), torch.randn(5, 4)
    params, others = model.params(), other_params(model)
    with model.loaded(params, train=True) as installed:
        expected = torch.autograd.grad(model(installed, x).square().sum(), list(installed.values()))
        before = {name: id(tensor) for name, tensor in model.module.named_parameters()}
        seen = model(others, x)
        assert {name: id(tensor) for name, tensor in model.module.named_parameters()} == before
        found = torch.autograd.grad(model(installed, x).square().sum(), list(installed.values()))
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)
            assert a.any()
    with model.loaded(others, train=True) as installed:
        torch.testing.assert_close(model(installed, x), seen)
    with model.loaded(params) as installed:
        expected = torch.autograd.grad(model(installed, x).square().sum(), list(installed.values()))
    gradients = grad(lambda p: model(p, x).square().sum())(params)
    for name, gradient in zip(params, expected, strict=True):
        torch.testing.assert_close(gradients[name], gradient)
