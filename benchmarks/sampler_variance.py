"""Measure the bias and the variance of the aggregate of each client sampler on the same client updates.

    python benchmarks/sampler_variance.py [--draws 10000] [--results benchmarks/results]
    python benchmarks/sampler_variance.py --page [docs/results/samplers.md]

The data are MNIST with 100 clients, divided by Dirichlet(0.01) in two ways: per client (600 samples each), and per
class (1 to thousands of samples per client). After 10 rounds of FedAvg, every client trains one epoch. These updates,
the compressed gradients and the losses then stay fixed while each sampler draws 10 clients many times.

The variance of the aggregate a is E ‖a − E a‖², relative to that of uniform sampling with the plain mean. The bias is
‖E a − target‖ / ‖target‖, for the two possible targets: the mean over clients and the mean over samples.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from marks import write

import fedstrata as fs
from fedstrata.aggregation.base import Aggregator, HorvitzThompson, Mean, MeanBySize, StratumMean
from fedstrata.base import style
from fedstrata.federation.messages import Fit, Weights
from fedstrata.reporting.axes import log_ticks, style_axes
from fedstrata.runs.simulation import Simulation
from fedstrata.sampling.allocation import Allocation, allocated, spread
from fedstrata.sampling.base import Selection
from fedstrata.sampling.clustered import Distributions, by_group, by_size, group
from fedstrata.sampling.fedssar import cluster, shares
from fedstrata.sampling.power_of_choice import LossReport
from fedstrata.sampling.sketches import Compress, restore, sketch
from fedstrata.sampling.stratified import Draws, draw, stratify
from fedstrata.sampling.weighted import with_replacement, without_replacement

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from aggregate_moments import moments, scattered

N, M, STRATA = 100, 10, 10
PAGE = Path(__file__).parents[1] / "docs" / "results" / "samplers.md"
Draw = Callable[[np.random.Generator], np.ndarray]


def frozen(balance: str) -> dict[str, Any]:
    """Compute the updates, gradients, losses and sizes that are the same for all samplers."""
    training = fs.Training(rounds=10, clients_per_round=M, local_epochs=1, batch_size=32, lr=0.05)
    spec = fs.Experiment(
        data="mnist", partition=fs.Dirichlet(alpha=0.01, balance=balance, clients=N), training=training
    )
    prepared = fs.prepare(spec)
    params = fs.run(spec).params
    weights = Weights({name: params[name] for name in prepared.config.model.params()}, {})
    federation = Simulation(prepared).federation
    federation.begin(11)
    everybody = range(N)
    fits = federation.ask(everybody, Fit(11, weights, {}, 1.0))
    flat = torch.cat([w.reshape(-1) for w in weights.params.values()])
    updates = np.stack(
        [torch.cat([w.reshape(-1) for w in fits[k].weights.params.values()]).sub(flat).numpy() for k in everybody]
    )
    quantized = federation.ask(everybody, Compress(11, weights, 9, 2048))
    losses = federation.ask(everybody, LossReport(11, weights))
    return {
        "sizes": prepared.config.sizes,
        "updates": updates.astype(np.float64),
        "sketches": np.stack([sketch(fits[k].weights.params, 2048, 0) for k in everybody]),
        "gradients": np.stack([restore(r.centres.numpy(), r.codes.numpy(), r.length) for r in quantized.values()]),
        "losses": np.array([reply.loss for reply in losses.values()]),
    }


def samplers(known: dict[str, Any]) -> dict[str, Draw]:
    """Return a mapping from each sampler's name to a function that draws the weights of the clients once."""
    sizes, everybody = known["sizes"], np.arange(N)

    def by(select: Callable[[np.random.Generator], Selection], aggregator: Aggregator) -> Draw:
        def weights(g: np.random.Generator) -> np.ndarray:
            chosen = select(g)
            places = np.arange(len(chosen.clients))
            return scattered(chosen.clients, aggregator.coefficients(chosen, places, sizes[chosen.clients]), N)

        return weights

    def uniform(g: np.random.Generator) -> Selection:
        return Selection.plain(g.choice(N, M, replace=False), N)

    gradients = known["gradients"]
    strata = stratify(gradients, STRATA, 0, 11)
    counts, norms = np.bincount(strata), np.linalg.norm(gradients, axis=1)
    deviations = spread(gradients, strata, len(counts))

    def fedsts(
        rule: Allocation, replacement: bool, draws: Draws = "sequential"
    ) -> Callable[[np.random.Generator], Selection]:
        def select(g: np.random.Generator) -> Selection:
            allocation, chance = allocated(rule, M, counts, deviations, g)
            chosen = draw(everybody, strata, counts, allocation, norms, replacement, g, draws)
            return replace(chosen, stratum_chance=chance if rule == "neyman-random" else None)

        return select

    clusters, _ = cluster(known["sketches"], 2, 0.1, 2000, np.random.default_rng(0))
    within = np.bincount(clusters)

    def fedssar(g: np.random.Generator) -> Selection:
        chosen = draw(everybody, clusters, within, shares(M, within, within, g), np.zeros(N), False, g)
        return replace(chosen, stratum_chance=np.minimum(M * within / N, 1.0) if len(within) > M else None)

    one, two = by_size(sizes, M), by_group(group(known["updates"].astype(np.float32), sizes, M), sizes, M)

    def clustered(distributions: Distributions, g: np.random.Generator) -> Selection:
        return Selection.from_draws(everybody, np.bincount(distributions.draw(g), minlength=N), sizes)

    def fedsampling(g: np.random.Generator) -> np.ndarray:
        kept = g.binomial(sizes, M / N)
        return kept / max(kept.sum(), 1)

    def power(g: np.random.Generator) -> Selection:
        candidates = g.choice(N, 2 * M, replace=False, p=sizes / sizes.sum())
        return Selection.plain(candidates[np.argsort(-known["losses"][candidates])[:M]], N)

    return {
        "uniform, mean": by(uniform, Mean()),
        "uniform, mean by size (FedAvg)": by(uniform, MeanBySize()),
        "uniform with replacement": by(
            lambda g: with_replacement(everybody, np.ones(N, dtype=np.int64), M, g, by_size=False), Mean()
        ),
        "by size with replacement": by(lambda g: with_replacement(everybody, sizes, M, g), MeanBySize()),
        "by size without replacement": by(lambda g: without_replacement(everybody, sizes, M, g), MeanBySize()),
        "clustered 1": by(lambda g: clustered(one, g), MeanBySize()),
        "clustered 2": by(lambda g: clustered(two, g), MeanBySize()),
        "FedSTS, paper": by(fedsts("neyman", False), StratumMean()),
        "FedSTS, one draw for each stratum": by(fedsts("neyman-at-least-one", False), StratumMean()),
        "FedSTS, rounded at random, Horvitz-Thompson": by(fedsts("neyman-random", True), HorvitzThompson()),
        "FedSTS, one for each, Horvitz-Thompson": by(fedsts("neyman-at-least-one", True), HorvitzThompson()),
        "FedSTS, rounded at random, inclusion probabilities": by(
            fedsts("neyman-random", False, "systematic"), HorvitzThompson()
        ),
        "FedSSAR": by(fedssar, MeanBySize()),
        "FedSSAR, Horvitz-Thompson": by(fedssar, HorvitzThompson()),
        "FedSampling (a tenth of all samples)": fedsampling,
        "power of choice (20 candidates)": by(power, Mean()),
    }


def measure(balance: str, draws: int) -> list[dict[str, Any]]:
    known = frozen(balance)
    updates, sizes = known["updates"], known["sizes"]
    over_clients, over_samples = updates.mean(axis=0), sizes @ updates / sizes.sum()
    rows: list[dict[str, Any]] = []
    for label, weights in samplers(known).items():
        found = moments(weights, updates, draws, np.random.default_rng(0))
        rows.append(
            {
                "balance": balance,
                "sampler": label,
                "variance": found.variance,
                "ratio": found.variance / rows[0]["variance"] if rows else 1.0,
                "noise": float(np.linalg.norm(found.error) / np.linalg.norm(over_clients)),
                **{
                    f"bias_{name}": float(np.linalg.norm(found.mean - target) / np.linalg.norm(target))
                    for name, target in (("clients", over_clients), ("samples", over_samples))
                },
            }
        )
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| Dirichlet(0.01) over | sampler | variance / uniform's | bias, mean over clients, % "
        "| bias, mean over samples, % | (its noise), % |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['balance']} | {row['sampler']} | {row['ratio']:.3f} | {100 * row['bias_clients']:.1f} "
        f"| {100 * row['bias_samples']:.1f} | {100 * row['noise']:.1f} |"
        for row in rows
    ]
    return "\n".join(lines)


ROWS = {
    "FedSTS, `paper` (default)": "FedSTS, paper",
    "FedSTS, `paper`, one draw for each stratum first (default for more than 1,000 clients)": (
        "FedSTS, one draw for each stratum"
    ),
    "FedSTS, `horvitz-thompson`": "FedSTS, rounded at random, Horvitz-Thompson",
    "FedSTS, `inclusion`": "FedSTS, rounded at random, inclusion probabilities",
    "FedSSAR, `paper`": "FedSSAR",
    "FedSSAR, `horvitz-thompson`": "FedSSAR, Horvitz-Thompson",
}
"""The rows of ``biases``: a mapping from the text of each row to the name of the sampler."""


def biases(rows: list[dict[str, Any]]) -> list[str]:
    """Return a Markdown table of the biases, in percent of the mean over clients, and of the variances."""
    by, balances = {(row["sampler"], row["balance"]): row for row in rows}, ("client", "class")
    lines = ["| method, `aggregation` | bias, equal sizes | variance | bias, skewed sizes | variance |"]
    lines += ["|---|---:|---:|---:|---:|"]
    for says, sampler in ROWS.items():
        mine = [by[sampler, balance] for balance in balances]
        cells = [
            f"{100 * row['bias_clients']:.1f} ± {100 * row['noise']:.1f} | {100 * row['ratio']:.0f}" for row in mine
        ]
        lines.append(f"| {says} | {' | '.join(cells)} |")
    return lines


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    balances = list(dict.fromkeys(row["balance"] for row in rows))
    colours = {name: line.colour.light for name, line in style.lines(["fedsts", "fedssar"]).items()}
    figure = Figure(figsize=(5.6 * len(balances), 4.8), dpi=130, layout="constrained")
    for axes, balance in zip(figure.subplots(1, len(balances), sharey=True, squeeze=False)[0], balances, strict=True):
        mine = [row for row in rows if row["balance"] == balance]
        families = [row["sampler"].split()[0].rstrip(",") for row in mine]
        # A gap before each family of samplers. Dots, because a bar's length on a logarithmic axis has no meaning.
        steps = [
            1 + 0.6 * (family != before) for family, before in zip(families, families[:1] + families, strict=False)
        ]
        places = np.cumsum(steps)
        for row, family, place in zip(mine, families, places, strict=True):
            axes.plot(row["ratio"], place, "o", color=colours.get(family.lower(), style.SOFT.light))
        axes.set_yticks(places, [row["sampler"] for row in mine])
        axes.axvline(1, color=style.SOFT.light, linewidth=1)
        axes.set_xscale("log")
        style_axes(axes, "variance of the aggregate / that of uniform sampling", "")
        log_ticks(axes.xaxis)
        axes.set_title(f"← less noise; Dirichlet(0.01) over {balance}", fontsize=10, loc="left")
    axes.invert_yaxis()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=10_000)
    parser.add_argument("--results", type=Path, help="folder to write sampler_variance.json, .md and .png to")
    help = f"page to write the biases of earlier results to, without new draws (default: {PAGE.name})"
    parser.add_argument("--page", type=Path, nargs="?", const=PAGE, help=help)
    options = parser.parse_args()
    if options.page:
        rows = json.loads((Path(__file__).parent / "results" / "sampler_variance.json").read_text(encoding="utf-8"))
        write(options.page, "biases", biases(rows))
        return
    torch.set_num_threads(1)
    rows = [row for balance in ("client", "class") for row in measure(balance, options.draws)]
    print(markdown(rows))
    if options.results:
        options.results.mkdir(parents=True, exist_ok=True)
        text = json.dumps(
            [{k: round(v, 8) if isinstance(v, float) else v for k, v in row.items()} for row in rows], indent=1
        )
        (options.results / "sampler_variance.json").write_text(text + "\n", encoding="utf-8")
        (options.results / "sampler_variance.md").write_text(markdown(rows) + "\n", encoding="utf-8")
        plot(rows, options.results / "sampler_variance.png")


if __name__ == "__main__":
    main()
