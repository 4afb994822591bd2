"""Sites that hang or are gone: what it costs the others."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from pathlib import Path
from typing import Any

import pytest
from site_engine import make_site_engine

import fedstrata as fs
from fedstrata.runs.preparation import prepare
from fedstrata.runs.simulation import run_prepared
from fedstrata.sites.settings import SiteSettings
from fedstrata.sites.site_server import SERVER, SiteServer
from fedstrata.sites.sums import Sums
from fedstrata.sites.wire import Ask, Envelope, Hop, SiteLostError, read

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))  # for the model, which sites load by its name

Hook = Callable[[str, Any], str]
"""What becomes of a message to a site: ``""``, ``hang`` or ``gone``."""


class Transport:
    """Sites in this process, each call with a limit to its time, as NVFlare's calls have one."""

    def __init__(self, hook: Hook) -> None:
        self.site_servers: dict[str, SiteServer] = {}
        self.hook, self.stop = hook, threading.Event()
        self._pool = ThreadPoolExecutor(16)

    def is_reachable(self, site: str) -> bool:
        return True

    def send(self, site: str, data: bytes, patience: float, number: int) -> object:
        what = self.hook(site, read(data, Envelope).body)
        if what == "gone":
            raise SiteLostError("it is gone")
        work = self._pool.submit(self._call, site, data, what)
        try:
            return work.result(timeout=patience)
        except TimeoutError:
            raise SiteLostError(f"it did not answer within {patience:g} s") from None

    def _call(self, site: str, data: bytes, what: str) -> bytes:
        if what == "hang":
            self.stop.wait()
        return self.site_servers[site].call(SERVER, data)


def run(spec: fs.Experiment, place: Path, hook: Hook, patience: float = 4.0) -> fs.History:
    prepared, sums, transport = prepare(spec), Sums(patience), Transport(hook)
    for name in "abc":

        def carry(target: str, data: bytes, name: str = name) -> object:
            return sums.add_up(name, data) if target == SERVER else transport.site_servers[target].call(name, data)

        settings = SiteSettings(patience=patience, simulated=True)
        transport.site_servers[name] = SiteServer(name, place / name, carry, settings)
    toml, site_of_client = spec.to_toml(), list("abc")
    engine = make_site_engine(prepared.config, transport, site_of_client, sums, spec=toml, run="run", patience=patience)
    try:
        return run_prepared(prepared, None, engine)
    finally:
        transport.stop.set()


def spec(method: dict[str, Any], rounds: int, **tables: Any) -> fs.Experiment:
    return fs.Experiment.from_table(
        {
            "data": {"name": "digits", "limit": 90},
            "partition": {"name": "iid", "clients": 3},
            "method": method,
            "training": {"rounds": rounds, "batch_size": 30, "execution": "per-client", "local_steps": 1},
            "evaluation": {"every": 0},
            **tables,
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [pytest.param({"name": "stratify", "cap": 6}, id="stratify", marks=pytest.mark.long), {"name": "fedtan"}],
)
def test_a_site_that_hangs_is_lost_and_the_others_are_not(method: dict[str, Any], tmp_path: Path) -> None:
    """The barrier and the calls that wait at it had one patience: all were lost together."""
    asked = []

    def hook(site: str, body: Any) -> str:
        asked.append(site)
        return "hang" if isinstance(body, Ask) and body.group and site == "b" and asked.count("b") > 2 else ""

    experiment = spec(method, 2, model="probes:normalised")
    history = run(experiment, tmp_path, hook)
    assert len(history) == 2
    failed = [record["clients_failed"] for record in history]
    assert max(failed) == 1  # site b's one client, and nobody who only waited for it
    if method["name"] == "stratify":
        assert all(record["samples"] > 0 for record in history)


@pytest.mark.slow
def test_a_relay_does_not_go_on_with_nobody(tmp_path: Path) -> None:
    """Its rounds passed in no time, and the run finished untrained."""
    hops = []

    def hook(site: str, body: Any) -> str:
        hops.append(site)
        return "gone" if len(hops) > 12 else ""

    with pytest.raises(SiteLostError, match="it is gone"):
        run(spec({"name": "sfl"}, 8), tmp_path, hook)


@pytest.mark.slow
def test_a_relay_goes_on_with_those_that_are_there(tmp_path: Path) -> None:
    history = run(
        spec({"name": "sfl"}, 2), tmp_path, lambda site, body: "gone" if isinstance(body, Hop) and site == "b" else ""
    )
    assert [record["clients_returned"] for record in history] == [2, 2]
