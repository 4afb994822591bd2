"""A site's answers, each computed once, and its heartbeats."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future

from fedstrata.base.errors import WireError

LOG = logging.getLogger(__name__)

HEARTBEAT = 1.0
"""Seconds between two heartbeats of a site."""

AT_WORK = -1
"""The size of an answer that is not ready yet."""


class LateError(WireError):
    """A question arrived after a later one, so that its answer is not wanted any more."""


class RequestCache:
    """Answers every question once; a repeated question, whose answer was lost, gets the same bytes."""

    def __init__(self) -> None:
        self._turn, self._lock = threading.Lock(), threading.Lock()
        self._newest, self._answer = 0, Future[bytes]()
        self.pulse = (0, 0)
        """The number of the last question that was begun, and the size of its answer, or ``AT_WORK``."""

    def answer(self, number: int, work: Callable[[], bytes]) -> bytes:
        """Return the result of ``work``, or of its first call for this question.

        Args:
            number: The number of the question, ascending; 0 for a question that is never repeated.
            work: Computes the answer.

        Raises:
            LateError: A later question was asked already.
        """
        with self._lock:
            first = number == 0 or number > self._newest
            if not first and number < self._newest:
                raise LateError(f"question {number} comes after {self._newest}: nobody waits for it any more")
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
    """Send a heartbeat every second from a thread.

    Args:
        cache: The questions of the site.
        send: Sends a heartbeat, with the cache's ``pulse``, without waiting for an answer.
        over: The exception of ``send`` when the job is over.
    """
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(HEARTBEAT):
            try:
                send(*cache.pulse)
            except over:
                return
            except Exception as error:
                # The server may be away for a while.
                LOG.debug("no heartbeat: %s", error)

    thread = threading.Thread(target=work, name="heartbeat", daemon=True)
    thread.start()
    return thread
