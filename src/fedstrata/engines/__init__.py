"""The engines: each decides in which processes the clients run."""

from __future__ import annotations

from fedstrata.base.errors import SpecError, nearest
from fedstrata.clients.client import ClientContext
from fedstrata.clients.store import StateStore
from fedstrata.federation.engine import Engine

ENGINES = {
    "local": "this process",
    "ray": "processes on all cores of this machine or of a Ray cluster",
    "nvflare": "sites of NVIDIA FLARE's simulator",
}
"""The name of each engine, and where its clients run."""


def make_engine(name: str, context: ClientContext, store: StateStore) -> Engine:
    """Return the engine that a name stands for.

    Raises:
        SpecError: No engine has this name.
    """
    if name == "local":
        from fedstrata.engines.local import LocalEngine
        from fedstrata.engines.worker_pool import cores

        return LocalEngine(context, store, context.config.training.workers or cores())
    if name == "ray":
        from fedstrata.engines.ray import RayEngine

        return RayEngine(context, store)
    raise SpecError("engine", f"no such engine; there are: {', '.join(ENGINES)}{nearest(name, ENGINES)}", name)
