"""Who is turned away is told so now and then, at both ends. NVFlare says it every few seconds in its words, or not."""

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
"""Seconds after which something is told again. Who is turned away tries again within a minute, for ever."""


class Once:
    """Tells what is new from what goes on.

    Args:
        clock: In seconds.

    >>> seconds = iter([0, 300, 500, 700])
    >>> new = Once(lambda: next(seconds))
    >>> [new("a") for _ in range(4)]
    [True, False, False, True]
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said: dict[str, float] = {}
        self._lock = threading.Lock()

    def __call__(self, what: str) -> bool:
        """Whether this was not told for a while, and is now."""
        with self._lock:
            now = self._clock()
            self._said = {each: at for each, at in self._said.items() if now - at <= PAUSE}
            if what in self._said:
                return False
            self._said[what] = now
            return True


class TurnedAway(logging.Filter):
    """At a site, among what NVFlare says of its server: that this site is turned away, and what goes wrong.

    A kit's log configuration names it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._new = Once()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is written; the refusal, in our words and now and then."""
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
        except ssl.SSLEOFError:
            raise  # whoever only looks whether the port is open hangs up
        except ssl.SSLError as error:
            reason = getattr(error, "verify_message", "") or error.reason or str(error)
            what = "certificates do not fit" if _of_certificates(error) else "TLS handshake failed"
            text = f"a connection{_peer()} is turned away, its {what}: {reason}"
            if self.server_side and self.new(text):
                LOG.warning("%s", text)
            raise


def _of_certificates(error: ssl.SSLError) -> bool:
    """Whether a handshake failed for a certificate: one that does not fit or is missing, or an alert about one."""
    reason = error.reason or ""
    return isinstance(error, ssl.SSLCertVerificationError) or "CERTIFICATE" in reason or "UNKNOWN_CA" in reason


def _peer() -> str:
    """Who is at the other end, in words. What asks for a handshake knows it, which is asyncio; a handshake does not."""
    transport = getattr(sys._getframe(2).f_locals.get("self"), "_transport", None)
    address = transport.get_extra_info("peername") if transport else None
    return f" from {address[0]}" if address else ""


def tell_handshakes(context: Any = ssl.SSLContext) -> None:
    """Let ``Handshake`` do those of a context; of all of this process unless one is given."""
    context.sslobject_class = Handshake
