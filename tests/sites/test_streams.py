"""NVFlare's receivers in one process: what it costs to remember a message."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from fedstrata.sites.streams import Later

PROGRAM = """
import gc, sys, threading, time
from types import SimpleNamespace
from nvflare.fuel.f3.streaming.byte_receiver import RxTask
if sys.argv[1] == "ours":
    from fedstrata.sites import streams
    streams.SWEEP = 0.5
    streams.bound_growth()
    streams.bound_growth()  # as a process does that is the server's and a site's in one
before = threading.active_count()
cell = SimpleNamespace(fire_and_forget=lambda *args, **options: {})
for sid in range(200):
    task = RxTask(sid, "site", cell, reliable=True)
    task.completed_task_ttl = 1.0
    RxTask.rx_task_map["site", sid] = task
    task.stop()
    task.stop()
most = threading.active_count() - before
import weakref
class Cycle: pass
cycle = Cycle()
cycle.cycle, seen = cycle, weakref.ref(cycle)
gc.collect(1)
gc.collect(1)  # now it is old
del cycle
end = time.monotonic() + 60
while RxTask.rx_task_map and time.monotonic() < end:
    time.sleep(0.05)
time.sleep(1)
print(most, len(RxTask.rx_task_map), seen() is None)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("whose", "threads"), [("ours", 0), ("nvflare", 200)])
def test_messages_are_forgotten_by_one_thread_and_what_they_leave_is_freed(whose: str, threads: int) -> None:
    pytest.importorskip("nvflare")
    done = subprocess.run([sys.executable, "-c", PROGRAM, whose], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(threads), "0", str(whose == "ours")]


BURSTS = """
import sys, threading, time
from concurrent.futures import wait
from fedstrata.sites import streams
if sys.argv[1] == "ours":
    streams.bound_growth()
from nvflare.collab.runtime.controller import CollabController
from nvflare.fuel.f3.endpoint import Endpoint
from nvflare.fuel.f3.sfm.conn_manager import ConnManager
from nvflare.fuel.f3.streaming import stream_utils
pools = [ConnManager(Endpoint("site")).frame_mgr_executor, stream_utils.stream_thread_pool]
pools.append(CollabController("server").inbound_executor)
counts = []
for messages in (5, 10, 20):
    arrived = threading.Event()
    work = [pool.submit(arrived.wait) for pool in pools for _ in range(messages)]
    arrived.set()
    wait(work)
    time.sleep(0.5)  # threads say a little later that they are free
    counts.append(threading.active_count())
print(*(count - counts[0] for count in counts))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("whose", "more"), [("ours", [0, 0, 0]), ("nvflare", [0, 15, 45])])
def test_a_burst_of_messages_starts_no_thread(whose: str, more: list[int]) -> None:
    """Threads of a deployment's processes became more for hours, whenever a burst was the largest so far."""
    pytest.importorskip("nvflare")
    done = subprocess.run([sys.executable, "-c", BURSTS, whose], capture_output=True, text=True, check=True)
    assert [int(count) for count in done.stdout.split()] == more


def test_what_is_due_first_is_done_first_whatever_the_others_raise() -> None:
    done: list[str] = []
    later, ended = Later(), threading.Event()
    later.after(0.2, ended.set)
    later.after(0.1, lambda: done.append("second"))
    later.after(0.01, lambda: 1 / 0)
    later.after(0.02, lambda: done.append("first"))
    assert ended.wait(30)
    assert done == ["first", "second"]
    time.sleep(0.05)
    later.after(0.0, lambda: done.append("again"))
    while len(done) < 3:
        time.sleep(0.01)


FREED = """
import sys
import psutil
from fedstrata.sites.streams import release_memory
blocks = [bytearray(60_000) for _ in range(2_000)]
last = bytearray(60_000)  # lies behind them, so that they are no end that can be cut off
del blocks
before = psutil.Process().memory_info().rss
if sys.argv[1] == "ours":
    release_memory()
print((before - psutil.Process().memory_info().rss) / 2**20)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="another C library")
def test_what_lies_free_goes_back_to_the_system() -> None:
    """The memory of a server's process grew for as long as messages came."""
    pytest.importorskip("psutil")
    freed = {
        how: float(
            subprocess.run([sys.executable, "-c", FREED, how], capture_output=True, text=True, check=True).stdout
        )
        for how in ("plain", "ours")
    }
    assert freed["plain"] < 1
    assert freed["ours"] > 50
