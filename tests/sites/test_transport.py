"""Sites that die, stop, are busy, or whose messages get lost: what the server sees of it, and how soon."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from fedstrata.base.errors import WireError
from fedstrata.sites import transport
from fedstrata.sites.idempotency import AT_WORK, RequestCache, heartbeat
from fedstrata.sites.transport import CollabTransport, retry
from fedstrata.sites.wire import SiteLostError


class OverError(Exception):
    """The job is over."""


class Site:
    """A site whose heart beats when the test says so, a second of its clock being a twentieth of ours."""

    def __init__(self) -> None:
        self.cache, self.begun, self.asked = RequestCache(), time.monotonic(), 0
        self.lost = 0
        """So many calls never arrive, and so many answers never come back."""
        self.lost_answers = 0
        self.work: Callable[[], bytes] = lambda: b"done"
        self.dead, self.number = threading.Event(), 0
        self.signal = SimpleNamespace(triggered=False)
        self.transport = CollabTransport({"a": self.call}, OverError, self.signal, self.clock)
        self._ended = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    def clock(self) -> float:
        return (time.monotonic() - self.begun) * 20

    def _beat(self) -> None:
        while not self._ended.wait(0.05):
            if not self.dead.is_set():
                self.transport.hear("a", *self.cache.pulse)

    def call(self, data: bytes, patience: float) -> object:
        self.asked += 1
        if self.lost:
            self.lost -= 1
            self._ended.wait(30)
        answer = self.cache.answer(self.number, self.work)
        if self.lost_answers:
            self.lost_answers -= 1
            self._ended.wait(30)
        return answer

    def send(self, patience: float = 600.0) -> object:
        self.number += 1
        return self.transport.send("a", b"question", patience, self.number)

    def close(self) -> None:
        self._ended.set()


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(transport, "LOOK", 0.0125)
    made = Site()
    yield made
    made.close()


@pytest.mark.slow
def test_a_site_that_dies_at_work_is_noticed_within_seconds_and_costs_nothing_then(site: Site) -> None:
    """It held the round for all its patience, and then two seconds at each exchange."""

    def dies() -> bytes:
        site.dead.set()
        return b""

    assert site.send() == b"done"
    site.work = dies
    begun = site.clock()
    site.lost_answers = 9
    with pytest.raises(SiteLostError, match="it has not answered for"):
        site.send()
    assert site.clock() - begun < 20  # ten, on a machine that does nothing else
    assert not site.transport.is_reachable("a")
    asked, begun = site.asked, time.monotonic()
    for _ in range(100):
        with pytest.raises(SiteLostError, match="it has not answered for"):
            site.send()
    assert site.asked == asked
    assert time.monotonic() - begun < 0.5
    site.work, site.lost_answers = lambda: b"back", 0
    site.dead.clear()
    time.sleep(0.15)
    assert site.send() == b"back"


@pytest.mark.slow
@pytest.mark.parametrize(
    "heartbeat", [(1, "x"), (1, float("nan")), (1, 1e300), (1, 2**62), (1, -7), ("1", 0), (None, None), (True, 0)]
)
def test_what_is_no_heartbeat_is_none(site: Site, heartbeat: Any) -> None:
    """One of them ended the run of everybody."""
    assert site.send() == b"done"
    site.dead.set()
    site.transport.hear("a", *heartbeat)
    time.sleep(0.6)
    site.transport.hear("a", *heartbeat)
    assert not site.transport.is_reachable("a")
    with pytest.raises(SiteLostError, match="it has not answered for"):
        site.send()


@pytest.mark.slow
def test_a_site_that_is_busy_is_waited_for_and_asked_once(site: Site) -> None:
    site.work = lambda: time.sleep(1.0) or b"late"  # type: ignore[func-returns-value]  # twenty seconds
    assert site.send() == b"late"
    assert site.asked == 1
    site.work = lambda: time.sleep(0.6) or b""  # type: ignore[func-returns-value]
    with pytest.raises(SiteLostError, match="it did not answer within 10 s"):
        site.send(10)
    assert site.transport.is_reachable("a")


@pytest.mark.parametrize("what", ["lost", "lost_answers"])
def test_a_call_that_stalls_is_made_again_and_computed_once(site: Site, what: str) -> None:
    """All three sites' calls stalled for forty seconds, and the job ended."""
    computed = []
    site.work = lambda: computed.append(1) or b"done"  # type: ignore[func-returns-value]
    setattr(site, what, 1)
    begun = site.clock()
    assert site.send() == b"done"
    assert 4 < site.clock() - begun < 15
    assert (len(computed), site.asked) == (1, 2)


def test_a_sum_that_stalls_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It held its group for two fifths of the patience, four minutes."""
    monkeypatch.setattr(transport, "STALL", 0.05)
    asked, stop = [], threading.Event()

    def call(data: bytes, left: float) -> object:
        asked.append(left)
        if len(asked) == 1:
            stop.wait(30)
        return data

    begun = time.monotonic()
    assert retry(call, b"part", 60.0) == b"part"
    assert time.monotonic() - begun < 10
    assert len(asked) == 2
    with pytest.raises(SiteLostError, match=r"it did not answer within 0\.2 s"):
        retry(lambda data, left: stop.wait(30), b"", 0.2)
    stop.set()


def reset_once(answers_after: float) -> tuple[Callable[[bytes, float], object], list[bytes]]:
    """A call that fails the first time and returns what it got from then on, and what it was asked."""
    asked: list[bytes] = []

    def call(data: bytes, left: float) -> object:
        asked.append(data)
        if len(asked) == 1:
            raise ConnectionError("reset")
        time.sleep(answers_after)
        return data

    return call, asked


def test_a_sum_whose_call_fails_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One error of a connection broke the group, also while another call was about to bring the sum."""
    monkeypatch.setattr(transport, "LOOK", 0.01)
    call, asked = reset_once(answers_after=0.0)
    assert retry(call, b"part", 60.0) == b"part"
    assert len(asked) == 2

    failed = threading.Event()

    def first_is_slow(data: bytes, left: float) -> object:
        if not failed.is_set():
            failed.wait(30)
            time.sleep(0.2)
            return data
        raise ConnectionError("reset")

    monkeypatch.setattr(transport, "STALL", 0.05)
    threading.Timer(0.02, failed.set).start()
    assert retry(first_is_slow, b"part", 60.0) == b"part"


def test_a_model_that_is_long_on_its_way_is_not_fetched_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "STALL", 0.01)
    monkeypatch.setattr(transport, "LOOK", 0.01)
    call, asked = reset_once(answers_after=0.2)
    assert retry(call, b"model", 60.0, beside=False) == b"model"
    assert len(asked) == 2


def test_what_fails_again_and_again_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "LOOK", 0.01)
    asked: list[bytes] = []

    def call(data: bytes, left: float) -> object:
        asked.append(data)
        raise WireError("no run has begun")

    with pytest.raises(WireError, match="no run has begun"):
        retry(call, b"part", 60.0)
    assert len(asked) == transport.FAILURES


@pytest.mark.long
@pytest.mark.slow
def test_a_process_does_not_wait_for_a_call_to_the_dead() -> None:
    """A run with a dead site was over, and its job went on for the whole patience."""
    program = (
        "import time; from fedstrata.sites.transport import begun; begun(lambda data, left: time.sleep(left), b'', 600)"
    )
    subprocess.run([sys.executable, "-c", program], timeout=120, check=True)


def test_an_answer_of_a_site_that_is_struck_off_meanwhile_counts_no_more(site: Site) -> None:
    """Until it was silent for eight seconds its answers counted."""
    struck: set[str] = set()
    site.transport.struck = struck.__contains__
    assert site.send() == b"done"

    def work() -> bytes:
        struck.add("a")
        return b"done"

    site.work = work
    with pytest.raises(SiteLostError, match="removed from the server's list"):
        site.send()
    asked = site.asked
    with pytest.raises(SiteLostError, match="removed from the server's list"):
        site.send()
    assert site.asked == asked, "it is asked nothing more"
    assert not site.transport.is_reachable("a")
    struck.clear()
    site.work = lambda: b"again"
    assert site.send() == b"again"


@pytest.mark.slow
def test_a_large_message_is_not_lost_because_it_is_long_on_its_way(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "RATE", 0.4)  # eight bytes take twenty seconds
    site.lost = 1
    begun = site.clock()
    assert site.send() == b"done"
    assert site.clock() - begun > 20


def test_a_call_that_fails_is_made_again_while_the_site_lives(site: Site) -> None:
    failed = []

    def broken() -> bytes:
        if len(failed) < 2:
            failed.append(1)
            raise WireError("stream error")
        return b"done"

    site.transport.sites["a"] = lambda data, patience: broken()
    assert site.send() == b"done"
    site.transport.sites["a"] = lambda data, patience: (_ for _ in ()).throw(OverError())
    with pytest.raises(OverError):
        site.send()


def test_who_waits_for_a_site_learns_that_the_job_is_over(site: Site) -> None:
    site.signal.triggered = True
    with pytest.raises(OverError):
        site.transport.is_reachable("a")


def test_a_question_is_answered_once_however_often_it_comes() -> None:
    cache, computed, go = RequestCache(), [], threading.Event()

    def work() -> bytes:
        computed.append(cache.pulse)
        go.wait(10)
        return b"12345"

    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(cache.answer, 7, work) for _ in range(4)]
        while not computed:
            time.sleep(0.001)
        assert cache.pulse == (7, AT_WORK)
        go.set()
        assert [one.result() for one in answers] == [b"12345"] * 4
    assert computed == [(7, AT_WORK)]
    assert cache.pulse == (7, 5)
    with pytest.raises(WireError, match="request 6 is late, because the server has already sent request 7"):
        cache.answer(6, work)
    assert cache.answer(0, lambda: b"each") + cache.answer(0, lambda: b"time") == b"eachtime"


def test_a_question_that_failed_fails_again_without_another_try() -> None:
    cache, tried = RequestCache(), []

    def work() -> bytes:
        tried.append(cache.pulse)
        raise KeyError("no answer")

    for _ in range(3):
        with pytest.raises(KeyError, match="no answer"):
            cache.answer(7, work)
    assert tried == [(7, AT_WORK)]
    assert cache.pulse == (7, 0)
    assert cache.answer(8, lambda: b"the next") == b"the next"


def test_a_heart_beats_while_the_site_works_and_ends_with_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstrata.sites.idempotency.HEARTBEAT", 0.001)
    cache, told = RequestCache(), []

    def tell(number: int, size: int) -> None:
        told.append((number, size))
        if len(told) == 2:
            raise ConnectionError("away for a moment")
        if number == 2:
            raise OverError

    thread = heartbeat(cache, tell, OverError)
    cache.answer(1, lambda: time.sleep(0.02) or b"abc")  # type: ignore[func-returns-value]
    time.sleep(0.02)
    cache.answer(2, lambda: b"")
    thread.join(10)
    assert not thread.is_alive()
    assert {(1, AT_WORK), (1, 3)} <= set(told)
