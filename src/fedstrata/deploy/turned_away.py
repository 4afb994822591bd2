"""Who is turned away is told so once, at both ends: NVFlare says it every few seconds, in words of its own, or not."""

from __future__ import annotations

import logging
import ssl
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

LOG = logging.getLogger(__name__)

DISABLED = "is disabled"
"""In what NVFlare's server answers to whoever is not on the list."""

REFUSED = (
    "the server turns this site away: it is not, or no longer, on the server's list of who may connect. "
    "Whoever runs the server can put it there: fedstrata revoke SERVER SITE --undo"
)

PAUSE = 600.0
"""Seconds after which something is new again. Who is turned away tries again within a minute, for ever."""


class Once:
    """Tells what is new from what goes on.

    Args:
        clock: In seconds.

    >>> seconds = iter([0, 5, 10, 700])
    >>> new = Once(lambda: next(seconds))
    >>> [new("a") for _ in range(4)]
    [True, False, False, True]
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[str, float] = {}
        self._lock = threading.Lock()

    def __call__(self, what: str) -> bool:
        """Whether this did not come for a while."""
        with self._lock:
            now = self._clock()
            before = self._seen.get(what)
            self._seen[what] = now
            return before is None or now - before > PAUSE


class TurnedAway(logging.Filter):
    """At a site, among what NVFlare says of its server: that this site is turned away, and what goes wrong.

    A kit's log configuration names it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._new = Once()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is written; the refusal, in our words and once."""
        if DISABLED not in f"{record.getMessage()} {_handled()}":
            return record.levelno >= logging.ERROR
        record.levelno, record.levelname = logging.ERROR, logging.getLevelName(logging.ERROR)
        record.msg, record.args = REFUSED, ()
        return self._new(REFUSED)


def _handled() -> str:
    """What is being handled right now, and what led to it: NVFlare writes down the last of these alone, without why."""
    texts, error = [], sys.exception()
    while error is not None:
        texts.append(str(error))
        error = error.__cause__ or error.__context__
    return " ".join(texts)


class Handshake(ssl.SSLObject):
    """At the server: says why a connection is turned away before NVFlare sees it. Else nobody does."""

    new = Once()

    def do_handshake(self) -> None:
        """As before, but for a line in the log where it fails."""
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise  # it goes on
        except ssl.SSLError as error:
            reason = getattr(error, "verify_message", "") or error.reason or str(error)
            if self.server_side and self.new(reason):
                LOG.warning("a connection is turned away, its certificates do not fit: %s", reason)
            raise


def tell_handshakes(context: Any = ssl.SSLContext) -> None:
    """Let ``Handshake`` do those of a context; of all of this process unless one is given."""
    context.sslobject_class = Handshake
