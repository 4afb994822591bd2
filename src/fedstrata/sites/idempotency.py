"""Compute a site's reply once, even if the request is repeated. Send the site's heartbeats."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future

from fedstrata.base.errors import WireError

LOG = logging.getLogger(__name__)

HEARTBEAT = 1.0
"""The number of seconds between two heartbeats of a site."""

AT_WORK = -1
"""While a site still computes a reply, its heartbeats contain this number instead of the reply's size."""


class LateError(WireError):
    """An error for a request that arrives after a newer request. The server no longer needs the reply."""


class RequestCache:
    """A cache that computes the reply to each request once, and returns the same bytes for a repeated request."""

    def __init__(self) -> None:
        self._turn, self._lock = threading.Lock(), threading.Lock()
        self._newest, self._answer = 0, Future[bytes]()
        self.pulse = (0, 0)
        """The number of the last request on which the site began to work, and the size of the reply in bytes (or
        ``AT_WORK``)."""

    def answer(self, number: int, work: Callable[[], bytes]) -> bytes:
        """Return the reply to a request. If the request was sent before, return the stored reply.

        Args:
            number: The sequence number of the request. Later requests have larger numbers. A request with the number 0
                is never repeated.
            work: A function that computes the reply.

        Raises:
            LateError: The server has already sent a later request.
        """
        with self._lock:
            first = number == 0 or number > self._newest
            if not first and number < self._newest:
                raise LateError(f"request {number} is late, because the server has already sent request {self._newest}")
            if first:
                self._newest, self._answer = max(number, self._newest), Future()
            answer = self._answer
        if first:
            with self._turn:
                self.pulse = number, AT_WORK
                try:
                    answer.set_result(work())
                except BaseException as error:
                    answer.set_exception(error)
                self.pulse = number, 0 if answer.exception() else len(answer.result())
        return answer.result()


def heartbeat(cache: RequestCache, send: Callable[[int, int], object], over: type[BaseException]) -> threading.Thread:
    """Start a daemon thread that sends a heartbeat every second, and return the thread.

    Args:
        cache: The cache that provides ``pulse``, the content of a heartbeat.
        send: A function that sends a heartbeat (the two numbers of ``pulse``), and does not wait for a reply.
        over: The exception that ``send`` raises when the job is over.
    """
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(HEARTBEAT):
            try:
                send(*cache.pulse)
            except over:
                return
            except Exception as error:
                # Errors are ignored, because the server may be unreachable for some time.
                LOG.debug("no heartbeat: %s", error)

    thread = threading.Thread(target=work, name="heartbeat", daemon=True)
    thread.start()
    return thread
