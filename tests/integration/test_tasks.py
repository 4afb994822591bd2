"""Every method on every task: a run either trains the loss of the task, or is refused before its first round."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from task_cases import CASES, prepared_of

import fedstrata as fs
from fedstrata.base.errors import SpecError
from fedstrata.methods.base import METHODS

NOT_CLASSES = [case for case in CASES if case != "classification"]

ONLY_CLASSIFICATION = ("rebafl", "moon", "fedrs", "fedlc", "bsm-fedavg")
"""Methods whose loss is a formula about classes."""

REFUSED: dict[tuple[str, str], tuple[str, str]] = {
    **{
        (method, case): ("has a loss of its own for the tasks classification", "Use another method, such as fedavg")
        for method in ONLY_CLASSIFICATION
        for case in NOT_CLASSES
    },
    **{
        ("fedavg-ft", case): ("needs classes for the server's samples", "Use another method, such as fedavg")
        for case in NOT_CLASSES
    },
    ("stratify", "regression"): ("needs classes, and the task 'regression' has none", "Set task.bins"),
    ("stratify", "multilabel"): ("needs classes, and the task 'multilabel' has none", "Set task.stratum"),
    ("stratify", "segmentation"): ("needs classes, and the task 'segmentation' has none", "Give each sample a domain"),
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


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", list(METHODS))
def test_a_method_trains_or_is_refused_before_the_first_round(method: str, case: str) -> None:
    table = {"name": method} | SETTINGS.get(method, {})
    more = {"partition": LEAVES_SAMPLES} if (method, case) == ("fedavg-ft", "classification") else {}
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
    if case != "classification":
        assert list(last["test"]) == list(prepared.data.task.default_metrics)
        assert before.loss is not None
        assert last["loss"] < before.loss


def test_all_expected_refusals_are_of_methods_and_cases_that_exist() -> None:
    assert {method for method, _ in REFUSED} <= {*METHODS}
    assert {case for _, case in REFUSED} <= set(CASES)
