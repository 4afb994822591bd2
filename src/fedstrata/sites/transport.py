"""How a server reaches its sites: heartbeats tell the dead from the busy, and a call that stalls is made again."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Protocol

from fedstrata.base.records import DEFAULT_LIMIT
from fedstrata.sites.idempotency import AT_WORK
from fedstrata.sites.wire import SiteLostError

LOG = logging.getLogger(__name__)

SILENCE = 8.0
"""Seconds without a heartbeat after which a site is taken for dead, until the next one."""

STALL = 5.0
"""Seconds after which a question that a living site does not know, or an answer that does not come, is on its way no
more."""

RATE = 1e6
"""Bytes a second that the slowest line carries: what is long on its way is not lost."""

LOOK = 0.25
"""Seconds between two looks at a call, and between one that failed and the next."""

FAILURES = 3
"""Calls that may fail before what the last one raised is believed."""

STRUCK = "it was struck off the server's list of who may connect"

Call = Callable[[bytes, float], object]
"""Carries bytes to one site within so many seconds, and gives back its answer."""


def begun(call: Call, data: bytes, patience: float) -> Future[object]:
    """A call under way, in a thread that nobody waits for: one to the dead lasts as long as its patience.

    Those of an executor are waited for when the process ends, so that a run with a dead site would not end.
    """
    future = Future[object]()

    def work() -> None:
        try:
            future.set_result(call(data, patience))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="call", daemon=True).start()
    return future


def retry(call: Call, data: bytes, patience: float, beside: bool = True) -> object:
    """What is answered to a question that may be asked again; ever less often, because it may only take long.

    Args:
        call: Asks.
        data: The question.
        patience: Seconds.
        beside: Whether what takes long is asked again beside the first call; else only what failed is.

    Raises:
        SiteLostError: Nothing was answered in time.
        Exception: What the last of ``FAILURES`` calls raised, when none is waited for any more.
    """
    end, pause = time.monotonic() + patience, STALL + len(data) / RATE if beside else math.inf
    calls: set[Future[object]] = set()
    again, failures = -math.inf, 0
    while (now := time.monotonic()) < end:
        if now >= again:
            calls.add(begun(call, data, end - now))
            again, pause = now + pause, 2 * pause
        done, calls = wait(calls, timeout=max(0.0, min(again, end) - now), return_when=FIRST_COMPLETED)
        for each in done:
            if each.exception() is None:
                return each.result()
        failures += len(done)
        if done and not calls:
            if failures >= FAILURES:
                return done.pop().result()  # which raises
            time.sleep(LOOK)
            again = -math.inf
    raise SiteLostError(f"no answer within {patience:g} s")


class _Heart:
    """What is known of one site.

    Args:
        now: When its first heartbeat is waited for.
    """

    def __init__(self, now: float) -> None:
        self.heard = self.changed = now
        self.number = self.size = 0

    def record(self, now: float, number: int, size: int) -> None:
        if (number, size) != (self.number, self.size):
            self.changed = now
        self.heard, self.number, self.size = now, number, size

    def on_its_way(self, number: int, size: int) -> int:
        """Bytes that may be under way: the question before the site begins with it, the answer when it is there."""
        if self.size == AT_WORK:
            return 0
        return self.size if self.number == number else size


class Signal(Protocol):
    """Says that the job is to end."""

    @property
    def triggered(self) -> Any:
        """Whether it does."""


class CollabTransport:
    """The server's calls to its sites; see ``fedstrata.sites.messenger.Transport``.

    Args:
        calls: How to call each site, by its name.
        over: What a call raises when the job is over.
        signal: Says that it is.
        clock: Seconds.
        struck: Whether a site was struck off the list of who may connect, which can happen at any time.
    """

    def __init__(
        self,
        calls: Mapping[str, Call],
        over: type[BaseException],
        signal: Signal,
        clock: Callable[[], float] = time.monotonic,
        struck: Callable[[str], bool] = lambda site: False,
    ) -> None:
        self.sites, self._over, self._signal, self._clock = dict(calls), over, signal, clock
        self.struck = struck
        self._hearts = {site: _Heart(clock()) for site in self.sites}
        self._lock = threading.Lock()

    def hear(self, site: str, number: int, size: int) -> None:
        """A heartbeat came.

        Args:
            site: Whose.
            number: Of the last question with which it began.
            size: Bytes of its answer; ``AT_WORK`` while it works.
        """
        # A site may say anything. What is no heartbeat is none.
        sound = type(number) is int and type(size) is int and AT_WORK <= size <= DEFAULT_LIMIT
        if sound and (heart := self._hearts.get(site)):
            with self._lock:
                heart.record(self._clock(), number, size)

    def there(self, site: str) -> bool:
        """Whether a site was heard of lately; otherwise asking it is in vain."""
        if self._signal.triggered:
            raise self._over("the job is over")
        return site in self.sites and not self.struck(site) and self._silence(site) <= SILENCE

    def send(self, site: str, data: bytes, patience: float, number: int) -> object:
        """What the site answers, however often it must be asked for that.

        A site that is dead is given up within seconds, and costs nothing until it is heard of again. One that is at
        work has ``patience`` seconds. Neither a question nor an answer that got lost costs more than ``STALL``.

        Raises:
            SiteLostError: It is dead, late, or struck off the list: an answer that is under way then counts no more.
        """
        if site not in self.sites:
            raise SiteLostError("it has not joined")
        heart = self._hearts[site]
        self._refuse_struck(site)
        self._refuse_silent(site, 0)
        begun = sent = self._clock()
        calls = {self._call(site, data, patience)}
        times = 1
        while True:
            done, calls = wait(calls, timeout=LOOK, return_when=FIRST_COMPLETED)
            self._refuse_struck(site)
            for call in done:
                try:
                    return call.result()
                except self._over:
                    raise
                except Exception as error:
                    LOG.info("site %s: %s", site, error)
            now = self._clock()
            if now - begun > patience:
                raise SiteLostError(f"no answer within {patience:g} s")
            with self._lock:
                size = heart.on_its_way(number, len(data))
                since = max(sent, heart.changed) if heart.number == number else sent
                stalled = heart.size != AT_WORK and heart.heard - since > times * (STALL + size / RATE)
            self._refuse_silent(site, size)
            if not calls:
                time.sleep(LOOK)
            if not calls or stalled:
                if stalled:
                    LOG.warning("site %s: the call %d stalls, and is made again", site, number)
                    times *= 2
                sent = now
                calls.add(self._call(site, data, patience))

    def _call(self, site: str, data: bytes, patience: float) -> Future[object]:
        return begun(self.sites[site], data, patience)

    def _silence(self, site: str) -> float:
        with self._lock:
            return self._clock() - self._hearts[site].heard

    def _refuse_struck(self, site: str) -> None:
        if self.struck(site):
            raise SiteLostError(STRUCK)

    def _refuse_silent(self, site: str, size: int) -> None:
        # Heartbeats wait behind what is on the same line.
        if (silence := self._silence(site)) > SILENCE + size / RATE:
            raise SiteLostError(f"nothing was heard of it for {silence:.0f} s")
