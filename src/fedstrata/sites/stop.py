"""Stop the server or a site. ``stop_fl.sh`` in the folder KIT runs ``python -m fedstrata.sites.stop KIT``."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

PIDS = ("daemon_pid.fl", "pid.fl")
"""Two files with process ids: the id of the script that restarts NVFlare, and the id of NVFlare itself."""

GRACE = 10.0
"""The number of seconds between SIGTERM and SIGKILL, in which processes can end by themselves."""

ROUNDED = 60.0
"""The maximum error in seconds of the start time that the operating system reports for a process."""


def stop(kit: Path) -> int:
    """Stop the process of the server or a site and its child processes, and wait until all of them have ended.

    Args:
        kit: The folder of the server or the site.

    Returns:
        The exit code, which is 1 if the process was not running, and otherwise 0.
    """
    import psutil

    running = {kit / name: process for name in PIDS if (process := _running(kit / name)) is not None}
    roots = [process for process in running.values() if _is_of(process, kit)]
    family: set[Any] = set(roots)
    for process in roots:
        with suppress(psutil.NoSuchProcess):
            family.update(process.children(recursive=True))
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(family, GRACE)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, GRACE)
    for path in (kit / name for name in (*PIDS, "shutdown.fl", "restart.fl")):
        process = running.get(path)
        if process is None or process in roots or _began_after(process, path):
            path.unlink(missing_ok=True)
        else:
            text = f"process {process.pid}, listed in {path}, does not belong to this kit and was not stopped"
            print(f"fedstrata: {text}", flush=True)
    text = f"stopped the processes of {kit}" if roots else f"no process of {kit} is running"
    print(f"fedstrata: {text}", flush=True)
    return int(not roots)


def _running(path: Path) -> Any:
    """Return the process whose id is in a file; None if the process has ended or the file does not exist."""
    import psutil

    try:
        process = psutil.Process(int(path.read_text(encoding="utf-8")))
        return None if process.status() == psutil.STATUS_ZOMBIE else process
    except (OSError, ValueError, psutil.Error):
        return None


def _began_after(process: Any, path: Path) -> bool:
    """Return True if a process began after its id was written to the file.

    In this case, the process that wrote the id has ended, and the system has given the id to a new process.
    """
    return bool(process.create_time() > path.stat().st_mtime + ROUNDED)


def _is_of(process: Any, kit: Path) -> bool:
    """Return True if the command line of a process contains a path to the folder ``kit`` or to its start script."""
    import psutil

    with suppress(psutil.Error):
        words = [process.cwd() / Path(word) for word in process.cmdline() if word]
        return any(_same(word, path) for word in words for path in (kit, kit / "startup" / "sub_start.sh"))
    return False


def _same(path: Path, other: Path) -> bool:
    with suppress(OSError):
        return path.samefile(other)
    return False


if __name__ == "__main__":
    sys.exit(stop(Path(sys.argv[1])))
