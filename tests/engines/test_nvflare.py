"""All methods in NVFlare's simulator, and what a user meets there."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import fedstrata as fs
from fedstrata.deploy import simulator
from fedstrata.deploy.configuration import write_job
from fedstrata.deploy.settings import JobSpec
from fedstrata.deploy.simulator import simulate
from fedstrata.errors import ExtraMissingError, FedstrataError, SpecError

# Tests are no package: the table that all engines share is loaded from its file.
_found = importlib.util.spec_from_file_location("matrix", Path(__file__).with_name("matrix.py"))
assert _found is not None
assert _found.loader is not None
_matrix = importlib.util.module_from_spec(_found)
_found.loader.exec_module(_matrix)
MASKED, MATRIX, final_bytes = _matrix.MASKED, _matrix.MATRIX, _matrix.final_bytes

needs_nvflare = pytest.mark.skipif(importlib.util.find_spec("nvflare") is None, reason="needs the extra nvflare")
HE = importlib.util.find_spec("tenseal") is not None
LABELS = [label for label in MATRIX if HE or label not in MASKED]


@pytest.fixture(scope="module")
def histories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, fs.History]:
    """All of them in one session: it is its start that takes long."""
    place = tmp_path_factory.mktemp("nvflare")
    runs = [(MATRIX[label], place / str(number)) for number, label in enumerate(LABELS)]
    return dict(zip(LABELS, simulate(runs), strict=True))


@needs_nvflare
@pytest.mark.slow
@pytest.mark.parametrize("label", LABELS)
def test_the_final_model_is_that_of_the_local_engine_to_the_bit(
    histories: dict[str, fs.History], tmp_path: Path, label: str
) -> None:
    fs.run(MATRIX[label], out=tmp_path / "local")
    there = histories[label]
    assert there.path is not None
    assert (there.path / "model.safetensors").read_bytes() == (tmp_path / "local" / "model.safetensors").read_bytes()
    assert final_bytes(there) == (tmp_path / "local" / "model.safetensors").read_bytes()


@needs_nvflare
@pytest.mark.slow
def test_a_run_goes_on_with_the_states_that_its_sites_kept(tmp_path: Path) -> None:
    spec = fs.Experiment.from_table(
        {
            "method": "scaffold",
            "partition": {"name": "dirichlet", "clients": 3},
            "model": {"name": "mlp", "hidden": [8]},
            "training": {"rounds": 4, "local_steps": 2, "execution": "per-client"},
            "evaluation": {"every": 0, "checkpoint_every": 1},
        }
    )
    out = tmp_path / "out"
    seen: list[int] = []

    def stop(record: object) -> None:
        seen.append(int(record["round"]))  # type: ignore[index]
        if len(seen) == 2:
            raise KeyboardInterrupt  # as if by hand; server and sites are ended with it

    with pytest.raises(KeyboardInterrupt):
        fs.run(spec, out=out, engine="nvflare", callbacks=[stop])
    history = fs.run(spec, out=out, engine="nvflare", resume=True)
    assert final_bytes(history) == final_bytes(fs.run(spec))
    assert [record["round"] for record in history] == [1, 2, 3, 4]


@needs_nvflare
def test_a_simulator_that_does_not_come_up_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And where it never does, the result of the rounds before is not taken for that of a run that was to go on."""
    table = {"partition": {"name": "iid", "clients": 2}, "training": {"rounds": 1, "local_epochs": 1}}
    program, real, started = simulator._PROGRAM, simulator._started, []

    def starting(session: Path, sites: int) -> object:
        started.append(session)
        monkeypatch.setattr(simulator, "_PROGRAM", program if len(started) == 2 else "no.such.program")
        return real(session, sites)

    monkeypatch.setattr(simulator, "_started", starting)
    spec = fs.Experiment.from_table(table)
    history = fs.run(spec, out=tmp_path, engine="nvflare")
    assert len(started) == 2
    assert final_bytes(history) == final_bytes(fs.run(spec))
    longer = (tmp_path / "spec.toml").read_text().replace("rounds = 1", "rounds = 2")
    (tmp_path / "spec.toml").write_text(longer)
    with pytest.raises(FedstrataError, match="ended without a result"):
        fs.run(tmp_path / "spec.toml", out=tmp_path, engine="nvflare", resume=True)
    assert len(started) == 4


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulator.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ExtraMissingError, match=r"fedstrata\[nvflare\]"):
        fs.run(fs.Experiment(), engine="nvflare")


@needs_nvflare
def test_arrays_and_modules_of_ones_own_cannot_travel() -> None:
    with pytest.raises(SpecError, match="give data and a model that the spec can name"):
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
