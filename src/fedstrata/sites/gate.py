"""Let only listed sites connect to the server, because NVFlare cannot revoke certificates."""

from __future__ import annotations

import logging
import threading
from functools import partial
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent

from fedstrata.sites.members import Members
from fedstrata.sites.nvflare_workarounds import bound_growth, refuse_clients
from fedstrata.sites.settings import USER

LOG = logging.getLogger(__name__)

_LOOKED_AT = (EventType.CLIENT_REGISTER_RECEIVED, EventType.CLIENT_HEARTBEAT_RECEIVED, EventType.SUBMIT_JOB)
"""The events at which the list of sites is read. Heartbeats are included, because running sites do not register again
after a restart of the server."""


class Gate(FLComponent):  # type: ignore[misc]  # NVFlare has no types
    """A component that checks the names of parties at registration, at each heartbeat and when a job arrives.

    A connecting site sends its name. NVFlare first asks whether the name is disabled, and then compares the name with
    the site's certificate. If the name is not on the list of sites, this component answers that the name is disabled.
    NVFlare does not verify the sender's name in other messages.

    Args:
        records: The folder with NVFlare's records of jobs, inside the server's folder.
    """

    def __init__(self, records: str) -> None:
        super().__init__()
        bound_growth()  # this process outlives all jobs, so its memory would otherwise grow without limit
        self._members = Members(Path(records).parent)
        self._said_of: set[str] = set()
        # The lock is needed because heartbeats arrive in many threads, but a client must be logged out only once.
        self._lock = threading.Lock()

    def handle_event(self, event_type: str, fl_ctx: Any) -> None:
        """Let NVFlare check names against the list of sites, and log out sites that were removed from the list."""
        if event_type not in _LOOKED_AT:
            return
        with self._lock:
            refuse_clients(fl_ctx, self.refuses, partial(self._refuses, names=self._members.names()))

    def refuses(self, name: str) -> bool:
        """Return True if a site or administrator with this name may not connect."""
        return self._refuses(name, self._members.names())

    def _refuses(self, name: str, names: list[str] | None) -> bool:
        if name == USER or name in (names or ()):
            self._said_of.discard(name)
            return False
        if name not in self._said_of:
            LOG.warning("%s is not on the list of sites that may connect, and was refused", name)
        self._said_of.add(name)
        return True
