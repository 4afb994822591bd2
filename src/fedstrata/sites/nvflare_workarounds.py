"""Work around problems of NVFlare. Only this module depends on NVFlare's internals.

Each workaround cites the version and the file of NVFlare. The other modules of ``fedstrata.sites`` use only NVFlare's
documented interfaces: ``nvflare.apis``, ``nvflare.collab``, the FLARE API, and the files that NVFlare makes for each
machine. Check every function of this module before you allow a new version of NVFlare.
"""

from __future__ import annotations

import ctypes
import gc
import io
import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout, suppress
from functools import cache, wraps
from importlib.resources import files
from pathlib import Path
from queue import PriorityQueue
from types import SimpleNamespace
from typing import Any

# Workarounds for memory and threads of long-lived processes

SWEEP = 30
"""The number of seconds between two runs of the garbage collector."""

AT_ONCE = 24
"""The initial number of threads in each of NVFlare's thread pools. Three sites keep at most half of these threads busy.
The pools allow up to 128 threads."""


@cache
def bound_growth() -> None:
    """Keep the number of threads and the memory use of this process constant while the process exchanges messages.

    The first call in a process starts a thread that never ends. Later calls have no effect.
    """
    cleanups = PriorityQueue[tuple[float, int, Callable[[], object]]]()
    _forget_in_one_thread(cleanups)
    _fill_thread_pools()
    gc.collect()
    # The objects that exist now are frozen, so that the collector skips them. Most of these objects are never freed.
    gc.freeze()
    threading.Thread(target=_clean_up, args=(cleanups,), name="clean-up", daemon=True).start()


def _forget_in_one_thread(cleanups: PriorityQueue[tuple[float, int, Callable[[], object]]]) -> None:
    """Let one thread delete the records of received messages, because NVFlare would start a timer thread per record.

    A receiver keeps a record of each message for 65 seconds, in case the message is sent again. With three sites and
    twenty exchanges per second, NVFlare would have 4,000 timer threads. The timers cannot be turned off. A shorter time
    (``streaming_retry_timeout``) would also shorten the time in which a lost message is sent again.

    Seen in NVFlare 2.9.0, ``fuel/f3/streaming/byte_receiver.py``, ``RxTask._schedule_remove_task``; since pull request
    4785 (reliable streams).
    """
    from nvflare.fuel.f3.streaming.byte_receiver import RxTask

    order, never_started = itertools.count(), SimpleNamespace(cancel=lambda: None)

    def schedule(self: Any, ttl: float | None = None) -> None:
        with self.stop_lock:
            if self.cleanup_timer:
                return
            self.cleanup_timer = never_started
        due = time.monotonic() + (self.completed_task_ttl if ttl is None else ttl)
        cleanups.put((due, next(order), self._remove_task))

    RxTask._schedule_remove_task = schedule


def _clean_up(cleanups: PriorityQueue[tuple[float, int, Callable[[], object]]]) -> None:
    """Every second, delete old records of received messages; every ``SWEEP`` seconds, free the memory of sent messages.

    For each sent message, even a small message, a buffer of 1 MiB stays in a cycle of references. Python's garbage
    collector examines old objects only when a quarter of all objects are new. Until then, these buffers would fill
    gigabytes.

    Seen in NVFlare 2.9.0, ``fuel/f3/streaming/byte_streamer.py``; since pull request 4785.
    """
    for second in itertools.count():
        if second % SWEEP == 0:
            gc.collect()
            release_memory()
        while cleanups.queue and cleanups.queue[0][0] <= time.monotonic():
            with suppress(Exception):
                cleanups.get()[-1]()
        time.sleep(1)


def release_memory() -> None:
    """Return unused memory of the C library to the operating system. Only glibc supports this."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def _fill_thread_pools() -> None:
    """Let NVFlare's thread pools start ``AT_ONCE`` threads immediately, instead of adding threads during the run.

    A pool starts another thread whenever the number of messages that arrive at the same time is larger than ever
    before. The number of threads would therefore grow for hours.

    Seen in NVFlare 2.9.0, in the pools of ``fuel/f3/sfm/conn_manager.py`` (``ConnManager``),
    ``collab/runtime/controller.py``, ``collab/runtime/executor.py``, ``fuel/f3/streaming/stream_utils.py`` and
    ``fuel/f3/streaming/byte_streamer.py``.
    """
    from nvflare.collab.runtime.controller import CollabController
    from nvflare.collab.runtime.executor import CollabExecutor
    from nvflare.fuel.f3.sfm.conn_manager import ConnManager
    from nvflare.fuel.f3.streaming import stream_utils
    from nvflare.fuel.f3.streaming.byte_streamer import reliable_retry_scheduler

    for owner in (ConnManager, CollabController, CollabExecutor):
        _start_threads_of(owner)
    _start_threads(
        stream_utils.stream_thread_pool, stream_utils.callback_thread_pool, reliable_retry_scheduler.retry_task_pool
    )


def _start_threads_of(owner: type[Any]) -> None:
    """Change a class of NVFlare so that every new object starts the threads of its pools."""
    construct = owner.__init__

    @wraps(construct)  # The wrapper preserves the names of the parameters, because NVFlare reads them.
    def construct_with_threads(self: Any, *arguments: Any, **named: Any) -> None:
        construct(self, *arguments, **named)
        _start_threads(*(value for value in vars(self).values() if isinstance(value, ThreadPoolExecutor)))

    owner.__init__ = construct_with_threads


def _start_threads(*pools: ThreadPoolExecutor) -> None:
    """Start at most ``AT_ONCE`` threads of each pool now."""
    started = threading.Event()
    for pool in pools:
        for _ in range(min(AT_ONCE, pool._max_workers)):
            pool.submit(started.wait)  # a thread that waits counts as busy, so the pool starts another thread
    started.set()


# Workarounds for jobs and sites


class JobEnd:
    """A signal that ends calls to sites.

    The signal is triggered when the job is aborted or when the job's server ends normally.

    Before NVFlare ends a job, it waits for all calls. Without this signal, a call to a dead site would last until its
    timeout.

    Seen in NVFlare 2.9.0, ``collab/api/_invocation.py``: a call waits until ``abort_signal.triggered`` is True.

    Args:
        signal: The job's abort signal.
    """

    def __init__(self, signal: Any) -> None:
        self._signal, self.reached = signal, False

    @property
    def triggered(self) -> bool:
        """Whether the job is over."""
        return bool(self.reached or self._signal.triggered)

    def ends_calls_to(self, site: Any) -> None:
        """End calls to a site as soon as this signal is triggered."""
        site.backend.abort_signal = self


def survive_kill(run: Path) -> None:
    """Let a job continue at the other sites if the job's process at this site is killed.

    NVFlare ends the whole job if the return code of the process is not 0. NVFlare reads the return code from a file in
    the job's folder. This function therefore writes 0 to this file in advance. A process that is not killed overwrites
    the file when it ends.

    Seen in NVFlare 2.9.0, ``private/fed/utils/fed_utils.py``, ``get_return_code``.

    Args:
        run: The job's folder at this site.
    """
    from nvflare.apis.fl_constant import FLMetaKey

    (run / FLMetaKey.PROCESS_RC_FILE).write_text("0")


def refuse_clients(fl_ctx: Any, refuses: Callable[[str], bool], refused_now: Callable[[str], bool]) -> None:
    """Refuse clients by name at registration and at heartbeats, and log out refused clients that are connected.

    Immediately before NVFlare compares a name with the certificate, it asks whether the name is disabled. Only an
    administrator can change NVFlare's own list of disabled names. If we did not log out a refused client, NVFlare would
    send jobs to this client for two more minutes.

    Seen in NVFlare 2.9.0, ``private/fed/server/client_manager.py`` (``ClientManager.is_client_disabled``) and
    ``private/fed/server/fed_server.py`` (``logout_client``).

    Args:
        fl_ctx: The context of an event at the server.
        refuses: A function that returns True if a name is refused. NVFlare calls this function for each name.
        refused_now: A function that returns True if a connected client must be logged out. Only
            ``refuse_clients`` calls ``refused_now``.
    """
    server = fl_ctx.get_engine().server
    server.client_manager.is_client_disabled = refuses
    for token, client in list(server.client_manager.get_clients().items()):
        if refused_now(client.name):
            server.logout_client(token)


# Workarounds for the simulator

SIMULATOR = "nvflare.private.fed.app.simulator.simulator"

SIMULATOR_ATTEMPTS = 2
"""The maximum number of attempts to start the simulator, if it ends before the first run has begun.

On a busy machine, NVFlare may lose a site during the start. The simulator then ends before any of our code has run.
Seen in NVFlare 2.9.0, ``private/fed/app/simulator/simulator_runner.py``.
"""


def simulator_command(job: Path, workspace: Path, sites: int) -> list[str]:
    """Return the command that runs a job in the simulator, with one process per site.

    In NVFlare 2.9.0, ``nvflare simulator`` runs the same command: ``private/fed/app/simulator/simulator.py``.
    """
    return [sys.executable, "-m", SIMULATOR, str(job), "-w", str(workspace), "-n", str(sites), "-t", str(sites)]


# Workarounds for the administrator's session


def open_session(user: str, admin: Path) -> Any:
    """Open an administrator's session. If the server is unreachable, suppress the FLARE API's many log lines."""
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    logging.getLogger("nvflare").setLevel(logging.CRITICAL)
    return new_secure_session(user, str(admin.absolute()), timeout=10.0)


def quiet_call(work: Callable[[], Any]) -> Any:
    """Call the FLARE API, suppress its output, and return the result (NVFlare 2.9.0, ``fuel/flare_api``)."""
    with redirect_stdout(io.StringIO()):
        return work()


def is_temporary(error: Exception, known: bool) -> bool:
    """Return True if a request may succeed later: the server is unreachable, or its sites and jobs are not ready.

    If a server stops while it answers, the API raises ``InternalError`` or ``RuntimeError``. After a restart, a server
    does not know our session, and the API raises ``AuthenticationError``.

    Seen in NVFlare 2.9.0, ``fuel/flare_api/flare_api.py`` (``Session._do_command``).

    Args:
        error: The exception that the FLARE API raised.
        known: Whether the server has accepted this session before.
    """
    from nvflare.apis.fl_exception import FLCommunicationError
    from nvflare.fuel.flare_api import api_spec as api

    away = (ConnectionError, TimeoutError, FLCommunicationError, api.SessionClosed, api.NoReply, api.InternalError)
    # These errors are temporary: a job may end between two requests, or begin before its sites are ready.
    between = (api.NoClientsAvailable, api.JobNotRunning, api.JobNotDone, api.ClientsStillRunning)
    if isinstance(error, api.AuthenticationError):
        return known
    return isinstance(error, (*away, RuntimeError, *between))


# Workarounds for start-up kits

SCHEDULER = {"max_jobs": 1, "min_schedule_interval": 10, "max_schedule_interval": 30, "max_schedule_count": 100_000}
"""Settings of the server's job scheduler. The scheduler runs one job at a time, because two jobs may write into the
same folder. If a job waits for sites, the scheduler tries to start it every 10 to 30 seconds, for weeks.

NVFlare computes ``2**n * min_schedule_interval`` for the nth attempt. With a float, this product overflows after a
thousand attempts, and the job is never tried again. The interval is therefore an integer. Seen in NVFlare 2.9.0,
``app_common/job_schedulers/job_scheduler.py``.
"""


def _kit_text(name: str) -> str:
    return "\n" + files(__package__).joinpath("kit", name).read_text(encoding="utf-8")


def adapt_script(name: str, text: str) -> str:
    """Change a script in the folder (kit) that NVFlare makes for the server or a site.

    The changed script uses the current Python, checks the folder before it starts NVFlare, and can be stopped at any
    time.

    NVFlare's ``stop_fl.sh`` asks for confirmation, and does nothing without a terminal. NVFlare's ``start.sh`` returns
    before the daemon has written its process id. A stop script that runs immediately after the start therefore does not
    find the process.

    Both problems were seen in NVFlare 2.9.0, ``lighter/templates/master_template.yml``.

    Args:
        name: The file name of the script.
        text: NVFlare's version of the script.
    """
    first, _, rest = text.partition("\n")
    rest = rest.replace("python3 ", '"$FEDSTRATA_PYTHON" ')
    rest = rest.replace("\nSECONDS=0\n", f"{_kit_text('sub_start.sh')}SECONDS=0\n")
    rest = rest.replace("\n  $DIR/sub_start.sh &", _kit_text("start.sh").rstrip())
    # Remove two steps of sub_start.sh. The first step writes daemon_pid.fl, but our own lines have already written this
    # file. The second step deletes pid.fl, but with --once this file contains the script's process id, and must remain.
    rest = rest.replace('\ncheck_daemon\n\necho $BASHPID > "$WORKSPACE/daemon_pid.fl"\n', "")
    rest = rest.replace('directly"\n  rm -f "$WORKSPACE/pid.fl"', 'directly"\n  rm -f')
    if name == "stop_fl.sh":
        rest = rest.partition('echo "Please use FL admin console')[0] + _kit_text("stop_fl.sh")
    return f"{first}\n{_kit_text('python.sh')}{rest}"
