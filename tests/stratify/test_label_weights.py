"""Label weights undo the choice of the frequencies: the expected gradient is that of the mean loss over all samples."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from batches import order_of, spec_of
from hypothesis import given
from hypothesis import strategies as st

import fedstrata as fs
from fedstrata.base.errors import FedstrataError, SpecError
from fedstrata.base.jsonl import read_jsonl
from fedstrata.clients.client import Client
from fedstrata.federation.allowed import Terms
from fedstrata.federation.messages import Weights
from fedstrata.federation.settings import Training
from fedstrata.stratify.client_batch import (
    PLACEHOLDERS,
    STATE,
    Reserved,
    fused_label_weighted_gradient,
    label_weighted_gradient,
)
from fedstrata.stratify.messages import LabelWeightedGradient
from fedstrata.stratify.schedule import Rule, frequencies, label_weights

RULES: list[Rule] = ["capped", "uniform", "uncapped"]
OWNERS = {"name": "given", "indices": ((6, 7), (0, 1, 2), (3, 4, 5))}
LABELS = np.array([0, 0, 0, 0, 1, 1, 2, 2])
LR = 0.1


@pytest.fixture(scope="module")
def eight() -> fs.Dataset:
    """Eight samples of three classes. Client 0 has class 2, which therefore gets the placeholder 0."""
    x = np.random.default_rng(0).normal(size=(8, 3))
    return fs.from_arrays(x, LABELS, x, LABELS, normalize="none")


def spec(**method: Any) -> fs.Experiment:
    table = {"batch_size": 6, "label_weights": True, "training": {"lr": LR}, **method}
    return spec_of(OWNERS, clients=3, **table)


def gradients(module: torch.nn.Module, data: fs.Dataset, where: np.ndarray, factors: np.ndarray) -> dict[str, Any]:
    """The gradient of the mean of the losses of some samples, each multiplied by its factor."""
    losses = F.cross_entropy(module(data.inputs(where)), data.y_train[where], reduction="none")
    parts = torch.autograd.grad((losses * torch.from_numpy(factors).float()).mean(), list(module.parameters()))
    return dict(zip(dict(module.named_parameters()), parts, strict=True))


def test_weights_by_hand() -> None:
    # Label 0 has half of all samples, but a third of the schedule: 1/2 ÷ 1/3 = 3/2.
    assert label_weights(np.array([4, 2, 2]), np.array([2, 2, 2])).tolist() == [1.5, 0.75, 0.75]
    assert label_weights(np.array([6, 3, 1]), np.array([3, 3, 1])) == pytest.approx([1.4, 0.7, 0.7])
    assert label_weights(np.array([0, 4]), np.array([0, 4])).tolist() == [1, 1]


@pytest.mark.slow
@given(st.lists(st.integers(1, 500), min_size=1, max_size=12).map(np.array), st.sampled_from(RULES))
def test_the_weighted_schedule_has_the_shares_of_the_data(totals: np.ndarray, rule: Rule) -> None:
    frequency = frequencies(totals, rule)
    weights = label_weights(totals, frequency)
    assert weights * frequency / frequency.sum() == pytest.approx(totals / totals.sum())
    assert rule != "uncapped" or weights == pytest.approx(1)


@pytest.mark.parametrize("execution", ["fused", "per-client"])
def test_a_step_by_hand(start, eight: fs.Dataset, execution: str) -> None:
    """The cap is 2, so one batch has two samples of each class, whose weights are 3/2, 3/4 and 3/4."""
    told = spec(training={"lr": LR, "execution": execution})
    started = start(told, eight)
    module = started.config.model.clone().module
    record = started.step()
    (used,) = order_of(started, told, eight)
    assert np.bincount(LABELS[used]).tolist() == [2, 2, 2]
    factors = np.array([1.5, 0.75, 0.75])[LABELS[used]]
    for name, gradient in gradients(module, eight, used, factors).items():
        expected = dict(module.named_parameters())[name].detach() - LR * gradient
        torch.testing.assert_close(started.state.weights.params[name], expected)
    losses = F.cross_entropy(module(eight.inputs(used)), eight.y_train[used], reduction="none").detach().numpy()
    assert record["train_loss"] == pytest.approx(float((losses * factors).mean()), rel=1e-5)


@pytest.mark.parametrize("fused", [True, False])
def test_over_all_draws_the_mean_is_the_gradient_of_all_samples(start, eight: fs.Dataset, fused: bool) -> None:
    """The law, exactly: all six choices of two of the four samples of class 0, which two clients have."""
    context = start(spec(), eight).federation.engine.context
    model = context.config.model
    weights = Weights(model.params(), model.buffers())
    factors = torch.tensor([0.75, 1.5, 0.75])  # by placeholder: classes 2, 0 and 1
    names = [{0: 2}, {1: 0}, {1: 0, 2: 1}]
    total: dict[str, Any] = dict.fromkeys(weights.params, 0.0)
    draws = list(combinations(range(4), 2))
    for drawn in draws:
        chosen = {0: [0, 1], 1: [i for i in drawn if i < 3], 2: [0] * (3 in drawn) + [1, 2]}
        clients = {}
        for number, places in chosen.items():
            if places:
                reserved = Reserved(1, {}, np.zeros(len(places), dtype=np.int64), np.array(places))
                clients[number] = Client(number, context, {STATE: reserved, PLACEHOLDERS: names[number]})
        request = LabelWeightedGradient(1, 0, weights, factors)
        if fused:
            replies = [fused_label_weighted_gradient(clients, dict.fromkeys(clients, request))]
        else:
            replies = [label_weighted_gradient(client, request) for client in clients.values()]
        assert sum(reply.samples for reply in replies) == 6
        for reply in replies:
            total = {name: total[name] + gradient / 6 / len(draws) for name, gradient in reply.gradient.items()}
    for name, gradient in gradients(model.clone().module, eight, np.arange(8), np.ones(8)).items():
        torch.testing.assert_close(total[name], gradient)


@pytest.mark.parametrize(("weighted", "close"), [(True, True), (False, False)])
def test_over_the_batches_of_an_epoch_too(start, weighted: bool, close: bool) -> None:
    """All samples of a class are equal, so that every draw is the mean of its class, and the steps are tiny."""
    y = np.repeat([0, 1, 2], [40, 12, 8])
    data = fs.from_arrays(3 * np.eye(3)[y], y, np.eye(3), [0, 1, 2], normalize="none")
    told = spec_of("iid", 3, schedule="uniform", label_weights=weighted, batch_size=4, training={"lr": 1e-4})
    started = start(told, data)
    module = started.config.model.clone().module
    assert started.step()["samples"] == 60
    for name, gradient in gradients(module, data, np.arange(60), np.ones(60)).items():
        before = dict(module.named_parameters())[name].detach()
        mean = (before - started.state.weights.params[name]) / (1e-4 * 15)
        assert (bool((mean - gradient).norm() < 0.01 * gradient.norm())) == close


@pytest.mark.slow
def test_uncapped_has_the_bytes_of_a_run_without_weights(eight: fs.Dataset, tmp_path) -> None:
    for weighted in (True, False):
        fs.run(spec(schedule="uncapped", label_weights=weighted), data=eight, out=tmp_path / str(weighted))
    model, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("True", "False"))
    assert model == other


@pytest.mark.slow
def test_a_run_that_stopped_ends_with_the_same_model(eight: fs.Dataset, tmp_path) -> None:
    told = spec(schedule="uniform", batch_size=3, training={"lr": LR, "rounds": 3})
    whole = fs.run(told, data=eight, out=tmp_path / "whole")

    def stop(record: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fs.run(told, data=eight, out=tmp_path / "run", callbacks=[stop])
    assert len(list(read_jsonl(tmp_path / "run" / "metrics.jsonl"))) == 1
    again = fs.run(told, data=eight, out=tmp_path / "run", resume=True)
    assert len(again) == 3
    assert all(torch.equal(again.params[name], tensor) for name, tensor in whole.params.items())


@pytest.mark.parametrize(
    ("method", "tables", "problem"),
    [
        ({"mode": "single"}, {}, "requires batches"),
        ({"mode": "hybrid"}, {}, "requires batches"),
        ({"local_steps": 2}, {}, "local step"),
        ({"masking": "prf"}, {}, "masking must hide"),
        ({}, {"privacy": {"min_samples": 2}}, "only few samples contribute to a sum"),
        ({}, {"privacy": {"sums": "secure"}, "partition": {"clients": 5}}, "few clients contribute to a secure sum"),
    ],
)
def test_where_weights_are_refused(method: dict[str, Any], tables: dict[str, Any], problem: str) -> None:
    table = {"method": {"name": "stratify", "label_weights": True, **method}, "training": {"rounds": 4}, **tables}
    with pytest.raises(SpecError, match=rf"method\.label_weights = True: .*{problem}"):
        fs.prepare(fs.Experiment.from_table(table))


def test_a_client_that_requires_more_samples_refuses_weights(start, eight: fs.Dataset) -> None:
    table = spec(label_weights=False).to_spec() | {"privacy": {"min_samples": 2}}
    context = start(fs.Experiment.from_table(table), eight).federation.engine.context
    state = {STATE: Reserved(1, {}, np.zeros(2, dtype=np.int64), np.arange(2)), PLACEHOLDERS: {0: 2}}
    request = LabelWeightedGradient(1, 0, Weights(context.config.model.params(), {}), torch.ones(3))
    with pytest.raises(FedstrataError, match=r"fewer samples than privacy\.min_samples"):
        label_weighted_gradient(Client(0, context, state), request)


@pytest.mark.parametrize(
    ("factors", "accepted"), [([1.5, 0.5], True), ([1.0, 0.0], False), ([1.0, -1.0], False), ([[1.0, 0.5]], False)]
)
def test_sites_accept_only_positive_weights(factors: Any, accepted: bool) -> None:
    (allowed,) = (
        each
        for each in spec().method.allowed(Terms(Training(), clients=3, strata=3))
        if each.request is LabelWeightedGradient
    )
    request = LabelWeightedGradient(1, 0, Weights({}, {}), torch.tensor(factors))
    assert (allowed.wrong(request, 1) == "") == accepted
