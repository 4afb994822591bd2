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

from fedstrata.sites.processes import end, start

START = """
import os, subprocess, sys, time
from pathlib import Path
own = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0)
Path("pids.part").write_text(f"{os.getpid()} {own.pid}")
Path("pids.part").rename("pids")
time.sleep(600)
"""
"""What a start-up kit starts, with a process in a group of its own: as NVFlare gives each job one."""
PARENT = """
import time
from pathlib import Path
from fedstrata.sites.local_deployment import Processes
with Processes(Path()) as processes:
    processes.start("server")
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
@pytest.mark.parametrize("kind", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGKILL])
def test_a_local_deployment_takes_along_what_it_started_and_what_that_started(tmp_path, kind):
    """After SIGTERM and SIGKILL its servers lived on."""
    kit = tmp_path / "server" / "startup"
    kit.mkdir(parents=True)
    (kit / "start.py").write_text(START)
    (kit / "sub_start.sh").write_text(f"exec {sys.executable} startup/start.py\n")
    with started("-c", PARENT, cwd=tmp_path) as command:
        command.wait_until((tmp_path / "server" / "pids").exists)
        assert len(alive(tmp_path / "server")) == 2
        os.kill(command.process.pid, kind)
        command.ended()
        assert command.soon(lambda: not alive(tmp_path / "server"))


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
