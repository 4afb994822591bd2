from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from fedstrata.evaluation.history import History
from fedstrata.evaluation.summary import summary_lines
from fedstrata.reporting.summary import failures, summary_panel

RECORD = {"round": 3, "accuracy": 0.75, "clients_invited": 10, "clients_returned": 7}


def written(console: Console) -> str:
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_panel_tells_how_good_who_and_where(tmp_path: Path) -> None:
    more = {"clients_dropped": 2, "clients_late": 1, "samples": 600, "bytes_up": 2_000_000, "seconds": 0.5}
    history = History([RECORD | more | {"round": 1}, {"round": 2}], method="[moon]", seed=5, path=tmp_path)
    console = Console(file=io.StringIO(), width=200)
    console.print(summary_panel(history))
    text = written(console)
    for part in (
        "[moon], seed 5",
        "75.00 % after 2 rounds",
        "75.00 % in round 1, selected on the test set",
        "50 % in round 1",
        "70.0 % of the invited clients, 2 dropped out, 1 late",
        "600 samples in 0.5 s",
        "2.0 MB by clients, 0.0 MB to clients",
        str(tmp_path),
    ):
        assert part in text


def test_panel_of_a_run_that_was_never_evaluated() -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(summary_panel(History([{"round": 1}])))
    assert "– after 1 round " in written(console)


def test_what_went_wrong_is_counted_by_kind(tmp_path: Path) -> None:
    history = History([RECORD], path=tmp_path)
    assert failures(History([RECORD])) is None
    assert failures(history) is None
    events = [
        {"round": 1, "km": "what a damaged line may look like"},
        {"round": 1, "kind": "dropped"},
        {"round": 1, "kind": "failed", "reason": "client 3: on fire"},
        {"round": 2, "kind": "refused", "reason": "NaN"},
        {"round": 3, "kind": "failed", "reason": "client 4: no disk"},
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    told = f"2 × failed, 1 × refused. The first reason: client 3: on fire (all are in {tmp_path / 'events.jsonl'})"
    assert failures(history) == told


def test_panel_begins_with_the_primary_metric() -> None:
    records = [
        RECORD
        | {"round": n, "validation": {"accuracy": 0.7, "auroc": u}, "test": {"accuracy": 0.75, "auroc": u - 0.125}}
        for n, u in enumerate((0.5, 0.75, 0.625), 1)
    ]
    first, best, other, *_ = summary_lines(History(records, primary="auroc"))
    assert first == ("auroc", "0.5000 after 3 rounds")
    assert best == ("best", "0.6250 in round 2, selected on validation samples")
    assert other == ("measured", "accuracy 75.00 %")
    history = History(records, primary="auroc")
    history.model_round = 2
    assert summary_lines(history)[0] == ("auroc", "0.6250 after 3 rounds, of the saved model (round 2)")


def test_panel_tells_other_metrics_and_why_a_run_was_stopped() -> None:
    record = RECORD | {"validation": {"accuracy": 0.7}, "test": {"accuracy": 0.75, "auroc": 0.875, "ece": None}}
    console = Console(file=io.StringIO(), width=200)
    history = History([record], metric_targets={"auroc": [0.8]})
    history.stopped = "that is enough"
    console.print(summary_panel(history))
    text = written(console)
    for part in ("75.00 % in round 3, selected on validation samples", "auroc 0.8750, ece –", "that is enough"):
        assert part in text
