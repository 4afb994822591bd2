"""What tests of whole deployments wait for, and where these listen."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable
from contextlib import suppress


def free_port() -> int:
    """A port that nobody listens on.

    The system does not give it to anybody who connects to somewhere, as it may one that it chose for us: a server that
    is started again would find it taken.
    """
    while True:
        port = random.randint(20_000, 32_000)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("localhost", port))
            return port


def until(what: str, ready: Callable[[], bool], seconds: float = 240.0) -> None:
    """Wait until something is so, and fail where it does not come to that."""
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, f"waited {seconds:g} s for {what}"
        time.sleep(0.2)
