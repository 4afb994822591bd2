"""Attacks of a hostile server on a real site: each succeeds on an open one, and what stops it is named.

What no declaration can stop, because the question is one that the job may ask, is measured instead: the attack succeeds
on the guarded site too, and the test says so.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
import torch.nn.functional as F
from asked import CLIENTS, Answers, Begin, Begun, Done, Refused, Save
from target import Target, Targets

from fedstrata.audits.gradients import EXACT, inputs_from, labels_from
from fedstrata.base import records
from fedstrata.base.errors import FedstrataError
from fedstrata.clients.handlers.sequential import Visit
from fedstrata.federation.messages import Fit, Params, Weights
from fedstrata.runs.preparation import Prepared, prepare
from fedstrata.sampling.client_sizes import SizeReport
from fedstrata.sampling.label_counts import LabelReport
from fedstrata.sites.configuration import described
from fedstrata.sites.policy import RuleError
from fedstrata.sites.settings import JobSpec, SiteSettings
from fedstrata.sites.wire import Ask, Failed, Fetch, Hopped
from fedstrata.stratify.messages import Gradient, Reserve, Steps

pytestmark = pytest.mark.slow
NONE, ALL = torch.zeros(0, dtype=torch.int64), (0.0, 1.0)
MODEL = {"model": {"name": "mlp", "hidden": [64]}}
FEW_LABELS = {"partition": {"name": "classes", "clients": CLIENTS, "per_client": 5}}
"""So few labels that a client has enough samples of each to name it."""
STRATIFY = {"method": {"name": "stratify"}, **MODEL, **FEW_LABELS}
PRF = {"method": {"name": "stratify", "masking": "prf"}}
LDP = {"method": {"name": "fedstas", "epsilon": 1.0, "bound": 50, "strata": 2}}


def reserve(*labels: int, batch: int = 0, round: int = 1, fresh: bool = True, refill: Any = NONE) -> Reserve:
    return Reserve(round, torch.full((len(labels),), batch), torch.tensor(labels), refill, fresh, ALL)


def got(outcome: Any) -> Any:
    """An answer; None for none."""
    return None if isinstance(outcome, (Failed, Refused)) else outcome


def truth(target: Target) -> tuple[Prepared, np.ndarray, np.ndarray]:
    """What only the site knows: its client 0's samples and their labels."""
    prepared = prepare(target.spec)
    samples = prepared.assignment[0]
    return prepared, samples, prepared.data.y_train.numpy()[samples]


def read_off(gradient: Params, prepared: Prepared, samples: np.ndarray) -> float:
    """The share of samples that stand in a row of the first layer's gradient."""
    names = list(gradient)
    return seen_in(inputs_from(gradient[names[0]], gradient[names[1]]), prepared, samples)


def seen_in(candidates: torch.Tensor, prepared: Prepared, samples: np.ndarray) -> float:
    if not len(candidates):
        return 0.0
    inputs = prepared.data.inputs(torch.from_numpy(samples)).flatten(1)
    return float((torch.cdist(inputs, candidates).square().min(dim=1).values / inputs.shape[1] < EXACT).float().mean())


# --- questions of another job: refused whatever the policy -----------------------------------------------------------


def asks_for_labels(target: Target) -> Any:
    reply = got(*target.ask(LabelReport()))
    return None if reply is None else dict(zip(reply.labels.tolist(), reply.counts.tolist(), strict=True))


def asks_for_the_plain_size(target: Target) -> Any:
    reply = got(*target.ask(SizeReport(1, 0, 1.0)))
    return None if reply is None else reply.samples


def asks_for_the_truth_under_a_bound(target: Target) -> Any:
    reply = got(*target.ask(SizeReport(1, 50, 1.0)))
    return None if reply is None else reply.samples


def asks_again_until_the_mean_is_the_truth(target: Target) -> Any:
    """E[R] = α n + (1 − α) M / 2, over two hundred answers with noise of their own."""
    alpha, replies = 0.5, []
    for round in range(1, 201):
        if (reply := got(*target.ask(SizeReport(round, 50, alpha)))) is None:
            return None
        replies.append(reply)
    mean = np.mean([reply.samples for reply in replies])
    return int(np.round((mean - (1 - alpha) * 25) / alpha, -1))


def asks_for_a_gradient_of_one(target: Target) -> Any:
    labels = truth(target)[2]
    target.ask(reserve(int(labels[0])))
    reply = got(*target.ask(Gradient(1, 0, target.weights), acks=[target.counts(0)]))
    return None if reply is None else reply.samples


FOREIGN: dict[str, tuple[dict[str, Any], Callable[[Target], Any], str]] = {
    "labels in a job with masked labels": (PRF, asks_for_labels, "kind"),
    "the plain size in a job under LDP": (LDP, asks_for_the_plain_size, "bounds"),
    "the truth under LDP's bound": (LDP, asks_for_the_truth_under_a_bound, "bounds"),
    "the mean of many randomised sizes": (LDP, asks_again_until_the_mean_is_the_truth, "bounds"),
    "labels in a SCAFFOLD job": ({"method": "scaffold"}, asks_for_labels, "kind"),
    "sizes in a SCAFFOLD job": ({"method": "scaffold"}, asks_for_the_plain_size, "kind"),
    "a gradient of one in a SCAFFOLD job": ({"method": "scaffold"}, asks_for_a_gradient_of_one, "kind"),
}


@pytest.mark.parametrize("attack", FOREIGN)
def test_what_the_job_does_not_declare_is_refused(target: Targets, attack: str) -> None:
    table, program, rule = FOREIGN[attack]
    control = target(table, opened=True)
    _, samples, labels = truth(control)
    found = program(control)
    expected = {
        asks_for_labels: dict(zip(*(a.tolist() for a in np.unique(labels, return_counts=True)), strict=True)),
        asks_for_a_gradient_of_one: 1,
    }
    assert found == expected.get(program, len(samples)), "the attack works where nothing is guarded"
    guarded = target(table, min_samples=1)
    assert program(guarded) is None
    assert set(guarded.refused) == {rule}


def test_asked_again_under_ldp_a_site_answers_once(target: Targets) -> None:
    guarded = target(LDP)
    alpha = -np.expm1(-1.0) / (1 + 48 * np.exp(-1.0))
    answers = [got(*guarded.ask(SizeReport(1, 50, float(alpha)))) for _ in range(20)]
    assert sum(answer is not None for answer in answers) == 1
    assert guarded.refused == ["repeat"] * 19


# --- a question of the job itself, over too few samples: the policy's minimum ----------------------------------------


def test_a_gradient_of_one_sample_gives_it_away(target: Targets) -> None:
    def program(site: Target) -> float | None:
        prepared, samples, labels = truth(site)
        wanted = int(labels[0])
        site.ask(reserve(wanted))
        reply = got(*site.ask(Gradient(1, 0, site.weights), acks=[site.counts(0)]))
        if reply is None:
            return None
        assert labels_from(list(reply.gradient.values())[-1], 1).tolist() == [wanted]
        return read_off(reply.gradient, prepared, samples[labels == wanted]) * (labels == wanted).sum()

    assert program(target(STRATIFY, opened=True)) >= 1
    # Without a minimum it is a question that Stratify asks: nothing else stops it.
    assert program(target(STRATIFY, min_samples=1)) >= 1
    guarded = target(STRATIFY)
    assert program(guarded) is None


def test_labels_of_few_samples_stay_also_where_enrolment_is_skipped(target: Targets) -> None:
    """Who asks for samples to be set aside is told of which labels there are none, and so how many there were."""
    table = {**STRATIFY, "partition": {"name": "dirichlet", "clients": CLIENTS, "alpha": 1.0}}

    def program(site: Target) -> dict[int, int]:
        reply = got(*site.ask(reserve(*np.arange(10).repeat(60).tolist())))
        served = (~reply.missing).reshape(10, 60).sum(dim=1).tolist()
        return {label: count for label, count in enumerate(served) if count}

    control = target(table, opened=True)
    found = dict(zip(*(each.tolist() for each in np.unique(truth(control)[2], return_counts=True)), strict=True))
    assert min(found.values()) < 5 <= max(found.values())
    assert program(control) == found
    assert program(target(table)) == {label: count for label, count in found.items() if count >= 5}


def test_a_model_that_travelled_over_one_sample_gives_its_label_away(target: Targets) -> None:
    table = {"method": {"name": "stratify", "mode": "single"}, **MODEL, **FEW_LABELS}

    def program(site: Target) -> bool | None:
        wanted = int(truth(site)[2][0])
        hopped = site.hop(Steps(1, torch.tensor([wanted]), NONE, True, ALL), ticket="mine")
        if not isinstance(hopped, Hopped) or isinstance(hopped.reply, Failed):
            return None
        moved = site.call(Fetch(1, 0, "mine"), caller="b")
        name = list(moved.params)[-1]
        return labels_from(site.weights.params[name] - moved.params[name], 1).tolist() == [wanted]

    assert program(target(table, opened=True))
    assert program(target(table, min_samples=1)), "a job that is allowed to do this does it"
    refused = target(table, begin=False)
    assert isinstance(refused.begin(), Refused), "five samples at least: no such job begins"
    assert refused.refused == ["policy.min_samples"]


def test_nobody_fetches_a_travelling_model_without_its_ticket(target: Targets) -> None:
    site = target({"method": "sfl"})
    visit = Visit(1)
    assert isinstance(site.hop(visit, ticket="the next one's"), Hopped)
    for caller, ticket in (("b", ""), ("c", "guess"), ("server", "")):
        assert isinstance(site.call(Fetch(1, 0, ticket), caller=caller), Refused)
    assert site.refused == ["relay"] * 3
    assert isinstance(site.call(Fetch(1, 0, "the next one's"), caller="b"), Weights)


# --- specs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["a path", "a file of a partition", "the hub"])
def test_a_spec_names_nothing_that_lies_at_the_site(target: Targets, tmp_path: Any, what: str) -> None:
    secret = tmp_path / "secret.npz"
    x, y = np.random.default_rng(0).normal(size=(60, 1, 8, 8)).astype(np.float32), np.arange(60) % 4
    np.savez(secret, x_train=x, y_train=y, x_test=x, y_test=y)
    np.savez(tmp_path / "partition.npz", indices=np.arange(60), offsets=np.array([0, 30, 60]))
    tables = {
        "a path": {"data": {"name": str(secret)}},
        "a file of a partition": {"partition": {"name": "given", "file": str(tmp_path / "partition.npz")}},
        "the hub": {"data": {"name": "hub:somebody/something"}},
    }
    control, guarded = target(opened=True, begin=False), target(begin=False)
    spec = tomli_w.dumps({**guarded.spec.to_spec(), **tables[what]})
    begin = Begin("run", spec, None, [0, 1], 2, 0)
    answer = guarded.call(begin)
    assert isinstance(answer, Refused)
    assert guarded.refused == ["data"]
    assert "catalog" in answer.reason
    if what != "the hub":  # the control: a site that lets anything be named reads the file
        assert isinstance(control.call(begin), Begun)


@pytest.mark.parametrize("what", ["a trace", "a path", "a file of a partition"])
def test_a_spec_names_nothing_that_lies_at_the_server(tmp_path: Path, what: str) -> None:
    """The administrator gets the error of a job, and is another party than the server."""
    pytest.importorskip("nvflare")
    from fedstrata.sites.job import Server

    secret = tmp_path / "secret"
    secret.write_text("toor:x:0:0\nclient,first,last\n")
    tables: dict[str, Any] = {
        "a trace": {"availability": {"name": "trace", "file": str(secret)}},
        "a path": {"data": {"name": f"{secret}.npz"}},
        "a file of a partition": {"partition": {"name": "given", "file": str(secret)}},
    }
    text = tomli_w.dumps({"method": {"name": "fedavg"}, **tables[what]})
    plan = JobSpec("run.toml", "run", 2, own_data=False)

    near = SimpleNamespace(sites=["a", "b"])

    def run(**settings: Any) -> None:
        Server([])._run(plan, text, tmp_path / "run", near, SiteSettings(**settings))  # type: ignore[arg-type]

    with pytest.raises(RuleError, match=r"Use one of: digits, or add it to 'catalog'"):
        run()
    with pytest.raises(FedstrataError) as listed:
        run(catalog=[str(secret), f"{secret}.npz"])
    assert not isinstance(listed.value, RuleError), "the control: the file is read"
    assert "toor" not in json.dumps(described(listed.value))


# --- the order of things ---------------------------------------------------------------------------------------------


def fit(site: Target, round: int) -> Fit:
    return Fit(round, site.weights, {}, 1.0)


def replayed(site: Target) -> list[Any]:
    return [got(*site.ask(fit(site, 1))) for _ in range(2)]


def gone_back(site: Target) -> list[Any]:
    return [got(*site.ask(fit(site, round))) for round in (3, 1)]


def beyond_the_last(site: Target) -> list[Any]:
    return [got(*site.ask(fit(site, round))) for round in (1, 99)]


@pytest.mark.parametrize(
    ("program", "rule"), [(replayed, "repeat"), (gone_back, "rounds"), (beyond_the_last, "rounds")]
)
def test_questions_come_once_and_rounds_in_order(target: Targets, program: Any, rule: str) -> None:
    assert None not in program(target(opened=True))
    guarded = target()
    first, second = program(guarded)
    assert first is not None
    assert second is None
    assert guarded.refused == [rule]


def test_an_answer_that_does_not_count_is_not_given_again(target: Targets) -> None:
    """A server that says so asks for the same batch at two models, or with another sample in it."""

    def program(site: Target) -> tuple[Any, Any]:
        labels = [int(label) for label in truth(site)[2]]
        site.ask(reserve(*labels[:6]))
        one = got(*site.ask(Gradient(1, 0, site.weights), acks=[site.counts(0)]))
        site.ask(reserve(*labels[6:12], fresh=False), acks=[site.counts()])
        return one, got(*site.ask(Gradient(1, 0, site.weights), acks=[site.counts(0)]))

    one, other = program(target(STRATIFY, opened=True))
    assert one is not None
    assert other is not None
    guarded = target(STRATIFY)
    one, other = program(guarded)
    assert one is not None
    assert other is None
    assert guarded.refused == ["order", "order"]


# --- what a declaration cannot stop: measured ------------------------------------------------------------------------


def test_two_rounds_that_differ_by_one_sample_give_it_away_whatever_the_policy(target: Targets) -> None:
    """All samples in round 1, all but one in round 2, at the same model: the difference is one sample."""

    def program(site: Target) -> float:
        prepared, samples, labels = truth(site)
        wanted = sorted(labels.tolist())
        sums = []
        for round, these in ((1, wanted), (2, wanted[1:])):
            site.ask(reserve(*these, round=round))
            reply = got(*site.ask(Gradient(round, 0, site.weights), acks=[site.counts(0)]))
            assert reply.samples == len(these)
            sums.append(reply.gradient)
        difference = {name: gradient.double() - sums[1][name].double() for name, gradient in sums[0].items()}
        assert labels_from(list(difference.values())[-1], 1).tolist() == wanted[:1]
        names = list(difference)
        weight, bias = difference[names[0]], difference[names[1]]
        best = bias.abs().argmax()
        inputs = prepared.data.inputs(torch.from_numpy(samples)).flatten(1).double()
        return float((inputs - weight[best] / bias[best]).square().mean(dim=1).min())

    for site in (target(STRATIFY, opened=True), target(STRATIFY)):
        assert program(site) < EXACT


def trapped(weights: Weights, brightness: np.ndarray) -> Weights:
    """A model made to leak (Fowl et al. 2022): unit i is active for the inputs brighter than its own threshold."""
    params = {name: torch.zeros_like(w) for name, w in weights.params.items()}
    first, bias, last, end = params
    units, features = params[first].shape
    params[first] += 1 / features
    params[bias] -= torch.from_numpy(np.quantile(brightness, np.linspace(0, 1, units + 2)[1:-1])).float()
    # All units have the same weight in the logits, so that neighbours differ by the inputs between their thresholds.
    params[last][0] = 1e-3
    params[end].zero_()
    return Weights(params, weights.buffers)


@pytest.mark.parametrize("opened", [True, False], ids=["open", "guarded"])
def test_a_model_made_to_leak_gives_samples_of_a_large_part_away_whatever_the_policy(
    target: Targets, opened: bool
) -> None:
    site = target(STRATIFY, opened=opened)
    prepared, samples, labels = truth(site)
    # The server knows digits as such: those of the test set say how bright they are.
    guess = prepared.data.inputs(slice(None), "test").flatten(1).mean(dim=1).numpy()
    site.ask(reserve(*labels.tolist()))
    model = trapped(site.weights, guess)
    reply = got(*site.ask(Gradient(1, 0, model), acks=[site.counts(0)]))
    assert reply.samples == len(samples) == 30
    names = list(reply.gradient)
    weight, bias = (reply.gradient[name].double() for name in names[:2])
    between = inputs_from(weight[:-1] - weight[1:], bias[:-1] - bias[1:]).float()
    assert seen_in(between, prepared, samples) > 0.3
    # The control: at an honest model of the start, a part of 30 shows far fewer.
    honest = target(STRATIFY, opened=opened)
    honest.ask(reserve(*labels.tolist()))
    plain = got(*honest.ask(Gradient(1, 0, honest.weights), acks=[honest.counts(0)]))
    assert read_off(plain.gradient, prepared, samples) < 0.3


def test_with_one_step_an_update_is_a_gradient_and_no_policy_stops_that(target: Targets) -> None:
    """FedAvg with one step on all samples: the difference of the models is the mean gradient over 30 samples."""
    site = target({**MODEL, "training": {"local_steps": 1, "batch_size": 30}})
    prepared, samples, labels = truth(site)
    reply = got(*site.ask(fit(site, 1)))
    rate = prepared.config.training.lr_at(1)
    name = list(reply.weights.params)[-1]
    gradient = (site.weights.params[name] - reply.weights.params[name]) / rate * len(samples)
    found = np.bincount(labels_from(gradient, len(samples)).numpy(), minlength=10)
    right = np.minimum(found, np.bincount(labels, minlength=10)).sum() / len(samples)
    assert right > 0.8


# --- whatever bytes --------------------------------------------------------------------------------------------------


def garbage(generator: random.Random, whole: bytes) -> bytes:
    kind = generator.randrange(6)
    if kind == 0:
        return generator.randbytes(generator.randrange(200))
    if kind == 1:  # a length that is not there
        return struct.pack("<Q", 2 ** generator.randrange(64)) + whole[8:]
    if kind == 2:
        return whole[: generator.randrange(len(whole))]
    if kind == 3:
        text = b"[" * 100_000 + b"]" * 100_000
        return struct.pack("<Q", len(text)) + text
    data = bytearray(whole)
    for _ in range(generator.randrange(1, 20)):
        data[generator.randrange(len(data))] = generator.randrange(256)
    return bytes(data)


@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=pytest.mark.long)])
def test_no_bytes_end_a_site(target: Targets, count: int) -> None:
    site = target()
    generator = random.Random(count)
    whole = records.encode(records.decode(records.encode(Ask(10**6, [0], [fit(site, 1)], [0], "", []))))
    for _ in range(count):
        answer = records.decode(site.raw(garbage(generator, whole), generator.choice(["server", "b"])))
        assert isinstance(answer, (Refused, Answers, Done))
    assert isinstance(site.begin(), Begun)
    site.exchange = 0
    assert got(*site.ask(fit(site, 1))) is not None
    assert site.refused is not None


@pytest.mark.parametrize(
    "request_",
    [
        reserve(*[0] * 6, batch=2**60),
        reserve(*[0] * 6, batch=-(2**60)),
        reserve(*[0] * 6, refill=torch.arange(10**6)),
        reserve(*range(10**5)),
        reserve(*[10**18] * 6),
        SizeReport(1, 2**62, 0.5),
    ],
    ids=[
        "far batch",
        "batch before the first",
        "a million pools anew",
        "many labels",
        "no such label",
        "a bound of 2⁶²",
    ],
)
def test_oversized_questions_end_in_an_answer_or_a_refusal(target: Targets, request_: Any) -> None:
    for site in (target(STRATIFY, opened=True), target(STRATIFY)):
        assert len(site.ask(request_)) == 1
        assert isinstance(site.call(Save(1)), (Done, Refused))
        assert CLIENTS == 2


def test_a_model_of_another_shape_is_no_answer(target: Targets) -> None:
    site = target()
    grown = Weights({name: F.pad(w, (0, 3)) for name, w in site.weights.params.items()}, {})
    for weights in (grown, Weights({}, {}), Weights({"x": torch.zeros(10**6)}, {})):
        asked = Fit(1, weights, {}, 1.0)
        assert got(*site.ask(asked)) is None
