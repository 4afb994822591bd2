from __future__ import annotations

import io

from rich.console import Console

from fedstrata.evaluation.history import History
from fedstrata.reporting.ending import ending


def runs(*accuracies: float, megabytes: float = 1.0, worst: float | None = None) -> list[History]:
    histories = []
    for seed, accuracy in enumerate(accuracies):
        record = {"round": 1, "accuracy": accuracy, "bytes_up": megabytes * 1e6, "bytes_down": 0}
        if worst is not None:
            record["clients"] = {"accuracy": {"worst_10": worst}}
        histories.append(History([record], seed=seed, targets=[]))
    return histories


THREE = {
    "fedavg": runs(0.70, 0.72, 0.71, worst=0.4),
    "better": runs(0.80, 0.83, 0.81, megabytes=2.0, worst=0.5),
    "worse": runs(0.60, 0.61, 0.61, worst=0.3),
}


def printed(table: object, width: int = 80) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    console.print(table)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]


def test_the_best_is_first_and_verdicts_have_signs() -> None:
    lines = printed(ending(THREE).table)
    assert [line.split()[0] for line in lines[-5:-2]] == ["better", "fedavg", "worse"]
    better, fedavg, worse = lines[-5:-2]
    assert better.split()[1:] == ["81.3", "±", "1.5", "▲", "+10.3", "[+8.3,", "+12.4]", "2.0", "50.0"]
    assert fedavg.split()[1:] == ["71.0", "±", "1.0", "baseline", "1.0", "40.0"]
    assert "▼ −10.3 [" in worse
    assert lines[-2].endswith("columns more: --columns all, or report.html")
    assert lines[-1] == "Mean ± sample standard deviation over 3 seeds."


def test_every_column_is_shown_on_request() -> None:
    text = "\n".join(printed(ending(THREE, every=True).table))
    assert "more:" not in text
    for heading in ("MB up", "seconds", "samples"):
        assert heading in text


def test_a_shown_difference_needs_no_more_seeds() -> None:
    result = ending(THREE)
    assert result.sentences[0] == "better is ahead of fedavg. worse is behind."
    assert result.seeds == ()


def test_more_seeds_are_suggested_when_no_order_is_shown() -> None:
    close = {"fedavg": runs(0.70, 0.72, 0.71), "better": runs(0.71, 0.75, 0.71)}
    result = ending(close)
    assert result.sentences[0] == "No method is shown to be ahead of fedavg."
    assert len(result.seeds) > 3
    assert f"{len(result.seeds)} seeds are needed to show this difference" in result.sentences[-1]
    assert ending({"fedavg": runs(0.7), "better": runs(0.8)}).seeds == (0, 1, 2, 3, 4)


def test_runs_on_different_data_are_not_compared() -> None:
    result = ending(THREE, is_comparable=False)
    assert result.sentences == ("The runs use different data, so their results are not compared.",)
    assert "minus" not in "\n".join(printed(result.table))


def test_large_amounts_are_in_gigabytes() -> None:
    large = {"a": runs(0.5, megabytes=1500), "b": runs(0.5, megabytes=2500)}
    text = "\n".join(printed(ending(large).table))
    assert "GB sent" in text
    assert "2.5" in text
