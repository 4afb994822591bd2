"""Measure what each hospital gains over training alone, with each method.

    python examples/hospitals/study.py --out runs/hospitals            # 10 seeds with 5 folds each, about 20 minutes
    python examples/hospitals/study.py --out runs/trial --seeds 1      # one seed, for a trial

Each patient is predicted by models that were not trained on this patient. For this, each seed divides the patients into
five folds, stratified by hospital and label. A cell is a method, a seed and a fold. Finished cells are not repeated, so
that an interrupted study can be continued. ``--results`` writes the figures as JSON. ``--page`` puts the table between
the marks in docs/results/hospitals.md. The study needs pandas: ``pip install 'fedstrata[tables]'``.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

import fedstrata as fs

HERE = Path(__file__).parent
SPEC = HERE / "hospitals.toml"
METHODS = ("fedavg", "scaffold", "fedstas", "rebafl", "stratify")
REFERENCES = ("local", "centralised")
FOLDS, RESAMPLES = 5, 4000
LOOKS = (10, 20, 30)
"""Rounds after which all patients are predicted."""
MARKS = "<!-- table -->", "<!-- end -->"

Reals = NDArray[np.float64]
Ints = NDArray[np.int64]


def folds(groups: Ints, seed: int) -> Ints:
    """Return the fold of each patient, (N,). Each group is divided among the folds evenly, in random order."""
    draw, fold = np.random.default_rng(seed), np.empty(len(groups), dtype=np.int64)
    for group in np.unique(groups):
        rows = draw.permutation(np.flatnonzero(groups == group))
        fold[rows] = (np.arange(len(rows)) + draw.integers(FOLDS)) % FOLDS
    return fold


def predicted(spec: fs.Experiment, data: fs.Dataset) -> Reals:
    """Train, and return each test patient's probability of the disease after each of ``LOOKS``, (looks, patients)."""
    found = []
    with fs.Simulation(fs.prepare(spec, data=data)) as simulation:
        model, data = simulation.prepared.config.model, simulation.prepared.data
        for record in simulation:
            if record["round"] in LOOKS:
                weights = simulation.evaluated()
                with torch.no_grad(), model.loaded(weights.params, weights.buffers) as params:
                    found.append(model(params, data.inputs(slice(None), "test")).softmax(1)[:, 1].numpy())
    return np.stack(found).astype(np.float64)


def cell(label: str, spec: fs.Experiment, data: fs.Dataset) -> Reals:
    """Return the predictions of a method or reference. With ``local``, each hospital predicts its own patients."""
    if label not in REFERENCES:
        return predicted(spec, data)
    assert data.client_test is not None
    runs = list(fs.reference_runs(label, {"": spec}, data=data).values())
    each = [predicted(run, data) for run in runs]
    if label == "centralised":
        return each[0]
    return np.stack([each[client][:, place] for place, client in enumerate(data.client_test.tolist())], axis=1)


def study(out: Path, seeds: int) -> dict[str, Reals]:
    """Return the out-of-fold predictions of each method, (seeds, looks, patients)."""
    overrides = [
        f"training.rounds={LOOKS[-1]}",
        "evaluation.every=0",
        "training.workers=1",
    ]  # results do not depend on these settings
    specs = fs.variants(tomllib.loads(SPEC.read_text(encoding="utf-8")), METHODS, overrides)
    specs |= dict.fromkeys(REFERENCES, specs["fedavg"])
    frame, hospital, sick = patients()
    schema = dict(specs["fedavg"].data.schema)
    result = {label: np.full((seeds, len(LOOKS), len(frame)), np.nan) for label in specs}
    for seed in range(seeds):
        fold = folds(2 * hospital + sick, seed)
        for number in range(FOLDS):
            data = None
            for label, spec in specs.items():
                file = out / label / f"seed-{seed}-fold-{number}.npy"
                if not file.exists():
                    if data is None:
                        held = fold == number
                        data = fs.from_dataframe(frame[~held], name="heart", **schema | {"test": frame[held]})
                    file.parent.mkdir(parents=True, exist_ok=True)
                    half = file.with_suffix(".half.npy")
                    np.save(half, cell(label, spec.model_copy(update={"seed": seed}), data))
                    half.replace(file)
                    print(f"{label}, seed {seed}, fold {number}", flush=True)
                result[label][seed][:, fold == number] = np.load(file)
    return result


def patients() -> tuple[pd.DataFrame, Ints, Ints]:
    """Return the rows as texts, and for each patient the hospital and the diagnosis (1 with the disease), (N,)."""
    frame = pd.read_csv(HERE / "heart.csv", dtype=str, keep_default_na=False)
    hospital = np.unique(frame["hospital"], return_inverse=True)[1]
    return frame, hospital, (frame["disease"] == "yes").to_numpy(dtype=np.int64)


def ranked(p: Reals, sick: Ints) -> Reals:
    """Return whether the sick patient of each pair of a sick and a well patient is ranked higher, (sick, well).

    The values are 1, or 1/2 for equal ranks, or 0, and are averaged over the seeds. The mean over all pairs is the
    AUROC (Mann and Whitney 1947). The AUROC of a resample of the patients is a weighted mean. All seeds use the same
    resamples.
    """
    high, low = p[:, sick == 1, None], p[:, None, sick == 0]
    return ((high > low) + 0.5 * (high == low)).mean(axis=0)


def resampled(pairs: Reals, seed: int) -> tuple[Reals, int]:
    """Return AUROCs of bootstrap resamples of the patients, and the number of resamples with only one class."""
    sick, well = pairs.shape
    counts = np.random.default_rng(seed).multinomial(sick + well, np.full(sick + well, 1 / (sick + well)), RESAMPLES)
    total = counts[:, :sick].sum(1) * counts[:, sick:].sum(1)
    sums = np.einsum("rs,sw,rw->r", counts[:, :sick], pairs, counts[:, sick:], optimize=True)
    return sums[total > 0] / total[total > 0], int((total == 0).sum())


def figures(predictions: dict[str, Reals]) -> dict[str, Any]:
    """Return AUROCs per hospital, rounds and method with 95 % bootstrap intervals, and gains over training alone."""
    frame, hospital, sick = patients()
    names = np.unique(frame["hospital"]).tolist()
    seeds = len(predictions["local"])
    result: dict[str, Any] = {"seeds": seeds, "folds": FOLDS, "resamples": RESAMPLES, "hospitals": {}}
    for number, name in enumerate(names):
        here, y = hospital == number, sick[hospital == number]
        entry: dict[str, Any] = {"patients": len(y), "well": int((y == 0).sum())}
        result["hospitals"][name] = entry
        if len(set(y.tolist())) < 2:
            entry["undefined"] = "patients of one class only"
            continue
        entry["after rounds"] = {}
        for look, rounds in enumerate(LOOKS):
            local = ranked(predictions["local"][:, look, here], y)
            found = entry["after rounds"][str(rounds)] = {}
            for label, p in predictions.items():
                pairs = ranked(p[:, look, here], y)
                drawn, entry["undefined resamples"] = resampled(pairs, number)
                gains, _ = resampled(pairs - local, number)
                single = [ranked(p[[seed], look][:, here], y).mean() for seed in range(seeds)]
                found[label] = {
                    "auroc": round(float(pairs.mean()), 4),
                    "interval": np.percentile(drawn, [2.5, 97.5]).round(4).tolist(),
                    "sd over seeds": round(float(np.std(single, ddof=1)), 4) if seeds > 1 else None,
                    "gain": round(float((pairs - local).mean()), 4),
                    "gain interval": np.percentile(gains, [2.5, 97.5]).round(4).tolist(),
                }
    return result


def page(result: dict[str, Any]) -> str:
    """Return the figures as Markdown: after the fewest rounds and, in a folded part, after more rounds."""
    lines = []
    for rounds in dict.fromkeys((LOOKS[0], LOOKS[-1])):
        if lines:
            lines += ["<details>", f"<summary>The same after {rounds} rounds</summary>", ""]
        heads = [f"{name} ({each['patients']}, {each['well']} well)" for name, each in result["hospitals"].items()]
        lines += [f"| after {rounds} rounds | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
        for label in (*METHODS, *REFERENCES):
            cells = [shown(each, str(rounds), label) for each in result["hospitals"].values()]
            lines.append(f"| {label} | {' | '.join(cells)} |")
        lines.append("")
        if "<details>" in lines:
            lines += ["</details>", ""]
    lost = {name: each["undefined resamples"] for name, each in result["hospitals"].items() if "undefined" not in each}
    left_out = ", ".join(f"{count} of {name}" for name, count in lost.items() if count) or "none"
    return "\n".join(
        [
            *lines,
            f"AUROC, and below it the gain over `local`; 95 % intervals from {result['resamples']:,} resamples of the",
            f"patients. Mean over {result['seeds']} seeds of {result['folds']} folds each. Resamples without a patient",
            f"of one class have no AUROC and are left out: {left_out}.",
            "",
        ]
    )


def shown(hospital: dict[str, Any], rounds: str, label: str) -> str:
    """Return the text of a cell of the table."""
    if "undefined" in hospital:
        return f"undefined: {hospital['undefined']}"
    found = hospital["after rounds"][rounds][label]
    low, high = found["interval"]
    text = f"{found['auroc']:.3f} ({low:.3f} to {high:.3f})"
    if label == "local":
        return text
    low, high = found["gain interval"]
    return f"{text}<br>{found['gain']:+.3f} ({low:+.3f} to {high:+.3f})"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder with the finished runs")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--results", type=Path, help="JSON file to write the numbers to")
    parser.add_argument("--page", type=Path, help="Markdown file to write the table to")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = figures(study(options.out, options.seeds))
    print(page(found))
    if options.results:
        options.results.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if options.page:
        before, _, rest = options.page.read_text(encoding="utf-8").partition(MARKS[0])
        text = f"{before}{MARKS[0]}\n{page(found)}{MARKS[1]}{rest.partition(MARKS[1])[2]}"
        options.page.write_text(text, encoding="utf-8")
