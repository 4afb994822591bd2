"""Compare the time of an evaluation per client with the time of one evaluation of all samples at once.

    python benchmarks/evaluation.py [--data mnist] [--repeats 201]

The evaluation per client applies the global model to each client's own test samples, and computes the metrics of every
client and their statistics over clients. The two evaluations take turns. The results are medians of the processor time
of one thread, and of the ratios.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

import fedstrata as fs
from fedstrata.base.errors import DataError
from fedstrata.evaluation.evaluator import Evaluator
from fedstrata.evaluation.holdouts import HeldOut
from fedstrata.evaluation.predictions import predict
from fedstrata.federation.messages import Weights

CASES = {"digits": 50, "mnist": 1000}
"""The number of clients for each data set."""


def seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def measure(name: str, metrics: list[str], repeats: int) -> tuple[int, float, float, float]:
    """Return the number of samples, the median seconds of both evaluations, and the median of their ratio."""
    clients = CASES[name]
    spec = fs.Experiment(
        data=name,
        partition=fs.Dirichlet(alpha=0.5, clients=clients, min_size=5),
        evaluation=fs.Evaluation(client_test=0.2, metrics=metrics),
    )
    prepared = fs.prepare(spec)
    model, data, own = prepared.config.model, prepared.data, prepared.held.own_test
    assert own is not None
    weights, indices = Weights(model.params(), model.buffers()), np.sort(own.indices)
    evaluator = Evaluator(spec.evaluation, model, data, HeldOut(own_test=own), clients)

    def by_client() -> None:
        parts = evaluator._predict_held(weights)
        values = evaluator._by_client(parts["clients"], own.owners, clients)
        evaluator._with_unheard(values, own.sizes, range(0, clients, 2))
        evaluator._table(values, own.sizes)

    def at_once() -> None:
        found = predict(model, weights, data, "train", indices)
        for metric in spec.evaluation.metrics:
            metric.of(found)

    by_client(), at_once()
    pairs = [(seconds(at_once), seconds(by_client)) for _ in range(repeats)]
    once, each = (statistics.median(column) for column in zip(*pairs, strict=True))
    return len(indices), once, each, statistics.median(b / a for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", choices=CASES, action="append")
    parser.add_argument("--repeats", type=int, default=201)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| data | clients | samples | metrics | at once, ms | by client, ms | ratio |\n|---|---|---|---|---|---|---|")
    for name in options.data or CASES:
        for metrics in (["accuracy"], ["accuracy", "macro-f1", "log-loss"], ["accuracy", "auroc"]):
            try:
                samples, once, each, ratio = measure(name, metrics, options.repeats)
            except DataError as error:
                print(f"{name}: {error}")
                break
            cells = (name, CASES[name], samples, ", ".join(metrics))
            print(f"| {' | '.join(map(str, cells))} | {once * 1e3:.2f} | {each * 1e3:.2f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
