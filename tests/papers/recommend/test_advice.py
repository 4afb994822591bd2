"""Advice from a small board on the digits: without results, with few results, and with results that show an order."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w

import fedstrata as fs
from fedstrata.base.errors import SpecError
from fedstrata.methods.base import METHODS
from fedstrata.papers.recommend.advice import MOST, advise, recommend, refused
from fedstrata.papers.recommend.columns import Board, Column
from fedstrata.papers.recommend.properties import measure
from fedstrata.papers.recommend.rules import RULES
from fedstrata.reporting.statistics import paired_difference
from fedstrata.runs.preparation import prepare

ROOT = Path(__file__).parents[3]
SHARED = {"data": {"name": "digits"}, "training": {"rounds": 20, "clients_per_round": 4, "local_epochs": 1}}
COLUMNS = {
    "two-classes-bernoulli": {
        "partition": {"name": "classes", "clients": 20, "per_client": 2},
        "availability": {"name": "bernoulli", "p": 0.5},
    },
    "iid-always": {"partition": {"name": "iid", "clients": 20}, "availability": {"name": "always"}},
}
BASE = [0.70, 0.72, 0.68, 0.71, 0.69]


def cell(*gains: float, seeds: int = 5) -> dict[str, list[float]]:
    """The results of a method whose accuracies differ from FedAvg's by these numbers."""
    listed = [gains[seed % len(gains)] for seed in range(seeds)]
    accuracy = [base + gain for base, gain in zip(BASE, listed, strict=False)]
    return {"seeds": list(range(seeds)), "accuracy": accuracy}


def write(path, columns, methods, shared=SHARED):
    """Write a board whose columns have the same results."""
    board = {"protocol": path.stem, "columns": {n: {**COLUMNS[n], "methods": methods} for n in columns}}
    path.write_text(json.dumps(board))
    path.with_suffix(".toml").write_text(tomli_w.dumps({"spec": shared}))
    return path


METHODS_OF_BOARD = {
    "fedavg": cell(0),
    "fedprox": cell(0.100, 0.101),
    "fedau": cell(0.050, 0.052),
    "feddyn": cell(-0.100, -0.101),
    "rebafl": cell(0.1, -0.1),
    "mixture": cell(0.2, 0.201),
}


@pytest.fixture
def board(tmp_path):
    """A board with two columns and five seeds."""
    return write(tmp_path / "board.json", COLUMNS, METHODS_OF_BOARD)


@pytest.mark.slow
@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_is_its_own_nearest_column(name, board):
    spec = fs.Experiment(**SHARED, **COLUMNS[name])
    advice = recommend(spec, board)
    assert (advice.columns[0].name, advice.columns[0].distance, advice.columns[0].clear) == (name, 0, [])
    assert len(advice.columns) == 2
    assert advice.columns[1].distance > 0.1
    assert "label_skew" in advice.columns[1].clear


@pytest.mark.slow
def test_a_column_is_measured_by_its_settings_and_not_by_its_name(board):
    swapped = dict(zip(COLUMNS, reversed(COLUMNS.values()), strict=True))
    content = json.loads(board.read_text())
    content["columns"] = {name: {**settings, "methods": METHODS_OF_BOARD} for name, settings in swapped.items()}
    board.write_text(json.dumps(content))
    assert recommend(fs.Experiment(**SHARED, **COLUMNS["iid-always"]), board).columns[0].name == "two-classes-bernoulli"


@pytest.mark.slow
def test_results_of_an_alike_column_decide_what_comes_first(board):
    advice = recommend(fs.Experiment(**SHARED, **COLUMNS["two-classes-bernoulli"]), board)
    assert list(advice.methods)[:2] == ["fedprox", "fedau"]
    assert advice.ahead == 2
    assert list(advice.behind) == ["feddyn"]
    assert not {"feddyn", "mixture"} & set(advice.methods)
    reason = advice.methods["fedau"][0]
    values = [
        dict(enumerate(100 * value for value in METHODS_OF_BOARD[name]["accuracy"])) for name in ("fedau", "fedavg")
    ]
    expected = paired_difference(*values, together=5)
    assert (reason.value, reason.interval, reason.n) == (expected.mean, expected.interval, 5)
    assert "+5.1 [" in reason.text
    assert "5 seeds" in reason.text
    # Without a result that shows an order, the measured absence of classes is the reason, and the result is told.
    told, measured = advice.methods["rebafl"]
    assert "The difference is not significant" in told.text
    assert (measured.property, measured.value) == ("absent_replies", advice.properties.absent_replies)
    # There is a place for FedDyn, and a rule names it, but it is behind FedAvg.
    few = advise(advice.properties, advice.columns, dict.fromkeys(["stratify", "fedgs", "fedntd"], "no"))
    assert list(few.methods) == ["fedprox", "fedau", "rebafl"]
    assert "the first 2 methods are significantly more accurate than FedAvg" in " ".join(advice.limits)


@pytest.mark.slow
def test_a_column_that_is_not_alike_does_not_decide(board):
    column = recommend(fs.Experiment(**SHARED, **COLUMNS["two-classes-bernoulli"]), board).columns[0]
    far = replace(column, own=replace(column.own, online=1.0))
    assert far.clear == ["online"]
    assert not far.alike
    advice = advise(far.own, [far], {})
    assert (advice.ahead, advice.behind) == (0, {})
    assert "feddyn" in advice.methods
    assert "fedprox" not in advice.methods


@pytest.mark.slow
def test_a_column_with_classes_is_not_alike_a_task_without_classes(board):
    spec = fs.Experiment(**SHARED, **COLUMNS["iid-always"], task="regression")
    advice = recommend(spec, board)
    assert not any(column.alike for column in advice.columns)
    assert advice.ahead == 0
    assert "label_skew" in advice.columns[0].clear


@pytest.mark.slow
def test_one_column_with_two_seeds(tmp_path):
    methods = {"fedavg": cell(0, seeds=2), "rebafl": cell(0.1, seeds=2)}
    file = write(tmp_path / "board.json", ["two-classes-bernoulli"], methods)
    advice = recommend(fs.Experiment(**SHARED, **COLUMNS["two-classes-bernoulli"]), file)
    assert advice.ahead == 0
    assert "+10.0 points (2 seeds). There are too few seeds" in advice.methods["rebafl"][0].text
    assert advice.limits[0] == "The board has 1 column on 1 data set (digits), with 2 seeds per method."


@pytest.mark.slow
def test_without_results(tmp_path):
    advice = recommend(fs.Experiment(**SHARED, **COLUMNS["two-classes-bernoulli"]), tmp_path / "none.json")
    assert (advice.columns, advice.ahead) == ([], 0)
    assert 3 <= len(advice.methods) <= MOST
    assert all(reason.property for reasons in advice.methods.values() for reason in reasons)
    assert advice.limits[0].startswith("Results of the board do not exist.")
    assert "The order of the methods is not a ranking." in advice.limits


@pytest.mark.slow
def test_no_property_gives_a_reason(tmp_path):
    advice = recommend(fs.Experiment(**SHARED, **COLUMNS["iid-always"]), tmp_path / "none.json")
    assert (advice.methods, advice.compared) == ({}, ["fedavg"])


@pytest.mark.slow
@pytest.mark.usefixtures("in_an_empty_folder")
def test_the_data_of_the_board_are_missing(tmp_path):
    file = write(tmp_path / "board.json", ["iid-always"], METHODS_OF_BOARD, {"data": {"name": "fashion_mnist"}})
    advice = recommend(fs.Experiment(**SHARED, **COLUMNS["iid-always"]), file)
    assert advice.columns == []
    (problem,) = [sentence for sentence in advice.limits if "cannot be measured" in sentence]
    assert "fashion_mnist" in problem


@pytest.mark.slow
@pytest.mark.parametrize("task", [pytest.param("classification", marks=pytest.mark.long), "regression"])
def test_the_refused_methods_are_those_that_a_run_refuses(task):
    spec = fs.Experiment(**SHARED, task=task, partition={"name": "iid", "clients": 20})
    problems, errors = refused(prepare(spec)), {}
    for name in METHODS:
        try:
            prepare(spec.replace(method=name))
        except SpecError as error:
            errors[name] = error
    assert problems.keys() == errors.keys()
    assert all(error.problem in problems[name] for name, error in errors.items())
    assert ("rebafl" in errors) == (task == "regression")
    assert "fedtan" in errors  # because the model has no BatchNorm layers


@pytest.mark.slow
def test_refused_methods_are_not_advised(board):
    column = recommend(fs.Experiment(**SHARED, **COLUMNS["two-classes-bernoulli"]), board).columns[0]
    advice = advise(column.own, [column], {"fedprox": "no", "rebafl": "no"})
    assert next(iter(advice.methods)) == "fedau"
    assert not {"fedprox", "rebafl"} & set(advice.methods)


def test_settings_of_single_columns():
    protocol = {"spec": SHARED, "more": {"all": {"training": {"clients_per_round": 20}}}}
    column = {**COLUMNS["iid-always"], "methods": {}}
    specs = Board({"all": column, "few": column}, protocol).specs()
    assert [spec.training.clients_per_round for spec in specs.values()] == [20, 4]
    assert all(spec.training.local_epochs == 1 and spec.partition.name == "iid" for spec in specs.values())


RESULTS = {
    ("rebafl", "feddyn"): {
        "data": {"limit": 1000},
        "partition": {"name": "classes", "clients": 20, "per_client": 2},
        "availability": "bernoulli",
        "training": {"rounds": 100, "clients_per_round": 20},
    },
    ("fedgs",): {
        "partition": {"name": "classes", "clients": 20, "per_client": 2},
        "training": {"rounds": 30, "clients_per_round": 5},
    },
    ("stratify",): {"partition": {"clients": 100, "alpha": 0.01, "min_size": 0}},
}
"""For methods that a rule recommends because of our own results: the partition and availability of these results."""


@pytest.mark.slow
@pytest.mark.parametrize("methods", RESULTS, ids=", ".join)
def test_a_rule_holds_in_the_setting_of_its_result(methods):
    measured = measure(prepare(fs.Experiment(**RESULTS[methods])))
    (rule,) = [rule for rule in RULES if set(methods) <= set(rule.methods)]
    assert rule.holds(measured)
    assert any(rule.methods[name].source.startswith("docs/") for name in methods)


def test_sources_exist():
    sources = {claim.source for rule in RULES for claim in rule.methods.values()}
    pages = {source for source in sources if not source.startswith("arXiv:")}
    assert all((ROOT / page).is_file() for page in pages)
    assert {name for rule in RULES for name in rule.methods} <= set(METHODS)


def test_a_column_without_fedavg_has_no_differences():
    own = measure(prepare(fs.Experiment(**SHARED, **COLUMNS["iid-always"])))
    column = Column("a", own, {"fedau": cell(0.1)}, own)
    assert advise(own, [column], {}).methods == {}
