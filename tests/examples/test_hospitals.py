"""The four hospitals: the data, the study and the notebook, at small scale."""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import io
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

import fedstrata as fs
from fedstrata.cli import main

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "hospitals"


def load_study():
    spec = importlib.util.spec_from_file_location("hospitals_study", FOLDER / "study.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


study = load_study()


@pytest.fixture
def at_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_the_data_are_what_uci_says():
    with (FOLDER / "heart.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert Counter(row["hospital"] for row in rows) == {
        "Cleveland": 303, "Hungary": 294, "VA Long Beach": 200, "Switzerland": 123
    }  # fmt: skip
    well = Counter(row["hospital"] for row in rows if row["disease"] == "no")
    assert well == {"Cleveland": 164, "Hungary": 188, "VA Long Beach": 51, "Switzerland": 8}
    assert {row["chol"] for row in rows if row["hospital"] == "Switzerland"} == {"0"}


@pytest.mark.slow
def test_the_spec_takes_every_row_and_zero_cholesterol_for_none(at_root):
    spec = fs.Experiment.from_toml(FOLDER / "hospitals.toml")
    prepared = fs.prepare(spec)
    data = prepared.data
    assert data.train_size + len(data.y_test) == 920
    assert prepared.assignment.names(data) == ["Cleveland", "Hungary", "Switzerland", "VA Long Beach"]
    names = spec.data.schema.names()
    swiss = data.x_train[prepared.assignment[2]]
    assert swiss[:, names.index("chol missing")].all()
    assert len(swiss[:, names.index("chol")].unique()) == 1
    assert swiss[0, names.index("chol")] > 200
    assert (data.x_train[:, names.index("thal=unknown")]).sum() > 300


@pytest.mark.slow
def test_its_command_prints_a_table(at_root, tmp_path, capsys):
    """Data with a schema could not be compared with each other."""
    command = [
        "compare",
        "examples/hospitals/hospitals.toml",
        "--methods",
        "fedavg,fedstas",
        "--out",
        str(tmp_path / "out"),
    ]
    assert main([*command, "--set", "training.rounds=1", "--jobs", "1", "--quiet"]) == 0
    assert "minus fedavg" in capsys.readouterr().out


def test_folds_part_the_patients_and_every_group_evenly():
    groups = np.repeat(np.arange(8), [164, 139, 188, 106, 8, 115, 51, 149])
    one, again, other = (study.folds(groups, seed) for seed in (0, 0, 1))
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)
    for group in range(8):
        sizes = np.bincount(one[groups == group], minlength=5)
        assert sizes.max() - sizes.min() <= 1


def test_the_mean_over_pairs_is_scikit_learns_auroc():
    draw = np.random.default_rng(0)
    sick, p = draw.integers(0, 2, 60), draw.integers(0, 9, (3, 60)) / 8  # with ties
    pairs = study.ranked(p, sick)
    assert pairs.mean() == pytest.approx(np.mean([roc_auc_score(sick, each) for each in p]), abs=1e-12)


@pytest.mark.slow
def test_a_resample_is_the_auroc_of_its_patients():
    draw = np.random.default_rng(1)
    sick = np.sort(draw.integers(0, 2, 12))[::-1]
    p = draw.random((1, 12))
    drawn, undefined = study.resampled(study.ranked(p, sick), seed=5)
    counts = np.random.default_rng(5).multinomial(12, np.full(12, 1 / 12), study.RESAMPLES)
    rows = [np.repeat(np.arange(12), each) for each in counts]
    both = [each for each in rows if len(set(sick[each])) == 2]
    assert undefined == len(rows) - len(both)
    expected = [roc_auc_score(sick[each], p[0, each]) for each in both[:50]]
    assert drawn[:50].tolist() == pytest.approx(expected)


@pytest.mark.long
@pytest.mark.slow
def test_the_study_goes_on_where_it_was_and_says_what_is_undefined(tmp_path, monkeypatch, capsys, at_root):
    monkeypatch.setattr(study, "LOOKS", (1,))
    monkeypatch.setattr(study, "FOLDS", 2)
    monkeypatch.setattr(study, "METHODS", ("fedavg", "stratify"))
    first = study.study(tmp_path, seeds=1)
    assert all(np.isfinite(p).all() and p.shape == (1, 1, 920) for p in first.values())
    cells = {path: path.read_bytes() for path in tmp_path.glob("*/*.npy")}
    assert len(cells) == 2 * 4
    (tmp_path / "stratify" / "seed-0-fold-1.npy").unlink()
    capsys.readouterr()
    again = study.study(tmp_path, seeds=1)
    assert capsys.readouterr().out == "stratify, seed 0, fold 1\n"
    assert all(np.array_equal(again[label], p) for label, p in first.items())
    found = study.figures(first)
    for hospital in found["hospitals"].values():
        methods = hospital["after rounds"]["1"]
        assert all(entry["interval"][0] <= entry["auroc"] <= entry["interval"][1] for entry in methods.values())
        assert methods["local"]["gain"] == 0
    page = study.page(found)
    assert "Switzerland (123, 8 well)" in page
    assert "left out: " in page
    found["hospitals"]["Hungary"] = {"patients": 3, "well": 3, "undefined": "patients of one class only"}
    assert study.page(found).count("| undefined: patients of one class only |") == 4


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(monkeypatch):
    """Its cells in order, in one namespace, where a reader would open it."""
    notebook = json.loads((ROOT / "examples" / "hospitals.ipynb").read_text(encoding="utf-8"))
    monkeypatch.chdir(ROOT / "examples")
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    shown, names = io.StringIO(), {}
    with contextlib.redirect_stdout(shown):
        for number, cell in enumerate(code):
            if number == 0:
                cell = cell.replace("ROUNDS = 10", "ROUNDS = 2")
            exec(compile(cell, f"cell {number}", "exec"), names)
    assert not any(cell.get("outputs") for cell in notebook["cells"])
    table = shown.getvalue().splitlines()[-5:]
    assert [line.split()[0] for line in table] == ["alone", "one", "fedavg", "scaffold", "rebafl"]
    assert all(0.4 < float(value) <= 1 for line in table for value in line.split()[-4:-2])
