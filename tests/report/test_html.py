from __future__ import annotations

import base64
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markupsafe import Markup

from fedstrata.errors import DataError
from fedstrata.history import History
from fedstrata.report import html, plots
from fedstrata.report.html import own_columns, write_comparison, write_report

VOID = {"meta", "img", "br", "link"}


class Page(HTMLParser):
    """Checks that tags are closed in order, and collects ids, texts and what is loaded."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(str(value))
            if name in ("src", "href", "xlink:href"):
                self.sources.append(str(value))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without pictures, which take most of the time."""
    for name in ("overview", "panels", "grid"):
        monkeypatch.setattr(plots, name, lambda *_: None)
    monkeypatch.setattr(html, "inline_svg", lambda figure, key: Markup("<svg></svg>"))


@pytest.mark.slow
def test_compare_folder_gets_table_picture_and_page(compare: Path) -> None:
    rows = write_comparison(compare)
    assert [row.label for row in rows] == ["fedavg", "fedstas"]
    assert json.loads((compare / "table.json").read_text())[1]["final_accuracy"]["n"] == 3
    assert (compare / "table.md").read_text().count("\n| fed") == 2
    assert (compare / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    text = (compare / "report.html").read_text()
    page = Page(text)
    assert "Mean ± sample standard deviation over 3 seeds." in page.text
    assert page.tags.count("section") == 2
    assert len(page.ids) == len(set(page.ids))
    # one for all, one for each method, one for what fedstas records
    assert page.tags.count("svg") == 4
    for svg in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL):
        ET.fromstring(svg)
    write_comparison(compare)
    assert (compare / "report.html").read_text() == text, "the same runs give the same page"


def test_page_needs_nothing_from_outside(make_run: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_run("mine", method="fedstas", rounds=5)
    out = write_report([folder], folder)
    assert out == folder / "report.html"
    text = out.read_text()
    page = Page(text)
    assert set(re.findall(r"https?://[^\"' <]+", text)) == {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    targets = [source[1:] for source in page.sources if source.startswith("#")]
    assert targets
    assert set(targets) <= set(page.ids)
    pictures = [source for source in page.sources if not source.startswith("#")]
    assert len(pictures) == 1
    assert (
        base64.b64decode(pictures[0].removeprefix("data:image/png;base64,")) == (folder / "partition.png").read_bytes()
    )
    assert str(tmp_path) not in text
    assert "prefers-color-scheme: dark" in text
    assert "currentColor" in text


@pytest.mark.slow
def test_page_tells_about_events_spec_and_own_columns(make_run: Callable[..., Path]) -> None:
    folder = make_run("mine", method="fedstas", rounds=20)
    page = Page(write_report([folder], folder).read_text())
    dropped = (folder / "events.jsonl").read_text().count("dropped")
    assert f"dropped {dropped} {2 * dropped}" in page.text
    assert "seed 0 20 failed 5 out of <memory>" in page.text
    assert 'name = "fedstas"' in page.text
    assert "keep_probability = 0.1" in page.text
    assert "strata_sizes 4, 3, 3" in page.text
    assert "neyman sd" in page.text
    assert "estimate.samples" in page.text


@pytest.mark.slow
def test_everything_is_escaped(make_run: Callable[..., Path], tmp_path: Path) -> None:
    evil = "<script>x()<&>--><"
    for name in ("a", "b"):
        folder = make_run(f"cmp/{name}{evil.replace('/', '')}/seed-0", rounds=3)
        (folder / "spec.toml").write_text(f'seed = 0\nmethod = "</pre>{evil}"\n')
        event = {"round": 1, "kind": evil, "clients": [1], "reason": evil}
        (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) | {f"own_{evil}": 0.5, "text": evil} for line in lines]
        records[0][f"own_{evil}"] = 0.7
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    text = write_report([tmp_path / "cmp"], tmp_path / "out.html").read_text()
    page = Page(text)
    assert "script" not in page.tags
    assert page.tags.count("pre") == 2
    assert evil in page.text


def test_a_run_without_rounds_or_extras(tmp_path: Path) -> None:
    folder = tmp_path / "young"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("")
    (folder / "partition.png").write_text("no picture")
    page = Page(write_report([folder], tmp_path / "new" / "page.html").read_text())
    assert "not recorded" in page.text
    assert "None was recorded." in page.text
    assert "img" not in page.tags


def test_a_folder_that_is_no_run_writes_nothing(make_run: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_run("mine")
    with pytest.raises(DataError, match="nothing is no folder"):
        write_report([folder, tmp_path / "nothing"], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_own_columns_are_drawn_where_they_change() -> None:
    records = [{"round": i, "loss": i, "rises": i, "flat": 2, "rare": i} for i in (1, 2)]
    assert own_columns([History(records[:1]), History(records)]) == (["rises", "rare"], {"flat": "2"}, [])
    many = History([{"round": i} | {f"m{j}": i * j for j in range(1, 15)} for i in (1, 2)])
    assert own_columns([many])[2] == ["m13", "m14"]


def test_each_data_set_has_a_table_of_its_own(make_run: Callable[..., Path], undrawn: None, tmp_path: Path) -> None:
    folders = [make_run("a"), make_run("b", best=0.7), make_run("c", best=0.5)]
    other = folders[2] / "spec.toml"
    other.write_text(other.read_text().replace("digits", "mnist"))
    text = write_report(folders, tmp_path / "report.html").read_text()
    words = Page(text).text
    assert text.count('<th scope="col">method</th>') == 2
    assert text.count("of all methods on digits") == 1
    # A label that is alone on its data set has nothing to be drawn beside.
    assert "of all methods on mnist" not in text
    assert words.index("On digits") < words.index("On mnist")

    other.unlink()
    assert "On data that no spec names" in write_report(folders, tmp_path / "again.html").read_text()


def test_one_data_set_needs_no_heading(compare: Path, undrawn: None, tmp_path: Path) -> None:
    assert "On digits" not in Page(write_report([compare], tmp_path / "report.html").read_text()).text
