"""Ray workers that all tests of a file share."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def two_workers() -> Iterator[Any]:
    """Make a pool of two workers for all tests of a file, because starting processes takes longer than a short run."""
    ray = pytest.importorskip("ray")
    from fedstrata.engines.ray import WorkerPool

    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="error")
        with WorkerPool(2) as pool:
            yield pool
    finally:
        ray.shutdown()
