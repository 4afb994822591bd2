"""Pages of generated runs of many shapes in a real browser: they agree with themselves and nothing is cut off."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import browser as browsers
import numpy as np
import pytest
from browser import Browser
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fedstrata.reporting.html import write_report

Maker = Callable[..., Path]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("browser"),
    pytest.mark.skipif(browsers.PROGRAM is None, reason="no Chromium is installed"),
]


class Shape(NamedTuple):
    """How many labels and seeds there are, and what is special about the second label."""

    labels: int
    seeds: int
    special: str = ""


SHAPES = {
    "one run": Shape(1, 1),
    "two runs": Shape(2, 1),
    "usual": Shape(6, 3),
    "many methods": Shape(20, 2),
    "a long name": Shape(3, 3, "long"),
    "diverged": Shape(4, 3, "diverged"),
    "regression": Shape(3, 3, "regression"),
    "sixty runs": Shape(60, 1),
}

RARE_SHAPES = [name for name in SHAPES if name not in ("one run", "usual")]

CUT_OFF = """
[...document.querySelectorAll("main *, header *")].filter(each => {
  const scrolls = each.closest(".wide, pre, .plot, svg, .legend .entry, .fates b, [hidden], option, .hidden");
  if (scrolls && !each.matches(".wide, .plot")) return false;
  const place = each.getBoundingClientRect();
  return place.width && (place.right > innerWidth + 0.5 || place.left < -0.5);
}).map(each => each.tagName + "." + each.className)
"""
PERCENTAGES = "[...document.body.innerText.matchAll(/([-\\u2212]?[0-9][0-9.,]*) %/g)].map(each => each[1])"
ROWS = """
[...document.querySelectorAll(".results tbody tr")].map(row => ({
  chip: row.querySelector(".chip")?.textContent ?? null,
  words: row.querySelector("td .drawn title")?.textContent ?? ""}))
"""


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsers.browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def write_shape(root: Path, shape: Shape, rounds: int, draw: int, write: Maker) -> Path:
    """Write the runs of a shape, and return the path of their page."""
    generator = np.random.default_rng(draw)
    for number in range(shape.labels):
        label = "long-" * 14 if shape.special == "long" and number == 1 else f"method-{number}"
        best = round(float(generator.uniform(0.2, 1)), 2)
        for seed in range(shape.seeds):
            folder = write(root / "cmp" / label / f"seed-{seed}", seed=seed, rounds=rounds, best=best)
            path = folder / "metrics.jsonl"
            records = [json.loads(line) for line in path.read_text().splitlines()]
            for record in records:
                record["accuracy"] = min(max(record["accuracy"], 0.0), 1.0)
                if shape.special == "diverged" and number == 1:  # NaN and infinity are written as null
                    record |= {"accuracy": 0.1, "loss": None, "train_loss": None}
                if shape.special == "regression":
                    record["test"] = {"rmse": 3.5 - 2 * record.pop("accuracy")}
            path.write_text("".join(json.dumps(record) + "\n" for record in records))
            if shape.special == "regression":
                spec = folder / "spec.toml"
                more = 'primary = "rmse"\nmetrics = ["rmse"]\ntargets = { rmse = [2.5, 2.0] }\n'
                spec.write_text(spec.read_text().replace("targets = [0.5, 0.8]\n", more))
    return write_report([root / "cmp"], root / "report.html")


def agrees(chip: str, words: str, *, lower: bool) -> bool:
    """Return True if the verdict of a row is that of its interval, whose ends are rounded."""
    if "interval" not in words:
        return chip in ("○ no order shown", "baseline")
    text = words.partition("95 % interval ")[2].partition(";")[0].replace("\u2212", "-")
    low, high = (float(end) for end in text.split(" to "))
    ahead, behind = (high <= 0, low >= 0) if lower else (low >= 0, high <= 0)
    return {"▲ ahead": ahead, "▼ behind": behind, "○ no order shown": low <= 0 <= high}[chip]


@pytest.mark.parametrize(
    "name", ["one run", "usual", *(pytest.param(name, marks=pytest.mark.long) for name in RARE_SHAPES)]
)
@settings(
    max_examples=2,
    deadline=None,
    phases=[Phase.generate],  # shrinking would open hundreds of pages
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(rounds=st.sampled_from([1, 2, 14, 40]), draw=st.integers(0, 99))
def test_a_page_agrees_with_itself_and_fits(
    window: Browser,
    write_measured: Maker,
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    rounds: int,
    draw: int,
) -> None:
    shape = SHAPES[name]
    page = write_shape(tmp_path_factory.mktemp("shape"), shape, rounds, draw, write_measured)
    for width in (1400, 420):
        window.open(page, width)
        assert window.problems == []
        assert window.value("[innerWidth, document.scrollingElement.scrollWidth]") == [width, width]
        assert window.value(CUT_OFF) == []
    percentages = [float(each.replace(",", "").replace("\u2212", "-")) for each in window.value(PERCENTAGES)]
    assert all(0 <= each <= 100 for each in percentages), percentages
    rows = window.value(ROWS)
    assert len(rows) == (shape.labels if shape.labels > 1 else 0)
    lower = shape.special == "regression"
    assert [row for row in rows if not agrees(row["chip"], row["words"], lower=lower)] == []
    for words in filter(None, (row["words"] for row in rows)):
        values = words.partition("seeds: ")[2].split(", ")
        assert shape.seeds > 2 or "interval" not in words, words
        assert shape.seeds < 3 or len(set(values)) == 1 or "interval" in words, words  # equal ones may have none
    assert window.value("document.querySelector('.answer strong').textContent").endswith(".")
    window.lay_out_for_print()
    assert window.value(browsers.LOST_ON_PAPER) == []
