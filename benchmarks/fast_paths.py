"""Measure the speed of each optimisation (fast path) relative to the plain code that it replaces, in turns.

    make bench-paths
    python benchmarks/fast_paths.py [--pairs 15] [--only manual traced …] [--results benchmarks/results]

A fast path must be at least 1.5 times as fast on work that users do; otherwise it is removed. The only exception is
keeping freed memory, which gains less but helps every MLP.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from paired import Ratio, in_turns, ratio_of

import fedstrata as fs
from fedstrata.runs.simulation import Simulation

Works = tuple[Callable[[], float | None], Callable[[], float | None]]
"""A function for the plain path and a function for the fast path. Each returns its seconds, or None."""


def images(count: int) -> fs.Dataset:
    """Return random images of ten classes; their content does not influence the speed of training."""
    draw = np.random.default_rng(0)
    y = np.arange(count) % 10
    x = (draw.integers(0, 200, size=(count, 28, 28)) + 5 * y[:, None, None]).astype(np.uint8)
    return fs.from_arrays(x, y, x[:100], y[:100])


def simulation(clients: int, samples: int, **tables: Any) -> Simulation:
    """Return a simulation with clients of equal size, after a first round that warms up."""
    training = {"rounds": 10_000, "local_epochs": 1, "batch_size": 20, "lr": 0.05, "workers": 1}
    table = {"partition": {"name": "iid", "clients": clients}, "evaluation": {"every": 0}, **tables}
    table["training"] = training | tables.get("training", {})
    spec = fs.Experiment.from_table(table)
    made = Simulation(fs.prepare(spec, data=images(clients * samples)))
    made.step()
    return made


def stepping(made: Simulation) -> Callable[[], None]:
    return lambda: made.step() and None


def manual(model: str) -> Works:
    """Compare autograd with backward passes that are written by hand."""
    from fedstrata.clients.training.local import manual_sgd_of

    plain = simulation(10, 300, model=model)
    plain.context.prepared[manual_sgd_of] = None
    return stepping(plain), stepping(simulation(10, 300, model=model))


def traced(model: str) -> Works:
    """Compare autograd with single-sample steps that are replayed from a trace."""
    from fedstrata.stratify import client_single

    method = {"name": "stratify", "mode": "single", "cap": 30}
    plain, fast = (simulation(10, 60, model=model, method=method) for _ in range(2))
    last = plain.context.cached(client_single._Last)
    last.model, last.stepper = (
        plain.context.config.model,
        client_single.AutogradStepper(plain.context, plain.context.config.model),
    )
    return stepping(plain), stepping(fast)


def team(model: str) -> Works:
    """Compare two worker processes with one process."""
    settings, samples = {"clients_per_round": 10}, 600 if model == "cnn" else 6000
    return (
        stepping(simulation(10, samples, model=model, training=settings)),
        stepping(simulation(10, samples, model=model, training=settings | {"workers": 2})),
    )


def fused(model: str) -> Works:
    """Compare one pass over a batch of Stratify with one pass per client."""
    method = {"name": "stratify", "cap": 200}
    return (
        stepping(simulation(100, 60, model=model, method=method, training={"execution": "per-client"})),
        stepping(simulation(100, 60, model=model, method=method)),
    )


def incremental_kmeans(_: str) -> Works:
    """Compare two ways to update k-means after 100 of 10,000 clients have changed: starting again, or continuing."""
    from fedstrata.sampling.allocation import spread
    from fedstrata.sampling.incremental_kmeans import Clusters
    from fedstrata.sampling.sketches import lengths
    from fedstrata.sampling.stratified import stratify

    draw = np.random.default_rng(0)
    groups = draw.normal(size=(10, 2048)).astype(np.float32)
    points = groups[draw.integers(10, size=10_000)] + draw.normal(size=(10_000, 2048)).astype(np.float32)
    norms = lengths(points)
    clusters = Clusters.of(points, norms, stratify(points, 10, 0, 1)).converged(points, norms)
    renewed = np.sort(draw.choice(10_000, 100, replace=False))
    fresh = points[renewed] + draw.normal(size=(100, 2048)).astype(np.float32)

    def plain() -> None:
        matrix = points.copy()
        matrix[renewed] = fresh
        strata = stratify(matrix, 10, 0, 2)
        spread(matrix, strata, 10)

    def fast() -> None:
        left, matrix = clusters.without(renewed, points[renewed]), points.copy()
        matrix[renewed] = fresh
        norms = lengths(matrix)
        left.converged(matrix, norms).spread(norms)

    return plain, fast


def messages(kind: str) -> Works:
    """Compare writing the tensors of messages directly with ``safetensors.torch.save``, which gives the same bytes."""
    from fedstrata.base import records

    weights = {name: w.detach() for name, w in torch.nn.Linear(784, 200).named_parameters()}
    tree = weights if kind == "weights" else {str(site): bytes(64) for site in range(10)}
    named = records._separated(tree)[1]
    assert safetensors.torch.save(named) == b"".join(records._block(named))
    return (
        lambda: [safetensors.torch.save(named) for _ in range(1000)] and None,
        lambda: [b"".join(records._block(named)) for _ in range(1000)] and None,
    )


def memory(model: str) -> Works:
    """Compare keeping freed memory in the process with returning it to the system, as glibc does by default."""

    def child(keep: bool) -> Child:
        environment = os.environ | ({} if keep else {"MALLOC_TRIM_THRESHOLD_": "131072"})
        return Child([sys.executable, __file__, "--serve", model], environment)

    return child(keep=False).seconds, child(keep=True).seconds


class Child:
    """A process that runs a round on request."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )

    def seconds(self) -> float:
        """Run a round, and return its seconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())


def serve(model: str) -> None:
    """Run a round for every line of standard input, and print its seconds."""
    made = simulation(10, 300, model=model)
    for _ in sys.stdin:
        began = time.perf_counter()
        made.step()
        print(time.perf_counter() - began, flush=True)


PATHS: dict[str, tuple[Callable[[str], Works], str, str]] = {
    "manual, MLP": (manual, "mlp", "training/sgd.py: FedAvg, 10 clients of 300 samples, batch 20"),
    "traced, MLP": (traced, "mlp", "training/traced_sgd.py: Stratify single"),
    "traced, CNN": (traced, "cnn", "training/traced_sgd.py: the same with convolutions"),
    "team, MLP": (team, "mlp", "engines/worker_pool.py: 10 clients of 6,000 samples, two processes"),
    "team, CNN": (team, "cnn", "engines/worker_pool.py: 10 clients of 600 samples, with convolutions"),
    "fused, MLP": (fused, "mlp", "stratify/client_batch.py: Stratify batch, 100 clients, one pass a batch"),
    "incremental k-means": (incremental_kmeans, "", "sampling/incremental_kmeans.py: 10,000 clients, 100 renewed"),
    "messages, keys": (messages, "keys", "base/records.py: ten signatures of 64 bytes"),
    "messages, weights": (messages, "weights", "base/records.py: a layer of 157,000 parameters"),
    "memory, CNN": (memory, "cnn", "process.py: FedAvg, freed memory kept"),
    "memory, MLP": (memory, "mlp", "process.py: the same with an MLP"),
}


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--only", nargs="+", help="prefixes of the names of fast paths to measure")
    parser.add_argument(
        "--results",
        type=Path,
        help="folder whose fast_paths.json and fast_paths.md to update with the new measurements",
    )
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with quiet():
        if options.serve:
            serve(options.serve)
            return
        found: dict[str, Ratio] = {}
        for name, (make, model, _) in PATHS.items():
            if options.only and not any(name.startswith(part) for part in options.only):
                continue
            found[name] = ratio_of(*in_turns(*make(model), options.pairs))
            print(f"{name:22}{found[name]}", flush=True)
    if options.results:
        kept = options.results / "fast_paths.json"
        before = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
        found = {name: found.get(name) or Ratio(**before[name]) for name in PATHS if name in found or name in before}
        lines = ["| path | where | times as fast as the plain path (95 % interval) |", "|---|---|---|"]
        lines += [f"| {name} | {PATHS[name][2]} | {ratio} |" for name, ratio in found.items()]
        options.results.mkdir(parents=True, exist_ok=True)
        (options.results / "fast_paths.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
        table = {name: vars(ratio) for name, ratio in found.items()}
        kept.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
