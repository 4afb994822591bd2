"""A site's questions one after another, and what it tells meanwhile: that it lives, and at which question it is."""

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
"""The size of an answer that is not there yet."""


class LateError(WireError):
    """A question came when nobody waits for its answer any more."""


class RequestCache:
    """Every question is answered once; who asks it again, because the answer was lost, is given the same bytes."""

    def __init__(self) -> None:
        self._turn, self._lock = threading.Lock(), threading.Lock()
        self._newest, self._answer = 0, Future[bytes]()
        self.pulse = (0, 0)
        """The number of the last question that was begun, and the bytes of its answer, or ``AT_WORK``."""

    def answer(self, number: int, work: Callable[[], bytes]) -> bytes:
        """What ``work`` gives, or gave when the question came first.

        Args:
            number: Of the question, ascending; 0 for one that is never asked again.
            work: Makes the answer.

        Raises:
            LateError: A later question came already.
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


def heartbeat(cache: RequestCache, tell: Callable[[int, int], object], over: type[BaseException]) -> threading.Thread:
    """Tell the server every second that this site lives, whatever else it does.

    Args:
        cache: Where the site is.
        tell: Carries that to the server; waits for no answer.
        over: What ``tell`` raises when the job is over.
    """
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(HEARTBEAT):
            try:
                tell(*cache.pulse)
            except over:
                return
            except Exception as error:
                # The server may be away for a while. That is no reason to stop.
                LOG.debug("no heartbeat: %s", error)

    thread = threading.Thread(target=work, name="heartbeat", daemon=True)
    thread.start()
    return thread
