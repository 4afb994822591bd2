"""Measure the fraction of a round's time that a site spends on checks of requests and replies, on digits.

Run it as ``python benchmarks/guard.py``, on a quiet machine. One site in this process has all clients. Messages are
bytes, as in a deployment, but no time is spent waiting for a network. The fraction is therefore larger than in a
deployment. The time of a round includes the work of the site and of the server. The time for the site's ledger, which
is written to a disk, is listed separately.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fedstrata as fs
from fedstrata.runs.simulation import Simulation
from fedstrata.sites.engine import NVFlareEngine
from fedstrata.sites.guard import Guard
from fedstrata.sites.ledger import Ledger
from fedstrata.sites.messenger import Messenger
from fedstrata.sites.policy import Policy
from fedstrata.sites.settings import SiteSettings
from fedstrata.sites.site_server import SERVER, SiteServer
from fedstrata.sites.sums import Sums

CHECKS = ("check", "take", "answered", "begin_exchange", "leave", "hop", "save", "fetched_by_server")
JOBS: dict[str, dict[str, Any]] = {
    "fedavg": {"method": "fedavg"},
    "fedavg, QSGD": {"method": "fedavg", "communication": {"up": "qsgd", "down": "qsgd"}},
    "fedstas, ε = 3": {"method": {"name": "fedstas", "epsilon": 3.0, "bound": 300}},
    "sfl": {"method": "sfl"},
    "stratify, batches": {"method": "stratify"},
    "stratify, one by one": {"method": {"name": "stratify", "mode": "single"}},
}


class Clock:
    """A clock that adds up the seconds of all calls of some functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls ``function`` and adds the time of the call to the clock."""

        def call(*args: Any, **how: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **how)
            finally:
                self.seconds += time.perf_counter() - began

        return call


def measured(job: dict[str, Any], rounds: int, folder: Path) -> tuple[float, float, float]:
    """Return the median seconds of a round, of the checks in it, and of the entries in the site's ledger."""
    spec = fs.Experiment.from_table(
        {
            **job,
            "partition": {"name": "iid", "clients": 10},
            "model": {"name": "mlp", "hidden": [64]},
            "training": {"rounds": rounds, "execution": "per-client"},
            "evaluation": {"every": 0, "checkpoint_every": 0},
        }
    )
    prepared, checks, writing = fs.prepare(spec), Clock(), Clock()
    ledger = Ledger(folder / "ledger")
    ledger.append = writing.timed(ledger.append)  # type: ignore[method-assign]
    site_server = SiteServer(
        "a", folder, lambda target, data: b"", SiteSettings(), policy=Policy(min_samples=1), ledger=ledger
    )

    class Transport:
        def is_reachable(self, site: str) -> bool:
            return True

        def send(self, site: str, data: bytes, patience: float, number: int) -> object:
            return site_server.call(SERVER, data)

    engine = NVFlareEngine(
        prepared.config, Messenger(Transport(), ["a"] * 10), Sums(60.0), spec=spec.to_toml(), run="run"
    )
    found: list[tuple[float, float, float]] = []
    with Simulation(prepared, engine) as simulation:
        guard: Guard = site_server._running().guard
        for name in CHECKS:
            setattr(guard, name, checks.timed(getattr(guard, name)))
        for record in simulation:
            found.append((record["seconds"], checks.seconds, writing.seconds))
            checks.seconds = writing.seconds = 0.0
    whole, checking, writing = (statistics.median(column) for column in zip(*found[1:], strict=True))
    return whole, checking, writing


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    print("| job | a round, ms | checks, ms | share | the ledger, ms |\n|---|---:|---:|---:|---:|")
    for name, job in JOBS.items():
        with tempfile.TemporaryDirectory() as place:
            whole, checking, writing = measured(job, options.rounds, Path(place))
        share = checking / whole
        print(f"| {name} | {1e3 * whole:.1f} | {1e3 * checking:.2f} | {share:.2%} | {1e3 * writing:.1f} |", flush=True)


if __name__ == "__main__":
    main()
