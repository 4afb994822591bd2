from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedstrata.evaluation.history import Confusion, History
from fedstrata.reporting import charts
from fedstrata.reporting.charts import FATE_NAMES, absences, chart_data, curve_names, fates
from fedstrata.reporting.runs import Run, load_runs

Maker = Callable[..., Path]


def run(records: list[dict], label: str = "a", seed: int = 0, events: list[dict] | None = None, **more: object) -> Run:
    history = History(records, seed=seed)
    for name, value in more.items():
        setattr(history, name, value)
    return Run(label, history, Path("nowhere"), events or [], "")


def test_curves_are_means_and_deviations_over_what_was_spent() -> None:
    def records(accuracies: list[float], up: int) -> list[dict]:
        return [
            {"round": i + 1, "accuracy": value, "bytes_up": up, "bytes_down": 10**6, "samples": 100}
            for i, value in enumerate(accuracies)
        ]

    runs = {"a": [run(records([0.2, 0.4], 10**6), seed=0), run(records([0.4, 0.8], 3 * 10**6), seed=1)]}
    found = chart_data(runs)
    assert [axis["key"] for axis in found["axes"]] == ["round", "bytes", "samples"]
    method = found["methods"][0]
    assert method["round"] == [1, 2]
    assert method["bytes"] == [3, 6]  # MB: 2 and 4 a round
    assert method["samples"] == [100, 200]
    assert method["y"] == {"accuracy": [[30, 60], [14.142, 28.284]]}
    assert method["final"] == [60, 28.284]
    assert method["ends"] == {"bytes": 6, "samples": 200}
    json.dumps(found, allow_nan=False)


def test_the_primary_metric_is_the_first_curve_and_the_value_of_the_front() -> None:
    records = [
        {"round": n, "accuracy": 0.9, "loss": 1.0, "test": {"accuracy": 0.9, "auroc": u}}
        for n, u in enumerate((0.5, 0.75), 1)
    ]
    found = chart_data({"a": [run(records, primary="auroc")]})
    assert found["primary"] == {"key": "test.auroc", "final": "final auroc", "lower": False}
    assert [metric["key"] for metric in found["metrics"]] == ["test.auroc", "accuracy", "loss"]
    assert found["methods"][0]["final"] == [0.75, None]
    by_loss = chart_data({"a": [run(records, primary="loss")]})
    assert by_loss["primary"] == {"key": "loss", "final": "final loss", "lower": True}
    assert [metric["key"] for metric in by_loss["metrics"]] == ["loss", "accuracy", "test.auroc"]
    early = chart_data({"a": [run([*records, records[0] | {"round": 3}], primary="auroc", model_round=2)]})
    assert early["methods"][0]["final"] == [0.75, None]
    usual = chart_data({"a": [run(records)]})
    assert usual["primary"] == {"key": "accuracy", "final": "final accuracy, %", "lower": False}


def test_one_seed_has_no_band_and_a_round_without_evaluation_no_value() -> None:
    records = [{"round": 1, "train_loss": 2.0}, {"round": 2, "train_loss": 1.0, "accuracy": 0.5}]
    assert chart_data({"a": [run(records)]})["methods"][0]["y"] == {"accuracy": [[None, 50]], "train_loss": [[2, 1]]}


def test_long_curves_are_thinned_to_evaluated_rounds_and_keep_their_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts, "POINTS", 10)
    records = [{"round": i, "train_loss": 1.0} | ({"accuracy": 0.5} if i % 5 == 0 else {}) for i in range(1, 101)]
    rounds = chart_data({"a": [run(records)]})["methods"][0]["round"]
    assert len(rounds) == 10
    assert rounds[0] == 5
    assert rounds[-1] == 100
    assert all(round % 5 == 0 for round in rounds)


def test_what_can_be_drawn() -> None:
    records = [
        {
            "round": i,
            "loss": i,
            "accuracy": 0.5,
            "rises": i,
            "flat": 2,
            "test": {"accuracy": 0.5, "ece": 0.1},
            "clients": {"accuracy": {"mean": 0.5, "sd": 0.1, "worst_10": 0.2}, "unheard": {"clients": 0}},
            "bytes_evaluation": i,
            "seconds": i,
        }
        for i in (1, 2)
    ]
    names = ["accuracy", "loss", "test.ece", "clients.accuracy.mean", "clients.accuracy.worst_10", "rises"]
    assert curve_names({"a": [History(records)]}) == names
    many = [{"round": i} | {f"m{j}": i * j for j in range(1, charts.OWN + 3)} for i in (1, 2)]
    assert len(curve_names({"a": [History(many)]})) == charts.OWN


def test_fates_tell_refused_from_failed_and_share_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    record = {"clients_returned": 5, "clients_dropped": 2, "clients_late": 1, "clients_failed": 3}
    events = [
        {"round": 2, "kind": "refused", "clients": [4], "reason": "NaN"},
        {"round": 2, "kind": "refused", "clients": [4, 7], "reason": "NaN"},
        {"round": 2, "kind": "failed", "clients": [9]},
    ]
    runs = run([{"round": i} | record for i in (1, 2, 3)], events=events)
    assert FATE_NAMES == ("returned", "dropped out", "late", "failed", "refused")
    assert fates(runs)["counts"] == [[5, 5, 5], [2, 2, 2], [1, 1, 1], [3, 1, 3], [0, 2, 0]]
    monkeypatch.setattr(charts, "BARS", 2)
    assert fates(runs) | {"run": ""} == {
        "run": "",
        "rounds": 3,
        "each": 2,
        "counts": [[10, 5], [4, 2], [2, 1], [4, 3], [2, 0]],
    }
    assert fates(run([]))["counts"] == [[], [], [], [], []]


def test_absences_are_shares_of_the_rounds_of_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = run([{"round": i, "classes_absent": absent} for i, absent in ((1, [0, 2]), (2, [0]), (3, []))])
    table = {"run": "seed 0", "rounds": 3, "each": 1, "some": 2, "rows": ["440", "000", "400"]}
    assert absences(runs, 3) == table
    monkeypatch.setattr(charts, "BARS", 2)
    assert absences(runs, 3) == table | {"each": 2, "rows": ["40", "00", "20"]}
    assert absences(run([{"round": 1}]), 3) is None
    assert absences(run([]), 2) == {"run": "seed 0", "rounds": 0, "each": 1, "some": 0, "rows": ["", ""]}


def test_classes_are_means_over_seeds_of_the_last_evaluation() -> None:
    first = run([{"round": 1, "per_class": [0.1, 0.1]}, {"round": 2, "per_class": [0.5, None]}, {"round": 3}])
    second = run([{"round": 1, "per_class": [1.0, None]}], seed=1)
    found = chart_data({"a": [first, second], "b": [run([{"round": 1}])]})["classes"]
    assert found == {"names": ["0", "1"], "rows": [[75, None], None], "confusion": [None, None]}
    assert chart_data({"b": [run([{"round": 1}])]})["classes"] is None


def test_confusion_adds_up_over_seeds_and_stands_in_for_accuracies(write_measured: Maker, tmp_path: Path) -> None:
    for seed in (0, 1):
        folder = write_measured(tmp_path / f"a/seed-{seed}", seed=seed, rounds=2, names=("cat", "dog"))
        table = {"last": {"round": 2, "confusion": [[3, 1], [2, 2 * seed]]}}
        (folder / "evaluation.json").write_text(json.dumps(table))
    found = chart_data(load_runs([tmp_path / "a"]))["classes"]
    assert found["names"] == ["cat", "dog"]
    assert found["confusion"] == [[[6, 2], [4, 2]]]
    assert found["rows"] == [[75, 25]]


def test_classes_are_those_of_the_model_kept() -> None:
    matrices = {"last": Confusion(2, np.array([[1, 0], [1, 0]])), "best": Confusion(1, np.array([[1, 1], [0, 2]]))}
    records = [{"round": 1, "accuracy": 0.75}, {"round": 2, "accuracy": 0.5}]
    assert chart_data({"a": [run(records, confusion=matrices)]})["classes"]["rows"] == [[100, 0]]
    kept = chart_data({"a": [run(records, confusion=matrices, model_round=1)]})["classes"]
    assert (kept["rows"], kept["confusion"]) == ([[50, 100]], [[[1, 1], [0, 2]]])
    by_class = [{**record, "per_class": [record["round"] / 4, 0.5]} for record in records]
    assert chart_data({"a": [run(by_class, model_round=1)]})["classes"]["rows"] == [[25, 50]]


def test_clients_are_a_map_a_seed_and_column_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def clients(*accuracies: float | None) -> list[dict]:
        return [{"client": i, "samples": 9, "heard": i, "accuracy": value} for i, value in enumerate(accuracies)]

    runs = {
        "a": [run([{"round": 1}], clients=clients(0.9, 0.2, 0.6)), run([{"round": 1}], seed=1, clients=clients(0.5))],
        "b": [run([{"round": 1}], clients=clients(0.7, 0.4, None))],
        "c": [run([{"round": 1}])],
    }
    found = chart_data(runs)["clients"]
    assert [(each["seed"], each["column"]) for each in found] == [
        ("seed 0", "accuracy"),
        ("seed 0", "heard"),
        ("seed 1", "accuracy"),
        ("seed 1", "heard"),
    ]
    assert found[0]["clients"] == [1, 2, 0]
    assert found[0]["rows"] == [[0.2, 0.6, 0.9], [0.4, None, 0.7], None]
    assert found[1]["rows"] == [[1, 2, 0], [1, 2, 0], None]
    assert found[2]["rows"] == [[0.5], None, None]
    monkeypatch.setattr(charts, "CLIENTS", 2)
    assert chart_data(runs)["clients"][0] | {"rows": None} == {
        "seed": "seed 0",
        "column": "accuracy",
        "percent": True,
        "clients": [1, 0],
        "of": 3,
        "rows": None,
    }
    monkeypatch.setattr(charts, "CELLS", 8)
    assert len(chart_data(runs)["clients"]) == 1
