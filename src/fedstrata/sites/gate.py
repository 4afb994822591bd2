"""Who may connect to a server: a list of our own, beside the certificates, which cannot be taken back."""

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
"""When the list is looked at. After a restart sites that went on register no more: their heartbeats let them in."""


class Gate(FLComponent):  # type: ignore[misc]  # NVFlare has no types
    """Lets NVFlare look at the server's list, at registration, at each heartbeat and when a job comes.

    NVFlare asks whether a name is disabled, and then whether a certificate proves it. So the name is asked of our list
    where NVFlare asks: what a party says of itself elsewhere proves nothing.

    Args:
        records: Where NVFlare's records are in the server's folder.
    """

    def __init__(self, records: str) -> None:
        super().__init__()
        bound_growth()  # this process runs longer than any job
        self._members = Members(Path(records).parent)
        self._said_of: set[str] = set()
        self._lock = threading.Lock()  # heartbeats come in many threads, and a client is logged out once

    def handle_event(self, event_type: str, fl_ctx: Any) -> None:
        """Put our list where NVFlare asks, before it asks, and log out who is no longer on it."""
        if event_type not in _LOOKED_AT:
            return
        with self._lock:
            refuse_clients(fl_ctx, self.refuses, partial(self._refuses, names=self._members.names()))

    def refuses(self, name: str) -> bool:
        """Whether somebody of this name may not connect."""
        return self._refuses(name, self._members.names())

    def _refuses(self, name: str, names: list[str] | None) -> bool:
        if name == USER or name in (names or ()):
            self._said_of.discard(name)
            return False
        if name not in self._said_of:
            LOG.warning("%s is not on the list of who may connect, and is turned away", name)
        self._said_of.add(name)
        return True
