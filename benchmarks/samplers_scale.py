"""Measure the time and the memory of choosing clients, for 100, 1,000 and 10,000 clients.

    python benchmarks/samplers_scale.py [--results benchmarks/results]

Every row of the table is measured in its own process, so that peak memory is measured separately. All clients have 60
samples of MNIST (samples repeat if there are not enough), and 50 clients per round train 5 epochs in batches of 32. The
work of training is therefore the same for every number of clients. Times are processor time. Selection is everything
that the client sampler does: requests to clients, including the clients' work to answer them, strata, allocation,
draws, and updates from the replies. FedSTS already has a compressed gradient of every client when the measurement
begins. The first rounds, in which it would know only few clients, are therefore left out.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

SAMPLES, INVITED, ROUNDS = 60, 50, 14
CLIENTS = (100, 1_000, 10_000)
SAMPLERS: dict[str, dict[str, Any]] = {
    "uniform": {"name": "uniform"},
    "fedsts, all": {"name": "fedsts", "refresh": "all"},
    "fedsts, participants": {"name": "fedsts", "refresh": "participants"},
    "fedsts, participants, asked": {"name": "fedsts", "refresh": "participants", "gradients": "asked"},
    "fedsts, participants, 256 coordinates": {"name": "fedsts", "refresh": "participants", "coordinates": 256},
    "fedssar": {"name": "fedssar"},
    "fedssar, 256 coordinates": {"name": "fedssar", "coordinates": 256},
    "clustered 1": {"name": "clustered", "algorithm": 1},
    "clustered 2": {"name": "clustered", "algorithm": 2},
    "weighted": {"name": "weighted"},
    "power-of-choice": {"name": "power-of-choice"},
}
MODELS = {"mlp": list(SAMPLERS), "cnn": ["uniform", "fedsts, participants", "fedsts, participants, asked"]}
"""The samplers that are measured with each model. Only few are measured with the CNN, because a round can take
minutes."""

SLOW = {("fedsts, all", 10_000), ("clustered 2", 10_000)}
"""Pairs that are left out as too slow: all clients train in every round, or Ward's clustering has 10,000 points."""


def measure(label: str, clients: int, model: str) -> dict[str, float]:
    """Run an experiment in this process, and return its times and its peak memory."""
    import numpy as np

    import fedstrata as fs
    from fedstrata.data.partitions.base import Assignment
    from fedstrata.sampling.base import CLIENT_SAMPLERS

    class Repeated(fs.Partition):
        """Every client has SAMPLES samples, which repeat if needed. Neighbouring clients have similar labels."""

        def split(self, dataset: fs.Dataset, seed: int) -> Assignment:
            order = np.argsort(dataset.y_train.numpy(), kind="stable")
            indices = np.resize(order, self.clients * SAMPLES)
            return Assignment(indices, np.arange(self.clients + 1) * SAMPLES)

        def assign(self, labels: object, domains: object, rng: object) -> list[object]:
            raise NotImplementedError

    spent: list[float] = []
    kind = CLIENT_SAMPLERS.find(SAMPLERS[label]["name"])

    def timed(method: Any) -> Any:
        def wrapped(*arguments: Any) -> Any:
            began = time.process_time()
            try:
                return method(*arguments)
            finally:
                spent.append(time.process_time() - began)

        return wrapped

    select = kind.select

    def informed(sampler: Any, federation: Any, state: Any, weights: Any) -> Any:
        if federation.round == 1 and SAMPLERS[label]["name"] == "fedsts":
            everybody = sampler.model_copy(update={"refresh": "all", "gradients": "asked"})
            _, state = select(everybody, federation, state, weights)
        return select(sampler, federation, state, weights)

    kind.select, kind.observe = timed(informed), timed(kind.observe)
    spec = fs.Experiment(
        data="mnist",
        partition=Repeated(clients=clients),
        method={"name": "fedavg", "client_sampler": SAMPLERS[label]},
        model=model,
        training={
            "rounds": ROUNDS,
            "clients_per_round": INVITED,
            "local_epochs": 5,
            "batch_size": 32,
            "lr": 0.05,
            "workers": 1,
        },
        evaluation=fs.Evaluation(every=0),
    )
    ends = [time.process_time()]
    fs.run(spec, callbacks=[lambda record: ends.append(time.process_time())])
    # The first rounds warm up and let FedSSAR meet every client, and the last round evaluates. These rounds are left
    # out.
    rounds = [end - begin for begin, end in pairwise(ends)][3:-1]
    each = [a + b for a, b in zip(spent[::2], spent[1::2], strict=True)]
    return {
        "first_ms": 1000 * each[0],
        "selection_ms": 1000 * statistics.median(each[3:-1]),
        "round_ms": 1000 * statistics.median(rounds),
        "share": statistics.median(a / b for a, b in zip(each[3:-1], rounds, strict=True)),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = [
        "With up to 1,000 clients, FedSTS's default (*all*) takes more time than training. Selection is everything "
        "that the client sampler does in a round, including the work that it causes at the clients. In each round, "
        f"{INVITED} clients train for five epochs on {SAMPLES} samples of MNIST each. Times are medians of processor "
        "time.",
        "",
        '- *all*, *participants*: `refresh = "all"` or `refresh = "participants"`.',
        '- *asked*: `gradients = "asked"`. FedSTS asks participants for gradients instead of using their updates.',
        "- *256 coordinates*: `coordinates = 256` instead of 2,048.",
        "- *fedsts* also applies to FedSTaS, which selects clients in the same way.",
        "- *first selection*: selection in the first round. Here, FedSTS asks every client for a gradient.",
        # Remove this line when the rows with 10,000 clients have been measured again.
        "- With 10,000 clients, selection with *participants* and *fedssar* takes about 30 ms more per round than "
        "in this table, because the server now copies all gradients.",
        "",
        "| sampler | model | clients | selection, ms | whole round, ms | share of the round, % | first selection, s "
        "| peak memory, MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['sampler']} | {row['model']} | {row['clients']:,} | {row['selection_ms']:.1f} | {row['round_ms']:.0f} "
        f"| {100 * row['share']:.1f} | {row['first_ms'] / 1000:.2f} | {row['peak_mb']:.0f} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, help="folder to write samplers_scale.json and samplers_scale.md to")
    parser.add_argument("--clients", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--sampler", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sampler:
        print(json.dumps(measure(options.sampler, options.clients, options.model)))
        return
    rows = []
    for model, labels in MODELS.items():
        for clients in CLIENTS:
            for label in labels:
                if (label, clients) in SLOW:
                    continue
                command = [sys.executable, __file__, "--clients", str(clients), "--sampler", label, "--model", model]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                row = {"sampler": label, "model": model, "clients": clients}
                row |= json.loads(done.stdout.splitlines()[-1])
                rows.append({key: round(v, 4) if isinstance(v, float) else v for key, v in row.items()})
                print(markdown(rows[-1:]).splitlines()[-1], flush=True)
    if options.results:
        options.results.mkdir(parents=True, exist_ok=True)
        (options.results / "samplers_scale.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        (options.results / "samplers_scale.md").write_text(markdown(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
