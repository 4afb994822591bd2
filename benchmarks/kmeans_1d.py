"""Compare exact one-dimensional k-means with the best of 10 starts of scikit-learn's k-means, in one thread.

    python benchmarks/kmeans_1d.py [--results benchmarks/results] [--repeats 5]

The values are the 178,110 coordinates of one client's gradient, for an MLP with hidden layers 200-100 and samples of
MNIST with one label. Shorter vectors are random coordinates of this gradient, except the vector of length 2,048, which
is its projection.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from sklearn.cluster import KMeans

import fedstrata as fs
from fedstrata.federation.messages import Params
from fedstrata.sampling.sketches import project, quantize

CENTRES = 9
SIZES = (2_048, 10_000, 100_000, 178_110)


def gradient() -> np.ndarray:
    """Return the gradient of the mean cross-entropy of the initial model over the first client's samples."""
    import torch
    import torch.nn.functional as F

    torch.set_num_threads(1)
    prepared = fs.prepare(fs.Experiment(data="mnist", partition=fs.Shards(clients=100, per_client=1)))
    model, where = prepared.config.model, torch.from_numpy(prepared.assignment[0].copy())
    weights: Params = model.params()
    with model.loaded(weights, model.buffers(), train=False) as params:
        loss = F.cross_entropy(model(params, prepared.data.inputs(where)), prepared.data.y_train[where])
        parts = torch.autograd.grad(loss, list(params.values()))
    return torch.cat([part.reshape(-1) for part in parts]).numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, help="folder to write kmeans_1d.json and kmeans_1d.md to")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    import torch

    whole = gradient()
    shuffled = np.random.default_rng(0).permutation(whole)
    rows = []
    for size in SIZES:
        values = project(torch.from_numpy(whole), size, 0).numpy() if size == 2_048 else shuffled[:size]
        ours, theirs, ratio, inertia = [], [], [], (0.0, 0.0)
        for repeat in range(options.repeats):
            began = time.perf_counter()
            centres, codes = quantize(values, CENTRES)
            middle = time.perf_counter()
            model = KMeans(CENTRES, n_init=10, random_state=repeat).fit(values[:, None])
            ended = time.perf_counter()
            ours.append(middle - began)
            theirs.append(ended - middle)
            ratio.append(theirs[-1] / ours[-1])
            exact = values.astype(np.float64)
            labels = model.labels_
            means = np.array([exact[labels == c].mean() for c in range(CENTRES)])
            inertia = (
                float(np.square(exact - centres.astype(np.float64)[codes]).sum()),
                float(np.square(exact - means[labels]).sum()),
            )
            assert inertia[0] <= inertia[1] * (1 + 1e-6), inertia
        rows.append(
            {
                "coordinates": size,
                "ours_ms": round(1000 * statistics.median(ours), 2),
                "sklearn_ms": round(1000 * statistics.median(theirs), 1),
                "ratio": round(statistics.median(ratio), 1),
                "ratio_least": round(min(ratio), 1),
                "inertia_over_sklearns": inertia[0] / inertia[1],
            }
        )
    lines = [
        "| coordinates | exact, ms | scikit-learn, best of 10, ms | faster (median, least of pairs) | inertia / its |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['coordinates']:,} | {row['ours_ms']} | {row['sklearn_ms']} | {row['ratio']} ×, {row['ratio_least']} × "
        f"| {row['inertia_over_sklearns']:.8f} |"
        for row in rows
    ]
    print("\n".join(lines))
    if options.results:
        options.results.mkdir(parents=True, exist_ok=True)
        (options.results / "kmeans_1d.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        (options.results / "kmeans_1d.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
