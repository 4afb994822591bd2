"""Measure the time of exchanges over NVFlare with 2 and 10 sites, and of a batch of Stratify.

    python benchmarks/engines.py [--deploy]

The exchanges are requests that need no work, sums over all clients, and hops (the model is passed from client to
client). The results are medians. ``--deploy`` adds a deployment of two sites as processes with mutual TLS. The sites
import this module.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

import fedstrata as fs
from fedstrata.base.records import record
from fedstrata.clients.client import Client
from fedstrata.clients.handling import handles
from fedstrata.federation.allowed import Agreed, Allowed
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import Reply, Request, RequestRule, Weights
from fedstrata.methods.base import Method
from fedstrata.sampling.client_sizes import SizeReport
from fedstrata.sites.federation import Sites
from fedstrata.sites.local_deployment import try_out
from fedstrata.sites.simulator import simulate
from fedstrata.stratify.messages import Steps

EXCHANGES = 100
HERE = Path(__file__).parent
NONE = torch.empty(0, dtype=torch.int64)


@record("bench/Added")
class Added(Reply):
    """The reply to ``Add``: the sum."""

    total: Tensor


@record("bench/Add")
class Add(Request):
    """A request for a sum over all clients, each of which adds 64 numbers."""

    reply_type: ClassVar[type[Reply]] = Added
    rule = RequestRule("64 ones", together=True)


@handles(Add)
def add(client: Client, request: Add) -> Added:
    """Compute the sum by one all-reduce."""
    assert client.group is not None
    return Added(client.group.all_reduce_sum(torch.ones(64)))


@record("bench/Nothing")
class Nothing:
    """The state of the method: only the model."""

    weights: Weights


class Echo(Method):
    """A method that asks clients for almost no work many times, and reports the time of each exchange."""

    paper: ClassVar[str] = "none"
    handlers = (add,)

    def allowed(self, agreed: Agreed) -> list[Allowed]:
        """Allow each request any number of times."""
        hop = Allowed(Steps, times=None, rule=RequestRule("the model as it came", relay=True))
        return [Allowed(SizeReport, times=None), hop, Allowed(Add, times=None)]

    def init(self, federation: Federation, weights: Weights) -> Nothing:
        """Return the initial model, which never changes."""
        return Nothing(weights)

    def run_round(self, federation: Federation, state: Nothing) -> tuple[Nothing, dict[str, Any]]:
        """Measure many exchanges of every kind."""
        clients = range(federation.config.clients)
        size, empty = SizeReport(federation.round, 0, 1.0), Steps(federation.round, NONE, NONE, False)
        hops = [(client, empty) for _ in range(-(-EXCHANGES // len(clients))) for client in clients]
        began = time.perf_counter()
        federation.relay(hops, state.weights)
        return state, {
            "hop_ms": 1e3 * (time.perf_counter() - began) / len(hops),
            "ask_ms": _median_ms(lambda: federation.ask(clients, size)),
            "sum_ms": _median_ms(lambda: federation.ask(clients, Add(), together=True)),
        }


def _median_ms(work: Callable[[], Any]) -> float:
    times = []
    for _ in range(EXCHANGES):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times)


def _echo(clients: int) -> fs.Experiment:
    return fs.Experiment.from_table(
        {
            "method": {"name": "engines:Echo"},
            "partition": {"name": "iid", "clients": clients},
            "model": {"name": "mlp", "hidden": [32]},
            "training": {"rounds": 2, "execution": "per-client"},
            "evaluation": {"every": 0},
        }
    )


def _stratify(clients: int) -> fs.Experiment:
    return fs.Experiment.from_table(
        {
            "method": {"name": "stratify"},
            "partition": {"name": "iid", "clients": clients},
            "model": {"name": "mlp", "hidden": [32]},
            "training": {"rounds": 3, "batch_size": 32, "execution": "per-client"},
            "evaluation": {"every": 0},
        }
    )


def _batch_ms(history: fs.History) -> float:
    """Return the median milliseconds of a batch, without the first round, in which imports and planning happen."""
    return statistics.median(1e3 * record["seconds"] / -(-record["samples"] // 32) for record in history[1:])


def _show(label: str, history: fs.History) -> None:
    last = history[-1]
    print(f"| {label} | {last['ask_ms']:.1f} | {last['hop_ms']:.1f} | {last['sum_ms']:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deploy", action="store_true")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    sys.path.insert(0, str(HERE))
    print("| sites | question and answers, ms | hop, ms | sum over all, ms |\n|---|---|---|---|", flush=True)
    batches: dict[int, tuple[float, float]] = {}
    for sites in (2, 10):
        echo, there = simulate([(_echo(sites), None), (_stratify(sites), None)], sites=sites)
        _show(f"local, {sites}", fs.run(_echo(sites)))
        _show(f"simulator, {sites}", echo)
        batches[sites] = _batch_ms(fs.run(_stratify(sites))), _batch_ms(there)
    if options.deploy:
        with tempfile.TemporaryDirectory() as place:
            own = {"allow": ["engines"]}
            table = {"server": {"port": 18542, **own}, "policy": {"min_samples": 1}, "site": {"a": own, "b": own}}
            folder = try_out(
                _echo(2), Sites.model_validate(table), Path(place) / "fed", base_dir=HERE, report=lambda line: None
            )
            _show("mutual TLS, 2", fs.History.load(folder))
    for sites, (here, there) in batches.items():
        print(f"Stratify, a batch, {sites} sites: {here:.1f} ms here, {there:.1f} ms there", flush=True)


if __name__ == "__main__":
    main()
