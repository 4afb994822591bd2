"""Measure how soon Chromium shows the first content of a report after it begins to load the file.

    python benchmarks/first_paint.py [REPORT.html …] [--loads 5]

Without a file, it first makes the report of 60 runs: ten methods on digits with six seeds each. The figures are medians
of all loads: of the first contentful paint, and of the time after which all charts are drawn. The browser starts once,
and shows an empty page between two loads.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from browser import Browser, browser

METHODS = "fedavg,fedprox,scaffold,feddyn,moon,fedrs,fedlc,bsm-fedavg,fedsampling,power-of-choice"
SPEC = """[partition]
clients = 40
min_size = 5
alpha = 0.3

[availability]
name = "bernoulli"
p = 0.6

[training]
rounds = 100
local_steps = 2

[evaluation]
client_test = 0.2
metrics = ["macro-f1", "log-loss"]
targets = [0.5, 0.8, 0.9]
"""
PAINTED = "performance.getEntriesByName('first-contentful-paint')"


def make(folder: Path) -> Path:
    """Run the comparison in an empty folder, and return the path of its report."""
    spec, out = folder / "spec.toml", folder / "comparison"
    spec.write_text(SPEC, encoding="utf-8")
    command = [sys.executable, "-m", "fedstrata", "compare", str(spec), "--methods", METHODS, "--seeds", "0,1,2,3,4,5"]
    subprocess.run([*command, "--out", str(out), "--quiet"], check=True, stdout=subprocess.DEVNULL)
    return out / "report.html"


def milliseconds(window: Browser, page: Path) -> tuple[float, float]:
    """Load a page, and return the time of its first contentful paint and of its last chart."""
    window.visit("about:blank", 1400, ready="true")
    window.open(page, 1400)
    window.wait(f"{PAINTED}.length")
    painted, drawn = window.value(f"[{PAINTED}[0].startTime, Number(document.documentElement.dataset.drawn)]")
    return painted, drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="*", type=Path)
    parser.add_argument("--loads", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        profile, runs = Path(folder, "profile"), Path(folder, "runs")
        profile.mkdir()
        runs.mkdir()
        reports = options.reports or [make(runs)]
        with browser(profile) as window:
            for report in reports:
                times = [milliseconds(window, report) for _ in range(options.loads)]
                painted, drawn = map(statistics.median, zip(*times, strict=True))
                size = report.stat().st_size / 1e6
                print(
                    f"{report.name}, {size:.2f} MB: first paint after {painted:.0f} ms, all drawn after {drawn:.0f} ms"
                )


if __name__ == "__main__":
    main()
