"""Cells run once, go on where they were stopped, and are shared by processes; what is missing shows."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from filelock import FileLock

from fedstrata.base.errors import DataError
from fedstrata.evaluation.history import History
from fedstrata.experiments.run import carry_out
from fedstrata.papers import pages
from fedstrata.papers.running import about_strata, figures, keep, known, results_file, run, run_one
from fedstrata.papers.tables import experiment_of, read
from fedstrata.reporting.replayed_strata import strata_of_folder

pytestmark = pytest.mark.xdist_group("readings")  # they take seconds to compute, once per process

TEXT = """
title = "Digits"
source = "Table 9"
metric = "final"
seeds = [0]
baseline = "plain"

[spec]
data = { name = "digits", limit = 100 }
partition = { name = "iid", clients = 4 }
model = { name = "mlp", hidden = [] }
training = { rounds = 3, local_epochs = 1, workers = 1 }
evaluation = { checkpoint_every = 1 }

[columns.x]

[rows.plain]
method = { name = "fedavg" }

[rows.near]
method = { name = "fedprox", mu = 0.1 }
"""


@pytest.fixture
def table():
    return read("rebafl", "mine", TEXT)


def quiet(text: str) -> None:
    """Say nothing."""


@pytest.mark.slow
def test_a_cell_is_run_once_and_says_what_it_was_made_of(table, tmp_path):
    cell = next(table.cells())
    found = run_one(table, cell, tmp_path, tmp_path / "runs")
    assert run_one(table, cell, tmp_path, tmp_path / "runs") is None
    kept = json.loads(results_file(tmp_path, table).read_text())
    assert kept == {cell.key: found}
    assert found["spec_sha256"] == cell.hash
    assert set(found["fingerprint"]) == {"data", "model", "partition"}
    assert set(found["versions"]) >= {"fedstrata", "torch", "python", "processor"}
    assert found["seconds"] > 0
    history = History.load(tmp_path / "runs" / cell.folder)
    assert found["curve"] == [round(100 * record["accuracy"], 2) for record in history]
    assert found["final"] == found["curve"][-1]
    assert found["best"] == max(found["curve"])


@pytest.mark.slow
def test_a_cell_goes_on_from_its_checkpoint(table, tmp_path):
    cell = next(table.cells())
    folder = tmp_path / "runs" / cell.folder

    class KilledError(Exception):
        pass

    def kill(record: dict) -> None:
        if record["round"] == 2:
            raise KilledError

    with pytest.raises(KilledError):
        carry_out(experiment_of(cell), out=folder, callbacks=[kill])
    begun = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    found = run_one(table, cell, tmp_path, tmp_path / "runs")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["round"] for record in records] == [1, 2, 3]
    assert records[0] == begun  # the first round was not run again: its seconds are the same
    whole = run_one(table, cell, tmp_path / "other", tmp_path / "other" / "runs")
    assert found["curve"] == whole["curve"]


@pytest.mark.slow
def test_a_cell_is_the_same_cell_on_every_device(table, tmp_path):
    cell = next(table.cells())
    result = run_one(table, cell, tmp_path, tmp_path / "runs", device="auto")
    assert 'device = "auto"' in (tmp_path / "runs" / cell.folder / "spec.toml").read_text()
    assert result["spec_sha256"] == cell.hash
    assert ("gpu" in result["versions"]) == torch.cuda.is_available()


def test_a_cell_that_another_process_is_at_is_left_alone(table, tmp_path):
    cell = next(table.cells())
    lock = tmp_path / "runs" / f"{cell.folder}.lock"
    lock.parent.mkdir(parents=True)
    with FileLock(lock):
        assert run_one(table, cell, tmp_path, tmp_path / "runs") is None
    assert known(tmp_path) == {}


@pytest.mark.slow
def test_a_cell_that_fails_is_told_of_and_the_others_run(table, tmp_path):
    broken = read("rebafl", "mine", TEXT.replace("mu = 0.1", "mu = -1.0"))
    told: list[str] = []
    failed = run([broken], tmp_path, tmp_path / "runs", show=told.append)
    assert list(failed) == ["rebafl/mine/near/x/seed-0"]
    assert "method.mu" in next(iter(failed.values()))
    assert len(told) == len(known(tmp_path)) == 1
    assert run([table], tmp_path, tmp_path / "runs", seeds=[7], show=quiet) == {}
    assert len(known(tmp_path)) == 1


def test_results_are_added_to_those_that_are_there(table, tmp_path):
    keep(tmp_path, table, {"b": {"spec_sha256": "2"}})
    keep(tmp_path, table, {"a": {"spec_sha256": "1"}})
    assert list(json.loads(results_file(tmp_path, table).read_text())) == ["a", "b"]
    assert known(tmp_path) == {"1": {"spec_sha256": "1"}, "2": {"spec_sha256": "2"}}
    results_file(tmp_path, table).write_text("{")
    with pytest.raises(DataError, match="is not a result file"):
        known(tmp_path)


@pytest.mark.slow
def test_what_is_missing_shows(table, tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "tables", lambda: {"rebafl/mine": table})
    run([table], tmp_path, tmp_path / "runs", show=quiet)
    pages.write(tmp_path)
    assert pages.missing([table], tmp_path) == {}
    (tmp_path / "fedssar.md").unlink()
    kept = json.loads(results_file(tmp_path, table).read_text())
    del kept["near/x/seed-0"]["final"]
    results_file(tmp_path, table).write_text(json.dumps(kept))
    assert pages.missing([table], tmp_path) == {
        str(tmp_path / "fedssar.md"): "the file is missing",
        "rebafl/mine/near/x/seed-0": "the run does not have a result",
    }


@pytest.mark.slow
def test_a_figure_that_is_not_on_its_page_shows(table, tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "tables", lambda: {"rebafl/mine": table})
    run([table], tmp_path, tmp_path / "runs", quick=True, show=quiet)
    pages.write(tmp_path, quick=True)
    assert pages.missing([table], tmp_path, quick=True) == {}
    text = (tmp_path / "rebafl.md").read_text()
    (tmp_path / "rebafl.md").write_text("\n".join(line for line in text.splitlines() if "| x | " not in line))
    wrong = pages.missing([table], tmp_path, quick=True)
    assert wrong == dict.fromkeys(
        ["rebafl/mine/plain/x/seed-0", "rebafl/mine/near/x/seed-0"], "the page does not show the result of this run"
    )


def test_a_run_without_accuracies_has_no_figures():
    with pytest.raises(DataError, match="no accuracy"):
        figures(History([{"round": 1, "accuracy": None, "seconds": 1.0}]))


def test_what_is_kept_of_a_run():
    record = {"round": 1, "accuracy": 0.51234, "seconds": 2.0, "samples": 10, "train_loss": 1.23456}
    assert figures(History([record, {**record, "round": 2, "accuracy": 0.6, "samples": 20}])) == {
        "rounds": 2,
        "final": 60.0,
        "last10": 55.61,
        "best": 60.0,
        "mean": 55.61,
        "seconds": 4.0,
        "samples": 15.0,
        "curve": [51.23, 60.0],
        "train_loss": [1.2346, 1.2346],
    }


def test_what_is_kept_of_strata(tmp_path):
    assert about_strata(History([{"round": 1}]), tmp_path) == {}
    rounds = [
        {"round": 1, "strata_sizes": [3, 4], "strata_allocation": [2, 0]},
        {"round": 2, "strata_sizes": [3, 3, 1], "strata_allocation": [2, 0, 1]},
    ]
    # Half of two strata, and a third of three: (1/2 + 1/3) / 2.
    assert about_strata(History(rounds), tmp_path) == {"strata": 2, "undrawn": 41.7}


@pytest.mark.slow
def test_a_cell_of_a_stratified_sampler_keeps_the_purity_of_its_strata(table, tmp_path):
    cell = replace(
        next(table.cells()),
        spec={**next(table.cells()).spec, "method": {"name": "fedsts", "strata": 2, "start": "random"}},
    )
    result = run_one(table, cell, tmp_path, tmp_path / "runs")
    view = strata_of_folder(tmp_path / "runs" / cell.folder)
    shares = [view.labels[view.strata == stratum].sum(axis=0) for stratum in (0, 1)]
    assert result["purity"] == round(100 * sum(share.max() for share in shares) / 100, 1)
    assert 0 <= result["undrawn"] < 50
