"""Who may connect to a server: a list of our own, beside the certificates, which cannot be taken back."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent

from fedstrata.deploy.members import Members
from fedstrata.deploy.settings import USER
from fedstrata.deploy.streams import bound_growth

LOG = logging.getLogger(__name__)


class Gate(FLComponent):  # type: ignore[misc]  # NVFlare has no types
    """Lets NVFlare look at the server's list, at registration and at each heartbeat.

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

    def handle_event(self, event_type: str, fl_ctx: Any) -> None:
        """Before the first registration is looked at, put our list where NVFlare asks."""
        if event_type == EventType.CLIENT_REGISTER_RECEIVED:
            fl_ctx.get_engine().server.client_manager.is_client_disabled = self.refuses

    def refuses(self, name: str) -> bool:
        """Whether somebody of this name may not connect."""
        if name == USER or name in (self._members.names() or ()):
            self._said_of.discard(name)
            return False
        if name not in self._said_of:
            LOG.warning("%s is not on the list of who may connect, and is turned away", name)
        self._said_of.add(name)
        return True
