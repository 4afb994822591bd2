"""Who may connect to a server: a list of our own, beside the certificates, which cannot be taken back."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_exception import NotAuthenticated

from fedstrata.deploy.members import members

LOG = logging.getLogger(__name__)


class Gate(FLComponent):  # type: ignore[misc]  # NVFlare has no types
    """Turns away whoever is not on the server's list, at registration and at each heartbeat of NVFlare's.

    Args:
        records: Where NVFlare's records are in the server's folder.
    """

    def __init__(self, records: str) -> None:
        super().__init__()
        self._kit = Path(records).parent
        self._told: set[str] = set()

    def handle_event(self, event_type: str, fl_ctx: Any) -> None:
        """Look at the list.

        Raises:
            NotAuthenticated: The name of a certificate that registers is not on it.
        """
        if event_type not in (EventType.CLIENT_REGISTER_RECEIVED, EventType.CLIENT_HEARTBEAT_RECEIVED):
            return
        peer = fl_ctx.get_peer_context()
        name = peer.get_identity_name() if peer is not None else ""
        if name in members(self._kit):
            self._told.discard(name)
            return
        if name not in self._told:
            LOG.warning("site %s is not on the list of who may connect, and is turned away", name or "without a name")
        self._told.add(name)
        reason = f"site {name} may not connect: it is not on the server's list"
        if event_type == EventType.CLIENT_REGISTER_RECEIVED:
            raise NotAuthenticated(reason)
        fl_ctx.set_prop(FLContextKey.UNAUTHENTICATED, reason, sticky=False)
