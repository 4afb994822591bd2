"""Measure how long ``fedstrata run`` of one round takes beyond ``import torch``.

    python benchmarks/startup.py [--repeats 7]

Both run as fresh processes in turns: ``python -c "import torch"``, and one round of FedAvg on digits with three clients
and a small model. Each figure is the minimum over all repeats, because other programs can only increase it. Processor
time is measured in user code; a busy machine changes it less than the elapsed time. A first turn, which is left out,
lets Python store compiled modules, as pip does when it installs the package.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SPEC = "[partition]\nclients = 3\n\n[model]\nhidden = [8]\n\n[training]\nrounds = 1\n"


def seconds(command: list[str]) -> tuple[float, float]:
    """Run a command, and return its elapsed seconds and its seconds of processor time in user code."""
    began, used = time.perf_counter(), os.times().children_user
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    return time.perf_counter() - began, os.times().children_user - used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder, "spec.toml")
        spec.write_text(SPEC, encoding="utf-8")
        torch, run = [], []
        for repeat in range(options.repeats + 1):
            torch.append(seconds([sys.executable, "-c", "import torch"]))
            out = str(Path(folder, str(repeat)))
            run.append(seconds([sys.executable, "-m", "fedstrata", "run", str(spec), "--out", out, "--quiet"]))
    print(f"{'seconds, least of ' + str(options.repeats):24}  elapsed  processor")
    rows = {name: tuple(map(min, zip(*taken[1:], strict=True))) for name, taken in (("torch", torch), ("run", run))}
    rows["difference"] = tuple(b - a for a, b in zip(rows["torch"], rows["run"], strict=True))
    names = {"torch": "import torch", "run": "fedstrata run, one round"}
    for name, (elapsed, processor) in rows.items():
        print(f"{names.get(name, name):24}  {elapsed:7.2f}  {processor:9.2f}")


if __name__ == "__main__":
    main()
