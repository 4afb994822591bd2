from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedstrata.base.errors import SpecError
from fedstrata.models.batchnorm import (
    FederatedBatchNorm2d,
    GroupBrokenError,
    LocalGroup,
    ReduceGroup,
    federate_batchnorm,
    federated,
)
from fedstrata.models.model import Model

R = TypeVar("R")


def in_threads(size: int, work: Callable[[int, ReduceGroup], R], timeout: float = 20.0) -> list[R]:
    """``work(k, group)`` on one thread a member; a member that fails breaks the group."""
    group = LocalGroup(size, timeout)

    def run(k: int) -> R:
        try:
            return work(k, group.member(k))
        except BaseException as error:
            group.abort(f"member {k}: {error}")
            raise

    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(run, k) for k in range(size)]]


def layers(kind: type[nn.Module], channels: int, **settings: object) -> nn.Module:
    torch.manual_seed(0)
    layer = kind(channels, **settings).double()
    if layer.affine:
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    return layer


CASES = [
    (nn.BatchNorm1d, (4,), [5, 2], {}),
    (nn.BatchNorm1d, (4, 3), [1, 6, 2], {}),
    (nn.BatchNorm2d, (4, 3, 5), [3, 1, 4], {}),
    (nn.BatchNorm2d, (4, 3, 5), [3, 2], {"momentum": None}),
    (nn.BatchNorm2d, (4, 2, 2), [3, 2], {"affine": False}),
    (nn.BatchNorm1d, (4,), [3, 2], {"track_running_stats": False}),
    (nn.BatchNorm2d, (4, 3, 5), [3, 0, 4], {}),
    (nn.BatchNorm1d, (4,), [1, 1], {}),
]


@pytest.mark.parametrize(("kind", "shape", "sizes", "settings"), CASES)
def test_forward_and_backward_are_those_of_the_union_batch(kind, shape, sizes, settings):
    native = layers(kind, shape[0], **settings)
    clients = [federate_batchnorm(copy.deepcopy(native)) for _ in sizes]
    # Far from zero, so that a careless Σx² − mμ² would show.
    batches = [[100 + torch.randn(n, *shape, dtype=torch.float64) for n in sizes] for _ in range(2)]
    weights = [torch.randn(n, *shape, dtype=torch.float64) for n in sizes]

    def work(k: int, group: ReduceGroup) -> tuple[Tensor, Tensor]:
        with federated(clients[k], group):
            for batch in batches:
                x = batch[k].clone().requires_grad_()
                out = clients[k](x)
            (out * out * weights[k]).sum().backward()
        return out.detach(), x.grad

    results = in_threads(len(sizes), work)
    for batch in batches:
        union = torch.cat(batch).requires_grad_()
        expected = native(union)
    (expected * expected * torch.cat(weights)).sum().backward()

    close = {"rtol": 1e-8, "atol": 1e-10}
    torch.testing.assert_close(torch.cat([out for out, _ in results]), expected.detach(), **close)
    torch.testing.assert_close(torch.cat([grad for _, grad in results]), union.grad, **close)
    for name, parameter in native.named_parameters():
        total = sum(client.get_parameter(name).grad for client in clients)
        torch.testing.assert_close(total, parameter.grad, **close)
    for client in clients:
        for name, buffer in native.named_buffers():
            torch.testing.assert_close(client.get_buffer(name), buffer, **close)
            assert torch.equal(client.get_buffer(name), clients[0].get_buffer(name))


def test_float32_statistics_far_from_zero():
    # Mean 1e4, variance 1: Σx² in float32 would lose the variance altogether.
    x = 1e4 + torch.randn(40, 3, 4, 4)
    native = nn.BatchNorm2d(3)
    clients = [federate_batchnorm(copy.deepcopy(native)) for _ in range(2)]

    def work(k: int, group: ReduceGroup) -> Tensor:
        with federated(clients[k], group):
            return clients[k](x[:25] if k == 0 else x[25:]).detach()

    out = torch.cat(in_threads(2, work))
    exact = x.double()
    var, mean = torch.var_mean(exact, (0, 2, 3), correction=0)
    expected = (exact - mean.view(1, 3, 1, 1)) / (var.view(1, 3, 1, 1) + 1e-5).sqrt()
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=5e-3)
    unbiased = torch.var(exact, (0, 2, 3)).float()
    torch.testing.assert_close(clients[0].running_var, 0.9 + 0.1 * unbiased, rtol=1e-4, atol=0)


def small_cnn() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.MaxPool2d(2),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(6 * 16, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(inplace=True),
        nn.Linear(8, 3),
    )


@pytest.mark.slow
def test_fifty_steps_on_three_clients_are_centralised_sgd():
    steps, sizes = 50, [7, 2, 3]
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(steps, sum(sizes), 1, 8, 8, generator=generator)
    y = torch.randint(3, (steps, sum(sizes)), generator=generator)
    central = small_cnn()
    clients = [federate_batchnorm(small_cnn()) for _ in sizes]
    bounds = [0, 7, 9, 12]

    def work(k: int, group: ReduceGroup) -> None:
        mine, module = slice(bounds[k], bounds[k + 1]), clients[k]
        parameters = list(module.parameters())
        with federated(module, group):
            for step in range(steps):
                loss = F.cross_entropy(module(x[step, mine]), y[step, mine], reduction="sum")
                grads = torch.autograd.grad(loss, parameters)
                # What the server does, done by each: the sum of the clients' gradients over the batch's size.
                for parameter, grad in zip(parameters, grads, strict=True):
                    with torch.no_grad():
                        parameter -= 0.1 * group.all_reduce_sum(grad) / sum(sizes)

    in_threads(3, work)
    start = [parameter.detach().clone() for parameter in central.parameters()]
    for step in range(steps):
        loss = F.cross_entropy(central(x[step]), y[step], reduction="sum")
        grads = torch.autograd.grad(loss, list(central.parameters()))
        for parameter, grad in zip(central.parameters(), grads, strict=True):
            with torch.no_grad():
                parameter -= 0.1 * grad / sum(sizes)

    assert any((a - b).abs().max() > 0.1 for a, b in zip(start, central.parameters(), strict=True))
    expected = central.state_dict()
    for name, tensor in clients[0].state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-4)
        for client in clients[1:]:
            assert torch.equal(client.state_dict()[name], tensor)


def test_without_a_group_and_in_evaluation_it_is_native():
    native = small_cnn()
    ours = federate_batchnorm(copy.deepcopy(native))
    x = torch.randn(5, 1, 8, 8)
    assert torch.equal(ours(x), native(x))
    assert all(torch.equal(ours.state_dict()[name], tensor) for name, tensor in native.state_dict().items())
    ours.eval(), native.eval()

    def work(k: int, group: ReduceGroup) -> Tensor:
        with federated(ours, group):
            return ours(x)

    assert torch.equal(in_threads(1, work)[0], native(x))


def test_conversion_keeps_names_tensors_and_settings():
    module = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.BatchNorm1d(3, eps=0.1, momentum=0.3)))
    module.eval()
    names, weight = list(module.state_dict()), module[1][0].weight
    assert federate_batchnorm(module) is module
    assert list(module.state_dict()) == names
    layer = module[1][0]
    assert layer.weight is weight
    assert (layer.eps, layer.momentum, layer.training) == (0.1, 0.3, False)
    assert isinstance(federate_batchnorm(nn.BatchNorm2d(3)), FederatedBatchNorm2d)
    assert Model(module).has_batchnorm
    assert not Model(nn.Sequential(nn.Linear(2, 2), nn.GroupNorm(1, 2), nn.InstanceNorm1d(2))).has_batchnorm


def test_batchnorm_that_cannot_be_federated_is_refused():
    module = nn.Sequential(nn.BatchNorm2d(2), nn.BatchNorm3d(2))
    with pytest.raises(SpecError, match="1 is a BatchNorm3d"):
        federate_batchnorm(module)
    assert type(module[0]) is nn.BatchNorm2d
    with pytest.raises(SpecError, match="federate_batchnorm"), federated(module, LocalGroup(1).member(0)):
        pass


def test_the_group_is_gone_after_the_block_and_there_is_one_at_a_time():
    layer = federate_batchnorm(nn.BatchNorm1d(2))
    group = LocalGroup(1)
    with federated(layer, group.member(0)):
        with pytest.raises(RuntimeError, match="already"), federated(layer, group.member(0)):
            pass
        assert layer._group is not None
    assert layer._group is None
    layer(torch.randn(3, 2))  # after an abort, too: no group, nothing to break
    group.abort()
    layer(torch.randn(3, 2))


def test_one_value_in_all_is_an_error_for_everybody():
    clients = [federate_batchnorm(nn.BatchNorm1d(2)) for _ in range(2)]

    def work(k: int, group: ReduceGroup) -> str:
        with federated(clients[k], group), pytest.raises(ValueError, match=r"at least 2 values per channel"):
            clients[k](torch.ones(k, 2))
        return "told"

    assert in_threads(2, work) == ["told", "told"]


def test_sums_are_taken_in_member_order():
    # In float32, (1 + 2^-24) + 2^-24 = 1, and (2^-24 + 2^-24) + 1 > 1: only the order tells them apart.
    values = [2.0**-24, 2.0**-24, 1.0]
    for late in range(3):

        def work(k: int, group: ReduceGroup, late: int = late) -> Tensor:
            if k == late:
                time.sleep(0.02)
            return group.all_reduce_sum(torch.tensor([values[k]]))

        for total in in_threads(3, work):
            assert total.item() == 1.0 + 2.0**-23


def test_many_turns_never_mix():
    def work(k: int, group: ReduceGroup) -> list[float]:
        totals = []
        for turn in range(200):
            total = group.all_reduce_sum(torch.tensor([float(turn * (k + 1))]))
            totals.append(total.item())
            total.zero_()  # everybody has a tensor of their own
        return totals

    for totals in in_threads(3, work):
        assert totals == [6.0 * turn for turn in range(200)]


def test_abort_releases_all_and_refuses_the_late():
    group = LocalGroup(3, timeout=20.0)
    waiting = threading.Barrier(3)
    told: list[str] = []

    def wait(k: int) -> None:
        waiting.wait()
        with pytest.raises(GroupBrokenError) as caught:
            group.member(k).all_reduce_sum(torch.ones(1))
        told.append(str(caught.value))

    threads = [threading.Thread(target=wait, args=(k,)) for k in (0, 1)]
    for thread in threads:
        thread.start()
    waiting.wait()
    start = time.monotonic()
    group.abort("client 2 dropped out")
    for thread in threads:
        thread.join(timeout=10)
    assert time.monotonic() - start < 5
    assert len(told) == 2
    assert all("client 2 dropped out" in message for message in told)
    with pytest.raises(GroupBrokenError, match="dropped out"):
        group.member(2).all_reduce_sum(torch.ones(1))


@pytest.mark.parametrize("first", ["the one that ends", "those that wait"])
def test_a_member_that_ends_without_its_part_releases_all(first):
    group = LocalGroup(3, timeout=None)
    if first == "the one that ends":
        group.leave(1)

    def work(k: int) -> str:
        with pytest.raises(GroupBrokenError) as caught:
            group.member(k).all_reduce_sum(torch.ones(1))
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        told = pool.map(work, (0, 2))
        if first == "those that wait":
            group.leave(1)
        for message in told:
            assert "member(s) 1 ended before they added a tensor to the sum" in message


def test_who_ends_after_the_last_sum_breaks_nothing():
    def work(k: int, group: LocalGroup) -> float:
        total = group.member(k).all_reduce_sum(torch.ones(1)).item()
        group.leave(k)
        return total

    group = LocalGroup(3, timeout=10.0)
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda k: work(k, group), range(3))) == [3.0] * 3


def test_who_waits_too_long_breaks_the_group_and_names_the_missing():
    group = LocalGroup(3, timeout=0.05)
    with pytest.raises(GroupBrokenError, match=r"member\(s\) 0, 2 did not add a tensor within 0.05 s"):
        group.member(1).all_reduce_sum(torch.ones(1))
    with pytest.raises(GroupBrokenError, match="did not add"):
        group.member(0).all_reduce_sum(torch.ones(1))


def test_members_out_of_step_are_told():
    group = LocalGroup(2, timeout=10.0)

    def work(k: int) -> str:
        with pytest.raises(GroupBrokenError, match="different shapes or dtypes") as caught:
            group.member(k).all_reduce_sum(torch.ones(1 + k))
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(work, range(2))
    assert first == second


def test_bad_sizes_and_members():
    with pytest.raises(ValueError, match="size = 0"):
        LocalGroup(0)
    with pytest.raises(ValueError, match="member 2"):
        LocalGroup(2).member(2)
