"""Clients side by side against the plain loop.

    python benchmarks/vectorised.py [--device auto] [--turns 7]

A round of FedAvg at the clients, in three ways: the plain loop in this process on one core of the processor (``loop``),
clients one after another on the device where that is a GPU (``alone``), and side by side on the device
(``side_by_side``). All ways take turns in one run. Written to ``benchmarks/results/vectorised.json``: median seconds,
samples a second, and the median over the turns of the loop's seconds by the others'. What is trained is compared once.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedstrata as fs
from fedstrata.clients.context import ClientContext
from fedstrata.clients.store import StateStore
from fedstrata.data import from_arrays
from fedstrata.engines.local import LocalEngine
from fedstrata.experiment import assemble
from fedstrata.federation.messages import Fit, FitReply, Weights
from fedstrata.partitions import Assignment
from fedstrata.training.devices import device_of

RESULTS = Path(__file__).parent / "results"
CASES = {
    "MLP 200-100, 100 clients of 60 samples, batch 20": ("mlp", 100, 60, {"batch_size": 20, "local_epochs": 1}),
    "MLP 200-100, 10 clients of 600 samples, batch 50": ("mlp", 10, 600, {"batch_size": 50, "local_epochs": 1}),
    "CNN 16/32, 100 clients of 60 samples, batch 20": ("cnn", 100, 60, {"batch_size": 20, "local_epochs": 1}),
    "CNN 16/32, 10 clients of 600 samples, batch 50": ("cnn", 10, 600, {"batch_size": 50, "local_epochs": 1}),
}
"""Model, clients, samples of each, settings; images of 28×28."""


def images(count: int) -> fs.Dataset:
    """Random images: how fast they are trained does not depend on what they show."""
    generator = np.random.default_rng(0)
    x = generator.integers(0, 256, size=(count + 10, 28, 28), dtype=np.uint8)
    y = np.arange(count + 10) % 10
    return from_arrays(x[:count], y[:count], x[count:], y[count:])


class Way:
    """One way to train a round.

    Args:
        model: A model's name.
        clients: How many.
        each: Samples of each.
        training: How they train.
    """

    def __init__(self, model: str, clients: int, each: int, training: dict[str, Any]) -> None:
        data = images(clients * each)
        spec = fs.Experiment(model=model, training=fs.Training(workers=1, **training))
        assignment = Assignment.from_lists(np.split(np.arange(clients * each), clients))
        config = assemble(spec, data, assignment).config
        self.engine = LocalEngine(ClientContext(config, data, assignment, spec.method.objective_in_use()), StateStore())
        self.request = Fit(1, Weights(config.model.params(), config.model.buffers()), {}, 1.0, 1.0)
        self.clients = clients

    def round(self) -> tuple[float, dict[int, FitReply]]:
        """Seconds that a round takes, and what it gives, which lies on the processor: nothing is left to wait for."""
        began = time.perf_counter()
        replies: dict[int, Any] = dict(
            self.engine.ask(dict.fromkeys(range(self.clients), self.request), together=False)
        )
        seconds = time.perf_counter() - began
        if told := list(self.engine.notes()):
            raise RuntimeError(f"not side by side: {told}")
        return seconds, replies


def ways(device: torch.device, case: tuple[str, int, int, dict[str, Any]]) -> Iterator[tuple[str, Way]]:
    """All ways of a case."""
    model, clients, each, training = case
    yield "loop", Way(model, clients, each, training)
    if device.type != "cpu":
        yield "alone", Way(model, clients, each, {**training, "device": str(device), "vectorise": False})
    yield "side_by_side", Way(model, clients, each, {**training, "device": str(device), "vectorise": True})


def measure(device: torch.device, case: tuple[str, int, int, dict[str, Any]], turns: int) -> dict[str, Any]:
    """Figures of one case."""
    made = dict(ways(device, case))
    first = {name: way.round()[1] for name, way in made.items()}
    apart = max(
        float((tensor - first["loop"][client].weights.params[name]).abs().max())
        for client, reply in first["side_by_side"].items()
        for name, tensor in reply.weights.params.items()
    )
    times: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(turns):
        for name, way in made.items():
            times[name].append(way.round()[0])
    samples = case[1] * case[2]
    return {
        "largest_difference_of_a_parameter": apart,
        "seconds": {name: statistics.median(taken) for name, taken in times.items()},
        "samples_per_second": {name: samples / statistics.median(taken) for name, taken in times.items()},
        "times_as_fast_as_the_loop": {
            name: statistics.median(a / b for a, b in zip(times["loop"], taken, strict=True))
            for name, taken in times.items()
            if name != "loop"
        },
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--turns", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = device_of(args.device)
    machine = (
        torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    )
    figures: dict[str, Any] = {
        "device": str(device),
        "machine": machine,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "turns": args.turns,
        "cases": {},
    }
    for label, case in CASES.items():
        found = figures["cases"][label] = measure(device, case, args.turns)
        ratios = ", ".join(f"{name} {ratio:.2f}" for name, ratio in found["times_as_fast_as_the_loop"].items())
        rates = ", ".join(f"{name} {rate:,.0f}" for name, rate in found["samples_per_second"].items())
        print(f"{label}: {rates} samples/s; times as fast as the loop: {ratios}", flush=True)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "vectorised.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
