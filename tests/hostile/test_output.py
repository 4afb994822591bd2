"""Names, labels and errors of another party, as terminals, tables, LaTeX, spreadsheets and logs show them."""

from __future__ import annotations

import argparse
import csv
import html
import io
import json
import logging
import logging.config
import re
from pathlib import Path

import pytest
import tomli_w
from rich.console import Console, RenderableType

from fedstrata.base.jsonl import write_json
from fedstrata.base.printable import csv_cell, printable
from fedstrata.cli import main
from fedstrata.evaluation.history import History
from fedstrata.reporting import contrasts, tables
from fedstrata.reporting.ending import ending
from fedstrata.reporting.progress import Progress
from fedstrata.sites.cli.deploy import _report
from fedstrata.sites.ledger import PLACE, Entry, Ledger
from fedstrata.sites.progress import STATUS
from fedstrata.sites.status import picture

FORGED = "fedstrata: all sites are in"
HOSTILE = f"\x1b]0;owned\x07\x1b[2J\r\n{FORGED}\u202e\u200b\x9b1m\x7f\x00|&\\"
SHOWN = r"\x1b]0;owned\x07\x1b[2J\r\n" + FORGED + r"\u202e\u200b\x9b1m\x7f\x00|&" + "\\"
FILE = HOSTILE.replace("\0", "")
"""As the name of a file, or in a TOML file of another party."""


def harmless(text: str, *, times: int = 1) -> None:
    """The text shows the hostile one escaped, moves nothing on a terminal and has no forged line."""
    assert text.count(r"\x1b[2J") >= times, text
    assert [letter for letter in text if not letter.isprintable() and letter != "\n"] == []
    assert not [line for line in text.splitlines() if line.startswith(FORGED)]


def rendered(what: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=400, color_system=None)
    console.print(what)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_what_is_hostile_is_shown_as_repr_shows_it_and_once() -> None:
    assert printable(HOSTILE) == SHOWN
    assert printable(SHOWN) == SHOWN, "what is safe stays as it is"
    assert printable("Zürich, 東京, η = 0.1 \\n") == "Zürich, 東京, η = 0.1 \\n"
    assert [csv_cell(value) for value in ("=1+1", "+1", "-1", "@A", "\tx", "\rx", "a-b", -1, -0.5, None)] == [
        "'=1+1", "'+1", "'-1", "'@A", r"'\tx", r"'\rx", "a-b", -1, -0.5, None,
    ]  # fmt: skip


OBJECTIVE = f"""
from fedstrata.objectives.base import CrossEntropy

class Spoilt(CrossEntropy):
    def loss(self, model, params, batch, context):
        if int(batch.y[0]) < ABOVE:
            raise ValueError({HOSTILE!r})
        return super().loss(model, params, batch, context)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("above", "code"), [(5, 0), (10, 1)])
def test_an_error_of_a_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], above: int, code: int
) -> None:
    (tmp_path / f"spoilt{above}.py").write_text(OBJECTIVE.replace("ABOVE", str(above)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    table = {
        "partition": {"name": "classes", "clients": 10, "per_client": 1},
        "method": {"name": "fedavg", "objective": f"spoilt{above}:Spoilt"},
        "training": {"rounds": 1, "local_steps": 1, "clients_per_round": 10},
    }
    Path("spec.toml").write_text(tomli_w.dumps(table))
    found = main(["run", "spec.toml", "--out", "out", "--quiet"])
    out, err = capsys.readouterr()
    assert found == code, err
    harmless(out if code == 0 else err)
    if code == 0:
        events = [json.loads(line) for line in Path("out/events.jsonl").read_text().splitlines()]
        assert any(HOSTILE in event.get("reason", "") for event in events), "the file has the text itself"


@pytest.mark.slow
def test_names_and_reasons_of_sites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sites = {HOSTILE: ["gone", HOSTILE], "b": [HOSTILE, ""]}
    table = {"round": 1, "rounds": 2, "bytes_up": 0, "bytes_down": 0, "sites": sites, "over": HOSTILE, "at": 0.0}
    (tmp_path / "startup").mkdir()
    (tmp_path / STATUS).parent.mkdir()
    write_json(tmp_path / STATUS, table)
    assert main(["status", str(tmp_path)]) == 0
    harmless(capsys.readouterr().out, times=4)
    assert main(["status", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sites"] == sites
    harmless(rendered(picture(table)), times=4)
    write_json(tmp_path / STATUS, {"questions": 1, "bytes_in": 0, "bytes_out": 0, "refused": HOSTILE, "working": False})
    assert main(["status", str(tmp_path)]) == 2, "damaged"
    own = {"questions": 1, "bytes_in": 0, "bytes_out": 0, "refused": HOSTILE, "working": False, "at": 0.0}
    write_json(tmp_path / STATUS, own)
    capsys.readouterr()
    assert main(["status", str(tmp_path)]) == 0
    harmless(capsys.readouterr().out)
    harmless(rendered(picture(own)))


@pytest.mark.parametrize("as_json", [False, True])
def test_what_submit_reports(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    _report(argparse.Namespace(json=as_json))(f"site a: gone, {HOSTILE}")
    captured = capsys.readouterr()
    harmless(captured.err if as_json else captured.out)


@pytest.mark.slow
def test_classes_and_clients_of_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    name = FILE.replace("/", "")
    with Path("own.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["who", "x", "y"])
        writer.writerows([(f"{name}{n % 2}", n % 7, f"{name}{n % 3}") for n in range(60)])
    schema = {"label": "y", "client": "who", "classes": [f"{name}{n}" for n in range(3)], "columns": {"x": "number"}}
    table = {"data": {"name": "own.csv", "schema": schema}, "partition": "natural", "model": "tabular"}
    Path("spec.toml").write_text(tomli_w.dumps(table))
    assert main(["partition", "spec.toml"]) == 0
    out = capsys.readouterr().out
    harmless(out, times=0)
    assert out.count(r"\x1b]0;owned") == 5
    assert main(["partition", "spec.toml", "--json"]) == 0
    out = capsys.readouterr().out
    assert json.loads(out)["classes"] == schema["classes"]
    assert [letter for letter in out if not letter.isprintable() and letter != "\n"] == []


def runs() -> dict[str, list[History]]:
    def seeds(*accuracies: float, warning: str = "") -> list[History]:
        histories = []
        for seed, accuracy in enumerate(accuracies):
            records = [{"round": 1, "accuracy": accuracy, "test": {HOSTILE: 0.5}}]
            histories.append(History(records, method="m", seed=seed, targets=[]))
            histories[-1].warning = warning
        return histories

    return {HOSTILE: seeds(0.5, 0.6, 0.55), f"[/]{HOSTILE}": seeds(0.6, 0.7, 0.69, warning="wild"), "=1+1": seeds(0.4)}


def test_labels_in_tables_of_a_terminal() -> None:
    harmless(rendered(ending(runs()).table), times=3)
    harmless(rendered(contrasts.to_screen(contrasts.contrast(runs()))), times=5)


def test_labels_in_markdown() -> None:
    rows, comparison = tables.compare_table(runs()), contrasts.contrast(runs())
    for text in (tables.to_markdown(rows), contrasts.to_markdown(comparison)):
        harmless(text, times=3)
        lines = [line for line in text.splitlines() if line.startswith("|")]
        plain = [re.sub(r"\\.", "", line) for line in lines]
        assert len({line.count("|") for line in plain}) == 1, "each row has the same columns"


def test_labels_in_latex() -> None:
    text = contrasts.to_latex(contrasts.contrast(runs()))
    assert r"\textbackslash{}x1b{[}2J\textbackslash{}r\textbackslash{}n" in text
    assert [letter for letter in text if not letter.isprintable() and letter != "\n"] == []
    assert not [line for line in text.splitlines() if line.startswith(FORGED)]


def test_labels_in_csv(tmp_path: Path) -> None:
    text = contrasts.to_csv({"@SUM(A1)": contrasts.contrast(runs())})
    rows = list(csv.DictReader(io.StringIO(text)))
    harmless(text)
    assert {row["label"] for row in rows} == {SHOWN, f"[/]{SHOWN}", "'=1+1"}
    assert {row["data"] for row in rows} == {"'@SUM(A1)"}
    assert {float(row["difference"]) for row in rows if row["difference"]}, "negative numbers are numbers"
    assert any(row["difference"].startswith("-") for row in rows)
    History([{"round": 1, "accuracy": -0.5, "=now()": "=1+1"}], method="m").to_csv(tmp_path / "rounds.csv")
    assert (tmp_path / "rounds.csv").read_text() == "round,accuracy,'=now()\n1,-0.5,'=1+1\n"


def test_names_in_the_csv_of_a_ledger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Ledger(tmp_path / PLACE).append([Entry("a", "=1+1", -1, to=HOSTILE), Entry("a", HOSTILE)])
    assert main(["ledger", str(tmp_path), "--csv"]) == 0
    out = capsys.readouterr().out
    harmless(out, times=2)
    first = next(csv.DictReader(io.StringIO(out)))
    assert (first["kind"], first["client"], first["to"]) == ("'=1+1", "-1", SHOWN)
    assert main(["ledger", str(tmp_path)]) == 0
    harmless(capsys.readouterr().out)


def compare_folder(root: Path, data: str) -> Path:
    for label in ("base", FILE.replace("/", ""), "@SUM(A1)"):
        for seed in range(2):
            folder = root / label / f"seed-{seed}"
            folder.mkdir(parents=True)
            lines = [json.dumps({"round": n, "accuracy": 0.5 + 0.1 * seed}) + "\n" for n in (1, 2)]
            (folder / "metrics.jsonl").write_text("".join(lines))
            spec = {"seed": seed, "data": {"name": data if label == "base" else "other"}, "method": {"name": "fedavg"}}
            (folder / "spec.toml").write_text(tomli_w.dumps(spec))
            (folder / "summary.json").write_text("{}")
    return root


@pytest.mark.parametrize("kind", ["console", "markdown", "latex", "csv", "json"])
def test_a_folder_of_another_party(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    folder = compare_folder(tmp_path / "theirs", f"x\n\\input{{/etc/passwd}}{FILE}")
    assert main(["table", str(folder), "--format", kind]) == 0
    out = capsys.readouterr().out
    assert [letter for letter in out if not letter.isprintable() and letter != "\n"] == []
    assert not [line for line in out.splitlines() if line.startswith((FORGED, r"\input"))]
    if kind == "latex":
        assert "% On x\\n\\input{/etc/passwd}" in out


@pytest.mark.slow
def test_a_page_escapes_once(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    folder = compare_folder(tmp_path / "a<b>&amp;", "x")
    (folder / "base").rename(folder / "a<b>&c")
    assert main(["report", str(folder), "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert html.escape("a<b>&c") in page
    assert html.escape(html.escape("a<b>&c")) not in page


@pytest.mark.parametrize("terminal", [True, False])
def test_progress(terminal: bool) -> None:
    times = iter(range(0, 1000, 20))
    console = Console(file=io.StringIO(), force_terminal=terminal, color_system=None, width=400)
    with Progress(console=console, clock=lambda: float(next(times))) as progress:
        progress.of_run(HOSTILE, 3)({"round": 1, "accuracy": 0.5, "test": {HOSTILE: 0.5}})
        progress.show(HOSTILE, 2, 3, HOSTILE)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    if terminal:  # rich itself moves the cursor
        text = re.sub(r"\x1b\[(\?25[lh]|\d?[AK])", "", text).replace("\r", "")
    harmless(text, times=2)


def test_lines_of_a_log(tmp_path: Path) -> None:
    pytest.importorskip("nvflare")
    from nvflare.fuel.utils import log_utils

    from fedstrata.sites.kits import LOGGING, configure_logging

    kit = tmp_path / "kit"
    (kit / LOGGING).parent.mkdir(parents=True)
    default = (Path(log_utils.__file__).parent / "log_config.json").read_text()
    (kit / LOGGING).with_suffix(".json.default").write_text(default)
    configure_logging(kit, verbose=False)
    config = json.loads((kit / LOGGING).read_text())
    config["handlers"]["logFileHandler"]["filename"] = str(tmp_path / "log.txt")
    config["handlers"]["consoleHandler"]["stream"] = stream = io.StringIO()
    root, before = logging.getLogger(), logging.getLogger().handlers[:]
    try:
        logging.config.dictConfig({**config, "disable_existing_loggers": False})
        try:
            raise ValueError(HOSTILE)
        except ValueError:
            logging.getLogger("fedstrata.sites.x").exception("site %s: %s", HOSTILE, 1)
    finally:
        for handler in root.handlers:
            handler.close()
        root.handlers = before
        root.setLevel(logging.WARNING)
    for text in ((tmp_path / "log.txt").read_text(), stream.getvalue()):
        harmless(re.sub(r"\x1b\[[\d;]*m", "", text), times=2)
        assert "Traceback" in text


def test_a_name_in_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / FILE.replace("/", "")
    folder.mkdir()
    assert main(["status", str(folder)]) == 2
    harmless(capsys.readouterr().err)
