"""The page in a real browser: what a person sees, clicks and types."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import browser as browsers
import numpy as np
import pytest
from browser import Browser

from fedstrata.base.style import ACCENT, Colour, lines
from fedstrata.reporting.html import PNG, write_report
from fedstrata.reporting.runs import keep_order

Maker = Callable[..., Path]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("browser"),
    pytest.mark.skipif(browsers.PROGRAM is None, reason="no Chromium is installed"),
]

EVIL = "<script>stolen=1<-script><img src=x onerror=stolen=1>"
LABELS = {"scaffold": 0.7, "fedavg": 0.8, EVIL: 0.9, "a-label-that-is-much-longer-than-any-other-one-of-them": 0.6}
RANKED = sorted(LABELS, key=lambda label: -LABELS[label])

CUT = """
[...document.querySelectorAll("main *, header *")].filter(each => {
  const clipped = each.closest(".wide, pre, .plot, svg, .legend .entry, .fates b, [hidden], option, .skip, .hidden");
  if (clipped && !each.matches(".wide, .plot")) return false;
  const place = each.getBoundingClientRect();
  return place.width && (place.right > innerWidth + 0.5 || place.left < -0.5);
}).map(each => each.tagName + "." + each.className + " " + each.textContent.slice(0, 40))
"""
INK = """
[...document.querySelectorAll(".plot canvas")].map(canvas => {
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data, found = new Set();
  for (let i = 0; i < pixels.length; i += 4) if (pixels[i + 3] > 200) found.add(pixels.slice(i, i + 3).join());
  return [...found];
})
"""


def painted_as(colour: Colour, scheme: str) -> str:
    """The red, green and blue of a colour, as ``INK`` gives it."""
    shown = colour.dark if scheme == "dark" else colour.light
    return ",".join(str(int(shown[i : i + 2], 16)) for i in (1, 3, 5))


FIRST_COLUMN = (
    "[...document.querySelectorAll('table.sortable')[0].tBodies[0].rows].map(row => row.cells[0].textContent)"
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, write_measured: Maker) -> Path:
    """Four methods with two seeds each; one of them and the classes have names that would like to be markup."""
    root = tmp_path_factory.mktemp("page")
    names = [f"</script>{EVIL}{i}" for i in range(4)]
    for label, best in LABELS.items():
        for seed in range(2):
            folder = write_measured(
                root / "cmp" / label / f"seed-{seed}", seed=seed, rounds=12, best=best, method="fedstas", names=names
            )
            spec = folder / "spec.toml"
            spec.write_text(spec.read_text().replace('"digits"', f"'{EVIL}'"))
    keep_order(root / "cmp", LABELS)
    return write_report([root / "cmp"], root / "report.html")


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsers.browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def opened(window: Browser, page: Path) -> Iterator[Browser]:
    window.open(page, 1400)
    yield window
    assert window.problems == []


def legend(window: Browser, label: str) -> str:
    """The entry of a method, as JavaScript."""
    return f"[...document.querySelectorAll('.legend .entry')][{RANKED.index(label)}]"


def change(window: Browser, select: str, value: str) -> None:
    window.value(f"{select}.value = '{value}', {select}.dispatchEvent(new Event('change')), 0")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 400])
def test_nothing_fails_and_nothing_is_cut_off(window: Browser, page: Path, width: int, scheme: str) -> None:
    window.open(page, width, scheme)
    assert window.problems == []
    assert window.value("[innerWidth, document.scrollingElement.scrollWidth]") == [width, width]
    assert window.value(CUT) == []
    assert window.value("document.querySelectorAll('.charts .chart, .heats .heat').length") == 8
    dark = scheme == "dark"
    paper = window.value("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(20, 23, 27)" if dark else "rgb(255, 255, 255)")
    painted = window.value(INK)
    assert len(painted) == 5
    for colours in painted[:2]:  # the front and accuracies; losses of all methods lie on each other
        assert {painted_as(line.colour, scheme) for line in lines(list(LABELS)).values()} <= set(colours)
    for colours in painted:
        assert ("228,231,235" if dark else "31,36,43") in colours


def test_names_are_text(opened: Browser) -> None:
    assert opened.value("typeof stolen") == "undefined"
    assert opened.value(f"{legend(opened, EVIL)}.querySelector('b').textContent") == EVIL
    assert EVIL in opened.value(FIRST_COLUMN)
    assert opened.value("document.querySelectorAll('main script, main img:not([src^=data])').length") == 0
    titles = "[...document.querySelectorAll('.heats title')].map(each => each.textContent)"
    assert f"</script>{EVIL}0" in opened.value(titles)


def test_a_table_sorts_by_click_and_by_key(opened: Browser) -> None:
    head = "document.querySelectorAll('table.sortable')[0].tHead.rows[0].cells[1]"
    assert opened.value(FIRST_COLUMN) == RANKED
    for order, rows in (("descending", RANKED), ("ascending", RANKED[::-1])):
        opened.value(f"{head}.querySelector('button').click()")
        assert opened.value(FIRST_COLUMN) == rows
        assert opened.value(f"{head}.getAttribute('aria-sort')") == order
    opened.value("document.querySelectorAll('table.sortable')[0].tHead.querySelectorAll('button')[0].focus()")
    opened.press("Tab", 9)
    opened.press("Enter", 13)
    assert opened.value(FIRST_COLUMN) == RANKED
    assert opened.value("document.querySelectorAll('[aria-sort]').length") == 0
    for order in ("descending", "ascending", None):
        opened.press(" ", 32)
        assert opened.value(f"{head}.getAttribute('aria-sort')") == order
    assert opened.value(f"document.activeElement === {head}.querySelector('button')"), "sorting keeps the focus"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_element_that_has_the_focus_shows_it(window: Browser, page: Path, scheme: str) -> None:
    seen = """(() => {
      const each = document.activeElement, look = getComputedStyle(each), place = each.getBoundingClientRect();
      const shown = place.bottom > 0 && place.top < innerHeight && place.right > 0 && place.left < innerWidth;
      const ring = look.outlineStyle === "solid" && parseFloat(look.outlineWidth) >= 2 ? look.outlineColor : null;
      return [each.tagName, ring, shown];
    })()"""
    window.open(page, 1400, scheme)
    window.value("for (const each of document.querySelectorAll('details')) each.open = true; 0")
    stops = list[tuple[str, str | None, bool]]()
    while not stops or stops[-1][0] != "BODY":  # after the last element, the focus leaves the page
        window.press("Tab", 9)
        stops.append(tuple(window.value(seen)))
    names = {name for name, *_ in stops}
    assert {"A", "BUTTON", "SELECT", "INPUT", "svg", "SUMMARY", "PRE", "DIV"} <= names
    accent = painted_as(ACCENT, scheme)
    assert [stop for stop in stops[:-1] if stop[1:] != (f"rgb({accent.replace(',', ', ')})", True)] == []


def test_arrow_keys_read_heat_maps_and_strips(opened: Browser) -> None:
    opened.value("document.querySelector('.heat svg').focus()")
    readout = "document.querySelector('{} .readout').textContent"
    for key, column in (("ArrowRight", 0), ("ArrowRight", 1), ("ArrowLeft", 0)):
        opened.press(key)
        name = f"</script>{EVIL}{column}"
        assert opened.value(readout.format(".heat")).startswith(f"{EVIL}, class {name}: ")
    opened.value("document.querySelector('.fates svg').focus()")
    opened.press("ArrowRight")
    assert ", round 1: " in opened.value(readout.format(".fates"))


@pytest.mark.parametrize("ends", [(0, 0), (1, 1), (0, 1), (1, 0.99)])
def test_an_axis_of_percentages_stays_within_0_and_100(
    window: Browser, write_measured: Maker, tmp_path: Path, ends: tuple[float, float]
) -> None:
    for name in ("fedavg", "moon"):
        metrics = write_measured(tmp_path / "cmp" / name / "seed-0", rounds=12) / "metrics.jsonl"
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
        for share, record in zip(np.linspace(*ends, len(records)).tolist(), records, strict=True):
            record["accuracy"] = share
        metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    page = write_report([tmp_path / "cmp"], tmp_path / "report.html")
    with window.spying():
        window.open(page, 1400)
        window.value("document.querySelector('.last').click()")
        window.wait(f"{browsers.PERCENT_TICKS}.length === 2")  # the front and the curves
        ticks = [tick for chart in window.value(browsers.PERCENT_TICKS) for tick in chart]
    assert len(ticks) >= 4
    assert all(0 <= tick <= 100 for tick in ticks), ticks


def test_a_method_switches_off_everywhere(opened: Browser) -> None:
    colour = painted_as(lines(list(LABELS))[EVIL].colour, "light")
    front = "document.querySelector('.front').textContent"
    rows = "document.querySelectorAll('.fates .row:not([hidden])').length"
    heat = "document.querySelector('.heat svg').getAttribute('aria-label')"

    def drawn() -> list[bool]:
        opened.value("new Promise(done => requestAnimationFrame(() => setTimeout(done)))")
        return [colour in colours for colours in opened.value(INK)[:2]]

    assert (drawn(), opened.value(rows)) == ([True] * 2, 8)
    # All cost the same here, so that one alone is both cheapest and best.
    assert opened.value(front).endswith(f": {EVIL}.")
    opened.value(f"{legend(opened, EVIL)}.click()")
    assert opened.value(f"{legend(opened, EVIL)}.getAttribute('aria-pressed')") == "false"
    assert (drawn(), opened.value(rows)) == ([False] * 2, 6)
    assert opened.value(front).endswith(": fedavg.")
    assert opened.value(heat).startswith("3 rows")
    opened.value("document.querySelectorAll('.legend .tools button')[1].click()")
    assert opened.value(rows) == 0
    assert opened.value(front) == "No method is shown."
    opened.value("document.querySelectorAll('.legend .tools button')[0].click()")
    assert (drawn(), opened.value(rows)) == ([True] * 2, 8)


def test_axes_and_metrics_can_be_chosen(opened: Browser) -> None:
    label = "document.querySelector('.curves .plot').getAttribute('aria-label').split(';')[0]"
    axis, log = "document.querySelector('.axis')", "document.querySelector('.log')"
    assert opened.value(label) == "test accuracy, % over round, of 4 methods"
    assert opened.value(f"[...{axis}.options].map(each => each.value)") == ["round", "bytes", "samples", "seconds"]
    before = opened.value(INK)
    change(opened, axis, "bytes")
    assert opened.value(f"{log}.checked"), "methods differ by orders of magnitude"
    assert opened.value(label) == "test accuracy, % over sent and received, MB, of 4 methods"
    change(opened, axis, "samples")
    assert not opened.value(f"{log}.checked")
    change(opened, "document.querySelector('.curves select.quantity')", "neyman_sd")
    assert opened.value(label) == "neyman sd over samples trained, of 4 methods"
    change(opened, "document.querySelectorAll('.heat select')[0]", "1")
    assert [len(colours) > 5 for colours in opened.value(INK)] == [True] * len(before)


def test_pointing_at_a_chart_tells_its_values(opened: Browser) -> None:
    place = opened.value(
        "(() => { const place = document.querySelector('.curves .u-over').getBoundingClientRect(); "
        "scrollTo(0, place.top); const now = document.querySelector('.curves .u-over').getBoundingClientRect(); "
        "return [now.left + now.width / 2, now.top + now.height / 2]; })()"
    )
    told = "document.querySelector('.legend .note').textContent"
    assert opened.value(told) == "test accuracy, %, at the end"
    opened.send("Input.dispatchMouseEvent", type="mouseMoved", x=place[0], y=place[1])
    opened.wait(f"{told}.includes('at round 6')")


def test_the_switch_of_light_and_dark(opened: Browser) -> None:
    def look() -> list[Any]:
        return opened.value(
            "[getComputedStyle(document.body).backgroundColor, document.querySelector('#theme').textContent]"
        )

    assert look() == ["rgb(255, 255, 255)", "theme: auto"]
    for _ in range(2):
        opened.value("document.querySelector('#theme').click()")
    assert look() == ["rgb(20, 23, 27)", "theme: dark"]
    opened.value("new Promise(done => setTimeout(done))")
    assert all("228,231,235" in colours for colours in opened.value(INK)), "charts follow"
    opened.value("dispatchEvent(new Event('beforeprint'))")
    assert look()[0] == "rgb(255, 255, 255)", "paper is white"
    opened.value("dispatchEvent(new Event('afterprint'))")
    assert look() == ["rgb(20, 23, 27)", "theme: dark"]
    opened.value("document.querySelector('#theme').click()")


def test_a_dark_page_is_printed_with_light_colours(opened: Browser) -> None:
    numbers = "[...document.querySelectorAll('.heat .in.on')].map(each => each.textContent + each.style.cssText)"
    light = opened.value(numbers)
    opened.visit(opened.value("location.href"), 1400, "dark")
    assert opened.value(numbers) != light, "the numbers in a heat map contrast with the shade below"
    opened.lay_out_for_print()
    assert opened.value(browsers.LOST_ON_PAPER) == []
    assert opened.value(numbers) == light
    for colours in opened.value(INK):
        assert "31,36,43" in colours
        assert "228,231,235" not in colours
    opened.value("dispatchEvent(new Event('afterprint')), 0")


def test_a_single_young_run_opens(window: Browser, tmp_path: Path) -> None:
    folder = tmp_path / "young"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("")
    window.open(write_report([folder], tmp_path / "none.html"), 400)
    (folder / "metrics.jsonl").write_text('{"round": 1, "accuracy": 0.5, "bytes_up": 0, "clients_invited": 0}\n')
    window.open(write_report([folder], tmp_path / "one.html"), 400)
    assert window.value("document.querySelector('.curves .only').textContent") == "one evaluation: 50.0 %"
    assert window.problems == []


def test_what_cost_nothing_is_named_beside_the_front(window: Browser, write_measured: Maker, tmp_path: Path) -> None:
    folders = [write_measured(tmp_path / name, rounds=3) for name in ("alone", "fedavg")]
    metrics = folders[0] / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("70000", "0").replace("90000", "0"))
    window.open(write_report(folders, tmp_path / "page.html"), 1400)
    told = "Pareto front (no other method shown is both cheaper and better): fedavg. "
    told += "Not drawn, because this cost is zero: alone."
    assert window.value("document.querySelector('.front').textContent") == told
    assert window.problems == []


@pytest.mark.long
def test_sixty_runs_are_small(window: Browser, write_measured: Maker, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    names = [f"class {i}" for i in range(40)]
    for label in range(60):  # each with a partition of its own and much to draw, which is the most that can be asked
        folder = tmp_path / "cmp" / f"method-{label}" / "seed-0"
        write_measured(folder, rounds=500, best=0.3 + label / 100, method="fedstas", names=names, clients=300)
        (folder / "partition.png").write_bytes(PNG + generator.bytes(80_000))
        own = generator.random((500, 30)).tolist()
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        more = [
            json.loads(line) | {f"own_{i}": x for i, x in enumerate(row)} for line, row in zip(lines, own, strict=True)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in more))
    page = write_report([tmp_path / "cmp"], tmp_path / "report.html")
    assert page.stat().st_size < 5e6
    window.open(page, 1400)
    assert window.problems == []
