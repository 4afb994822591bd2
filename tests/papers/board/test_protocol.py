"""The protocol is frozen, and gives all entries the same number of trials."""

from __future__ import annotations

import hashlib
import json

import pytest

from fedstrata.base.errors import SpecError
from fedstrata.papers.board.protocol import importable, read
from fedstrata.papers.tables import experiment_of

CELLS = "0d6250b2b97e693e535cfd6492fa94cbeabd52f6e1a2424d4b15b7a69ed869bf"
"""Digest of the cells of three entries in all columns. A changed cell needs a new protocol, such as ``absent-v2``."""


@pytest.fixture
def protocol():
    return read()


def every_column(protocol):
    return [*protocol.columns(), *protocol.columns(list(protocol.more))]


def test_finished_cells_are_found_again(protocol):
    entries = protocol.entries(["fedavg", "rebafl", "rebafl+fedau"])
    hashes = [
        cell.hash
        for column in every_column(protocol)
        for entry in entries
        for trials in [protocol.trials(column, entry)]
        for cell in [*(cell for cell, _ in trials), *protocol.runs(column, entry, trials[0][1])]
    ]
    assert hashlib.sha256(json.dumps(hashes).encode()).hexdigest() == CELLS


def test_the_columns(protocol):
    product = [
        f"{partition}-{availability}"
        for partition in ("dirichlet", "two-classes", "iid")
        for availability in ("always", "bernoulli", "label", "persistent")
    ]
    assert [column.label for column in protocol.columns()] == product
    assert list(protocol.more) == ["fedau-bernoulli", "fedau-markov", "fedau-cyclic"]


@pytest.mark.slow
def test_all_entries_have_valid_trials_and_equally_many(protocol):
    assert len(protocol.entries()) > 41
    """In the first column, all trials are valid. Each other column has one trial per entry, and all in turn."""
    for place, column in enumerate(every_column(protocol)):
        for number, entry in enumerate(protocol.entries()):
            trials = protocol.trials(column, entry)
            assert len({cell.hash for cell, _ in trials}) == len(protocol.rates) == 4, entry.name
            for cell, settings in [trials[(place + number) % 4]] if place else trials:
                spec = experiment_of(cell)
                assert spec.training.lr == settings["training"]["lr"]
                assert spec.to_spec()["method"].items() >= settings.get("method", {}).items()


def test_trials_and_runs_have_the_same_number_of_training_samples_and_other_seeds(protocol):
    (entry,), column = protocol.entries(["fedavg"]), protocol.columns()[0]
    trial = experiment_of(protocol.trials(column, entry)[0][0])
    run = experiment_of(protocol.runs(column, entry, {})[0])
    assert trial.data.limit * (1 - trial.evaluation.validation) == run.data.limit
    assert run.evaluation.validation is None
    assert trial.seed not in protocol.seeds


def test_unknown_names(protocol):
    with pytest.raises(SpecError, match=r"--columns = 'iid-alwys'.*did you mean 'iid-always'"):
        protocol.columns(["iid-alwys"])
    with pytest.raises(SpecError, match=r"METHOD = 'fedav'.*did you mean 'fedavg'"):
        protocol.entries(["fedav"])
    with pytest.raises(SpecError, match=r"METHOD.name = 'nothing:Here'"):
        protocol.entries(["nothing:Here"])
    with pytest.raises(SpecError, match=r"METHOD = 'absent\.py:Mine'.*does not exist"):
        protocol.entries(["absent.py:Mine"])


def test_a_file_is_imported_from_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [])
    (tmp_path / "written.py").write_text("")
    assert importable(f"{tmp_path}/written.py:Mine") == "written:Mine"
    assert importable("written:Mine") == "written:Mine"
    import sys

    assert sys.path == [str(tmp_path)]
