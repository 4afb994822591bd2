"""Compare FedAvg of examples/shakespeare with Flower's: its accuracy over seeds, and its speed.

    python benchmarks/peers/text.py                       # after examples/shakespeare/prepare.py; ten minutes
    python benchmarks/peers/text.py --whole --seeds 0 --rounds 3 --json runs/whole.json

Both train the example's LSTM on the same sequences, with the settings of ``shakespeare.toml`` and one thread, and
weight a client's model by its tokens. For each seed, each side runs once; the sides take turns at running first. The
speed is in sequences per second, from the end of the first round to the end of the last but one, because fedstrata
evaluates in the last round. With ``--whole``, all clients take one step per round, with all their sequences. Nothing is
drawn at random then, so that both sides must end with the same loss.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from text_sides import FOLDER, SIDES, TRAINING, arrays

ROOT = Path(__file__).resolve().parents[2]


def measure(side: str, python: Path, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run one side in its own process, and return its results."""
    paths = [str(FOLDER), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    command = [str(python), __file__, "--side", side, "--seeds", str(seed), "--rounds", str(options.rounds)]
    command += ["--whole"] if options.whole else []
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, cwd=FOLDER, env=env, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"accuracy"')]
    if not lines:
        raise SystemExit(f"{side} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return {"side": side, "seed": seed, "load": os.getloadavg()[0]} | json.loads(lines[-1])


def compare(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return each side's accuracies, and the median, smallest and largest ratio of speeds over the seeds."""
    of = {side: [run for run in runs if run["side"] == side] for side in SIDES}
    result: dict[str, Any] = {}
    for side, each in of.items():
        scores = [run["accuracy"] for run in each]
        spread = statistics.stdev(scores) if len(scores) > 1 else None
        result[side] = {"accuracy": statistics.fmean(scores), "sd over seeds": spread}
    for by in ("per_second", "per_cpu_second"):
        ratios = [ours[by] / theirs[by] for ours, theirs in zip(*of.values(), strict=True)]
        result[f"fedstrata is faster, {by}"] = [statistics.median(ratios), min(ratios), max(ratios)]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--rounds", type=int, default=TRAINING["rounds"])
    parser.add_argument(
        "--whole", action="store_true", help="take one step per round, with all clients and all sequences"
    )
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/fedstrata/peers").expanduser())
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "shakespeare.json")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    TRAINING["rounds"] = options.rounds
    if options.whole:
        clients = int(arrays()["client"].max()) + 1
        TRAINING.update(clients_per_round=clients, batch_size=len(arrays()["x_train"]))
    if options.side:
        SIDES[options.side](int(options.seeds))
        return
    from bench import environment, machine

    pythons = {"fedstrata": Path(sys.executable), "flower": environment("flower", options.cache)}
    runs = []
    for turn, seed in enumerate(map(int, options.seeds.split(","))):
        for side in list(SIDES)[:: -1 if turn % 2 else 1]:
            runs.append(measure(side, pythons[side], seed, options))
            print(json.dumps(runs[-1]), flush=True)
    result = {"machine": machine(), "rounds": options.rounds, **compare(runs), "runs": runs}
    options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(compare(runs), indent=1))


if __name__ == "__main__":
    main()
