"""Helpers for tests of deployments: find a port, and wait for conditions."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable
from contextlib import suppress


def free_port() -> int:
    """Return a port on which nobody listens.

    It is below the ports that the system gives to clients. So it is still free when a server is started again.
    """
    while True:
        port = random.randint(20_000, 32_000)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("localhost", port))
            return port


def until(what: str, ready: Callable[[], bool], seconds: float = 240.0) -> None:
    """Wait until ``ready`` returns True; fail after ``seconds``."""
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, f"waited {seconds:g} s for {what}"
        time.sleep(0.2)
