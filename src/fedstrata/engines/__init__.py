"""The engines that run clients: on this machine, on a Ray cluster, or at simulated sites."""

from __future__ import annotations

from fedstrata.base.errors import SpecError, not_among
from fedstrata.clients.client import ClientContext, StateStore
from fedstrata.federation.engine import Engine

ENGINES = {
    "local": "this process",
    "ray": "processes on all cores of this machine or of a Ray cluster",
    "nvflare": "sites of NVIDIA FLARE's simulator",
}
"""A mapping from the name of each engine to the place where the engine runs clients."""


def make_engine(name: str, context: ClientContext, store: StateStore) -> Engine:
    """Create the engine with the given name.

    Args:
        name: ``local`` or ``ray``. (``fedstrata.sites.simulator`` starts runs with ``nvflare``.)
        context: The data, the assignment of samples, the model and the settings that all clients share.
        store: The store of the clients' states.

    Raises:
        SpecError: No engine has this name.
    """
    if name == "local":
        from fedstrata.engines.local import LocalEngine
        from fedstrata.engines.worker_pool import cores

        # Simulated masks need secrets, which clients keep in the memory of one process. All clients therefore run in
        # this process.
        workers = 1 if context.config.privacy.simulate_masks else context.config.training.workers or cores()
        return LocalEngine(context, store, workers)
    if name == "ray":
        from fedstrata.engines.ray import RayEngine

        return RayEngine(context, store)
    raise SpecError("engine", not_among("is not an engine", name, ENGINES), name)
