"""Measure how well each method predicts the air times of each carrier, and write the table of README.md.

    python examples/flights/study.py --out runs/flights       # about four minutes

Each seed draws its own test flights. A cell is a method and a seed. Finished cells are not repeated, so that an
interrupted study can be continued. ``--results`` writes the figures as JSON, and ``--page`` puts the table into a page.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import fedstrata as fs

HERE = Path(__file__).parent
SPEC = HERE / "flights.toml"
METHODS = ("fedavg", "fedavg-all", "fedsts", "stratify")
REFERENCES = ("local", "centralised")
RESAMPLES = 2000
MARKS = "<!-- table -->", "<!-- end -->"

Reals = NDArray[np.float64]


def errors_of(spec: fs.Experiment, data: fs.Dataset) -> Reals:
    """Train, and return the error of each test flight in minutes, (N,)."""
    with fs.Simulation(fs.prepare(spec, data=data)) as simulation:
        for _ in simulation:
            pass
        model, weights, fitted = simulation.prepared.config.model, simulation.evaluated(), simulation.prepared.data
        with torch.no_grad(), model.loaded(weights.params, weights.buffers) as params:
            values = fitted.task.predictions(model(params, fitted.inputs(slice(None), "test")))["values"]
    return (values - fitted.y_test)[:, 0].numpy()


def cell(label: str, spec: fs.Experiment, data: fs.Dataset) -> Reals:
    """Return the errors of a method or reference. With ``local``, each carrier's model predicts its own flights."""
    if label not in REFERENCES:
        return errors_of(spec, data)
    each = [errors_of(run, data) for run in fs.reference_runs(label, {"": spec}, data=data).values()]
    if label == "centralised":
        return each[0]
    assert data.client_test is not None
    return np.array([each[carrier][place] for place, carrier in enumerate(data.client_test.tolist())])


def study(out: Path, seeds: int) -> dict[str, Any]:
    """Return the RMSE of each carrier and method, and its gain over ``local``, with 95 % bootstrap intervals."""
    overrides = ["evaluation.every=0", "training.workers=1"]  # results do not depend on these settings
    specs = fs.variants(tomllib.loads(SPEC.read_text(encoding="utf-8")), METHODS, overrides)
    specs |= dict.fromkeys(REFERENCES, specs["fedavg"])
    drawn: dict[str, dict[str, list[Reals]]] = {}
    train: dict[str, int] = {}
    for seed in range(seeds):
        data = specs["fedavg"].data.load(seed, specs["fedavg"].task)
        assert data.client_train is not None
        assert data.client_test is not None
        errors = {}
        for label, spec in specs.items():
            file = out / label / f"seed-{seed}.npy"
            if not file.exists():
                file.parent.mkdir(parents=True, exist_ok=True)
                half = file.with_suffix(".half.npy")
                np.save(half, cell(label, spec.model_copy(update={"seed": seed}), data))
                half.replace(file)
                print(f"{label}, seed {seed}", flush=True)
            errors[label] = np.load(file) ** 2
        for number, name in enumerate(data.client_names):
            here = data.client_test.numpy() == number
            train[name] = int((data.client_train == number).sum())
            count = int(here.sum())
            # The same flights are resampled for all methods, so that their gains are paired comparisons.
            weights = np.random.default_rng([seed, number]).multinomial(count, np.full(count, 1 / count), RESAMPLES)
            weights = np.concatenate([np.ones((1, count)), weights])
            for label, squares in errors.items():
                means = weights @ squares[here] / count
                drawn.setdefault(name, {}).setdefault(label, []).append(np.sqrt(means))
    carriers = {}
    for name, methods in drawn.items():
        means = {label: np.mean(each, axis=0) for label, each in methods.items()}
        carriers[name] = {"train": train[name]} | {
            label: {
                "rmse": round(float(mean[0]), 2),
                "interval": np.percentile(mean[1:], [2.5, 97.5]).round(2).tolist(),
                "gain": np.percentile((means["local"] - mean)[1:], [2.5, 97.5]).round(2).tolist(),
                "seeds": [round(float(each[0]), 2) for each in methods[label]],
            }
            for label, mean in means.items()
        }
    return {"seeds": seeds, "resamples": RESAMPLES, "carriers": carriers}


def page(result: dict[str, Any]) -> str:
    """Return the figures as Markdown; bold where the interval of the gain over ``local`` does not contain 0."""
    labels = ("local", *METHODS, "centralised")
    lines = [f"| carrier (training flights) | {' | '.join(labels)} |", f"|---|{'---|' * len(labels)}"]
    for name, carrier in result["carriers"].items():
        cells = []
        for label in labels:
            each = carrier[label]
            value = f"{each['rmse']:.1f}"
            apart = label != "local" and not each["gain"][0] <= 0 <= each["gain"][1]
            low, high = each["interval"]
            cells.append(f"{f'**{value}**' if apart else value} ({low:.1f}–{high:.1f})")
        lines.append(f"| {name} ({carrier['train']}) | {' | '.join(cells)} |")
    means = [np.mean([carrier[label]["rmse"] for carrier in result["carriers"].values()]) for label in labels]
    lines.append(f"| mean of the carriers | {' | '.join(f'{mean:.1f}' for mean in means)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder with the finished runs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--results", type=Path, help="JSON file to write the numbers to")
    parser.add_argument("--page", type=Path, help="Markdown file to write the table to")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = study(options.out, options.seeds)
    print(page(result))
    if options.results:
        options.results.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if options.page:
        before, _, rest = options.page.read_text(encoding="utf-8").partition(MARKS[0])
        text = f"{before}{MARKS[0]}\n{page(result)}{MARKS[1]}{rest.partition(MARKS[1])[2]}"
        options.page.write_text(text, encoding="utf-8")
