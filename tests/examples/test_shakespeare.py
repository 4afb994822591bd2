"""The speaking roles of Shakespeare: the sequences, the command of the page at small scale, and the page's figures."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import fedstrata as fs
from fedstrata.cli import main

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "shakespeare"
REAL = Path(os.environ.get("FEDSTRATA_DATA", "~/.cache/fedstrata")).expanduser() / "shakespeare.npz"


MOST = 0.163
"""The share of the most frequent character, the space, in the test part of the real roles."""


def load_prepare() -> ModuleType:
    spec = importlib.util.spec_from_file_location("shakespeare_prepare", FOLDER / "prepare.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


prepare = load_prepare()


def texts(*lines: str) -> dict[str, np.ndarray]:
    """Return a source file's arrays: one role for each text."""
    parts = [np.frombuffer(line.encode(), dtype=np.uint8) for line in lines]
    names = np.array([f"a play: ROLE {number:03}" for number in range(len(lines))])
    return {"text": np.concatenate(parts), "ends": np.cumsum([len(part) for part in parts]), "roles": names}


def test_each_character_is_followed_by_the_next_one_of_the_same_role():
    text = "To be, or not to be:\n" * 20  # 420 characters: 5 sequences and 19 more predictions
    x, y = prepare.sequences(np.frombuffer(text.encode(), dtype=np.uint8))
    assert x.shape == y.shape == (6, 80)
    counts = y != -100
    spoken = "".join("\n" if i == 0 else chr(i + 31) for i in y[counts])
    assert spoken == text[1:]
    assert counts.sum(axis=1).tolist() == [80] * 5 + [19]
    assert np.array_equal(x.ravel()[1:419], y.ravel()[:418])


def test_the_last_fifth_of_a_role_is_its_test_part():
    source = texts("a" * 801, "b" * 2401, "c" * 500)
    data = prepare.arrays(source, smallest=801)
    assert data["client_train"].tolist() == ["a play: ROLE 000"] * 8 + ["a play: ROLE 001"] * 24
    assert data["client_test"].tolist() == ["a play: ROLE 000"] * 2 + ["a play: ROLE 001"] * 6
    assert data["y_test"][:, 0].tolist() == [ord("a") - 31] * 2 + [ord("b") - 31] * 6


def changed(*settings: str) -> list[str]:
    """Return the arguments that change settings of the spec."""
    return [text for setting in settings for text in ("--set", setting)]


def real() -> dict[str, np.ndarray]:
    """Return the data of the real roles."""
    with np.load(REAL) as source:
        return prepare.arrays(source)


@pytest.fixture
def beside(monkeypatch):
    """Where the reader of the page stands."""
    monkeypatch.chdir(FOLDER)
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.fixture
def small(tmp_path) -> list[str]:
    """The arguments for a short run with twelve roles that say little."""
    words = ["the king ", "my good lord ", "a horse! ", "good night, "]
    lines = [words[number % 4] * (30 + number) for number in range(12)]
    np.savez(tmp_path / "tiny.npz", **prepare.arrays(texts(*lines), smallest=200))
    return changed(f"data.name={tmp_path / 'tiny.npz'}", "training.rounds=3", "evaluation.every=1", "model.hidden=16")


@pytest.mark.slow
def test_the_spec_of_the_page_learns_characters(beside, small, tmp_path):
    assert main(["run", "shakespeare.toml", *small, "--out", str(tmp_path / "run"), "--quiet"]) == 0
    history = fs.History.load(tmp_path / "run")
    assert history[-1]["loss"] < history[0]["loss"] < np.log(96)
    assert history[-1]["accuracy"] > 1 / 96


@pytest.mark.long
@pytest.mark.slow
def test_the_command_of_the_page_compares_three_methods(beside, small, tmp_path, capsys):
    out = ["--seeds", "0", "--jobs", "1", "--out", str(tmp_path / "out"), "--quiet"]
    assert main(["compare", "shakespeare.toml", *small, *out]) == 0
    assert "minus fedavg" in capsys.readouterr().out
    runs = fs.load_runs(tmp_path / "out")
    assert sorted(runs) == ["fedavg", "fedsts", "scaffold"]
    for each in runs.values():
        assert each[0].history[-1]["loss"] < each[0].history[0]["loss"] < np.log(96)


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_file(), reason=f"needs {REAL}")
def test_the_data_have_253_real_roles():
    data = real()
    sizes = np.unique(data["client_train"], return_counts=True)[1]
    assert (len(sizes), sizes.min(), sizes.max(), sizes.sum()) == (253, 51, 646, 31441)
    tokens = data["y_test"][data["y_test"] != -100]
    assert (len(data["x_test"]), len(tokens)) == (7870, 619837)
    assert np.bincount(tokens).max() / len(tokens) == pytest.approx(MOST, abs=0.0005)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_file(), reason=f"needs {REAL}")
def test_253_real_roles_learn_more_than_the_most_frequent_character(beside, tmp_path):
    np.savez(tmp_path / "roles.npz", **real())
    short = changed(f"data.name={tmp_path / 'roles.npz'}", "training.rounds=4", "training.workers=1")
    assert main(["run", "shakespeare.toml", *short, "--out", str(tmp_path / "run"), "--quiet"]) == 0
    assert fs.load_runs(tmp_path / "run")["run"][0].history[-1]["accuracy"] > 1.5 * MOST
