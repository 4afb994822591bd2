"""All methods in NVFlare's simulator, and what a user meets there."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matrix
import pytest

import fedstrata as fs
from fedstrata.base.errors import ExtraMissingError, FedstrataError, SpecError
from fedstrata.sites import nvflare_workarounds, simulator
from fedstrata.sites.configuration import write_job
from fedstrata.sites.settings import JobSpec
from fedstrata.sites.simulator import simulate

needs_nvflare = pytest.mark.skipif(importlib.util.find_spec("nvflare") is None, reason="needs the extra nvflare")
STOPPED = "ask, state of the objective"
"""The run that is interrupted and goes on."""


pytestmark = pytest.mark.xdist_group("servers")


@dataclass
class Session:
    """What became of all experiments of the matrix in one session of the simulator, because its start takes long.

    Args:
        folders: Their run folders.
        histories: Their results.
        before: The rounds that were heard of before the first of the runs was stopped.
        after: Those that were heard of once they all went on.
        starts: How often the simulator was started to go on.
    """

    folders: dict[str, Path]
    histories: dict[str, fs.History]
    before: list[int]
    after: list[int]
    starts: int


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    place = tmp_path_factory.mktemp("nvflare")
    labels = sorted(matrix.MATRIX, key=lambda label: label != STOPPED)
    runs = [(matrix.MATRIX[label], place / str(number)) for number, label in enumerate(labels)]
    before: list[int] = []
    after: list[int] = []

    def stop(record: Mapping[str, Any]) -> None:
        before.append(record["round"])
        if len(before) == 2:
            raise KeyboardInterrupt  # as if by hand; server and sites are ended with it

    with pytest.raises(KeyboardInterrupt):
        simulate(runs, sites=2, callbacks=[stop])
    with starting("no.such.program", nvflare_workarounds.SIMULATOR) as started:
        found = simulate(runs, resume=True, callbacks=[lambda record: after.append(record["round"])])
    folders = {label: folder for label, (_, folder) in zip(labels, runs, strict=True)}
    return Session(folders, dict(zip(labels, found, strict=True)), before, after, len(started))


@contextmanager
def starting(*programs: str) -> Iterator[list[Path]]:
    """Let the simulator be these programs, one after another; what was started so far."""
    real, started = simulator._started, list[Path]()

    def start(root: Path, sites: int) -> Any:
        patch.setattr(nvflare_workarounds, "SIMULATOR", programs[len(started)])
        started.append(root)
        return real(root, sites)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulator, "_started", start)
        yield started


@pytest.mark.long
@needs_nvflare
@pytest.mark.slow
@pytest.mark.parametrize("label", matrix.MATRIX)
def test_the_final_model_is_that_of_the_local_engine_to_the_bit(
    session: Session, local: Callable[[str], fs.History], label: str
) -> None:
    here, there = local(label), session.histories[label]
    assert matrix.final_bytes(there) == matrix.final_bytes(here)
    assert (session.folders[label] / "model.safetensors").read_bytes() == matrix.final_bytes(here)
    assert matrix.figures(there) == matrix.figures(here)
    assert there.clients == here.clients


@needs_nvflare
@pytest.mark.long
def test_every_method_gives_the_bytes_of_the_local_engine(tmp_path: Path) -> None:
    specs = list(matrix.EVERY_METHOD.values())
    there = simulate([(spec, tmp_path / str(number)) for number, spec in enumerate(specs)])
    assert [matrix.final_bytes(history) for history in there] == [matrix.final_bytes(fs.run(spec)) for spec in specs]


@pytest.mark.long
@needs_nvflare
@pytest.mark.slow
def test_a_run_goes_on_with_the_states_that_its_sites_kept(session: Session) -> None:
    assert session.before == [1, 2]
    whole = [record["round"] for history in session.histories.values() for record in history]
    assert whole[-len(session.after) :] == session.after
    # A round is heard of when it is written down, just before its checkpoint: the second one may come again. And until
    # the server ends after the interrupt, the run's other two rounds may pass.
    assert 1 <= len(whole) - len(session.after) <= 4


@pytest.mark.long
@needs_nvflare
@pytest.mark.slow
def test_a_simulator_that_does_not_come_up_is_started_again(session: Session, tmp_path: Path) -> None:
    """And where it never does, the result of the rounds before is not taken for that of a run that was to go on."""
    assert session.starts == 2
    shutil.copytree(session.folders[STOPPED], tmp_path / "run", ignore=shutil.ignore_patterns("sites"))
    text = (tmp_path / "run" / "spec.toml").read_text().replace("rounds = 4", "rounds = 5")
    (tmp_path / "run" / "spec.toml").write_text(text)
    with starting(*["no.such.program"] * 2) as started, pytest.raises(FedstrataError, match="ended without a result"):
        fs.run(tmp_path / "run" / "spec.toml", out=tmp_path / "run", engine="nvflare", resume=True)
    assert len(started) == 2


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulator.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ExtraMissingError, match=r"fedstrata\[nvflare\]"):
        fs.run(fs.Experiment(), engine="nvflare")


@needs_nvflare
def test_arrays_and_modules_of_ones_own_cannot_travel() -> None:
    with pytest.raises(SpecError, match="loads the data and the model at each site, so it cannot use objects of this"):
        fs.run(fs.Experiment(), engine="nvflare", data=fs.Data("digits").load())


def test_a_job_is_a_few_lines_of_json_and_no_source(tmp_path: Path) -> None:
    spec = fs.Experiment().to_toml()
    write_job(tmp_path / "job", [JobSpec("run.toml", "run", 10)], [spec])
    files = {str(path.relative_to(tmp_path / "job")) for path in (tmp_path / "job").rglob("*") if path.is_file()}
    config = "app/config"
    assert files == {
        "meta.json",
        f"{config}/config_fed_server.json",
        f"{config}/config_fed_client.json",
        f"{config}/run.toml",
    }
    assert (tmp_path / "job" / config / "run.toml").read_text() == spec
