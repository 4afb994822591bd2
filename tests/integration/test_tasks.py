"""Every method on every task: a run either trains the loss of the task, or is refused before its first round."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from quick import others_long
from task_cases import CASES, prepared_of

import fedstrata as fs
from fedstrata.base.errors import SpecError
from fedstrata.base.rng import rng
from fedstrata.federation.messages import Weights
from fedstrata.methods.base import METHODS

CLASSES = ("classification", "classification, weights", "classification, several inputs")
NOT_CLASSES = [case for case in CASES if case not in CLASSES]

RARER_CASES = [case for case in CASES if case not in ("classification", "regression")]
"""Cases that only make test-long runs with every method."""

ONLY_CLASSIFICATION = ("rebafl", "moon", "fedrs", "fedlc", "bsm-fedavg", "fedntd", "fedvls")
"""Methods whose loss is a formula about classes."""

REFUSED: dict[tuple[str, str], tuple[str, str]] = {
    **{
        (method, case): ("has its own loss for the tasks classification", "Use another method, such as fedavg")
        for method in ONLY_CLASSIFICATION
        for case in NOT_CLASSES
    },
    **{
        (method, "classification, weights"): ("would ignore the task's settings (class_weights, l", "such as fedavg")
        for method in ONLY_CLASSIFICATION
    },
    ("feddecorr", "next-token, domains"): ("needs one feature vector per sample", "Use another objective"),
    ("feddecorr", "segmentation"): ("needs one feature vector per sample", "Use another objective"),
    **{
        (method, case): ("the server needs samples of each class", "Use another method, such as fedavg")
        for method in ("fedavg-ft", "ccvr")
        for case in NOT_CLASSES
    },
    **{
        (method, task): (f"needs classes, but the task {task!r} has no classes", remedy)
        for method in ("stratify", "fedentopt", "fedgs")
        for task, remedy in (
            ("regression", "Set task.bins"),
            ("multilabel", "Set task.stratum"),
            ("segmentation", "Give each sample a domain"),
        )
    },
}
"""Methods and tasks that do not fit; for each, the reason in the error, and what the error proposes."""

SETTINGS: dict[str, dict[str, Any]] = {
    "fedsts": {"strata": 2},
    "fedstas": {"strata": 2},
    "fedavg-ft": {"per_class": 2},
}
"""Settings with which a method fits four clients with ten samples each."""

LEAVES_SAMPLES = {"name": "classes", "clients": 4, "per_client": 2, "size": 6}
"""A partition that leaves the server samples of each class."""


def numbers(value: Any) -> Iterator[float]:
    """Yield all numbers in a nested record."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, float | int) and not isinstance(value, bool):
        yield float(value)


IN_OTHER_TESTS = (
    *(
        "clustered",
        "fedadagrad",
        "fedadam",
        "fedau",
        "fedavgm",
        "fedawe",
        "fedbabu",
        "feddecorr",
        "feddyn",
        "fedentopt",
    ),
    *("fedexp", "fedlc", "fedlesam", "fednova", "fedntd", "fedrs", "fedsam", "fedssar", "fedvarp", "fedyogi", "mifa"),
)
"""Methods that other quick tests train with classes."""
QUICK = [(method, "regression") for method in METHODS]
QUICK += [(method, "classification") for method in METHODS if method not in IN_OTHER_TESTS]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "case"), others_long(itertools.product(METHODS, CASES), QUICK))
def test_a_method_trains_or_is_refused_before_the_first_round(method: str, case: str) -> None:
    table = {"name": method} | SETTINGS.get(method, {})
    more = {"partition": LEAVES_SAMPLES} if method == "fedavg-ft" and case in CLASSES else {}
    if (method, case) in REFUSED:
        with pytest.raises(SpecError) as caught:
            prepared_of(case, table, norm=method == "fedtan", **more)
        message = str(caught.value)
        assert "\n" not in message
        assert message.startswith("method")
        for part in REFUSED[method, case]:
            assert part in message
        return
    prepared = prepared_of(case, table, norm=method == "fedtan", **more)
    with fs.Simulation(prepared) as simulation:
        before = simulation.evaluate()
        records = list(simulation)
    assert len(records) == 2
    assert not simulation.events
    last = records[-1]
    assert last["loss"] is not None
    assert last["train_loss"] is not None
    assert all(map(math.isfinite, numbers(records)))
    if case not in CLASSES:
        assert list(last["test"]) == list(prepared.data.task.default_metrics)
        assert before.loss is not None
        assert last["loss"] < before.loss


def test_all_expected_refusals_are_of_methods_and_cases_that_exist() -> None:
    assert {method for method, _ in REFUSED} <= {*METHODS}
    assert {case for _, case in REFUSED} <= set(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_an_objective_that_uses_the_loss_of_the_task_accepts_any_task(case: str) -> None:
    with fs.Simulation(prepared_of(case, {"name": "fedavg", "objective": "task_cases:Tamed"})) as simulation:
        assert simulation.step()["train_loss"] > 0
    undeclared = {"name": "fedavg", "objective": "task_cases:Undeclared"}
    if CASES[case] == {"name": "classification"}:
        prepared_of(case, undeclared)
        return
    with pytest.raises(SpecError, match=r"^method = 'fedavg': has its own loss"):
        prepared_of(case, undeclared)


def test_the_head_is_tuned_with_class_weights() -> None:
    method = {"name": "fedavg-ft", "per_class": 2, "steps": 1}
    case = "classification, weights"
    prepared = prepared_of(case, method, partition=LEAVES_SAMPLES)
    config = prepared.config
    weights = Weights(config.model.params(), config.model.buffers())
    _, loss = prepared.spec.method.tuned(config, weights)  # type: ignore[attr-defined]
    x, y = config.server_data.balanced(2, rng(0, "server-samples"))  # type: ignore[union-attr]
    logits = config.model(weights.params, x)
    factors = torch.tensor([0.5, 1.0, 1.5])[y]
    log_shares = logits.log_softmax(dim=1)
    expected = -0.9 * log_shares.gather(1, y[:, None])[:, 0] - 0.1 * log_shares.mean(dim=1)
    assert loss == pytest.approx(float((factors * expected).mean()), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedtan"])
def test_a_client_counts_by_its_tokens(method: str) -> None:
    """The average of the clients' models weights them by tokens that count, not by sequences."""
    prepared = prepared_of("next-token, domains", method, norm=method == "fedtan", training={"rounds": 1})
    heard: list[Any] = []
    with fs.Simulation(prepared, listener=lambda round, replies: heard.append(replies)) as simulation:
        simulation.step()
        after = simulation.state.weights.params
    replies = max(heard, key=len)
    tokens = [int((prepared.data.y_train[prepared.assignment[client]] != -100).sum()) for client in range(4)]
    assert len(set(tokens)) > 1
    assert [replies[client].weight for client in range(4)] == tokens
    for name, tensor in after.items():
        mean = sum(replies[client].weights.params[name] * tokens[client] for client in range(4)) / sum(tokens)
        torch.testing.assert_close(tensor, mean)
