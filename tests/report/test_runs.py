from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fedstrata.errors import DataError
from fedstrata.report.runs import load_runs


def test_compare_folder_becomes_its_runs_in_order_of_seeds(compare: Path, make_run: Callable[..., Path]) -> None:
    make_run("cmp/fedavg/seed-10", seed=10)
    runs = load_runs([compare])
    assert list(runs) == ["fedavg", "fedstas"]
    assert [run.history.seed for run in runs["fedavg"]] == [0, 1, 2, 10]
    assert runs["fedstas"][0].history.method == "fedstas"
    assert runs["fedavg"][0].partition is not None


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
    with pytest.raises(DataError, match="nowhere is no folder"):
        load_runs([tmp_path / "nowhere"])
    with pytest.raises(DataError, match="no folder was given"):
        load_runs([])
