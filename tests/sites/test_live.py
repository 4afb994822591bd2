"""The page about a run: what it shows, to whom, and that it follows the run."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from browser import LOST_ON_PAPER, PERCENT_TICKS, PROGRAM, Browser, browser

import fedstrata as fs
from fedstrata.cli import main
from fedstrata.sites.live import hosts, serving
from fedstrata.sites.progress import STATUS, Progress, SiteProgress
from fedstrata.sites.status import of_run, source_of

SPEC = {
    "partition": {"clients": 4},
    "model": {"name": "mlp", "hidden": [8]},
    "training": {"rounds": 3, "local_steps": 2},
}


TEXTS = "[...document.querySelectorAll('{}')].map(each => each.textContent.trim())"


def facts_of(page: Browser) -> dict[str, str]:
    """The list of facts below the progress bar."""
    return dict(zip(page.value(TEXTS.format("#facts dt")), page.value(TEXTS.format("#facts dd")), strict=True))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("live") / "run"
    fs.run(fs.Experiment.from_table(SPEC), out=folder)
    return folder


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    """A server's folder, as its process writes it."""
    (tmp_path / "startup").mkdir()
    (tmp_path / "startup" / "server.key").write_text("secret")
    return tmp_path


def get(address: str, path: str = "", **headers: str) -> tuple[int, bytes, Any]:
    place = urlsplit(address)
    line = http.client.HTTPConnection(place.hostname or "", place.port or 0, timeout=30)
    line.request("GET", path if path.startswith("/") else place.path + path, headers=headers)
    answer = line.getresponse()
    found = answer.status, answer.read(), answer.headers
    line.close()
    return found


@pytest.mark.slow
def test_a_run_and_its_report_are_served_to_this_machine_alone(run: Path) -> None:
    with serving(source_of(run)) as (address, look):
        look()
        place = urlsplit(address)
        assert place.hostname == "127.0.0.1"
        code, page, headers = get(address)
        assert (code, b"uPlot" in page) == (200, True)
        assert headers["Cache-Control"] == "no-store"
        status = json.loads(get(address, "status.json")[1])
        assert (status["round"], status["rounds"], status["over"], status["report"]) == (3, 3, "complete", True)
        assert status["curves"]["accuracy"][0] == [1, 2, 3]
        assert b"<title>" in get(address, "report.html")[1]
        # A page of another name that points here must not read it, nor who has not got the address.
        assert get(address, "status.json", Host=f"evil.example:{place.port}")[0] == 403
        assert get(address, "status.json", Host="evil.example")[0] == 403
        assert get(address, "status.json", Host=f"localhost:{place.port}")[0] == 200
        other = ("/y" if place.path[1] == "x" else "/x") + place.path[2:]
        for path in ("/", "/status.json", f"{other}status.json", place.path.rstrip("/"), f"{place.path}../spec.toml"):
            assert get(address, path)[0] == 404, path
        assert get(address, f"{place.path}%2e%2e/spec.toml")[0] == 404


def test_at_the_usual_port_browsers_leave_it_out() -> None:
    assert hosts(80) == {"127.0.0.1", "localhost", "127.0.0.1:80", "localhost:80"}
    assert hosts(8080) == {"127.0.0.1:8080", "localhost:8080"}


@pytest.mark.slow
def test_a_port_that_is_taken_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(source_of(run)) as (address, _):
        assert main(["status", str(run), "--serve", str(urlsplit(address).port)]) == 2
    assert "--serve" in capsys.readouterr().err
    assert main(["status", str(run), "--serve", "70000"]) == 2


@pytest.mark.slow
def test_what_is_shown_is_what_was_written_and_no_file_of_the_kit(kit: Path) -> None:
    source = source_of(kit)
    with serving(source) as (address, look):
        look()
        assert get(address, "status.json")[1] == b"null"
        progress = Progress(9, ["a"], lambda site: ("gone", "<b>"), path=kit / STATUS, about={"run": "none"})
        progress({"round": 1, "accuracy": 0.5, "loss": float("nan")})
        progress.write()
        assert get(address, "status.json")[1] == b"null", "others wait for who looks"
        look()
        status = json.loads(get(address, "status.json")[1])
        assert (status["round"], status["sites"], status["report"]) == (1, {"a": ["gone", "<b>"]}, False)
        progress.end("SpecError: no")
        look()
        status = json.loads(get(address, "status.json")[1])
        assert (status["over"], status["report"]) == ("SpecError: no", False)
        for path in ("startup/server.key", "local/fedstrata.toml"):
            assert get(address, path)[0] == 404


def test_a_run_folder_tells_what_its_records_say(run: Path) -> None:
    table = of_run(run)
    assert table["accuracy"] == fs.History.load(run)[-1]["accuracy"]
    assert table["bytes_up"] == sum(record["bytes_up"] for record in fs.History.load(run))
    assert table["sites"] == {}
    assert table["run"] == "run"
    assert table["title"] == "fedavg on digits"
    assert table["setting"].startswith("4 clients")
    assert table["seconds"] == fs.History.load(run).summary["seconds"]


def test_the_best_round_of_a_regression_has_the_lowest_error() -> None:
    history = fs.History(primary="rmse", targets=[], metric_targets={"rmse": [2, 1]})
    progress = Progress(9, [], lambda site: ("", ""), history)
    for round, error in ((1, 3.0), (2, 1.5), (3, 1.75)):
        progress({"round": round, "loss": error**2, "test": {"rmse": error}})
    table = progress.table()
    assert (table["value"], table["best"], table["best_round"], table["reached"]) == (1.75, 1.5, 2, {"rmse 2": 2})
    assert list(table["curves"]) == ["rmse", "loss"]
    assert table["curves"]["rmse"] == [[1, 2, 3], [3.0, 1.5, 1.75]]


@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None, reason="no browser")
@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.long)])
def test_a_browser_shows_a_run_and_the_site_that_dies(kit: Path, tmp_path: Path, scheme: str) -> None:
    state = {"a": ("in", ""), "b": ("in", "")}
    about = {"run": "<b>run", "title": "moon on <i>digits", "setting": "2 clients"}
    history = fs.History(targets=[0.2, 0.9])
    progress = Progress(9, state, state.__getitem__, history, kit / STATUS, about)
    for round, accuracy in ((1, 0.1), (2, 0.3), (3, 0.25)):
        progress({"round": round, "accuracy": accuracy, "clients_returned": 2, "bytes_up": 2_500_000})
    progress.write()
    (tmp_path / "profile").mkdir()
    with serving(source_of(kit)) as (address, look), browser(tmp_path / "profile") as page:
        look()
        page.visit(address, 900, scheme)
        assert page.value("document.title") == "moon on <i>digits, round 3 of 9 – fedstrata"
        assert page.value(TEXTS.format("header > *")) == [
            "moon on <i>digits",
            "<b>run · 2 clients",
            "round 3 of 9runningreport",
        ]
        assert page.value("document.querySelectorAll('canvas').length") == 2
        assert page.value(TEXTS.format(".chart-head")) == ["accuracy, %", "clients that replied"]
        label = page.value("document.querySelector('.plot').getAttribute('aria-label')")
        assert label == "accuracy, % over rounds, 25 in round 3"
        facts = facts_of(page)
        del facts["duration"], facts["time left"]
        assert facts == {
            "accuracy": "25.0 %",
            "best so far": "30.0 % in round 2",
            "targets reached": "20 % in round 2",
            "clients in the last round": "2 returned",
            "sent up": "7.5 MB",
            "sent down": "0.0 kB",
        }
        state["b"] = "gone", "<img src=x onerror=alert(1)>"
        progress({"round": 4, "accuracy": 0.5, "clients_returned": 1})
        progress._written = 0.0
        progress.write()
        look()
        page.wait("document.querySelectorAll('.fate3').length === 1")
        progress.end("complete")
        look()
        page.wait("document.getElementById('state').textContent === 'ended: complete'")
        assert page.value("document.getElementById('round').textContent") == "round 4 of 9"
        assert page.value("document.getElementById('facts-head').textContent") == "Result"
        assert facts_of(page)["best"] == "50.0 % in round 4"
        rows = page.value("[...document.querySelectorAll('#sites tr')].map(row => row.innerText.replace(/\\s+/g, ' '))")
        assert [row.strip() for row in rows] == ["a in", "b gone <img src=x onerror=alert(1)>"]
        assert page.value("document.querySelectorAll('img').length") == 0
        assert page.problems == []


@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None, reason="no browser")
def test_the_axis_of_accuracies_stays_within_0_and_100(kit: Path, tmp_path: Path) -> None:
    progress = Progress(9, [], lambda site: ("", ""), path=kit / STATUS, about={"run": "none"})
    for accuracy in (0.0, 1.0):
        progress({"round": 1 + int(accuracy), "accuracy": accuracy})
    progress.write()
    (tmp_path / "profile").mkdir()
    with serving(source_of(kit)) as (address, look), browser(tmp_path / "profile") as page, page.spying():
        look()
        page.visit(address, 900)
        page.wait(f"{PERCENT_TICKS}.length === 1")
        (ticks,) = page.value(PERCENT_TICKS)
        assert (min(ticks), max(ticks)) == (0, 100)


@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None, reason="no browser")
def test_print_cuts_no_chart_and_has_light_colours(run: Path, tmp_path: Path) -> None:
    axis = """[...document.querySelectorAll('canvas')].map(canvas => {
      const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
      return pixels.some((_, i) => i % 4 === 0 && pixels.slice(i, i + 4).join() === '31,36,43,255');
    })"""
    (tmp_path / "profile").mkdir()
    with serving(source_of(run)) as (address, look), browser(tmp_path / "profile") as page:
        look()
        page.visit(address, 1400, "dark")
        assert page.value(axis) == [False] * 4
        page.lay_out_for_print()
        assert page.value(axis) == [True] * 4
        assert page.value(LOST_ON_PAPER) == []
        assert page.pdf(tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
        assert page.problems == []


@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None, reason="no browser")
def test_a_browser_shows_a_sites_own_part_a_server_that_is_away_and_a_run_that_waits(
    kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = SiteProgress(kit / STATUS)
    site.question(2_000_000)
    site.answer(500, "its data file: column 'age'")
    site.write()
    (tmp_path / "profile").mkdir()
    source = source_of(kit)
    with serving(source) as (address, look), browser(tmp_path / "profile") as page:
        look()
        page.visit(address, 500)
        assert page.value("document.getElementById('title').textContent") == "Status of this site"
        assert "column 'age'" in page.value("document.getElementById('facts').textContent")
        monkeypatch.setattr(source, "table", lambda: {"away": "ConnectionError: refused"})
        look()
        page.wait("document.getElementById('state').textContent === 'ConnectionError: refused'")
        assert page.value("document.getElementById('title').textContent") == "The server cannot be reached"
        assert page.value("document.getElementById('facts').textContent") == ""
        assert page.value("document.getElementById('facts-head').hidden"), "below it there is nothing"
        monkeypatch.setattr(source, "table", lambda: {"waiting": "its job is RUNNING"})
        look()
        page.wait("document.getElementById('state').textContent === 'its job is RUNNING'")
        assert page.value("document.getElementById('title').textContent") == "A run is waiting"
        assert page.problems == []
