from __future__ import annotations

import csv
import json
import math
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from fedstrata.base.errors import DataError, SpecError
from fedstrata.base.jsonl import MetricsLog, write_json
from fedstrata.evaluation.history import History, Record

RECORDS = [
    {"round": 1, "accuracy": 0.5, "bytes_up": 10, "seconds": 0.5, "strata": {"a": 1.0}},
    {"round": 2, "bytes_up": 10, "seconds": 0.25, "sizes": [1, 2]},
    {"round": 3, "accuracy": 0.8, "bytes_up": 10, "seconds": 0.25, "strata": {"a": 2.0}},
    {"round": 4, "accuracy": 0.8, "bytes_up": 5, "seconds": 0.0},
    {"round": 5, "accuracy": 0.6, "bytes_up": 5, "seconds": 0.0, "samples": 40},
]


def test_summary_by_hand() -> None:
    summary = History(RECORDS, targets=[0.5, 0.75, 0.9], method="fedavg", seed=3).summary
    # 0.5, 0.8, 0.8, 0.6: squares of the deviations from 0.675 add up to 0.0675, over 3 is 0.15²
    assert summary.pop("accuracy_sd_last20") == pytest.approx(0.15)
    assert summary == {
        "method": "fedavg",
        "seed": 3,
        "rounds": 5,
        "final_accuracy": 0.6,
        "best_accuracy": 0.8,
        "best_round": 3,
        "best_on": "test",
        "rounds_to_target": {"0.5": 1, "0.75": 3, "0.9": None},
        "samples": 40,
        "bytes_up": 40,
        "bytes_down": 0,
        "seconds": 1.0,
    }


def test_deviation_is_over_the_last_twenty_evaluated_rounds() -> None:
    wild = [{"round": i + 1, "accuracy": float(i % 2)} for i in range(10)]
    calm = [{"round": 11 + 2 * i, "accuracy": 0.5} for i in range(20)]
    assert History(wild + calm).summary["accuracy_sd_last20"] == 0.0
    assert History(wild[:1]).summary["accuracy_sd_last20"] is None


def test_deviation_is_over_no_fewer_than_twenty_rounds() -> None:
    """Ten of 0 and ten of 1: their squares about a half add up to 5, over 19."""
    rounds = [{"round": i + 1, "accuracy": float(i >= 10)} for i in range(20)]
    assert History(rounds).summary["accuracy_sd_last20"] == pytest.approx(math.sqrt(5 / 19))


def test_summary_of_nothing_and_of_a_run_never_evaluated() -> None:
    for records in ([], [{"round": 1, "bytes_up": 3}]):
        summary = History(records).summary
        assert summary["final_accuracy"] is summary["best_accuracy"] is summary["best_round"] is None
        assert set(summary["rounds_to_target"].values()) == {None}


def test_columns_skip_what_is_missing() -> None:
    history = History(RECORDS)
    rounds, values = history.column("accuracy")
    assert rounds.tolist() == [1, 3, 4, 5]
    assert values.tolist() == [0.5, 0.8, 0.8, 0.6]
    assert history.column("strata.a")[1].tolist() == [1.0, 2.0]
    assert history.columns == ["accuracy", "bytes_up", "seconds", "strata.a", "samples"]
    assert history.column("loss")[0].tolist() == []  # every run may have one


def test_unknown_column_names_the_nearest() -> None:
    with pytest.raises(SpecError, match=r"'stratum.a'.*did you mean 'strata.a'"):
        History(RECORDS).column("stratum.a")
    with pytest.raises(SpecError, match="sizes"):
        History(RECORDS).column("sizes")


def test_a_diverged_run_has_no_final_loss_but_keeps_its_rounds() -> None:
    history = History()
    history.append({"round": 1, "accuracy": np.float32(0.5), "loss": torch.tensor(1.0)})
    history.append({"round": 2, "accuracy": math.nan, "loss": math.inf})
    assert history[1] == {"round": 2, "accuracy": None, "loss": None}
    assert history.final_accuracy == 0.5
    assert [record["round"] for record in history] == [1, 2]
    assert len(history[:1]) == 1


def test_repr_tells_what_it_is(tmp_path: Path) -> None:
    text = repr(History(RECORDS, method="fedavg", seed=3, path=tmp_path))
    assert text == f"History(fedavg, seed 3, 5 rounds, accuracy 0.6000 (best 0.8000 in round 3), {tmp_path})"
    assert repr(History([{"round": 1}])) == "History(1 round)"


def test_a_frame_has_a_row_a_round() -> None:
    frame = History(RECORDS).to_frame()
    assert frame["round"].tolist() == [1, 2, 3, 4, 5]
    assert frame["accuracy"].dtype == float
    assert frame["accuracy"].isna().tolist() == [False, True, False, False, False]
    assert frame["strata.a"].dropna().tolist() == [1.0, 2.0]
    assert frame["sizes"][1] == [1, 2]
    assert len(History().to_frame()) == 0


class Cells(HTMLParser):
    """The texts of a table's cells; tags that are not closed in order are an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {"th": [], "td": [], "p": []}
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)
        if tag in self.texts:
            self.texts[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1] in self.texts:
            self.texts[self.open[-1]][-1] += data


def test_a_notebook_shows_a_card_of_a_run() -> None:
    records = [
        {"round": 1, "accuracy": 0.5, "loss": 1.25, "clients_invited": 4, "clients_returned": 3, "bytes_up": 2_000_000},
        {"round": 2, "accuracy": None, "loss": None, "clients_invited": 4, "clients_returned": 0, "bytes_up": 0},
        {"round": 3, "accuracy": 0.75, "loss": 1.0, "clients_invited": 4, "clients_returned": 4, "bytes_up": 500_000},
    ]
    page = History(records, method="<b>", seed=3)._repr_html_()
    shown = Cells(page).texts
    assert shown["p"] == ["", "accuracy in rounds 1 to 3, from 50.00 % to 75.00 %"]
    assert "<b>&lt;b&gt; · seed 3</b>" in page
    columns = ["round", "accuracy", "loss", "returned/invited", "MB"]
    assert shown["th"][-5:] == columns  # without seconds, which no round has
    assert shown["td"][-15:-10] == ["1", "50.00 %", "1.25", "3/4", "2.00"]
    assert shown["td"][-10:-5] == ["2", "–", "–", "0/4", "–"]
    assert shown["td"][-5:] == ["3", "75.00 %", "1", "4/4", "0.50"]
    # From the lower left to the upper right corner, 3 pixels from the border.
    assert 'points="3.0,45.0 237.0,3.0"' in page
    assert "script" not in page


def test_a_card_of_a_run_where_lower_is_better_and_of_runs_without_results() -> None:
    records = [{"round": i, "accuracy": None, "loss": 2.0, "test": {"rmse": 10.0 / i}} for i in range(1, 31)]
    shown = Cells(History(records, primary="rmse", lower=("rmse",))._repr_html_()).texts
    assert shown["p"][1:] == ["rmse in rounds 1 to 30, from 0.3333 to 10", "The last 10 of 30 rounds."]
    assert shown["th"][-3:] == ["round", "rmse", "loss"]
    assert shown["td"][-3:] == ["30", "0.3333", "2"]
    never = Cells(History([{"round": 1, "accuracy": None, "loss": None}])._repr_html_()).texts
    assert never["th"][-1:] == ["round"]
    assert Cells(History()._repr_html_()).texts["p"] == ["", "no rounds yet"]


def test_csv_reads_back(tmp_path: Path) -> None:
    History(RECORDS).to_csv(tmp_path / "run.csv")
    with (tmp_path / "run.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["accuracy"] for row in rows] == ["0.5", "", "0.8", "0.8", "0.6"]
    assert json.loads(rows[1]["sizes"]) == [1, 2]
    assert json.loads(rows[0]["strata"]) == {"a": 1.0}


def test_load_finds_method_seed_and_targets(tmp_path: Path) -> None:
    MetricsLog(tmp_path / "metrics.jsonl").append(*RECORDS)
    (tmp_path / "spec.toml").write_text('seed = 4\n[method]\nname = "moon"\n[evaluation]\ntargets = [0.7]\n')
    history = History.load(tmp_path)
    assert (history.method, history.seed, history.targets) == ("moon", 4, (0.7,))
    assert list(history) == RECORDS
    write_json(tmp_path / "summary.json", history.summary | {"method": "mine"})
    again = History.load(tmp_path)
    assert again.summary == history.summary | {"method": "mine"}


def test_load_has_the_parameters_where_there_are_any(tmp_path: Path) -> None:
    MetricsLog(tmp_path / "metrics.jsonl").append(*RECORDS)
    going = History.load(tmp_path)
    assert going.params is None
    tensors = {"w": torch.arange(3.0), "n": torch.tensor(2)}
    (tmp_path / "model.safetensors").write_bytes(safetensors.torch.save(tensors))
    history = History.load(tmp_path)
    assert going.params is None  # its records end before that model
    assert history.params is not None
    assert all(torch.equal(history.params[name], tensor) for name, tensor in tensors.items())
    assert history.params is history.params  # read once
    history.params = None
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    damaged = History.load(tmp_path)
    assert damaged.final_accuracy == 0.6  # who asks for no parameters is not told of them
    with pytest.raises(DataError, match=r"model\.safetensors cannot be read"):
        damaged.params  # noqa: B018


def test_load_refuses_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is not a run folder.*metrics\.jsonl"):
        History.load(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"round": 1}\n')
    (tmp_path / "summary.json").write_text("[")
    with pytest.raises(DataError, match=str(tmp_path)):
        History.load(tmp_path)


def test_targets_of_many_digits_are_read_back(tmp_path: Path) -> None:
    targets = [2 / 3, 0.1234564, 0.9000001, 0.9000004]
    records = [{"round": 1, "accuracy": 0.1234562}, {"round": 2, "accuracy": 0.9000002}]
    live = History(records, targets=targets)
    MetricsLog(tmp_path / "metrics.jsonl").append(*records)
    write_json(tmp_path / "summary.json", live.summary)
    assert list(live.summary["rounds_to_target"].values()) == [2, 2, 2, None]
    assert History.load(tmp_path).summary["rounds_to_target"] == live.summary["rounds_to_target"]


def test_the_best_round_is_picked_on_validation_samples_where_there_are_any() -> None:
    picked = [
        {"round": 1, "accuracy": 0.9, "validation": {"accuracy": 0.3}},
        {"round": 2, "accuracy": 0.6, "validation": {"accuracy": 0.8}},
        {"round": 3, "accuracy": 0.7, "validation": {"accuracy": 0.8}},
    ]
    summary = History(picked).summary
    assert (summary["best_on"], summary["best_round"], summary["best_accuracy"]) == ("validation", 2, 0.6)
    assert History([{**record, "validation": None} for record in picked]).best_round == 1
    nowhere = [{"round": 1, "accuracy": 0.5, "validation": {"accuracy": None}}]
    assert History(nowhere).best_on == "test"


def measured(round: int, accuracy: float, auroc: float, brier: float, loss: float = 1.0) -> Record:
    """A round whose values on the validation samples are 0.01 better than those on the test set."""
    test = {"auroc": auroc, "brier": brier}
    better = {"accuracy": accuracy + 0.01, "auroc": auroc + 0.01, "brier": brier - 0.01, "loss": loss - 0.01}
    return {"round": round, "accuracy": accuracy, "loss": loss, "test": test, "validation": better}


IMBALANCED = [measured(1, 0.98, 0.5, 0.4), measured(8, 0.9, 0.8, 0.3, 2.0), measured(20, 0.91, 0.7, 0.1, 0.5)]


def test_the_primary_metric_decides_the_best_round() -> None:
    history = History(IMBALANCED, primary="auroc")
    assert (history.best_round, history.best_on) == (8, "validation")
    chosen = ("primary", "lower_is_better", "final_auroc", "best_auroc", "final_accuracy", "best_accuracy")
    assert [history.summary[key] for key in chosen] == ["auroc", False, 0.7, 0.8, 0.91, 0.9]
    assert repr(history) == "History(3 rounds, auroc 0.7000 (best 0.8000 in round 8))"
    unvalidated = [{**record, "validation": None} for record in IMBALANCED]
    assert History(unvalidated, primary="auroc").best_round == 8
    assert History(IMBALANCED).best_round == 1
    assert "primary" not in History(IMBALANCED).summary


def test_the_direction_of_the_primary_metric_is_the_metrics_own(tmp_path: Path) -> None:
    assert History(IMBALANCED, primary="loss").best_round == 20
    brier = History(IMBALANCED, primary="brier", lower={"brier"})
    assert (brier.best_round, brier.summary["best_brier"]) == (20, 0.1)
    MetricsLog(tmp_path / "metrics.jsonl").append(*IMBALANCED)
    (tmp_path / "spec.toml").write_text("[evaluation]\nmetrics = ['auroc', 'my:brier']\nprimary = 'auroc'\n")
    assert History.load(tmp_path).best_round == 8
    # Only the summary says that the class my:brier is better if it is lower.
    write_json(tmp_path / "summary.json", brier.summary)
    assert History.load(tmp_path).summary == brier.summary


def test_final_values_are_those_of_the_model_that_the_run_saved(tmp_path: Path) -> None:
    history = History(IMBALANCED, primary="auroc")
    history.model_round = 8
    final = ("final_auroc", "best_auroc", "final_accuracy")
    assert [history.summary[key] for key in final] == [0.8, 0.8, 0.9]
    assert history.final("test.brier") == 0.3
    assert repr(history) == "History(3 rounds, auroc 0.8000 (best 0.8000 in round 8))"
    history.model_round, history.kept = 4, {"round": 4, "accuracy": 0.7, "test": {"auroc": 0.65}}
    assert [history.summary[key] for key in final] == [0.65, 0.8, 0.7]
    MetricsLog(tmp_path / "metrics.jsonl").append(*IMBALANCED)
    write_json(tmp_path / "summary.json", history.summary)
    assert History.load(tmp_path).summary == history.summary


def test_a_primary_metric_without_values_has_no_best_round() -> None:
    history = History([{"round": 1, "accuracy": 0.5, "loss": 1.0}], primary="auroc")
    assert history.best_round is history.summary["final_auroc"] is None
    assert repr(history) == "History(1 round)"


def test_targets_of_other_metrics(tmp_path: Path) -> None:
    records = [
        {"round": n, "accuracy": a, "loss": 1 - a, "test": {"auroc": a, "ece": 0.5 - a / 2, "mine": 1 - a}}
        for n, a in enumerate((0.0, 0.5, 0.75), start=1)
    ]
    targets = {"auroc": [0.5, 0.9], "ece": [0.25], "loss": [0.3], "mine": [0.6]}
    history = History(records, targets=[0.6], metric_targets=targets, lower={"loss", "ece", "mine"})
    assert history.summary["rounds_to_target"] == {
        "0.6": 3,
        "auroc": {"0.5": 2, "0.9": None},
        "ece": {"0.25": 2},
        "loss": {"0.3": 3},
        "mine": {"0.6": 2},
    }
    MetricsLog(tmp_path / "metrics.jsonl").append(*records)
    (tmp_path / "spec.toml").write_text(
        "[evaluation]\nmetrics = ['auroc', 'ece', {name = 'm:mine', lower_is_better = true}]\n"
        "targets = {accuracy = [0.6], auroc = [0.5, 0.9], ece = [0.25], loss = [0.3], mine = [0.6]}\n"
    )
    assert History.load(tmp_path).summary["rounds_to_target"] == history.summary["rounds_to_target"]
    write_json(tmp_path / "summary.json", history.summary | {"stopped": "enough", "model_round": 2})
    again = History.load(tmp_path)
    ending = {"stopped": "enough", "model_round": 2, "final_accuracy": 0.5}
    assert again.summary == history.summary | ending


def test_damaged_files_of_evaluations_are_named(tmp_path: Path) -> None:
    MetricsLog(tmp_path / "metrics.jsonl").append(*RECORDS)
    (tmp_path / "evaluation.json").write_text('{"last": {"round": 1}}')
    with pytest.raises(DataError, match=r"evaluation.json or clients.csv in .* cannot be read"):
        History.load(tmp_path)
