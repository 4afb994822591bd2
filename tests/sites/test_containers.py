"""The container, compose and systemd files, done as written: in fresh folders, where there is no container daemon."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import stat
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from waiting import free_port

from fedstrata.sites.processes import end, start

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "examples" / "deploy"
UNIT = PLACE / "fedstrata@.service"
PARTIES = ("server", "cleveland", "hungary", "switzerland")


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile, in order."""
    lines = (PLACE / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    return [(line.split()[0], line.split(None, 1)[1]) for line in lines if line.strip() and not line.startswith("#")]


def services() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    found: dict[str, Any] = yaml.safe_load((PLACE / "compose.yaml").read_text())["services"]
    return found


def test_nobody_is_root_and_nobody_sees_another_ones_files() -> None:
    steps = instructions()
    assert ("USER", "fedstrata") in steps
    assert steps.index(("USER", "fedstrata")) > max(n for n, (kind, _) in enumerate(steps) if kind == "RUN")
    for name in PARTIES:
        service = services()[name]
        assert not service["user"].startswith(("0", "root"))
        assert service["cap_drop"] == ["ALL"]
        kit, *files = service["volumes"]
        assert kit == f"./kits/{name}:/kit"
        assert all(file.endswith(":ro") and name in file for file in files)
        assert len(files) == (name != "server")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    unit = shutil.copy(UNIT, tmp_path / "fedstrata@server.service")
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert (done.returncode, [row for row in done.stderr.splitlines() if "fedstrata" in row]) == (0, [])


@contextmanager
def image(place: Path) -> Iterator[dict[str, str]]:
    """What the Dockerfile makes: packages that are here already are found here, and its own is built and installed.

    Yields:
        The environment of a process in it.
    """
    made = place / "image"
    venv.create(made / "usr", with_pip=True)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    packages = made / "usr" / "lib" / version / "site-packages"
    (packages / "here.pth").write_text(sysconfig.get_path("purelib") + "\n")
    inside = {key: os.environ[key] for key in ("HOME", "LANG") if key in os.environ}
    inside |= {"PATH": f"{made / 'usr' / 'bin'}:/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    inside |= {key: value for key, value in os.environ.items() if key.lower().startswith(("pip_", "http", "no_proxy"))}
    for kind, words in instructions():
        if kind == "COPY":
            *sources, target = shlex.split(words)
            for source in sources:
                where = made / target.strip("/")
                if target.endswith("/"):
                    where.mkdir(parents=True, exist_ok=True)
                ignore = shutil.ignore_patterns("__pycache__")
                here = ROOT / source
                shutil.copytree(here, where, ignore=ignore) if here.is_dir() else shutil.copy(here, where)
        elif kind == "RUN" and not words.startswith("useradd"):  # a user of this machine is not ours to make
            command = words.replace("/src", str(made / "src"))
            done = subprocess.run(
                command, shell=True, env=inside, cwd=made, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr
    yield inside


def as_started(name: str, place: Path) -> tuple[list[str], Path]:
    """What a service runs and where, with its files mounted."""
    service = services()[name]
    command = service.get("entrypoint") or json.loads(dict(instructions())["ENTRYPOINT"])
    folder = service.get("working_dir", dict(instructions())["WORKDIR"])
    cwd = place
    for volume in service["volumes"]:
        host, inside, *_ = volume.split(":")
        if inside == folder:
            cwd = (place / host).resolve()
            continue
        target = cwd / Path(inside).relative_to(folder)
        if not target.exists():
            shutil.copy(place / host, target)
    return command, cwd


@pytest.mark.long
@pytest.mark.xdist_group("servers")
def test_three_hospitals_as_the_files_start_them(tmp_path: Path) -> None:
    pytest.importorskip("nvflare")
    shutil.copytree(ROOT / "examples" / "hospitals", tmp_path / "examples" / "hospitals")
    shutil.copytree(PLACE, place := tmp_path / "examples" / "deploy")
    # Without compose's network nobody is called "server", and another port may be free.
    port = free_port()
    text = (place / "sites.toml").read_text().replace('"server"', '"localhost"').replace("8002", str(port))
    (place / "sites.toml").write_text(text)
    running = []
    with image(tmp_path) as inside:

        def once(name: str) -> None:
            command, cwd = as_started(name, place)
            done = subprocess.run(
                command, cwd=cwd, env=inside, capture_output=True, text=True, check=False, timeout=900
            )
            assert done.returncode == 0, done.stdout + done.stderr

        where = "import fedstrata; print(fedstrata.__file__)"
        found = subprocess.run(["python", "-c", where], env=inside, capture_output=True, text=True, check=True).stdout
        assert found.startswith(str(tmp_path)), "it is the image's own"
        once("provision")
        for path in (place / "kits").rglob("*"):
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
        try:
            for name in PARTIES:
                command, cwd = as_started(name, place)
                with (tmp_path / f"{name}.txt").open("wb") as log:
                    running.append(start(command, cwd=cwd, env=inside, stdout=log, stderr=subprocess.STDOUT))
            once("submit")
        finally:
            for process in running:
                end(process, 0)
        # The rehearsal over the same files ends with the same bytes.
        for name in PARTIES[1:]:
            text = text.replace(f'[site.{name}]\ndata = "own.csv"', f'[site.{name}]\ndata = "kits/{name}/own.csv"')
        (place / "rehearsed.toml").write_text(text)
        more = ["--set", "training.clients_per_round=3", "--sites", "rehearsed.toml", "--out", "rehearsed", "--quiet"]
        subprocess.run(["fedstrata", "run", "hospitals.toml", *more], cwd=place, env=inside, check=True)
    models = [(place / run / "model.safetensors").read_bytes() for run in ("result", "rehearsed")]
    assert models[0] == models[1]
