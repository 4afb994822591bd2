"""Send messages from the server to the sites, monitor the sites' heartbeats, and repeat lost messages."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from fedstrata.base.records import DEFAULT_LIMIT
from fedstrata.sites.idempotency import AT_WORK
from fedstrata.sites.wire import SiteLostError

LOG = logging.getLogger(__name__)

SILENCE = 8.0
"""The number of seconds without a heartbeat after which a site is considered dead, until its next heartbeat."""

STALL = 5.0
"""The number of seconds after which a request or a reply is considered lost although the site sends heartbeats."""

RATE = 1e6
"""The assumed speed of the slowest connection in bytes per second. Large messages therefore get more time before they
are considered lost."""

LOOK = 0.25
"""The number of seconds between two checks for the end of a call, and between a failed call and the next call."""

FAILURES = 3
"""The number of failed calls after which the error of the last call is raised."""

STRUCK = "it was removed from the server's list of sites that may connect"

Call = Callable[[bytes, float], object]
"""A function that sends bytes to one site, and returns the reply. The second argument is the timeout in seconds."""


def begun(call: Call, data: bytes, patience: float) -> Future[object]:
    """Begin a call in a daemon thread, and return a future that will contain the reply.

    A call to a dead site lasts until its timeout. With an executor instead of a daemon thread, the process could not
    end before all calls end.
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
    """Send a request until a reply arrives, and return the reply.

    The request is repeated after growing pauses, because a reply may take a long time.

    Args:
        call: A function that sends the request.
        data: The encoded request.
        patience: The number of seconds within which a reply must arrive.
        beside: Whether to repeat the request while an earlier call still waits. If False, the request is repeated only
            after a call has failed.

    Raises:
        SiteLostError: A reply did not arrive in time.
        Exception: ``FAILURES`` calls have failed. The error of the last call is raised.
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
                return done.pop().result()  # ``result`` raises the error of the call
            time.sleep(LOOK)
            again = -math.inf
    raise SiteLostError(f"it did not answer within {patience:g} s")


class _Heart:
    """The last heartbeat of a site.

    Args:
        now: The current time in seconds. The first heartbeat is expected within ``SILENCE`` seconds from now.
    """

    def __init__(self, now: float) -> None:
        self.last_beat = self.changed = now
        self.number = self.size = 0

    def record(self, now: float, number: int, size: int) -> None:
        if (number, size) != (self.number, self.size):
            self.changed = now
        self.last_beat, self.number, self.size = now, number, size

    def on_its_way(self, number: int, size: int) -> int:
        """Return the number of bytes that may be in transit: the size of the request or of the finished reply.

        Args:
            number: The sequence number of the request.
            size: The size of the request in bytes.
        """
        if self.size == AT_WORK:
            return 0
        return self.size if self.number == number else size


class CollabTransport:
    """The server's calls to its sites; see ``fedstrata.sites.messenger.Transport``.

    Args:
        calls: A mapping from the name of each site to the function that calls the site.
        over: The class of the exception that a call raises when the job is over.
        signal: An object like ``JobEnd``. The attribute ``triggered`` of this object is True when the job is over.
        clock: A function that returns the time in seconds.
        struck: A function that returns True if a site was removed from the list of sites that may connect.
    """

    def __init__(
        self,
        calls: Mapping[str, Call],
        over: type[BaseException],
        signal: Any,
        clock: Callable[[], float] = time.monotonic,
        struck: Callable[[str], bool] = lambda site: False,
    ) -> None:
        self.sites, self._over, self._signal, self._clock = dict(calls), over, signal, clock
        self.struck = struck
        self._hearts = {site: _Heart(clock()) for site in self.sites}
        self._lock = threading.Lock()

    def hear(self, site: str, number: int, size: int) -> None:
        """Record a valid heartbeat, and ignore an invalid heartbeat.

        Args:
            site: The name of the site.
            number: The sequence number of the last request on which the site began to work.
            size: The size in bytes of the reply to this request; ``AT_WORK`` while the site still computes the reply.
        """
        sound = type(number) is int and type(size) is int and AT_WORK <= size <= DEFAULT_LIMIT
        if sound and (heart := self._hearts.get(site)):
            with self._lock:
                heart.record(self._clock(), number, size)

    def is_reachable(self, site: str) -> bool:
        """Return True if a site may connect and has sent a heartbeat in the last ``SILENCE`` seconds."""
        if self._signal.triggered:
            raise self._over("the job is over")
        return site in self.sites and not self.struck(site) and self._silence(site) <= SILENCE

    def send(self, site: str, data: bytes, patience: float, number: int) -> object:
        """Send a message and return the site's reply. Repeat the message if the message or the reply seems to be lost.

        If the site is dead, this method raises an error within seconds. A busy site has ``patience`` seconds to reply.

        Raises:
            SiteLostError: The site is dead or late, or was removed from the list of sites. A reply that arrives later
                is ignored.
        """
        if site not in self.sites:
            raise SiteLostError("it has not joined")
        heart = self._hearts[site]
        self._refuse_struck(site)
        self._refuse_silent(site, 0)
        start = sent = self._clock()
        calls = {begun(self.sites[site], data, patience)}
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
            if now - start > patience:
                raise SiteLostError(f"it did not answer within {patience:g} s")
            with self._lock:
                size = heart.on_its_way(number, len(data))
                since = max(sent, heart.changed) if heart.number == number else sent
                stalled = heart.size != AT_WORK and heart.last_beat - since > times * (STALL + size / RATE)
            self._refuse_silent(site, size)
            if not calls:
                time.sleep(LOOK)
            if not calls or stalled:
                if stalled:
                    LOG.warning("site %s: call %d got no answer, and is repeated", site, number)
                    times *= 2
                sent = now
                calls.add(begun(self.sites[site], data, patience))

    def _silence(self, site: str) -> float:
        with self._lock:
            return self._clock() - self._hearts[site].last_beat

    def _refuse_struck(self, site: str) -> None:
        if self.struck(site):
            raise SiteLostError(STRUCK)

    def _refuse_silent(self, site: str, size: int) -> None:
        # The limit includes the time to transfer ``size`` bytes, because a heartbeat may have to wait for large
        # messages on the same connection.
        if (silence := self._silence(site)) > SILENCE + size / RATE:
            raise SiteLostError(f"it has not answered for {silence:.0f} s")
