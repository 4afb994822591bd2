"""The table of the clients' own results."""

from __future__ import annotations

import json

import numpy as np
import pytest

import fedstrata as fs
from fedstrata.base.errors import SpecError
from fedstrata.cli.main import main
from fedstrata.evaluation.history import History
from fedstrata.reporting.by_client import by_client, to_csv, to_latex, to_markdown


def history(*rows):
    made = History([])
    made.clients = list(rows)
    return made


def ward(name, auroc, client=0):
    return {"client": client, "name": name, "train_samples": 9, "auroc": auroc}


RUNS = {
    "fedavg": [history(ward("H07", 0.5), ward("a_b", 0.75, 1)), history(ward("H07", 0.7), ward("a_b", "", 1))],
    "moon": [history(ward("H07", 0.9), ward("a_b", 0.25, 1)), history(ward("H07", 0.9), ward("a_b", 0.25, 1))],
}


def test_each_client_has_a_row_by_its_name_over_the_seeds():
    table = by_client(RUNS, "auroc")
    assert list(table) == ["H07", "a_b"]
    assert [round(table["H07"][label].mean, 6) for label in RUNS] == [0.6, 0.9]
    assert (table["a_b"]["fedavg"].mean, table["a_b"]["fedavg"].n) == (0.75, 1)  # one seed had no positive sample


def test_it_is_printed_in_each_format():
    table = by_client(RUNS, "auroc")
    assert "| a_b | 0.7500 | 0.2500" in to_markdown(table, "auroc")
    assert "auroc on each client's own test samples; mean over 2 seeds." in to_markdown(table, "auroc")
    assert r"a\_b & 0.7500 & 0.2500" in to_latex(table, "auroc")
    assert to_csv(table).splitlines()[3] == "a_b,fedavg,1,0.75,,,"


def test_three_seeds_have_an_interval_that_ends_at_what_is_possible():
    table = by_client({"a": [history(ward("H07", auroc)) for auroc in (0.9, 0.99, 1.0)]}, "auroc")
    low, high = table["H07"]["a"].interval
    assert (0.8 < low < 0.9, high) == (True, 1)
    assert "mean over 3 seeds with its 95 % interval." in to_markdown(table, "auroc")


def test_clients_that_are_others_in_each_seed_are_refused():
    unnamed = {"client": 0, "accuracy": 0.5}
    assert by_client({"a": [history(unnamed)]})["0"]["a"].mean == 0.5
    with pytest.raises(SpecError, match="results of a client cannot be averaged over seeds"):
        by_client({"a": [history(unnamed), history(unnamed)]})


def test_what_is_missing_is_named():
    with pytest.raises(SpecError, match=r"these runs do not contain results of individual clients\. Set"):
        by_client({"a": [History([])]})
    with pytest.raises(
        SpecError,
        match=r"--by-client = 'aurok': is not a result of these runs; did you mean 'auroc'\? Use one of: auroc",
    ):
        by_client(RUNS, "aurok")


@pytest.mark.slow
def test_a_comparison_of_named_hospitals(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    draw, names = np.random.default_rng(0), np.repeat(["H01", "H02", "007"], 40)
    y = draw.integers(0, 2, size=120)
    x = draw.normal(size=(120, 4)) + y[:, None]
    data = fs.from_arrays(x, y, x, y, clients=names)
    spec = fs.Experiment(
        partition=fs.Natural(),
        training={"rounds": 2, "local_epochs": 1},
        evaluation={"client_test": 0.25, "metrics": ["accuracy", "auroc"]},
    )
    runs = fs.compare({"a": spec, "b": spec.replace(method="fedprox")}, seeds=[0, 1], data=data, out="cmp", jobs=1)
    assert [row["name"] for row in runs["a"][0].clients] == ["007", "H01", "H02"]
    assert '"H01"' in (tmp_path / "cmp" / "report.html").read_text()
    assert main(["table", "cmp", "--by-client", "auroc", "--format", "json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert list(table) == ["007", "H01", "H02"]
    aurocs = [run.clients[0]["auroc"] for run in runs["a"]]
    assert table["007"]["a"]["mean"] == pytest.approx(sum(aurocs) / 2)
