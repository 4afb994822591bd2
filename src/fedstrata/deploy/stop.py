"""What a kit's stop script does: ``python -m fedstrata.deploy.stop KIT``."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

PIDS = ("daemon_pid.fl", "pid.fl")
"""In a kit: the process that starts NVFlare anew when it ends, and NVFlare."""

GRACE = 10.0
"""Seconds that processes have to end by themselves."""


def stop(kit: Path) -> int:
    """End the party that was started from a folder, with all that it started, and wait for that.

    Args:
        kit: Its folder.

    Returns:
        The exit code: 0, or 1 where nothing runs.
    """
    import psutil

    found = [process for name in PIDS if (process := _running(kit, kit / name)) is not None]
    family: set[Any] = set(found)
    for process in found:
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
    for name in (*PIDS, "shutdown.fl", "restart.fl"):
        (kit / name).unlink(missing_ok=True)
    if not found:
        print(f"fedstrata: nothing that was started from {kit} runs here", flush=True)
        return 1
    print(f"fedstrata: stopped what was started from {kit}", flush=True)
    return 0


def _running(kit: Path, path: Path) -> Any:
    """The process whose number a file holds; None where it has ended, and another one may have its number."""
    import psutil

    try:
        process = psutil.Process(int(path.read_text(encoding="utf-8")))
        words = process.cmdline()
    except (OSError, ValueError, psutil.Error):
        return None
    return process if any(word == str(kit) or word.endswith("/sub_start.sh") for word in words) else None


if __name__ == "__main__":
    sys.exit(stop(Path(sys.argv[1])))
