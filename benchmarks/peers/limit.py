"""Profile a round, and compare its speed with the fastest possible training on this machine.

    python benchmarks/peers/limit.py [cnn mlp small]

The fastest possible training is a bare loop that trains the same model on the same number of samples, with the batch
size that is fastest. The round and the loop take turns in one thread; times are CPU time.
"""

from __future__ import annotations

import copy
import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from fedstrata_run import model_of, partition_of
from work import SETTINGS, Setting, arrays

import fedstrata as fs
from fedstrata.base.process import prepare_process
from fedstrata.runs.preparation import prepare
from fedstrata.runs.simulation import Simulation

PARTS = {
    "local training": ("local.py", "train"),
    "· forward, backward, update": (("local.py", "loss_and_gradient"), ("steps.py", "step"), ("sgd.py", "step")),
    "· samples in a new order": ("local.py", "shuffled"),
    "· model in and out": (("model.py", "loaded"), ("model.py", "_copy_into"), ("model.py", "_copies")),
    "samples made floats": ("dataset.py", "inputs"),
    "checks of replies": ("reply_checks.py", "defect_of"),
    "aggregation": ("base.py", "combine"),
    "sizes of messages": ("records.py", "size"),
}


SHARE, REPETITIONS = 2000, 5
"""The number of samples that the bare loop trains at a time, and the number of turns of the loop and a round."""


class Round:
    """A federation in this process; each call runs a round."""

    def __init__(self, setting: Setting, invited: int) -> None:
        x, y = arrays(setting.data)
        training = fs.Training(
            clients_per_round=invited,
            local_epochs=setting.epochs,
            batch_size=setting.batch,
            lr=setting.lr,
            rounds=1_000_000,
        )
        spec = fs.Experiment(
            partition=partition_of(setting),
            model=model_of(setting),
            training=training,
            evaluation=fs.Evaluation(every=0),
        )
        prepared = prepare(spec, data=fs.from_arrays(x, y, x[:100], y[:100], normalize="unit"))
        self.config, self.data = prepared.config, prepared.data
        self._simulation = Simulation(prepared)

    def __call__(self) -> None:
        """Run the next round."""
        self._simulation.step()


def central(round_: Round, samples: int, batch: int, lr: float) -> Callable[[], None]:
    """Return a function that trains the model by a bare loop over tensors in memory."""
    x, y = round_.data.inputs(torch.arange(samples)), round_.data.labels(torch.arange(samples))
    module = copy.deepcopy(round_.config.model.module).train()
    params = list(module.parameters())

    def go() -> None:
        for begin in range(0, samples, batch):
            loss = F.cross_entropy(module(x[begin : begin + batch]), y[begin : begin + batch])
            gradient = torch.autograd.grad(loss, params)
            with torch.no_grad():
                torch._foreach_add_(params, list(gradient), alpha=-lr)

    return go


def seconds(go: Callable[[], None]) -> float:
    began = time.process_time()
    go()
    return time.process_time() - began


def main() -> None:
    prepare_process(1)
    for name in sys.argv[1:] or ["cnn", "mlp", "small"]:
        setting = SETTINGS[name]
        invited = {"cnn": 1, "mlp": 2}.get(name, setting.invited)
        round_ = Round(setting, invited)
        samples = invited * setting.epochs * setting.samples
        sizes = (50, 100, 200, 500)
        loops = {size: central(round_, min(samples, SHARE), size, setting.lr) for size in sizes}
        round_()
        for go in loops.values():
            go()
        ratios: dict[int, list[float]] = {size: [] for size in sizes}
        for _ in range(REPETITIONS):
            ours = samples / seconds(round_)
            for size, go in loops.items():
                ratios[size].append(ours / (min(samples, SHARE) / seconds(go)))
        limit = {size: statistics.median(found) for size, found in ratios.items()}
        best = min(limit, key=lambda size: limit[size])
        print(f"\n{name}: {100 * limit[best]:.0f} % of the centralised limit (a bare loop, batch {best}; others: "
              + ", ".join(f"{size}: {100 * share:.0f} %" for size, share in limit.items()) + ")")  # fmt: skip
        profile = cProfile.Profile(time.process_time)
        profile.runcall(round_)
        table(profile)


def table(profile: cProfile.Profile) -> None:
    """Print the share of each part of a round in its time."""
    stats: dict[tuple[str, int, str], Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    whole = max(row[3] for key, row in stats.items() if key[2] == "run_round")
    print("| part of a round | share |\n|---|---:|")
    for label, where in PARTS.items():
        wanted = where if isinstance(where[0], tuple) else (where,)
        spent = sum(row[3] for key, row in stats.items() if any(key[0].endswith(f) and key[2] == n for f, n in wanted))
        print(f"| {label} | {100 * spent / whole:.1f} % |")


if __name__ == "__main__":
    main()
