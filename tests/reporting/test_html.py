from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from fedstrata.base.errors import DataError
from fedstrata.evaluation.history import History
from fedstrata.reporting import html
from fedstrata.reporting.html import constants, write_comparison, write_report
from fedstrata.reporting.runs import keep_order

Maker = Callable[..., Path]

VOID = {"meta", "img", "br", "link", "input"}


class Page(HTMLParser):
    """Checks that tags are closed in order, and collects ids, texts and what is loaded."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.words: list[str] = []
        self.scripts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append((dict(attrs).get("type") or "", ""))
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
        if self.open[-1:] == ["script"]:
            kind, text = self.scripts.pop()
            self.scripts.append((kind, text + data))
        elif self.open[-1:] != ["style"]:
            self.words.append(data)

    @property
    def data(self) -> list[dict]:
        return json.loads(next(text for kind, text in self.scripts if kind == "application/json"))

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.mark.slow
def test_compare_folder_gets_table_pictures_and_page(compare: Path) -> None:
    rows = write_comparison(compare)
    assert [row.label for row in rows] == ["fedavg", "fedstas"]
    assert json.loads((compare / "table.json").read_text())[1]["final_accuracy"]["n"] == 3
    assert (compare / "table.md").read_text().count("\n| fed") == 2
    assert (compare / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    text = (compare / "report.html").read_text()
    page = Page(text)
    assert "fedstas is ahead of fedavg." in page.text
    assert "Means over 3 seeds, ± the sample standard deviation" in page.text
    assert "minus fedavg" in page.text
    assert " p " not in page.text.replace("– p ", ""), "p-values are left to the command table"
    assert [method["name"] for method in page.data[0]["methods"]] == ["fedstas", "fedavg"], "the best one first"
    assert len(page.ids) == len(set(page.ids))
    write_comparison(compare)
    assert (compare / "report.html").read_text() == text, "the same runs give the same page"


@pytest.mark.slow
def test_cells_of_the_table_say_value_and_difference_and_what_they_are_sorted_by(compare: Path, tmp_path: Path) -> None:
    text = write_report([compare], tmp_path / "report.html").read_text()
    first, second = re.findall(r"<tr[^>]*>.*?</tr>", text.partition("<tbody>")[2].partition("</tbody>")[0], re.DOTALL)
    values = [History.load(compare / f"fedstas/seed-{seed}").final_accuracy for seed in range(3)]
    others = [History.load(compare / f"fedavg/seed-{seed}").final_accuracy for seed in range(3)]
    mean, difference = sum(values) / 3, (sum(values) - sum(others)) / 3
    cells = re.findall(r'<td data-value="([^"]*)">(.*?)</td>', first)
    assert float(cells[0][0]) == pytest.approx(mean)
    assert cells[0][1].startswith(f"<b>{100 * mean:.1f}</b> <small>± ")
    assert float(cells[1][0]) == pytest.approx(difference)
    assert cells[1][1] == f"{100 * difference:+.1f}"
    assert "▲ ahead" in first
    assert len(re.findall('class="seed"', first)) == 3
    assert 'class="baseline"' in second
    low, high = map(float, re.search(r"95 % interval \+([\d.]+) to \+([\d.]+); seeds: ", first).groups())
    assert 0 < low < 100 * difference < high


@pytest.mark.slow
@pytest.mark.parametrize("data_sets", [1, 2])
def test_headings_have_no_gap(make_run: Maker, tmp_path: Path, data_sets: int) -> None:
    folders = [make_run("a"), make_run("b", best=0.7)]
    if data_sets == 2:
        spec = folders[1] / "spec.toml"
        spec.write_text(spec.read_text().replace("digits", "mnist"))
    page = Page(write_report(folders, tmp_path / "report.html").read_text())
    levels = [int(tag[1]) for tag in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


@pytest.mark.slow
def test_a_single_run_is_called_by_its_method_and_seed(make_run: Maker, tmp_path: Path) -> None:
    page = Page(write_report([make_run("one2", seed=4)], tmp_path / "report.html").read_text())
    assert "fedavg, seed 4, on digits" in page.text
    assert "one2" not in page.text
    assert [method["name"] for method in page.data[0]["methods"]] == ["fedavg"]


@pytest.mark.slow
def test_the_command_for_more_seeds_is_shown_for_compare_folders_only(make_run: Maker, tmp_path: Path) -> None:
    for seed in range(2):
        make_run(f"cmp/a/seed-{seed}", seed=seed)
        make_run(f"cmp/b/seed-{seed}", seed=seed, best=0.91)
    assert "fedstrata compare" not in write_report([tmp_path / "cmp"], tmp_path / "report.html").read_text()
    keep_order(tmp_path / "cmp", ["a", "b"])
    page = Page(write_report([tmp_path / "cmp"], tmp_path / "report.html").read_text())
    seeds = re.search(r"(\d+) seeds are needed to show this difference", page.text)
    assert seeds is not None
    numbers = ",".join(map(str, range(int(seeds[1]))))
    assert f"fedstrata compare SPEC.toml --seeds {numbers} --out cmp" in page.text


@pytest.mark.slow
def test_page_needs_nothing_from_outside_and_runs_nothing_but_its_own(make_run: Maker, tmp_path: Path) -> None:
    folder = make_run("mine", method="fedstas", rounds=5)
    out = write_report([folder], folder)
    assert out == folder / "report.html"
    text = out.read_text()
    page = Page(text)
    # A name space, and where the library is from; nothing is fetched.
    assert set(re.findall(r"https?://[^\"'` <)]+", text)) == {
        "http://www.w3.org/2000/svg",
        "https://github.com/leeoniya/uPlot",
    }
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text)[1].replace("&#39;", "'")
    ours = [script for kind, script in page.scripts if not kind]
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in ours]
    assert policy == (
        "default-src 'none'; script-src " + " ".join(f"'sha256-{each}'" for each in hashes)
        + "; style-src 'unsafe-inline'; img-src data:"
    )  # fmt: skip
    assert "Permission is hereby granted" in ours[0]
    targets = [source[1:] for source in page.sources if source.startswith("#")]
    assert targets
    assert set(targets) <= set(page.ids)
    pictures = [source for source in page.sources if not source.startswith("#")]
    assert len(pictures) == 1
    assert (
        base64.b64decode(pictures[0].removeprefix("data:image/png;base64,")) == (folder / "partition.png").read_bytes()
    )
    assert str(tmp_path) not in text


@pytest.mark.slow
def test_page_tells_about_events_spec_and_own_columns(make_run: Maker) -> None:
    folder = make_run("mine", method="fedstas", rounds=20)
    page = Page(write_report([folder], folder).read_text())
    dropped = (folder / "events.jsonl").read_text().count("dropped")
    assert f"{dropped} {2 * dropped} clients" in page.text
    assert "seed 0 20 failed 5 out of <memory>" in page.text
    assert 'name = "fedstas"' in page.text
    assert "keep_probability 0.1 in every round" in page.text
    assert "strata_sizes 4, 3, 3 in the last round" in page.text
    ours = {"key": "neyman_sd", "name": "neyman sd", "own": True, "low": None, "high": None, "better": 0}
    assert ours in page.data[0]["metrics"]
    assert "estimate.samples" in [metric["key"] for metric in page.data[0]["metrics"]]


@pytest.mark.slow
def test_everything_is_escaped(make_run: Maker, tmp_path: Path) -> None:
    evil = "<script>x()<&>--><"
    for name in ("a", "b"):
        folder = make_run(f"cmp/{name}{evil.replace('/', '')}/seed-0", rounds=3)
        (folder / "spec.toml").write_text(f'seed = 0\nmethod = "</pre>{evil}"\n[data]\nname = "</script>{evil}"\n')
        event = {"round": 1, "kind": evil, "clients": [1], "reason": evil}
        (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
        (folder / "model.json").write_text(json.dumps({"class_names": [f"</script>{evil}", "<!--"]}))
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        records = [
            json.loads(line) | {f"own_</script>{evil}": 0.5, "text": evil, "per_class": [0, 1]} for line in lines
        ]
        records[0][f"own_</script>{evil}"] = 0.7
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    text = write_report([tmp_path / "cmp"], tmp_path / "out.html").read_text()
    page = Page(text)
    assert [kind for kind, _ in page.scripts] == ["application/json", "", "", ""]
    assert page.tags.count("pre") == 2
    assert evil in page.text
    assert page.data[0]["classes"]["names"] == [f"</script>{evil}", "<!--"]
    assert f"own_</script>{evil}" in page.data[0]["methods"][0]["y"]


@pytest.mark.slow
def test_a_run_without_rounds_or_extras(tmp_path: Path) -> None:
    folder = tmp_path / "young"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("")
    (folder / "partition.png").write_text("no picture")
    page = Page(write_report([folder], tmp_path / "new" / "page.html").read_text())
    assert page.data[0]["metrics"] == []
    assert "No events were recorded." in page.text
    assert "img" not in page.tags


def test_a_folder_that_is_no_run_writes_nothing(make_run: Maker, tmp_path: Path) -> None:
    folder = make_run("mine")
    with pytest.raises(DataError, match="nothing': is not a folder"):
        write_report([folder, tmp_path / "nothing"], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_numbers_that_never_change_are_words() -> None:
    records = [{"round": i, "loss": i, "rises": i, "flat": 2, "clients": {"flat": 1}} for i in (1, 2)]
    assert constants([History(records[:1]), History(records)]) == {"flat": "2"}


@pytest.mark.slow
def test_each_data_set_has_tables_of_its_own(make_run: Maker, tmp_path: Path) -> None:
    folders = [make_run("a"), make_run("b", best=0.7), make_run("c", best=0.5)]
    other = folders[2] / "spec.toml"
    other.write_text(other.read_text().replace("digits", "mnist"))
    page = Page(write_report(folders, tmp_path / "report.html").read_text())
    assert [[method["name"] for method in each["methods"]] for each in page.data] == [["a", "b"], ["c"]]
    assert page.text.index("On digits") < page.text.index("On mnist")
    other.unlink()
    assert "On unknown data" in write_report(folders, tmp_path / "again.html").read_text()


@pytest.mark.slow
def test_one_data_set_needs_no_heading(compare: Path, tmp_path: Path) -> None:
    assert "On digits" not in Page(write_report([compare], tmp_path / "report.html").read_text()).text


@pytest.mark.slow
def test_a_partition_is_shown_once(compare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for label in ("fedavg", "fedstas"):
        (compare / label / "seed-2" / "partition.png").write_bytes(html.PNG + b"another" * 20)
    page = Page(write_report([compare], tmp_path / "report.html").read_text())
    assert len([source for source in page.sources if source.startswith("data:")]) == 2
    assert "seed 0, seed 1: all methods" in page.text
    assert "seed 2: all methods" in page.text
    monkeypatch.setattr(html, "PICTURES", 100)
    page = Page(write_report([compare], tmp_path / "report.html").read_text())
    assert len([source for source in page.sources if source.startswith("data:")]) == 1
    assert "Not shown, to limit the size of this page: seed 2 (all methods)" in page.text


@pytest.mark.slow
def test_methods_come_in_the_order_of_their_comparison(compare: Path, tmp_path: Path) -> None:
    keep_order(compare, ["fedstas", "fedavg"])
    page = Page(write_report([compare], tmp_path / "report.html").read_text())
    assert [method["name"] for method in page.data[0]["methods"]] == ["fedstas", "fedavg"]
    assert "minus fedstas" in page.text
