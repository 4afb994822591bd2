from __future__ import annotations

import pytest

from fedstrata.evaluation.history import History
from fedstrata.reporting.contrasts import caption, contrast
from fedstrata.reporting.statistics import Estimate
from fedstrata.reporting.tables import Measure, compare_table, keys, show, shown, to_json, to_markdown


def run(accuracies: list[float], seed: int = 0) -> History:
    records = [{"round": i + 1, "accuracy": a, "bytes_up": 1_500_000} for i, a in enumerate(accuracies)]
    return History(records, method="m", seed=seed, targets=[0.5, 0.9, 0.99])


RUNS = {"a|b": [run([0.2, 0.6, 0.5]), run([0.9, 0.8, 0.7], seed=1)], "[one]": [run([0.55, 0.95])]}


def test_cells_by_hand() -> None:
    first, second = compare_table(RUNS)
    assert first.cells["final_accuracy"].mean == pytest.approx(0.6)
    assert first.cells["final_accuracy"].sd == pytest.approx(0.1 * 2**0.5)
    assert show(first, "final_accuracy") == "60.00 ± 14.14"
    assert show(first, "best_round") == "2 ± 1"  # rounds 2 and 1: mean 1.5, shown even
    assert show(first, "rounds_to_0.9") == "1 (1 of 2)"
    assert show(first, "rounds_to_0.99") == "–"
    assert show(first, "bytes_up") == "4.5"  # both seeds alike
    assert show(second, "final_accuracy") == "95.00"
    assert second.cells["final_accuracy"].sd is None


def test_a_target_that_nobody_reached_has_no_column_but_is_in_the_json() -> None:
    rows = compare_table(RUNS)
    assert [key for key in keys(rows) if key.startswith("rounds_to")] == ["rounds_to_0.5", "rounds_to_0.9"]
    plain = to_json(rows)
    assert plain[0]["label"] == "a|b"
    assert plain[0]["seeds"] == 2
    assert plain[0]["rounds_to_0.99"] == {"mean": None, "sd": None, "n": 0}


def test_default_targets_that_all_runs_reached_at_once_have_no_column() -> None:
    def imbalanced(*accuracies: float, **more: list[float]) -> History:
        return History([{"round": 5 * n, "accuracy": a} for n, a in enumerate(accuracies, 1)], **more)

    runs = {"a": [imbalanced(0.94, 0.98), imbalanced(0.96)], "b": [imbalanced(0.98)]}
    rows = compare_table(runs)
    assert [key for key in keys(rows) if key.startswith("rounds_to")] == ["rounds_to_0.95"]
    assert to_json(rows)[0]["rounds_to_0.5"]["n"] == 2
    later = compare_table(runs | {"c": [imbalanced(0.4, 0.6)]})
    assert "rounds_to_0.5" in keys(later)
    chosen = compare_table({"a": [imbalanced(0.98, targets=[0.5])]})
    assert "rounds_to_0.5" in keys(chosen)
    assert keys([]) == []


def test_markdown_has_the_same_columns_in_every_line() -> None:
    lines = to_markdown(compare_table(RUNS)).splitlines()
    table = [line.replace(r"\|", "") for line in lines[:4]]
    assert len({line.count("|") for line in table}) == 1
    assert "| 60.00 ± 14.14 |" in table[2]
    assert lines[-1] == "Mean ± sample standard deviation over 1 to 2 seeds."
    assert "Mean" not in to_markdown(compare_table({"one": [run([0.5])]}))


def test_a_spread_that_rounds_to_0_is_left_out() -> None:
    how = Measure("seconds", 1, 1)
    assert shown(Estimate(0.6, 0.04, 3), how, 3) == "0.6"
    assert shown(Estimate(0.6, 0.06, 3), how, 3) == "0.6 ± 0.1"
    assert shown(Estimate(-0.6, 1500.0, 3), how, 3) == "−0.6 ± 1,500.0"


def measured(seed: int, *values: tuple[float, float, float], primary: str = "auroc") -> History:
    """A run of rounds with these accuracies, AUROC and losses."""
    records = [
        {"round": n, "accuracy": a, "loss": loss, "test": {"accuracy": a, "auroc": u}}
        for n, (a, u, loss) in enumerate(values, 1)
    ]
    return History(records, seed=seed, primary=primary)


def test_the_primary_metric_has_the_first_columns() -> None:
    values = (0.98, 0.6, 0.3), (0.9, 0.8, 0.5), (0.95, 0.75, 0.4)
    rows = compare_table({"a": [measured(0, *values), measured(1, *values)]})
    assert keys(rows)[:5] == ["final_auroc", "best_auroc", "best_round", "rounds", "final_accuracy"]
    assert to_markdown(rows).startswith("|  | final auroc | best auroc | best round | rounds | final accuracy, % |")
    assert [show(rows[0], key) for key in keys(rows)[:5]] == ["0.7500", "0.8000", "2", "3", "95.00"]
    assert not {"test.auroc", "best_accuracy"} & rows[0].cells.keys()
    by_loss = compare_table({"a": [measured(0, *values, primary="loss")]})
    assert [show(by_loss[0], key) for key in keys(by_loss)[:3]] == ["0.4000", "0.3000", "1"]


def test_final_values_are_of_the_model_kept_and_the_caption_says_so() -> None:
    def kept(seed: int, round: int | None) -> History:
        values = [(0.98, 0.5, 1.0), (0.9, 0.8, 1.0), (0.91, 0.7, 1.0)]
        history = measured(seed, *values)
        for record, (_, auroc, _) in zip(history, values, strict=True):
            record["validation"] = {"accuracy": 0.5, "auroc": auroc}
        history.model_round = round
        return history

    rows = compare_table({"a": [kept(0, 2), kept(1, 2)], "b": [kept(0, None)]})
    assert [show(row, "final_auroc") for row in rows] == ["0.8000", "0.7000"]
    assert show(rows[0], "final_accuracy") == "90.00"
    said = "Final values of a are from the saved model (round of the best validation auroc)."
    assert said in to_markdown(rows)
    assert [row.get("kept") for row in to_json(rows)] == ["round of the best validation auroc", None]
    elsewhere = compare_table({"a": [kept(0, 1)]})
    assert to_markdown(elsewhere).endswith("\nFinal values are from the saved model.\n")
    found = contrast({"a": [kept(0, 2)], "b": [kept(0, 3)]}, ["final_auroc", "test.auroc", "best_auroc"])
    assert [row.value.mean for row in found.rows] == [0.8, 0.7, 0.8, 0.7, 0.8, 0.8]
    assert "Final values are from the saved model." in caption(found)


def test_other_metrics_have_a_column_each_by_the_last_evaluation() -> None:
    def measured(*values: float, worst: float) -> History:
        over = {"clients": 3, "mean": 0.7, "worst_10": worst, "unheard": {"clients": 0}}
        records = [
            {"round": n, "accuracy": 0.5, "test": {"accuracy": 0.5, "macro-f1": v}} for n, v in enumerate(values, 1)
        ]
        records[-1]["clients"] = {"accuracy": over, "unheard": {"clients": 1, "accuracy": over}}
        return History(records)

    rows = compare_table({"a": [measured(0.1, 0.25, worst=0.4)], "b": [run([0.5])]})
    extra = [key for key in keys(rows) if "." in key and not key.startswith("rounds")]
    assert extra == ["clients.accuracy.worst_10", "test.macro-f1"]
    assert show(rows[0], "test.macro-f1") == "0.2500"
    assert show(rows[0], "clients.accuracy.worst_10") == "40.00"
    assert show(rows[1], "test.macro-f1") == "–"
    head = to_markdown(rows).splitlines()[0]
    assert "| final macro-f1 |" in head
    assert "| final accuracy, worst tenth of the clients, % |" in head
