"""The first screen's values: by hand for few runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fedstrata.base.style import OTHER, SERIES
from fedstrata.evaluation.history import History
from fedstrata.reporting.charts import strokes
from fedstrata.reporting.contrasts import contrast
from fedstrata.reporting.html import ranked
from fedstrata.reporting.overview import CUT, WIDE, overview, target_of
from fedstrata.reporting.runs import Run, histories

Runs = Mapping[str, Sequence[Run]]


def run(label: str, accuracies: Sequence[float], seed: int = 0, **more: Any) -> Run:
    """A run with 1 MB of traffic per round."""
    records = [
        {"round": n, "accuracy": value, "bytes_up": 4e5, "bytes_down": 6e5} | more
        for n, value in enumerate(accuracies, 1)
    ]
    return Run(label, History(records, method=label, seed=seed), Path(f"{label}/seed-{seed}"), [], "")


def shown(runs: Runs) -> dict[str, Any]:
    comparison = contrast(histories(runs))
    return overview(runs, comparison, ranked(list(runs), comparison))


def of_two(**more: Any) -> Runs:
    low, high = [0.4, 0.6, 0.82, 0.84], [0.85, 0.84, 0.86, 0.88]
    return {
        "a": [run("a", low, seed, **more) for seed in (0, 1)],
        "b": [run("b", high, seed, **more) for seed in (0, 1)],
    }


def test_rows_are_sorted_and_cells_are_by_hand() -> None:
    first = shown(of_two())
    assert [row["label"] for row in first["rows"]] == ["b", "a"]
    assert first["heads"] == [("final accuracy", "%"), ("MB", "to 80 %"), ("rounds", "to 80 %")]
    best, baseline = first["rows"]
    assert [cell["text"] for cell in best["cells"]] == ["88.0", "1.0", "1"]
    assert [cell["text"] for cell in baseline["cells"]] == ["84.0", "3.0", "3"]
    assert [cell["best"] for cell in best["cells"]] == [True, True, True]
    assert best["minus"] == "+4.0"
    assert best["words"] == "+4.0 points; seeds: +4.0, +4.0"
    assert (baseline["minus"], baseline["baseline"], baseline["marks"]) == ("", True, None)


def test_cards_name_the_best_and_leave_out_what_has_no_data() -> None:
    cards = shown(of_two())["cards"]
    assert cards == [("most accurate", "b", "88.0 %"), ("fewest bytes to 80 %", "b", "1.0 MB")]
    clients = {"clients": {"accuracy": {"worst_10": 0.5}}}
    cards = shown(of_two(**clients))["cards"]
    assert cards[-1] == ("fairest: worst tenth of the clients", "a and b", "50.0 %")


def test_the_steadiest_has_the_smallest_deviation_of_the_last_ten_evaluations() -> None:
    steady, jumpy = [0.9, 0.8] + [0.5] * 10, [0.5, 0.6] * 6
    runs = {"jumpy": [run("jumpy", jumpy)], "steady": [run("steady", steady)], "young": [run("young", [0.5])]}
    # 0.5 and 0.6 in turns: a deviation of 0.05 · √(10 / 9)
    assert shown(runs)["cards"][-1] == ("steadiest: last 10 evaluations", "steady", "± 0.0 points")
    del runs["steady"]
    assert shown(runs)["cards"][-1] == ("steadiest: last 10 evaluations", "jumpy", "± 5.3 points")


def test_a_column_without_differences_is_a_sentence() -> None:
    runs = {"a": [run("a", [0.85, 0.9])], "b": [run("b", [0.81, 0.94])]}
    first = shown(runs)
    assert first["heads"] == [("final accuracy", "%")]
    assert "Equal for all methods: MB to 90 %, 2.0." in first["caption"]


def test_the_target_is_the_hardest_that_half_of_the_labels_reached() -> None:
    finals = {"a": [0.96], "b": [0.91, 0.92], "c": [0.85], "d": [0.97, 0.4]}
    members = {
        label: [History([{"round": 1, "accuracy": x}], seed=n) for n, x in enumerate(each)]
        for label, each in finals.items()
    }
    assert target_of(members) == 0.9
    assert target_of({"d": members["d"], "e": members["c"], "f": [History([])]}) == 0.95
    assert target_of({"f": [History([{"round": 1, "accuracy": 0.1}])]}) is None


def test_where_lower_is_better_the_lowest_is_first_and_bold() -> None:
    def one(value: float, seed: int) -> Run:
        history = History([{"round": 1, "test": {"rmse": value}}], seed=seed, primary="rmse")
        return Run("", history, Path(), [], "")

    values = {"a": (3, 3.01, 3.03), "b": (1, 1.03, 1.01)}
    runs = {label: [one(value, seed) for seed, value in enumerate(each)] for label, each in values.items()}
    best, baseline = shown(runs)["rows"]
    assert (best["label"], best["cells"][0]["best"], best["verdict"].words) == ("b", True, "ahead")
    assert shown(runs)["cards"][0] == ("lowest final rmse", "b", "1.013")
    assert baseline["cells"][0]["best"] is False


def test_places_of_differences_share_a_scale_and_far_ones_are_cut() -> None:
    finals = {"base": 0.5, "x": 0.51, "y": 0.48, "z": 0.49, "far": 0.1}
    drawn = shown({label: [run(label, [value])] for label, value in finals.items()})["drawn"]
    rows = drawn["rows"]
    assert rows["y"]["mean"] < rows["z"]["mean"] < drawn["zero"] < rows["x"]["mean"] < WIDE
    assert rows["x"]["mean"] - drawn["zero"] == pytest.approx(drawn["zero"] - rows["z"]["mean"], abs=0.2)
    assert rows["far"]["cut"] == [True, False]
    assert rows["far"]["mean"] == 0
    assert not any(any(rows[label]["cut"]) for label in "xyz")
    ticks = {text: place for place, text in drawn["ticks"]}
    assert ticks["0"] == drawn["zero"]
    assert min(float(text.replace("\u2212", "-")) for text in ticks) >= -2 * CUT * 1.2


def test_beyond_eight_labels_the_baseline_and_the_five_best_have_colours() -> None:
    labels = ["base", *(f"m{n}" for n in range(9))]
    lines = strokes(labels, labels[::-1])
    assert [label for label in labels if lines[label] is not OTHER] == ["base", "m4", "m5", "m6", "m7", "m8"]
    assert len({line.name for line in lines.values() if line is not OTHER}) == 6
    assert len(set(strokes(labels[:8], labels[7::-1]).values())) == len(SERIES)
