"""What starts others of its own ends with who started it, and takes them along."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from processes import started

from fedstrata.deploy.processes import end, start

CHILD = """
import os, subprocess, sys, time
from pathlib import Path
own = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0)
Path("pids.part").write_text(f"{os.getpid()} {own.pid}")
Path("pids.part").rename("pids")
time.sleep(600)
"""
PARENT = f"""
import sys, time
from fedstrata.deploy.processes import start
process = start([sys.executable, "-c", {CHILD!r}])
time.sleep(600)
"""


def alive(folder: Path) -> list[int]:
    def is_alive(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return [pid for pid in map(int, (folder / "pids").read_text().split()) if is_alive(pid)]


@pytest.mark.slow
def test_a_killed_process_takes_along_what_it_started_and_what_that_started(tmp_path):
    with started("-c", PARENT, cwd=tmp_path) as command:
        command.wait_until((tmp_path / "pids").exists)
        assert len(alive(tmp_path)) == 2
        os.kill(command.process.pid, signal.SIGKILL)
        command.ended()
        assert command.soon(lambda: not alive(tmp_path))


@pytest.mark.slow
def test_all_are_told_to_end_and_the_exit_code_is_the_commands():
    process = start([sys.executable, "-c", "import sys; sys.exit(7)"])
    assert process.wait(300) == 7
    end(process, 10)
    said = subprocess.PIPE
    program = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('told'))); "
    process = start([sys.executable, "-u", "-c", program + "print('ready'); time.sleep(600)"], stdout=said)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    end(process, 60)
    assert process.stdout.read() == b"told\n"
    process.stdout.close()
    assert process.returncode == 0
