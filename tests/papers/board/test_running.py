"""Trials choose settings, seeds run with them, killed runs go on, and processes share cells."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from fedstrata.base.errors import DataError
from fedstrata.evaluation.history import History
from fedstrata.papers.board.protocol import read
from fedstrata.papers.board.running import Board, best, curve, limited, of_run, of_trial, refusal, results_of
from fedstrata.papers.running import read as read_results
from fedstrata.papers.running import results_file

COMMAND = [sys.executable, "-m", "fedstrata", "board", "run", "fedavg", "--quick", "--out", "out"]


def run(protocol, folder, names):
    told: list[str] = []
    board = Board(protocol, folder, folder / "runs", None, told.append)
    board.run(protocol.columns(), protocol.entries(names))
    assert board.failed == {}
    return told


@pytest.mark.slow
def test_the_best_trial_on_validation_samples_gives_the_settings_of_all_seeds(small, tmp_path):
    column, (entry,) = small.columns()[0], small.entries(["fedavg"])
    assert len(run(small, tmp_path, ["fedavg"])) == 4 + 3
    results, trials = results_of(tmp_path, column), small.trials(column, entry)
    validation = [results[cell.hash]["validation"] for cell, _ in trials]
    chosen = trials[validation.index(max(validation))][1]
    assert best(trials, results) == chosen
    assert not any({"accuracy", "worst_class"} & set(results[cell.hash]) for cell, _ in trials), "trials test nothing"
    for cell in small.runs(column, entry, chosen):
        result = results[cell.hash]
        assert result["settings"] == chosen
        history = History.load(tmp_path / "runs" / cell.folder)
        assert result["accuracy"] == round(100 * history[-1]["accuracy"], 2)
        assert result["worst_class"] == round(100 * min(history[-1]["per_class"]), 2)
        assert result["worst_client"] == round(100 * history[-1]["personal"]["accuracy"]["worst_10"], 2)
        assert (result["bytes_up"], result["samples"]) == (history.total("bytes_up"), history.total("samples"))
        assert result["curve"] == [list(point) for point in curve(history)]
        assert result["core_seconds"] > 0
        assert set(result["fingerprint"]) == {"data", "model", "partition"}
    assert run(small, tmp_path, ["fedavg"]) == []


@pytest.mark.slow
def test_fedavg_also_runs_with_the_learning_rates_of_methods_with_a_second_setting(small, tmp_path):
    run(small, tmp_path, ["fedavg"])
    column, (entry,) = small.columns()[0], small.entries(["fedavg"])
    trials, results = small.trials(column, entry), results_of(tmp_path, column)
    chosen = best(trials, results)["training"]["lr"]
    validation = {settings["training"]["lr"]: results[cell.hash]["validation"] for cell, settings in trials}
    rates = [rate for rate in validation if rate != chosen][:2]
    other = replace(small, rates_with_setting=rates)
    told = run(other, tmp_path, ["fedavg"])
    assert [line.split(": ")[1] for line in told] == [f"fedavg/limited/seed-{seed}" for seed in range(3)]
    for cell, settings in limited(other, column, results):
        result = results_of(tmp_path, column)[cell.hash]
        assert result["settings"] == settings == {"training": {"lr": max(rates, key=validation.__getitem__)}}
        history = History.load(tmp_path / "runs" / cell.folder)
        assert result["accuracy"] == round(100 * history[-1]["accuracy"], 2)
    assert run(other, tmp_path, ["fedavg"]) == []


@pytest.mark.slow
def test_an_entry_that_cannot_run_is_stored_with_the_reason(small, tmp_path):
    (told,) = run(small, tmp_path, ["fedtan"])
    column, (entry,) = small.columns()[0], small.entries(["fedtan"])
    assert "requires a model with BatchNorm" in told
    trials, results = small.trials(column, entry), results_of(tmp_path, column)
    assert "requires a model with BatchNorm" in refusal(trials, results)
    assert best(trials, results) is None
    assert run(small, tmp_path, ["fedtan"]) == []


@pytest.mark.usefixtures("in_an_empty_folder")
def test_missing_data_are_an_error_and_not_a_refusal(tmp_path):
    protocol = read()
    board = Board(protocol, tmp_path, tmp_path / "runs", None, print)
    with pytest.raises(DataError, match="fashion_mnist"):
        board.run(protocol.columns(["iid-always"]), protocol.entries(["scaffold"]))
    assert not (tmp_path / "cells").exists()


def test_results_are_means_over_the_end_of_the_run():
    def record(round, accuracy, classes):
        clients = {"accuracy": {"mean": accuracy, "worst_10": accuracy / 2}}
        counts = {"bytes_up": 10, "bytes_down": 20, "samples": 5, "seconds": 1.0}
        return {"round": round, "accuracy": accuracy, "per_class": classes, "personal": clients, **counts}

    rounds = [{"round": n, "bytes_up": 10, "bytes_down": 20, "samples": 5, "seconds": 1.0} for n in range(1, 11)]
    rounds[3], rounds[7], rounds[9] = record(4, 0.9, [1, 1]), record(8, 0.4, [0.1, 0.5]), record(10, 0.6, [0.7, 0.3])
    result = of_run(History(rounds), Path(), settings={})
    # The last fifth of ten rounds begins after round 8; the means of the classes are 0.4 and 0.4.
    assert (result["accuracy"], result["worst_class"], result["worst_client"]) == (50.0, 40.0, 25.0)
    assert (result["bytes_up"], result["bytes_down"], result["samples"], result["seconds"]) == (100, 200, 50, 10.0)
    assert result["curve"] == [(4, 90.0, 120, 20), (8, 40.0, 240, 40), (10, 60.0, 300, 50)]


def test_of_a_model_that_diverged_the_clients_results_are_those_of_the_global_model():
    counts = {"bytes_up": 10, "bytes_down": 20, "samples": 5, "seconds": 1.0}
    clients = {"accuracy": {"mean": 0.1, "worst_10": 0.0}}
    history = History([{"round": 1, "accuracy": 0.1, "per_class": [0.0, 0.2], "clients": clients, **counts}])
    result = of_run(history, Path(), settings={})
    assert (result["accuracy"], result["client_mean"], result["worst_client"]) == (10.0, 10.0, 0.0)
    assert of_trial(history, Path(), personal=True)["validation"] == 0.0


def cells(folder: Path):
    (file,) = folder.glob("out/cells/board/absent-v1/*.json")
    return read_results(file)


@pytest.mark.long
@pytest.mark.slow
def test_a_killed_command_goes_on_and_two_processes_share_its_cells(tmp_path):
    with subprocess.Popen(COMMAND, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        process.stdout.readline()
        process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    before = cells(tmp_path)
    assert 2 <= len(before) < 7
    both = [subprocess.Popen(COMMAND, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=os.environ) for _ in "ab"]
    told = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    ran = Counter(line.partition(": ")[2].partition(":")[0] for text in told for line in text.splitlines()[:-1])
    assert set(ran.values()) == {1}
    after = cells(tmp_path)
    assert len(after) == 7
    assert set(ran) == after.keys() - before.keys(), "finished cells were not run again"
    assert before.items() <= after.items()


def test_the_results_of_a_column_are_in_one_file(small, tmp_path):
    run(small, tmp_path, ["fedtan"])
    path = results_file(tmp_path, small.columns()[0])
    assert path == tmp_path / "cells" / "board" / "absent-v1" / "dirichlet-label.json"
    assert list(json.loads(path.read_text())) == ["fedtan/trial-0/seed-1000"]
