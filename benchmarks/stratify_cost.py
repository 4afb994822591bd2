"""Compare the time of Stratify's batches and single-sample steps with that of centralised training, and count hops.

    python benchmarks/stratify_cost.py [--data mnist] [--samples 12800] [--labels cifar10] [--only mlp,cnn,resnet9,hops]

The compared functions take turns in one process: an epoch of batch mode in the local engine and an epoch of centralised
training (same model, batch size, optimiser and data), or a single-sample step and a step of a plain PyTorch loop. The
medians over the turns, in processor time and in elapsed time, are written to ``benchmarks/results/stratify_cost.json``.
ResNet-9 with BatchNorm is measured on a few batches of 128, with one thread and with two. In a hop, the model is passed
to the next client. Hops are counted without training, and plotted in ``benchmarks/results/stratify_hops.png``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import fedstrata as fs
from fedstrata.base import style
from fedstrata.clients.client import ClientContext, StateStore
from fedstrata.engines import make_engine
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import Weights
from fedstrata.papers.calculations import transfers
from fedstrata.reporting.axes import log_ticks
from fedstrata.runs.preparation import Prepared, prepare
from fedstrata.runs.simulation import make_context
from fedstrata.stratify.client_single import stepper_of

RESULTS = Path(__file__).parent / "results"
CHUNKS = (1, 2, 3, 5, 8, 12, 20, 35, 50, 75, 100, 150)


def spec_of(
    data: dict[str, Any], model: str, partition: dict[str, Any], batch_size: int = 64, **method: Any
) -> fs.Experiment:
    training = {"batch_size": batch_size, "lr": 0.01}
    table = {"data": data, "model": model, "training": training, "method": {"name": "stratify", **method}}
    return fs.Experiment.from_table(table | {"partition": {"clients": 10, **partition}})


def in_turn(turns: int, **work: Callable[[], Any]) -> tuple[dict[str, float], dict[str, float]]:
    """Run functions in turns, and return their median processor seconds and elapsed seconds, without the first turn."""
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in work}
    for turn in range(turns + 1):
        for name, run in work.items():
            began = time.process_time(), time.perf_counter()
            run()
            if turn:
                spent[name].append((time.process_time() - began[0], time.perf_counter() - began[1]))
    medians = {name: np.median(values, axis=0).tolist() for name, values in spent.items()}
    return {name: both[0] for name, both in medians.items()}, {name: both[1] for name, both in medians.items()}


def context_of(prepared: Prepared) -> ClientContext:
    return make_context(prepared)


def batch_epochs(spec: fs.Experiment, turns: int, threads: int = 1) -> dict[str, float]:
    """Return the seconds per batch of batch mode and of centralised training, over whole epochs, and their ratio."""
    torch.set_num_threads(threads)
    prepared = prepare(spec)
    config, data = prepared.config, prepared.data
    federation = Federation(make_engine("local", context_of(prepared), StateStore()), config, spec.availability)
    federation.begin(0)
    state = spec.method.init(federation, Weights(config.model.params(), config.model.buffers()))
    round = 0

    def stratify() -> None:
        nonlocal state, round
        round += 1
        federation.begin(round)
        state, _ = spec.method.run_round(federation, state)

    module = prepare(spec).config.model.module.train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    generator = np.random.default_rng(0)
    batches = -(-data.train_size // config.training.batch_size)

    def centralised() -> None:
        for batch in np.array_split(generator.permutation(data.train_size), batches):
            where = torch.from_numpy(batch)
            optimizer.zero_grad()
            F.cross_entropy(module(data.inputs(where)), data.y_train[where]).backward()
            optimizer.step()

    spent, clock = in_turn(turns, centralised=centralised, stratify=stratify)
    torch.set_num_threads(1)
    found = spent if threads == 1 else clock
    ratios = {"ratio": found["stratify"] / found["centralised"], "clock": clock["stratify"] / clock["centralised"]}
    return {name: seconds / batches for name, seconds in found.items()} | ratios


def single_steps(spec: fs.Experiment, turns: int, count: int = 40) -> dict[str, float]:
    """Return the microseconds of a single-sample step of a client, and of a step of a plain PyTorch loop."""
    prepared = prepare(spec)
    data, model = prepared.data, prepared.config.model
    stepper = stepper_of(context_of(prepared), model)
    where = torch.arange(count)
    x, y = data.inputs(where), data.y_train[where]
    module = prepare(spec).config.model.module.train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)

    def plain() -> None:
        for i in range(count):
            optimizer.zero_grad()
            F.cross_entropy(module(x[i : i + 1]), y[i : i + 1]).backward()
            optimizer.step()

    def ours() -> None:
        stepper.run(x, y, 0.01)

    spent, _ = in_turn(20 * turns, plain=plain, stratify=ours)
    found = {name: 1e6 * seconds / count for name, seconds in spent.items()}
    return found | {"ratio": found["stratify"] / found["plain"]}


def single_epoch(spec: fs.Experiment) -> dict[str, float]:
    """Return the microseconds per sample in an epoch of single-sample mode; time outside of steps is overhead."""
    history = fs.run(fs.Experiment.from_table(spec.to_spec() | {"evaluation": {"every": 0}, "training": _two()}))
    record = history[0]  # the second round evaluates
    return {"us_a_sample": 1e6 * record["seconds"] / record["samples"], "hops": record["hops"]}


def _two() -> dict[str, Any]:
    return {"rounds": 2, "lr": 0.01}


def hops(spec: fs.Experiment) -> dict[str, Any]:
    """Return the hops per sample in an epoch, for several chunk sizes, computed without training."""
    found: dict[str, Any] = {"chunk_sizes": list(CHUNKS)}
    for name, retain, weighted in (
        ("uniform, retain 0.5", 0.5, False),
        ("weighted, retain 0.5", 0.5, True),
        ("uniform, retain 1", 1.0, False),
    ):
        curve = [round(count, 4) for count in transfers(spec, CHUNKS, retain=retain, weighted=weighted)]
        found[name] = curve
        found[f"saved by chunk size 5, {name}"] = round(1 - curve[CHUNKS.index(5)] / curve[0], 4)
    return found


def draw_hops(found: dict[str, Any], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
    rules = [name for name in found if name.startswith(("uniform", "weighted"))]
    for name, line in zip(rules, style.SERIES[1:], strict=False):
        axes.plot(
            found["chunk_sizes"], found[name], line.dash, color=line.colour.light, marker="o", markersize=3, label=name
        )
    axes.axvline(5, color=style.GRID.light, zorder=0)
    axes.set(xscale="log", xlabel="chunk size", ylabel="hops / samples", ylim=(0, 1.02))
    axes.set_title("CIFAR-10, Dirichlet(0.5), 10 clients", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    log_ticks(axes.xaxis)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--samples", type=int, default=12_800)
    parser.add_argument("--labels", default="cifar10")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument(
        "--only",
        default="mlp,cnn,resnet9,hops",
        help="comma-separated parts to measure; results of other parts are kept",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    turns, only = arguments.turns, arguments.only.split(",")
    data = {"name": arguments.data, "limit": arguments.samples}
    dirichlet = {"name": "dirichlet", "alpha": 0.5}
    path = RESULTS / "stratify_cost.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    found |= {"torch": torch.__version__, "threads": 1}
    for model in [model for model in ("mlp", "cnn") if model in only]:
        # An uncapped schedule uses the same samples as an epoch of centralised training.
        found[f"batch epoch, {model}"] = batch_epochs(spec_of(data, model, dirichlet, schedule="uncapped"), turns)
        found[f"single step, {model}"] = single_steps(spec_of(data, model, dirichlet), turns)
        found[f"single epoch, {model}"] = single_epoch(spec_of(data, model, dirichlet, mode="single"))
        print(json.dumps(found, indent=1), flush=True)
    if "resnet9" in only:
        resnet = spec_of(
            {"name": "cifar10", "limit": 256}, "resnet9", {"name": "classes", "per_client": 1}, 128, schedule="uncapped"
        )
        for threads in (1, 2):
            found[f"batch of 128, resnet9, {threads} thread(s)"] = batch_epochs(resnet, min(turns, 3), threads)
    if "hops" in only:
        found["hops"] = hops(spec_of({"name": arguments.labels}, "cnn", dirichlet))
        draw_hops(found["hops"], RESULTS / "stratify_hops.png")
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({name: value for name, value in found.items() if name != "hops"}, indent=1))


if __name__ == "__main__":
    main()
