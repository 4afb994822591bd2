"""Sites in this process that exchange bytes with the server, as NVFlare's sites do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from site_engine import make_site_engine

from fedstrata.federation.engine import Engine
from fedstrata.runs.preparation import Prepared
from fedstrata.sites.settings import SiteSettings
from fedstrata.sites.site_server import SERVER, SiteServer
from fedstrata.sites.sums import Sums


def near_sites(prepared: Prepared, place: Path, request: Any, *, direct: bool = True) -> Engine:
    """Return an engine over two sites of two clients each."""
    patience = 120.0
    sums, site_servers = Sums(patience), {}

    class Transport:
        def is_reachable(self, site: str) -> bool:
            return True

        def send(self, site: str, data: bytes, patience: float, number: int) -> object:
            return site_servers[site].call(SERVER, data)

    for name in "ab":

        def carry(target: str, data: bytes, name: str = name) -> object:
            return sums.add_up(name, data) if target == SERVER else site_servers[target].call(name, data)

        site_servers[name] = SiteServer(name, place / name, carry, SiteSettings(patience=patience, simulated=True))
    spec, site_of_client = prepared.spec.to_toml(), list("aabb")
    engine = make_site_engine(
        prepared.config, Transport(), site_of_client, sums, spec=spec, run="run", patience=patience, direct=direct
    )
    engine.restore(0)
    return engine


def through_the_server(prepared: Prepared, place: Path, request: Any) -> Engine:
    return near_sites(prepared, place, request, direct=False)
