"""The workarounds for NVFlare: threads and memory of processes that exchange messages for days."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from fedstrata.sites import nvflare_workarounds

PROGRAM = """
import gc, sys, threading, time
from types import SimpleNamespace
from nvflare.fuel.f3.streaming.byte_receiver import RxTask
if sys.argv[1] == "ours":
    from fedstrata.sites import nvflare_workarounds
    nvflare_workarounds.SWEEP = 1
    nvflare_workarounds.bound_growth()
    nvflare_workarounds.bound_growth()  # as a process does that is the server's and a site's in one
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
time.sleep(2)
print(most, len(RxTask.rx_task_map), seen() is None)
"""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("whose", "threads"), [("ours", 0), ("nvflare", 200)])
def test_messages_are_forgotten_by_one_thread_and_what_they_leave_is_freed(whose: str, threads: int) -> None:
    pytest.importorskip("nvflare")
    done = subprocess.run([sys.executable, "-c", PROGRAM, whose], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(threads), "0", str(whose == "ours")]


BURSTS = """
import sys, threading, time
from concurrent.futures import wait
from fedstrata.sites import nvflare_workarounds
if sys.argv[1] == "ours":
    nvflare_workarounds.bound_growth()
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


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("whose", "more"), [("ours", [0, 0, 0]), ("nvflare", [0, 15, 45])])
def test_a_burst_of_messages_starts_no_thread(whose: str, more: list[int]) -> None:
    """Threads of a deployment's processes became more for hours, whenever a burst was the largest so far."""
    pytest.importorskip("nvflare")
    done = subprocess.run([sys.executable, "-c", BURSTS, whose], capture_output=True, text=True, check=True)
    assert [int(count) for count in done.stdout.split()] == more


ORDER = """
import time
from types import SimpleNamespace
from nvflare.fuel.f3.streaming.byte_receiver import RxTask
from fedstrata.sites.nvflare_workarounds import bound_growth
bound_growth()
forgotten = []
class Task(RxTask):
    def _remove_task(self):
        forgotten.append(self.sid)
        raise RuntimeError
cell = SimpleNamespace(fire_and_forget=lambda *args, **options: {})
for seconds in (3, 1, 2):
    task = Task(seconds, "site", cell, reliable=True)
    task._schedule_remove_task(seconds)
    task._schedule_remove_task(0)
end = time.monotonic() + 60
while len(forgotten) < 3 and time.monotonic() < end:
    time.sleep(0.05)
print(*forgotten)
"""


@pytest.mark.long
@pytest.mark.slow
def test_messages_are_forgotten_in_order_and_once_even_if_forgetting_fails() -> None:
    pytest.importorskip("nvflare")
    done = subprocess.run([sys.executable, "-c", ORDER], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "2", "3"]


PUBLIC = ("nvflare.apis", "nvflare.collab", "nvflare.widgets", "nvflare.fuel.flare_api.api_spec")
"""NVFlare's documented packages."""


@pytest.mark.slow
def test_only_one_module_touches_the_internals_of_nvflare() -> None:
    folder = Path(nvflare_workarounds.__file__).parent
    inner = set()
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            inner |= {file.name for name in names if name.startswith("nvflare") and not name.startswith(PUBLIC)}
    assert inner == {"nvflare_workarounds.py"}


FREED = """
import sys
import psutil
from fedstrata.sites.nvflare_workarounds import release_memory
blocks = [bytearray(60_000) for _ in range(2_000)]
last = bytearray(60_000)  # lies behind them, so that they are no end that can be cut off
del blocks
before = psutil.Process().memory_info().rss
if sys.argv[1] == "ours":
    release_memory()
print((before - psutil.Process().memory_info().rss) / 2**20)
"""


@pytest.mark.slow
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
