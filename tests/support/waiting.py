"""What tests of whole deployments wait for, and where these listen."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def until(what: str, ready: Callable[[], bool], seconds: float = 240.0) -> None:
    """Wait until something is so, and fail where it does not come to that."""
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, f"waited {seconds:g} s for {what}"
        time.sleep(0.2)
