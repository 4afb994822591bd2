"""Compare the accuracy of DP-SGD (``privacy.dp``) with the example of Opacus, which trains on all of MNIST.

    python benchmarks/private_mnist.py run --out DIR
    python benchmarks/private_mnist.py table [--page docs/privacy/samples.md]

A cell is a setting, a number of clients that divide MNIST among themselves, and a seed. ``run`` can be stopped at any
time. It skips the cells that are already in ``benchmarks/results``, and resumes a cell from its run folder in DIR.
``table`` writes the finished settings between the marks of the page.

The network, the settings and the published accuracies are those of ``examples/mnist.py`` and ``examples/mnist.md`` of
Opacus (Yousefpour et al. 2021). Each of the 60,000 samples is in a step with probability 0.004, a round is an epoch of
250 steps, and δ is 1e-5. With ten clients, each client takes these 250 steps on its own samples, and the server
averages the models. The noise of these runs comes from the seed.
"""

from __future__ import annotations

import argparse
import json
import statistics
from itertools import product
from pathlib import Path
from typing import Any

from marks import write
from torch import nn

import fedstrata as fs
from fedstrata.base.jsonl import write_json

RESULTS = Path(__file__).parent / "results" / "private_mnist.json"
SEEDS, CLIENTS = (0, 1, 2), (1, 10)
SETTINGS: dict[str, dict[str, float]] = {
    "noise 1.3, 15 epochs": {"noise": 1.3, "clip": 1.5, "lr": 0.25, "epochs": 15, "opacus": 94.6},
    "noise 0.7, 45 epochs": {"noise": 0.7, "clip": 1.5, "lr": 0.25, "epochs": 45, "opacus": 97.1},
    "noise 1.1, 60 epochs": {"noise": 1.1, "clip": 1.0, "lr": 0.15, "epochs": 60, "opacus": 96.8},
}


class SampleConvNet(nn.Sequential):
    """The network of Opacus' example for MNIST, with 26,010 parameters."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        convolutions = [nn.Conv2d(shape[0], 16, 8, stride=2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1)]
        convolutions += [nn.Conv2d(16, 32, 4, stride=2), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Flatten()]
        super().__init__(*convolutions, nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, classes))


def key_of(name: str, clients: int, seed: int) -> str:
    """Return the key of a cell in the results."""
    return f"{name}, {clients} clients, seed {seed}" if clients > 1 else f"{name}, seed {seed}"


def spec_of(setting: dict[str, float], clients: int, seed: int) -> fs.Experiment:
    """Return the spec of a cell. The normalisation is that of the example, so it does not depend on the samples."""
    return fs.Experiment.from_table(
        {
            "seed": seed,
            "data": {"name": "mnist", "shift": [255 * 0.1307], "scale": [1 / (255 * 0.3081)]},
            "partition": {"name": "iid", "clients": clients},
            "training": {
                "rounds": int(setting["epochs"]),
                "local_epochs": 1,
                "batch_size": 240 // clients,
                "lr": setting["lr"],
                "workers": 1,
            },
            "privacy": {"dp": {"clip": setting["clip"], "noise": setting["noise"], "delta": 1e-5}},
            "evaluation": {"every": 5, "checkpoint_every": 1},
        }
    )


def run(out: Path) -> None:
    """Run the cells that have no result yet."""
    for clients, (name, setting), seed in product(CLIENTS, SETTINGS.items(), SEEDS):
        if (key := key_of(name, clients, seed)) in results():
            continue
        folder = out / key.replace(" ", "-").replace(",", "")
        spec = spec_of(setting, clients, seed)
        last: dict[str, Any] = fs.run(spec, model=SampleConvNet, out=folder, resume=folder.exists())[-1]
        write_json(RESULTS, {**results(), key: {"accuracy": last["accuracy"], "epsilon": last["epsilon"]}})
        print(key, last["accuracy"], flush=True)


def results() -> dict[str, Any]:
    """Return the results of the finished cells."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


def table(page: Path | None) -> None:
    """Write the settings with at least one finished seed as a table."""
    cells = results()
    lines = [
        "| clients | noise, epochs | clip | learning rate | ε | accuracy | seeds | Opacus |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for clients, (name, setting) in product(CLIENTS, SETTINGS.items()):
        found = [cells[key] for seed in SEEDS if (key := key_of(name, clients, seed)) in cells]
        if not found:
            continue
        accuracies = [100 * cell["accuracy"] for cell in found]
        spread = f" ± {statistics.stdev(accuracies):.1f}" if len(found) > 1 else ""
        columns = f"{clients} | {setting['noise']:g}, {setting['epochs']:g} | {setting['clip']:g} | {setting['lr']:g}"
        accuracy = f"{statistics.mean(accuracies):.1f}{spread} %"
        columns = f"{columns} | {found[0]['epsilon']:.2f} | {accuracy} | {len(found)} of {len(SEEDS)}"
        opacus = f"{setting['opacus']:.1f} %" if clients == 1 else ""
        lines.append(f"| {columns} | {opacus} |")
    write(page, "opacus", lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("run").add_argument("--out", type=Path, required=True)
    commands.add_parser("table").add_argument("--page", type=Path)
    options = parser.parse_args()
    if options.command == "run":
        run(options.out)
    else:
        table(options.page)


if __name__ == "__main__":
    main()
