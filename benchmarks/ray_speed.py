"""Compare Ray with the local engine: the time of a round of FedAvg, of an exchange, and of steps of Stratify.

    python benchmarks/ray_speed.py [--turns 7] [--workers 2] [--data mnist]

The engines take turns in one process, and each client uses one thread. ``local`` is the local engine without worker
processes; ``local_team`` has as many workers as Ray. The medians over the turns, and the medians of the ratios to
``local``, are written to ``benchmarks/results/ray_speed.json``. A round of FedAvg trains 10 of 100 clients. An exchange
asks clients for their number of samples. For Stratify, the time is the time of one batch or, in single-sample mode, of
one hop (a client trains on some samples and passes the model on).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ray
import torch

import fedstrata as fs
from fedstrata.clients.client import StateStore
from fedstrata.engines.ray import RayEngine, WorkerPool
from fedstrata.runs.preparation import prepare
from fedstrata.runs.simulation import Simulation, make_context
from fedstrata.sampling.client_sizes import SizeReport

RESULTS = Path(__file__).parent / "results"


class Run(Simulation):
    """An experiment that runs round by round on one engine."""

    def __init__(self, spec: fs.Experiment, pool: WorkerPool | None) -> None:
        prepared = prepare(spec.model_copy(update={"evaluation": fs.Evaluation(every=0)}))
        if pool is None:
            super().__init__(prepared)
        else:
            super().__init__(prepared, RayEngine(make_context(prepared), StateStore(), pool=pool))

    def sizes(self, clients: int) -> None:
        """Ask some clients for their number of samples."""
        self.federation.ask(range(clients), SizeReport(self.round, 0, 1.0))


def in_turn(turns: int, **work: Callable[[], Any]) -> dict[str, list[float]]:
    """Run functions in turns, and return the seconds of each; the first turn is a warm-up and is left out."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(turns + 1):
        for name, run in work.items():
            began = time.perf_counter()
            run()
            if turn:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def compared(turns: int, per: float = 1.0, **work: Callable[[], Any]) -> dict[str, float]:
    """Return the median milliseconds of each function, and the median of its speed relative to ``local``."""
    seconds = in_turn(turns, **work)
    result = {f"{name}_ms": round(1000 * statistics.median(values) / per, 3) for name, values in seconds.items()}
    for name, values in seconds.items():
        if name != "local":
            ratios = [a / b for a, b in zip(seconds["local"], values, strict=True)]
            result[f"{name}_speed"] = round(statistics.median(ratios), 3)
    return result


def spec_of(data: str, clients: int, model: Any, **tables: Any) -> fs.Experiment:
    partition = {"name": "dirichlet", "alpha": 0.5, "clients": clients}
    return fs.Experiment.from_table({"data": data, "partition": partition, "model": model, **tables})


def fedavg(data: str, model: str, turns: int, pool: WorkerPool) -> dict[str, float]:
    """Time a round with 10 of 100 clients."""
    training = {"lr": 0.05, "local_epochs": 2, "clients_per_round": 10}
    alone, team = (spec_of(data, 100, model, training=training | {"workers": n}) for n in (1, len(pool)))
    return compared(turns, local=Run(alone, None).step, local_team=Run(team, None).step, ray=Run(alone, pool).step)


def exchange(clients: int, turns: int, pool: WorkerPool) -> dict[str, float]:
    """Time an exchange that needs almost no work of clients."""
    spec = spec_of("digits", 10, "mlp")
    local, there = Run(spec, None), Run(spec, pool)
    return compared(turns, local=lambda: local.sizes(clients), ray=lambda: there.sizes(clients))


def stratify(turns: int, pool: WorkerPool, **method: Any) -> dict[str, float]:
    """Time one batch (64 samples of 10 clients) or one hop of single-sample mode, for an MLP of 166,310 parameters."""
    table = {"name": "stratify", "cap": 40, **method}
    training = {"batch_size": 64, "lr": 0.05, "workers": 1}
    spec = spec_of("digits", 10, "mlp", method=table, training=training | {"execution": "per-client"})
    fused = spec_of("digits", 10, "mlp", method=table, training=training)
    local, there, at_once = Run(spec, None), Run(spec, pool), Run(fused, None)
    local.step(), there.step()
    log = local.federation.log
    parts = log.hops or log.exchanges
    return compared(turns, per=parts, local=local.step, ray=there.step, local_fused=at_once.step) | {"parts": parts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--data", default="mnist")
    options = parser.parse_args()
    turns = options.turns
    torch.set_num_threads(1)
    with ExitStack() as closing:
        logging.getLogger("ray").setLevel(logging.ERROR)
        ray.init(
            address="local",
            num_cpus=options.workers,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
        )
        closing.callback(ray.shutdown)
        pool = closing.enter_context(WorkerPool(options.workers))
        results: dict[str, Any] = {"workers": options.workers}
        for name, measure in {
            "exchange, 1 client": lambda: exchange(1, 20 * turns, pool),
            "exchange, 10 clients": lambda: exchange(10, 20 * turns, pool),
            "stratify, a batch": lambda: stratify(turns, pool),
            "stratify, a hop": lambda: stratify(turns, pool, mode="single"),
            "fedavg, mlp": lambda: fedavg(options.data, "mlp", turns, pool),
            "fedavg, cnn": lambda: fedavg(options.data, "cnn", turns, pool),
        }.items():
            results[name] = measure() | {"load": round(os.getloadavg()[0], 1)}
            print(name, json.dumps(results[name]), flush=True)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "ray_speed.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
