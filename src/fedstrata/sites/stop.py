"""What a kit's stop script does: ``python -m fedstrata.sites.stop KIT``."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

PIDS = ("daemon_pid.fl", "pid.fl")
"""In a kit: the process that starts NVFlare anew when it ends, and NVFlare."""

GRACE = 10.0
"""Seconds that processes have to end by themselves."""

ROUNDED = 60.0
"""Seconds by which the system may be wrong about when a process began."""


def stop(kit: Path) -> int:
    """End the party that was started from a folder, with all that it started, and wait for that.

    Args:
        kit: Its folder.

    Returns:
        The exit code: 0, or 1 where nothing runs.
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
    _, left = psutil.wait_procs(family, GRACE)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, GRACE)
    for path in (kit / name for name in (*PIDS, "shutdown.fl", "restart.fl")):
        process = running.get(path)
        if process is None or process in roots or _began_after(process, path):
            path.unlink(missing_ok=True)
        else:
            print(f"fedstrata: process {process.pid}, which {path} names, is left alone: whose is it?", flush=True)
    if not roots:
        print(f"fedstrata: nothing that was started from {kit} runs here", flush=True)
        return 1
    print(f"fedstrata: stopped what was started from {kit}", flush=True)
    return 0


def _running(path: Path) -> Any:
    """The process whose number a file holds; None where it has ended."""
    import psutil

    try:
        process = psutil.Process(int(path.read_text(encoding="utf-8")))
        return None if process.status() == psutil.STATUS_ZOMBIE else process
    except (OSError, ValueError, psutil.Error):
        return None


def _began_after(process: Any, path: Path) -> bool:
    """Whether a process began after a file was written, and has the number of the one that the file names."""
    return bool(process.create_time() > path.stat().st_mtime + ROUNDED)


def _is_of(process: Any, kit: Path) -> bool:
    """Whether a process is this kit's script, or was given this kit's folder, by whatever path."""
    import psutil

    with suppress(psutil.Error):
        words = [process.cwd() / Path(word) for word in process.cmdline() if word]
        return any(_same(word, own) for word in words for own in (kit, kit / "startup" / "sub_start.sh"))
    return False


def _same(path: Path, other: Path) -> bool:
    with suppress(OSError):
        return path.samefile(other)
    return False


if __name__ == "__main__":
    sys.exit(stop(Path(sys.argv[1])))
