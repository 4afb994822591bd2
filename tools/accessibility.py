"""Check HTML pages with axe-core in Chromium, in both themes: ``python tools/accessibility.py AXE.js PAGE.html …``.

It also checks the status page of a run in progress and of a finished run. It prints each violation of WCAG 2.2 AA with
the element, and exits with code 1 if there are any.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
import browser

import fedstrata as fs
from fedstrata.sites.live import serving
from fedstrata.sites.status import source_of

TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22a", "wcag22aa"]
THEMES = ("light", "dark")
OPTIONS = json.dumps({"runOnly": {"type": "tag", "values": TAGS}})
# While a colour still changes to that of the theme, axe-core would report a contrast that is too low.
SETTLED = "Promise.allSettled(document.getAnimations().map(each => each.finished))"
RUN = f"""{SETTLED}.then(() => axe.run(document, {OPTIONS})).then(result =>
  [result.passes.length, result.violations.map(each => [each.id, each.help, each.nodes.map(node => node.html)])])"""
SPEC = {
    "partition": {"clients": 4},
    "model": {"name": "mlp", "hidden": [8]},
    "training": {"rounds": 3, "local_steps": 2},
}


@contextmanager
def statuses() -> Iterator[dict[str, str]]:
    """Serve the status pages of a run in progress and of a finished run, and yield the address of each."""
    with tempfile.TemporaryDirectory() as place:
        over, going = Path(place) / "over", Path(place) / "going"
        fs.run(fs.Experiment.from_table(SPEC), out=over)
        going.mkdir()
        for name in ("spec.toml", "metrics.jsonl"):
            shutil.copy(over / name, going)
        with serving(source_of(over)) as (finished, update_finished), serving(source_of(going)) as (current, update):
            update_finished()
            update()
            yield {"status of a finished run": finished, "status of a run in progress": current}


def check(window: browser.Browser, axe: str, name: str, address: str, theme: str) -> list[tuple[str, str, list[str]]]:
    """Return the rules that a page violates in a theme: each rule's id, description and elements (as HTML).

    Raises:
        RuntimeError: None of the rules applied to the page, so the check is not valid.
    """
    is_drawn = not address.startswith("file:") or "dataset.drawn" in Path(name).read_text(encoding="utf-8")
    window.visit(address, 1400, theme, ready=browser.DRAWN if is_drawn else "true")
    # Unfold all folded sections, so that they are checked too.
    window.value(f"{axe}; for (const each of document.querySelectorAll('details')) each.open = true; 0")
    passed, violations = window.value(RUN)
    if not passed:
        raise RuntimeError(f"{name}: no rule of axe-core applied.")
    print(f"{name}, {theme}: {passed} rules passed, {len(violations)} violated")
    return [(name, words, nodes) for name, words, nodes in violations]


def main(axe: str, *pages: str) -> int:
    """Check the pages with axe-core, and return the exit code."""
    count, text = 0, Path(axe).read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as profile, browser.browser(Path(profile)) as window, statuses() as served:
        for page, address in {**{page: Path(page).resolve().as_uri() for page in pages}, **served}.items():
            for theme in THEMES:
                violations: list[Any] = check(window, text, page, address, theme)
                count += len(violations)
                for name, words, nodes in violations:
                    print(f"  {name}: {words}", *nodes[:5], sep="\n    ")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
