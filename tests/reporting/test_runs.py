from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import fedstrata as fs
from fedstrata.base.errors import DataError, ExtraMissingError
from fedstrata.reporting.runs import LABELS, Runs, keep_order, load_runs


def test_compare_folder_becomes_its_runs_in_order_of_seeds(compare: Path, make_run: Callable[..., Path]) -> None:
    make_run("cmp/fedavg/seed-10", seed=10)
    runs = load_runs([compare])
    assert list(runs) == ["fedavg", "fedstas"]
    assert [run.history.seed for run in runs["fedavg"]] == [0, 1, 2, 10]
    assert runs["fedstas"][0].history.method == "fedstas"


def test_label_folder_and_run_folder(compare: Path, make_run: Callable[..., Path]) -> None:
    alone = make_run("mine")
    runs = load_runs([alone, compare / "fedavg", compare / "fedstas" / "seed-1", alone])
    assert {label: len(members) for label, members in runs.items()} == {"mine": 1, "fedavg": 3, "fedstas": 1}


def test_equal_labels_from_two_places_stay_apart(make_run: Callable[..., Path], tmp_path: Path) -> None:
    for place in ("a/fedavg", "b/fedavg"):
        make_run(f"{place}/seed-0")
    make_run("b/moon/seed-0")
    assert list(load_runs([tmp_path / "a", tmp_path / "b"])) == ["a/fedavg", "b/fedavg", "moon"]


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"neither a run folder .* nor a compare folder"):
        load_runs([tmp_path])
    with pytest.raises(DataError, match="nowhere': is not a folder"):
        load_runs([tmp_path / "nowhere"])
    with pytest.raises(DataError, match="a folder is required"):
        load_runs([])


def test_labels_come_in_the_order_of_their_comparison(compare: Path, make_run: Callable[..., Path]) -> None:
    make_run("cmp/aaa/seed-0")
    keep_order(compare, ["fedstas", "fedavg"])
    assert list(load_runs(compare)) == ["fedstas", "fedavg", "aaa"]
    keep_order(compare, ["aaa"])  # a method is added: the baseline stays
    assert list(load_runs([compare])) == ["fedstas", "fedavg", "aaa"]
    keep_order(compare, ["fedavg", "aaa", "fedstas"])  # all are asked for, in another order
    assert list(load_runs([compare])) == ["fedavg", "aaa", "fedstas"]
    (compare / LABELS).write_text("{")
    with pytest.raises(DataError, match=r"labels\.json cannot be read"):
        load_runs(compare)


def test_runs_that_are_not_over_are_no_rows_of_a_table(compare: Path) -> None:
    runs = load_runs(compare)
    assert runs.finished() == runs  # none is: better those than nothing
    (compare / "fedavg" / "seed-1" / "summary.json").write_text("{}")
    over = load_runs(compare).finished()
    assert isinstance(over, Runs)
    assert {label: [run.history.seed for run in members] for label, members in over.items()} == {"fedavg": [1]}


def test_a_frame_has_a_row_a_run(compare: Path) -> None:
    runs = fs.load_runs(compare)
    frame = runs.to_frame()
    assert frame["label"].tolist() == ["fedavg"] * 3 + ["fedstas"] * 3
    assert frame["seed"].tolist() == [0, 1, 2] * 2
    history = runs["fedstas"][2].history
    row = frame.iloc[-1]
    assert row["final_accuracy"] == history.final_accuracy
    assert row["rounds_to_target.0.5"] == history.rounds_to_target(0.5)
    assert row["bytes_up"] == 20 * 70_000
    assert (row["data"], row["finished"], row["folder"]) == ("digits", False, str(compare / "fedstas" / "seed-2"))
    means = frame.groupby("label")["final_accuracy"].mean()
    assert means["fedavg"] == pytest.approx(sum(run.history.final_accuracy or 0 for run in runs["fedavg"]) / 3)


def test_a_frame_without_pandas_names_its_extra(compare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = load_runs(compare)
    monkeypatch.setitem(sys.modules, "pandas", None)
    for each in (runs, runs["fedavg"][0].history):
        with pytest.raises(ExtraMissingError, match=r"fedstrata\[tables\]"):
            each.to_frame()
