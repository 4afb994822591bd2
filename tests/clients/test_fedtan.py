"""FedTAN: averaged statistics and averaged gradients of them, in the first step of a round."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from limits import within
from torch import nn

import fedstrata as fs
from fedstrata.base.errors import SpecError
from fedstrata.models.averagednorm import averaged
from fedstrata.models.batchnorm import LocalGroup, federate_batchnorm
from fedstrata.runs.preparation import prepare


def module(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    made = nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
    )
    return federate_batchnorm(made).double().train()


def parts(sizes: tuple[int, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(n, 3, generator=generator, dtype=torch.float64) + k,
            torch.randint(0, 2, (n,), generator=generator),
        )
        for k, n in enumerate(sizes)
    ]


def in_tandem(data: list[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[list[torch.Tensor], nn.Module]]:
    """Each client's gradients of its own mean loss, computed in a thread each."""
    group, modules = LocalGroup(len(data), timeout=10), [module() for _ in data]

    def work(k: int) -> list[torch.Tensor]:
        x, y = data[k]
        with averaged(modules[k], group.member(k), len(y)):
            loss = F.cross_entropy(modules[k](x), y)
            return list(torch.autograd.grad(loss, list(modules[k].parameters())))

    with ThreadPoolExecutor(len(data)) as pool:
        return list(zip(pool.map(work, range(len(data))), modules, strict=True))


def reference(data: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The gradient of Σ p_k F_k by autograd, with every layer's statistics averaged in sight of it; the statistics."""
    net = module()
    share = [len(y) / sum(len(y) for _, y in data) for _, y in data]
    hidden, seen = [x for x, _ in data], []
    for layer in net:
        if isinstance(layer, nn.BatchNorm1d):
            mean = sum(p * h.mean(0) for p, h in zip(share, hidden, strict=True))
            var = sum(p * h.var(0, correction=0) for p, h in zip(share, hidden, strict=True))
            hidden = [(h - mean) / torch.sqrt(var + layer.eps) * layer.weight + layer.bias for h in hidden]
            seen += [mean.detach(), var.detach()]
        else:
            hidden = [layer(h) for h in hidden]
    total = sum(p * F.cross_entropy(h, y) for p, h, (_, y) in zip(share, hidden, data, strict=True))
    return list(torch.autograd.grad(total, list(net.parameters()))), seen


@pytest.mark.parametrize("sizes", [(5,), (4, 4), (2, 7, 5)])
def test_the_mean_of_the_clients_gradients_is_that_of_the_whole(sizes):
    data = parts(sizes)
    found = in_tandem(data)
    expected, statistics = reference(data)
    for i, gradient in enumerate(expected):
        mean = sum(n / sum(sizes) * gradients[i] for n, (gradients, _) in zip(sizes, found, strict=True))
        torch.testing.assert_close(mean, gradient, rtol=1e-9, atol=1e-12)
    for _, net in found:
        kept = [t for name, t in net.named_buffers() if name.endswith(("mean", "var"))]
        torch.testing.assert_close(kept, statistics, rtol=1e-12, atol=1e-12)


def test_alone_it_is_ordinary_batchnorm():
    ((gradients, _),) = in_tandem(parts((6,)))
    net, (x, y) = module(), parts((6,))[0]
    expected = torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters()))
    torch.testing.assert_close(gradients, list(expected), rtol=1e-9, atol=1e-12)


def test_images_are_normalised_by_channel():
    conv = federate_batchnorm(
        nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2))
    ).double()
    x = torch.randn(5, 1, 4, 4, dtype=torch.float64)
    y = torch.tensor([0, 1, 0, 1, 1])
    expected = torch.autograd.grad(F.cross_entropy(conv.train()(x), y), list(conv.parameters()))
    with averaged(conv, LocalGroup(1).member(0), 5):
        got = torch.autograd.grad(F.cross_entropy(conv(x), y), list(conv.parameters()))
    torch.testing.assert_close(list(got), list(expected), rtol=1e-9, atol=1e-12)
    assert "forward" not in vars(conv[1])


def spec_of(**training: object) -> fs.Experiment:
    return fs.Experiment.from_table(
        {
            "partition": {"name": "given", "indices": [[0, 1, 2], [3, 4, 5, 6]]},
            "method": "fedtan",
            "training": {"local_epochs": 1, "lr": 0.1, "batch_size": 8, **training},
        }
    )


def small() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))


def test_a_round_of_one_step_is_a_step_of_the_whole(start, seven):
    """Two clients, one full batch each: the mean by size of their models is one SGD step on Σ p_k F_k."""
    started = start(spec_of(), seven, small())
    before = started.state.weights.params
    metrics = started.step()
    assert metrics["samples"] == 7
    net = federate_batchnorm(small()).train()
    net.load_state_dict(before, strict=False)
    halves = [(seven.inputs(torch.tensor(part)), seven.y_train[part]) for part in ([0, 1, 2], [3, 4, 5, 6])]
    hidden = [net[0](x) for x, _ in halves]
    mean = sum(p * h.mean(0) for p, h in zip((3 / 7, 4 / 7), hidden, strict=True))
    var = sum(p * h.var(0, correction=0) for p, h in zip((3 / 7, 4 / 7), hidden, strict=True))
    losses = []
    for h, (_, y) in zip(hidden, halves, strict=True):
        normal = (h - mean) / torch.sqrt(var + 1e-5) * net[1].weight + net[1].bias
        losses.append(F.cross_entropy(net[3](F.relu(normal)), y))
    total = 3 / 7 * losses[0] + 4 / 7 * losses[1]
    for (name, w), g in zip(net.named_parameters(), torch.autograd.grad(total, list(net.parameters())), strict=True):
        torch.testing.assert_close(started.state.weights.params[name], (w - 0.1 * g).detach(), rtol=1e-4, atol=1e-6)
    buffers = started.state.weights.buffers
    torch.testing.assert_close(buffers["1.running_mean"], mean.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(buffers["1.running_var"], var.detach(), rtol=1e-5, atol=1e-6)


def test_later_steps_keep_the_statistics_of_the_first(start, seven):
    one, many = start(spec_of(), seven, small()), start(spec_of(local_epochs=4), seven, small())
    one.step()
    many.step()
    for name in ("1.running_mean", "1.running_var"):
        torch.testing.assert_close(one.state.weights.buffers[name], many.state.weights.buffers[name])
    assert int(many.state.weights.buffers["1.num_batches_tracked"]) == 1
    assert not torch.equal(one.state.weights.params["0.weight"], many.state.weights.params["0.weight"])


def test_a_client_without_a_sample_does_not_hold_up_the_rest(start, seven):
    table = spec_of().to_spec()
    table["partition"] = {"name": "given", "indices": [[0, 1, 2], [], [3, 4, 5, 6]], "min_size": 0}
    started = start(fs.Experiment.from_table(table), seven, small())
    two = start(spec_of(), seven, small())
    assert started.step()["clients_failed"] == 0
    two.step()
    for name, w in two.state.weights.params.items():
        torch.testing.assert_close(started.state.weights.params[name], w, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [pytest.param((20, 20, 23, 1), marks=pytest.mark.long), (16, 1, 0)], ids=str)
def test_a_client_of_one_sample_does_not_hold_up_the_rest_for_ever(start, sizes):
    """BatchNorm has no statistics of one sample, so that its holder takes no step; but it takes part in the sums."""
    ends = [sum(sizes[:k]) for k in range(len(sizes) + 1)]
    table = {
        "method": "fedtan",
        "model": "resnet9",
        "partition": {
            "name": "given",
            "indices": [list(range(a, b)) for a, b in itertools.pairwise(ends)],
            "min_size": 0,
        },
        "training": {"rounds": 1, "local_epochs": 1, "lr": 0.01, "batch_size": 8},
        "evaluation": {"every": 0},
    }
    metrics = within(300, lambda: start(fs.Experiment.from_table(table)).step())
    assert metrics["clients_failed"] == 0
    assert metrics["samples"] == sum(n for n in sizes if n > 1)


def test_a_round_of_those_who_have_no_batch_changes_nothing(start, seven):
    table = spec_of().to_spec()
    table["partition"] = {"name": "given", "indices": [[0], [1]], "min_size": 0}
    started = start(fs.Experiment.from_table(table), seven, small())
    before = started.state.weights
    assert started.step()["clients_failed"] == 0
    assert all(torch.equal(w, before.params[name]) for name, w in started.state.weights.params.items())
    assert all(torch.equal(b, before.buffers[name]) for name, b in started.state.weights.buffers.items())


@pytest.mark.slow
def test_it_learns(start):
    spec = fs.Experiment.from_table(
        {
            "partition": {"name": "dirichlet", "alpha": 1.0, "clients": 4},
            "method": "fedtan",
            "training": {"rounds": 6, "local_epochs": 1, "lr": 0.05},
        }
    )
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
    assert fs.run(spec, model=net)[-1]["accuracy"] > 0.8


@pytest.mark.parametrize(
    ("section", "change"),
    [
        ("training", {"batch_norm": "local"}),
        ("method", {"objective": "fedprox"}),
        ("method", {"data_sampler": "fedsampling"}),
    ],
)
def test_what_it_does_not_do_is_refused(seven, section, change):
    table = spec_of().to_spec()
    table[section] |= change
    with pytest.raises(SpecError, match=f"{section}.{next(iter(change))}"):
        prepare(fs.Experiment.from_table(table), data=seven, model=small())


def test_without_batchnorm_it_is_refused(seven):
    with pytest.raises(SpecError, match=r"FedTAN requires a model with BatchNorm layers\. Without"):
        prepare(spec_of(), data=seven, model=nn.Linear(2, 3))
