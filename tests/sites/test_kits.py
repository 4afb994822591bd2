"""Start-up kits: who may read them, what they log, and that they work wherever they lie, with the right Python."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from waiting import until

from fedstrata.sites.kits import LOGGING, RESOURCES
from fedstrata.sites.start import start
from fedstrata.sites.stop import stop

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("kits")]


@pytest.fixture
def kits(federations: Path, tmp_path: Path) -> Path:
    shutil.copytree(federations / "fed", tmp_path / "fed")
    return tmp_path / "fed"


def test_nobody_else_can_read_a_kit(kits: Path) -> None:
    """The root's private key was readable, and kept safe by its folder alone."""
    for path in (kits, *kits.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() or path.suffix == ".sh" else 0o600), path
    assert stat.S_IMODE((kits / "authority" / "cert.json").stat().st_mode) == 0o600


def test_a_kit_has_no_filters_that_would_see_nothing(kits: Path) -> None:
    assert [path.name for path in kits.rglob("*") if "sample" in path.name or path.suffix == ".ipynb"] == []


def test_the_records_of_jobs_are_in_the_kit_wherever_it_is_moved(kits: Path, tmp_path: Path) -> None:
    """They were in a folder of all users, by the name of the federation: another one of that name found them."""
    for place in ("first", "second"):
        moved = kits / "server" if place == "first" else (kits / "server").rename(tmp_path / "elsewhere")
        assert start(moved, verbose=False) == 0
        text = (moved / RESOURCES).read_text()
        assert f'"{moved}/records/jobs-storage"' in text
        assert f'"{moved}/records/snapshot-storage"' in text
        assert "/var/tmp" not in text
        assert "/tmp/nvflare" not in text
    moved.rename(kits / "server")


@pytest.mark.parametrize("verbose", [False, True])
def test_nvflare_is_quiet_unless_it_is_asked(kits: Path, verbose: bool) -> None:
    start(kits / "a", verbose=verbose)
    config = json.loads((kits / "a" / LOGGING).read_text())
    assert config["loggers"]["root"]["level"] == "INFO"
    assert ("nvflare" not in config["loggers"]) == verbose
    assert set(config["handlers"]) == {"consoleHandler", "logFileHandler"}


@pytest.mark.parametrize("how", ["named", "command", "beside"])
def test_a_kit_starts_with_the_python_that_has_fedstrata(kits: Path, tmp_path: Path, how: str) -> None:
    """It took whatever python3 there was."""
    for name in ("python3", "own"):
        python = tmp_path / name
        python.write_text('#!/bin/bash\necho "$(basename "$0") $*"; [[ "$*" == *sites.start* ]] || exit 7\n')
        python.chmod(0o755)
    command = tmp_path / "fedstrata"
    command.write_text(f"#!{tmp_path / 'own'}\n")
    command.chmod(0o755)
    if how == "beside":  # the path of an environment may be too long for a first line; the command may be a link
        (tmp_path / "environment").mkdir()
        (tmp_path / "environment" / "python").symlink_to(tmp_path / "own")
        command = command.rename(tmp_path / "environment" / "fedstrata")
        command.write_text("#!/bin/sh\n'''exec' …\n' '''\n")
        (tmp_path / "fedstrata").symlink_to(command)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)}
    if how == "named":
        command.unlink()
        environment["FEDSTRATA_PYTHON"] = str(tmp_path / "own")
    done = subprocess.run(
        ["bash", str(kits / "a" / "startup" / "sub_start.sh"), "--once", "--verbose"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 7, done.stderr
    name = "python" if how == "beside" else "own"
    assert f"{name} -m fedstrata.sites.start {kits / 'a'} --once --verbose" in done.stdout
    assert f"{name} -u -m nvflare.private.fed.app.client.client_train" in done.stdout
    assert "python3" not in done.stdout


def test_a_kit_that_may_not_start_does_not(kits: Path, tmp_path: Path) -> None:
    (tmp_path / "own").write_text("#!/bin/bash\necho 'no data'; exit 3\n")
    (tmp_path / "own").chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin", "FEDSTRATA_PYTHON": str(tmp_path / "own")}
    command = ["bash", str(kits / "a" / "startup" / "sub_start.sh"), "--once"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, "no data" in done.stdout) == (3, True)
    assert sys.executable not in done.stdout


def script(kit: Path, name: str) -> subprocess.CompletedProcess[str]:
    """Run one of a kit's scripts, without a terminal."""
    environment = {"PATH": "/usr/bin:/bin", "FEDSTRATA_PYTHON": sys.executable, "PYTHONPATH": ":".join(sys.path)}
    return subprocess.run(
        ["bash", str(kit / "startup" / name)],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_a_start_in_the_background_says_first_what_is_wrong(kits: Path) -> None:
    """Its exit code was 0, and what was wrong came after the prompt."""
    (kits / "a" / "local" / "policy.toml").write_text('min_samples = "many"\n')
    try:
        done = script(kits / "a", "start.sh")
    finally:
        running = stop(kits / "a") == 0
    assert done.returncode == 1
    assert "problem  min_samples = 'many'" in done.stdout
    assert not running


@pytest.mark.long
@pytest.mark.parametrize("once", [False, True])
def test_a_party_is_stopped_without_a_question(kits: Path, tmp_path: Path, once: bool) -> None:
    """It asked, and without a terminal did nothing; a party that was started once it could not stop at all."""
    own, kit = tmp_path / "own", kits / "a"  # the former stands for NVFlare, with the process of a job
    own.write_text('#!/bin/bash\n[[ "$*" == *fedstrata.sites* ]] && exit 0\nsleep 300 &\necho $! > job\nwait\n')
    own.chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin", "FEDSTRATA_PYTHON": str(own)}
    command = ["bash", str(kit / "startup" / ("sub_start.sh" if once else "start.sh")), *(["--once"] if once else [])]
    with (tmp_path / "console.txt").open("wb") as console:
        started = subprocess.Popen(command, env=environment, stdout=console, cwd=tmp_path)
    job = tmp_path / "job"
    until("the process of a job", lambda: job.exists() and job.read_text().strip() != "", 60)
    try:
        done = script(kit, "stop_fl.sh")
    finally:
        stop(kit)
        started.kill()
        started.wait()
    assert (done.returncode, "stopped the processes" in done.stdout) == (0, True), done.stdout + done.stderr
    assert not psutil.pid_exists(int(job.read_text()))
    assert list(kit.glob("*.fl")) == []
    done = script(kit, "stop_fl.sh")
    assert (done.returncode, "no process of" in done.stdout) == (1, True)


def test_a_process_that_has_the_number_of_one_that_ended_is_left_alone(kits: Path) -> None:
    other = subprocess.Popen(["sleep", "60"])
    (kits / "a" / "pid.fl").write_text(f"{other.pid}\n")
    try:
        assert stop(kits / "a") == 1
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_number_that_was_given_away_again_is_forgotten(kits: Path) -> None:
    """Kept, it would be taken for a party that runs, and none could be started."""
    other = subprocess.Popen(["sleep", "60"])
    path = kits / "a" / "daemon_pid.fl"
    path.write_text(f"{other.pid}\n")
    try:
        assert stop(kits / "a") == 1
        assert path.exists(), "it may be what the file names"
        os.utime(path, (0, 0))
        assert stop(kits / "a") == 1
        assert not path.exists()
        assert other.poll() is None
        path.write_text(f"{other.pid}\n")
        other.kill()
        until("its end", lambda: psutil.Process(other.pid).status() == psutil.STATUS_ZOMBIE, 10)
        assert stop(kits / "a") == 1
        assert not path.exists(), "nobody waited for it, and it has ended"
    finally:
        other.kill()
        other.wait()


def test_the_script_of_another_kit_is_left_alone(kits: Path, tmp_path: Path) -> None:
    (tmp_path / "other" / "startup").mkdir(parents=True)
    path = tmp_path / "other" / "startup" / "sub_start.sh"
    path.write_text("sleep 60\nexit\n")
    other = subprocess.Popen(["bash", str(path)], process_group=0)
    (kits / "a" / "daemon_pid.fl").write_text(f"{other.pid}\n")
    try:
        assert stop(kits / "a") == 1
        assert other.poll() is None
    finally:
        os.killpg(other.pid, signal.SIGKILL)
        other.wait()


@pytest.mark.long
@pytest.mark.parametrize("once", [False, True])
def test_a_party_that_was_started_by_another_path_is_stopped(kits: Path, tmp_path: Path, once: bool) -> None:
    """The words did not match, its number was deleted all the same, and no path could stop it."""
    (tmp_path / "link").symlink_to(kits / "a")
    own = tmp_path / "own"  # stands for NVFlare
    own.write_text('#!/bin/bash\n[[ "$*" == *fedstrata.sites* ]] && exit 0\necho $$ > runs\nsleep 300 & wait\n')
    own.chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin", "FEDSTRATA_PYTHON": str(own)}
    name = "sub_start.sh --once" if once else "start.sh"
    command = ["bash", "-c", f"bash {tmp_path}/link/startup/{name} > console.txt 2>&1"]
    started = subprocess.Popen(command, env=environment, cwd=tmp_path)
    runs = tmp_path / "runs"
    try:
        until("the party", lambda: runs.exists() and runs.read_text().strip() != "", 60)
        assert stop(kits / "a") == 0
        assert not psutil.pid_exists(int(runs.read_text()))
    finally:
        stop(tmp_path / "link")
        started.kill()
        started.wait()


@pytest.mark.parametrize("once", [False, True])
def test_a_party_can_be_stopped_as_soon_as_it_is_started(kits: Path, tmp_path: Path, once: bool) -> None:
    """In the seconds until its settings were read nothing ran there, it said; and then the party started."""
    own = tmp_path / "own"  # what makes a kit ready takes its time
    own.write_text('#!/bin/bash\n[[ "$*" == *--check ]] && exit 0\necho "$*" >> asked\nsleep 300 & wait\n')
    own.chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin", "FEDSTRATA_PYTHON": str(own)}
    command = ["bash", str(kits / "a" / "startup" / ("sub_start.sh" if once else "start.sh")), *["--once"] * once]
    with (tmp_path / "console.txt").open("wb") as console:
        started = subprocess.Popen(command, env=environment, stdout=console, cwd=tmp_path)
    try:
        if once:
            until("what makes it ready", (tmp_path / "asked").exists, 60)
        else:
            assert started.wait(60) == 0
        assert stop(kits / "a") == 0
        until("its end", lambda: not script_runs(kits / "a"), 10)
        asked = (tmp_path / "asked").read_text() if (tmp_path / "asked").exists() else ""
        assert "nvflare" not in asked
    finally:
        stop(kits / "a")
        started.kill()
        started.wait()
    assert list((kits / "a").glob("*.fl")) == []


def script_runs(kit: Path) -> bool:
    name = str(kit / "startup" / "sub_start.sh")
    found = (each.info for each in psutil.process_iter(["cmdline", "status"]))
    return any(name in (each["cmdline"] or ()) and each["status"] != psutil.STATUS_ZOMBIE for each in found)


def test_what_could_not_be_started_leaves_no_number(kits: Path, tmp_path: Path) -> None:
    (tmp_path / "own").write_text("#!/bin/bash\nexit 3\n")
    (tmp_path / "own").chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin", "FEDSTRATA_PYTHON": str(tmp_path / "own")}
    for words in ([], ["--once"]):
        command = ["bash", str(kits / "a" / "startup" / "sub_start.sh"), *words]
        assert subprocess.run(command, env=environment, capture_output=True, check=False).returncode == 3
        assert list((kits / "a").glob("*.fl")) == []


@pytest.mark.parametrize(
    ("name", "unless_told"), [("MALLOC_ARENA_MAX", "2"), ("GLIBC_TUNABLES", "glibc.malloc.tcache_max=256")]
)
def test_threads_keep_no_memory_of_their_own_unless_told(
    kits: Path, tmp_path: Path, name: str, unless_told: str
) -> None:
    """With an arena or a cache for each thread, a server's memory grew for as long as messages came."""
    (tmp_path / "own").write_text(f'#!/bin/bash\necho "it is ${name}"; exit 3\n')
    (tmp_path / "own").chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin", "FEDSTRATA_PYTHON": str(tmp_path / "own")}
    command = ["bash", str(kits / "a" / "startup" / "sub_start.sh"), "--once"]
    for given, used in (({}, unless_told), ({name: "8"}, "8")):
        done = subprocess.run(command, env=environment | given, capture_output=True, text=True, check=False)
        assert f"it is {used}\n" in done.stdout
