"""Workers of Ray's that a file of tests shares."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def two_workers() -> Iterator[Any]:
    """A pool of two for all tests of a file: most of the time of a short run is the start of processes."""
    ray = pytest.importorskip("ray")
    from fedstrata.engines.ray import WorkerPool

    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="error")
        with WorkerPool(2) as pool:
            yield pool
    finally:
        ray.shutdown()
