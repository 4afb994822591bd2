"""Check HTML pages with axe-core in Chromium, in both themes: ``python tools/accessibility.py AXE.js PAGE.html …``.

It prints each violation of WCAG 2.2 AA with the element, and exits with code 1 if there are any.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
import browser

TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22a", "wcag22aa"]
THEMES = ("light", "dark")
RUN = f"""axe.run(document, {{runOnly: {{type: "tag", values: {json.dumps(TAGS)}}}}}).then(result =>
  [result.passes.length, result.violations.map(each => [each.id, each.help, each.nodes.map(node => node.html)])])"""


def check(window: browser.Browser, axe: str, page: Path, theme: str) -> list[tuple[str, str, list[str]]]:
    """Return the rules that a page violates in a theme: id, description, and the HTML of the elements.

    Raises:
        RuntimeError: No rule applied, so that the check proves nothing.
    """
    window.open(page, 1400, theme)
    # Everything that is folded is checked too.
    window.value(f"{axe}; for (const each of document.querySelectorAll('details')) each.open = true; 0")
    passed, violations = window.value(RUN)
    if not passed:
        raise RuntimeError(f"{page}: no rule of axe-core applied.")
    print(f"{page}, {theme}: {passed} rules passed, {len(violations)} violated")
    return [(name, words, nodes) for name, words, nodes in violations]


def main(axe: str, *pages: str) -> int:
    """Check the pages with the file of axe-core, and return the exit code."""
    count, text = 0, Path(axe).read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as profile, browser.browser(Path(profile)) as window:
        for page in pages:
            for theme in THEMES:
                violations: list[Any] = check(window, text, Path(page), theme)
                count += len(violations)
                for name, words, nodes in violations:
                    print(f"  {name}: {words}", *nodes[:5], sep="\n    ")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
