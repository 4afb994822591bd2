"""The work that is done with every library: settings, data, models, and the results to print.

This module runs in the environments of all libraries, so it needs only PyTorch and NumPy.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

CORES = len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Setting:
    """One setting of the comparison.

    Args:
        data: The name of the data set.
        model: ``cnn``, ``mlp`` or ``cnn2``.
        clients: The number of clients. They divide a seeded permutation of the training samples among them.
        samples: The number of samples of a client.
        invited: The number of clients that train in a round.
        epochs: The number of epochs of a client in a round.
        batch: The number of samples in a mini-batch.
        lr: The learning rate of SGD.
        rounds: The number of rounds that count; one more round before them warms up.
    """

    data: str
    model: str
    clients: int
    samples: int
    invited: int
    epochs: int
    batch: int
    lr: float
    rounds: int

    @property
    def steps(self) -> int:
        """The number of steps of all clients in a round."""
        return self.invited * self.epochs * -(-self.samples // self.batch)

    @property
    def seen(self) -> int:
        """The number of samples on which clients train in a round; a sample counts once per epoch."""
        return self.invited * self.epochs * self.samples


SETTINGS = {
    "cnn": Setting("mnist", "cnn", 100, 600, 10, 5, 50, 0.05, 2),
    "mlp": Setting("mnist", "mlp", 100, 600, 10, 5, 50, 0.05, 6),
    "small": Setting("mnist", "mlp", 1000, 60, 100, 1, 20, 0.1, 12),
    "cifar": Setting("cifar10", "cnn2", 1000, 50, 50, 1, 10, 0.1, 4),
}
"""The settings: two in which computation takes most of the time, one with many small clients, and the benchmark of
pfl-research (which has 30 rounds)."""


def arrays(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the training set as it is stored: images as bytes (N, H, W[, C]), and labels (N,)."""
    folder = Path(os.environ.get("FEDSTRATA_DATA", "~/.cache/fedstrata")).expanduser()
    with np.load(folder / f"{name}.npz") as file:
        return file["x_train"], file["y_train"].astype(np.int64).ravel()


def tensors(setting: Setting) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all training samples as inputs of a model, (N, C, H, W) float32 in [0, 1], and their labels."""
    x, y = arrays(setting.data)
    x = x[:, None] if x.ndim == 3 else np.moveaxis(x, 3, 1)
    return torch.from_numpy(np.ascontiguousarray(x)).float().div_(255), torch.from_numpy(y)


def owners(setting: Setting) -> list[np.ndarray]:
    """Return the indices of each client's samples."""
    total = setting.clients * setting.samples
    size = 50_000 if setting.data == "cifar10" else 60_000
    return np.split(np.random.default_rng(0).permutation(size)[:total], setting.clients)


@functools.cache
def loaded(setting: Setting) -> tuple[torch.Tensor, torch.Tensor, list[np.ndarray]]:
    """Return the samples, labels and clients of a setting, read once per process.

    Flower sends functions of the main program to its actors again for each client, but not those of this module.
    """
    return *tensors(setting), owners(setting)


def net(name: str) -> nn.Sequential:
    """Build a model, with the same initial parameters for all libraries."""
    torch.manual_seed(0)
    if name == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 100), nn.ReLU(),
                             nn.Linear(100, 10))  # fmt: skip
    if name == "cnn":
        return nn.Sequential(*_block(1, 16, 5), *_block(16, 32, 5), nn.Flatten(), nn.Linear(1568, 128), nn.ReLU(),
                             nn.Linear(128, 10))  # fmt: skip
    # The model of pfl-research's benchmark has two 3x3 convolutions of 32 and 64 channels.
    return nn.Sequential(*_block(3, 32, 3), *_block(32, 64, 3), nn.Flatten(), nn.Linear(4096, 128), nn.ReLU(),
                         nn.Linear(128, 10))  # fmt: skip


def _block(inner: int, outer: int, side: int) -> list[nn.Module]:
    return [nn.Conv2d(inner, outer, side, padding=side // 2), nn.ReLU(), nn.MaxPool2d(2)]


@torch.no_grad()
def final_loss(module: nn.Module, setting: Setting) -> float:
    """Return the mean cross-entropy over 2,000 training samples, which are the same for all libraries."""
    x, y = tensors(setting)
    where = torch.from_numpy(np.concatenate(owners(setting))[:2000])
    return float(F.cross_entropy(module.eval()(x[where]), y[where]))


class Clock:
    """A record of the end of each round, and of the work that was done."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.ends: list[float] = []
        self.cpu: list[float] = []
        self.steps = self.seen = 0

    @property
    def rounds(self) -> int:
        """The number of rounds to run, including the one that warms up."""
        return self.setting.rounds + 1

    def trained(self, steps: int, seen: int) -> None:
        """Add the steps and samples of a client's training."""
        self.steps += steps
        self.seen += seen

    def round_over(self) -> None:
        """Record the time at the end of a round."""
        self.ends.append(time.time())
        self.cpu.append(cpu_seconds())

    def report(self, loss: float, **more: Any) -> None:
        """Print the result as JSON, in the last line of the output."""
        setting, timed = self.setting, self.setting.rounds
        ends = self.ends[: self.rounds]
        done = {
            "seconds": ends[-1] - ends[0],
            "samples": setting.seen * timed,
            "per_second": setting.seen * timed / (ends[-1] - ends[0]),
            "per_cpu_second": setting.seen * timed / (self.cpu[len(ends) - 1] - self.cpu[0]),
            "first_round": ends[0] - float(os.environ.get("BENCH_STARTED", "nan")),
            "loss": loss,
            "steps": self.steps,
            "honest": self.steps == setting.steps * len(self.ends) and self.seen == setting.seen * len(self.ends),
        }
        print(json.dumps(done | more), flush=True)


def cpu_seconds() -> float:
    """Return the CPU time of this process and its descendants in seconds."""
    parents, used = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                stat = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(folder.name)] = int(stat[1])
            used[int(folder.name)] = int(stat[11]) + int(stat[12])
    family = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(used.get(pid, 0) for pid in family) / os.sysconf("SC_CLK_TCK")


def parse() -> tuple[str, Setting]:
    """Return the name and the setting that the command line chooses."""
    parser = argparse.ArgumentParser()
    parser.add_argument("setting", choices=SETTINGS)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--clients", type=int)
    parser.add_argument("--invited", type=int)
    options = parser.parse_args()
    setting = SETTINGS[options.setting]
    torch.set_num_threads(int(os.environ.get("BENCH_THREADS", CORES)))
    changed = {key: value for key in ("rounds", "clients", "invited") if (value := getattr(options, key))}
    return options.setting, Setting(**{**vars(setting), **changed})


def named(module: nn.Sequential, params: dict[str, torch.Tensor]) -> nn.Sequential:
    """Load into ``module`` the parameters of a model with the same layers in the same order; return ``module``."""
    own = module.state_dict()
    module.load_state_dict(OrderedDict(zip(own, params.values(), strict=True)))
    return module
