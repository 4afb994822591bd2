"""Compare a GPU with the CPU of the same machine: training samples per second of FedAvg.

    python benchmarks/devices.py [--turns 3]

On the CPU, clients train in one worker process per core; on the GPU, one client trains after another. The devices take
turns in one process. Ten of ten clients train in each round, and models are not evaluated. Large models have so few
samples that the CPU needs seconds. The GPU is then also measured alone, with more samples (``larger``). Inputs are
random numbers of the usual shapes, because only the time is measured. The medians and the ratio GPU / CPU, with its
95 % interval, are written to ``benchmarks/results/devices.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from paired import ratio_of
from torch import Tensor, nn

import fedstrata as fs
from fedstrata.runs.preparation import prepare
from fedstrata.runs.simulation import Simulation

RESULTS = Path(__file__).parent / "results"
CLIENTS = 10
TOKENS, WORDS = 128, 8000
"""Length of a text, and size of the vocabulary."""


class Transformer(nn.Module):
    """An encoder of six layers with 512 features (19 million parameters) that classifies texts by their mean."""

    def __init__(self, shape: tuple[int, ...], classes: int, features: int = 512, layers: int = 6) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, features)
        self.places = nn.Parameter(0.02 * torch.randn(shape[0], features))
        layer = nn.TransformerEncoderLayer(features, 8, 2 * features, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, classes) of texts ``x`` (B, T) of token ids."""
        return self.head(self.encoder(self.words(x) + self.places).mean(1))


WORK: dict[str, dict[str, Any]] = {
    "MLP 784-200-10": {"shape": (28, 28), "samples": 600, "model": {"name": "mlp", "hidden": [200]}},
    "CNN": {"shape": (28, 28), "samples": 600, "model": "cnn"},
    "ResNet-18": {"shape": (3, 32, 32), "samples": 32, "larger": 256, "model": {"name": "resnet18", "norm": "gn"}},
    "Transformer": {"shape": (TOKENS,), "samples": 16, "larger": 128, "model": "devices:Transformer"},
}
"""Each workload's shape of a sample, samples per client, and model."""


def write_data(path: Path, shape: tuple[int, ...], samples: int) -> None:
    """Write a data set of random images, or of texts if ``shape`` is a length, with ten classes."""
    draw = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {}
    for part, count in (("train", CLIENTS * samples), ("test", 100)):
        size = (count, *shape)
        ids = len(shape) == 1
        arrays[f"x_{part}"] = draw.integers(0, WORDS, size) if ids else draw.integers(0, 256, size, dtype=np.uint8)
        arrays[f"y_{part}"] = np.arange(count) % 10
    np.savez(path, **arrays)


def simulation(folder: Path, name: str, samples: int, device: str) -> Simulation:
    """Return the simulation of a workload with some samples per client on a device."""
    work = WORK[name]
    path = folder / f"{name} {samples}.npz"
    if not path.exists():
        write_data(path, work["shape"], samples)
    table = {
        "data": {"name": str(path), "normalize": "keep" if len(work["shape"]) == 1 else "unit"},
        "partition": {"name": "iid", "clients": CLIENTS},
        "model": work["model"],
        "training": {
            "rounds": 1000,
            "clients_per_round": CLIENTS,
            "local_epochs": 1,
            "batch_size": 32,
            "lr": 0.01,
            "device": device,
        },
        "evaluation": {"every": 0},
    }
    return Simulation(prepare(fs.Experiment.from_table(table)))


def seconds_of(name: str, samples: int, devices: tuple[str, ...], turns: int) -> dict[str, list[float]]:
    """Return the seconds of each round of a workload, on devices that take turns."""
    seconds: dict[str, list[float]] = {device: [] for device in devices}
    with tempfile.TemporaryDirectory() as folder:
        runs = {device: simulation(Path(folder), name, samples, device) for device in devices}
        for turn in range(turns + 1):
            for device, run in runs.items():
                began = time.perf_counter()
                run.step()
                torch.cuda.synchronize()
                if turn:  # the first turn starts the workers and loads the GPU's libraries
                    seconds[device].append(round(time.perf_counter() - began, 3))
        for run in runs.values():
            run.close()
    return seconds


def measure(name: str, turns: int) -> dict[str, Any]:
    """Return the samples per second of a workload on both devices, and their ratio."""
    samples, larger = WORK[name]["samples"], WORK[name].get("larger")
    seconds = seconds_of(name, samples, ("cpu", "cuda"), turns)
    result: dict[str, Any] = {"samples": samples, **rates_of(samples, seconds)}
    result |= {"ratio": str(ratio_of(seconds["cpu"], seconds["cuda"])), "seconds": seconds}
    if larger is not None:
        more = seconds_of(name, larger, ("cuda",), turns)
        result["larger"] = {"samples": larger, **rates_of(larger, more), "seconds": more}
    return result


def rates_of(samples: int, seconds: dict[str, list[float]]) -> dict[str, float]:
    """Return each device's median of training samples per second."""
    return {device: round(CLIENTS * samples / statistics.median(each), 1) for device, each in seconds.items()}


def main() -> None:
    """Measure each workload, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3)
    turns = parser.parse_args().turns
    results: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "work": {},
    }
    for name in WORK:
        results["work"][name] = measured = measure(name, turns)
        print(f"{name}: CPU {measured['cpu']:.0f}, GPU {measured['cuda']:.0f} samples/s, ratio {measured['ratio']}")
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "devices.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
