"""What a result was made from, signed: whoever changes a file, or is of another federation, is found out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import fedstrata as fs
from fedstrata.base.errors import DataError
from fedstrata.cli import main
from fedstrata.sites.manifest import CERTIFICATE, FINGERPRINTS, MANIFEST, SECRET, fingerprint, sign, verify

pytestmark = pytest.mark.slow


def test_the_key_of_fingerprints_is_never_readable_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.csv").write_bytes(b"1")
    monkeypatch.setattr(Path, "chmod", lambda self, mode: None)
    fingerprint(tmp_path / "own.csv", tmp_path / "a")
    assert (tmp_path / "a" / SECRET).stat().st_mode & 0o077 == 0


def test_a_fingerprint_tells_files_apart_and_nothing_of_them(tmp_path: Path) -> None:
    file = tmp_path / "own.csv"
    file.write_text("age\n40\n")
    first = fingerprint(file, tmp_path / "a")
    assert fingerprint(file, tmp_path / "a") == first
    assert fingerprint(file, tmp_path / "b") != first, "whoever has the same file cannot find out who else has"
    file.write_text("age\n41\n")
    assert fingerprint(file, tmp_path / "a") != first
    assert fingerprint(None, tmp_path / "a") == ""


@pytest.mark.xdist_group("kits")
def test_a_manifest_names_what_a_result_was_made_from(
    tmp_path: Path, federations: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any site could sign one: a certificate of the federation was enough."""
    spec = fs.Experiment.from_table(
        {"data": {"limit": 60}, "partition": {"name": "iid", "clients": 2}, "training": {"rounds": 1}}
    )
    fs.run(spec, out=tmp_path / "run")
    (tmp_path / "run" / FINGERPRINTS).write_text('{"a": "0123", "b": "4567"}')
    sign(tmp_path / "run", federations / "fed" / "admin")
    found = verify(tmp_path / "run", federations / "fed" / "a")
    assert found["sites"] == {"a": "0123", "b": "4567"}
    assert {"model.safetensors", "metrics.jsonl", "spec.toml", FINGERPRINTS} <= found["result"].keys()
    assert found["versions"]["fedstrata"]
    with pytest.raises(DataError, match="does not have a valid signature of this federation"):
        verify(tmp_path / "run", federations / "other" / "a")
    assert main(["verify", str(tmp_path / "run"), "--kit", str(federations / "fed" / "a")]) == 0
    said = capsys.readouterr().out
    assert "signed by the administrator; " in said
    assert ", metrics.jsonl, model.json, model.safetensors, " in said
    assert "data of b 4567" in said
    assert main(["verify", str(tmp_path / "run"), "--kit", str(federations / "fed" / "a"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found
    sign(tmp_path / "run", federations / "fed" / "b")
    assert main(["verify", str(tmp_path / "run"), "--kit", str(federations / "fed" / "a")]) == 2
    assert "is signed by b, but must be signed by the administrator, admin@fedstrata.local" in capsys.readouterr().err
    sign(tmp_path / "run", federations / "fed" / "admin")
    text = (tmp_path / "run" / MANIFEST).read_text()
    (tmp_path / "run" / MANIFEST).write_text(text.replace("0123", "0124"))
    with pytest.raises(DataError, match=r"does not have a valid signature of this federation \(InvalidSignature"):
        verify(tmp_path / "run", federations / "fed" / "a")
    (tmp_path / "run" / MANIFEST).write_text(json.dumps(json.loads(text), indent=2) + "\n")
    (tmp_path / "run" / "model.safetensors").write_bytes(b"another")
    with pytest.raises(
        DataError, match=r"was changed after the administrator signed it: model\.safetensors \(changed\)"
    ):
        verify(tmp_path / "run", federations / "fed" / "a")
    (tmp_path / "run" / CERTIFICATE).unlink()
    with pytest.raises(DataError, match="cannot be read as a certificate"):
        verify(tmp_path / "run", federations / "fed" / "a")


@pytest.fixture
def result(tmp_path: Path, federations: Path) -> Path:
    """A signed folder, of a run as far as a signature knows one."""
    (tmp_path / "statistics").mkdir()
    for name in ("spec.toml", "run.json", "model.safetensors", "events.jsonl", "statistics/sums", FINGERPRINTS):
        (tmp_path / name).write_text("{}")
    sign(tmp_path, federations / "fed" / "admin")
    return tmp_path


@pytest.mark.xdist_group("kits")
@pytest.mark.parametrize("name", ["spec.toml", "run.json", "events.jsonl", "statistics/sums", FINGERPRINTS])
def test_every_file_is_as_it_was_signed(result: Path, federations: Path, name: str) -> None:
    """Model, metrics and spec were; events and fingerprints could be changed."""
    verify(result, federations / "fed" / "a")
    (result / name).write_text("{ }")
    with pytest.raises(DataError, match=rf"{name} \(changed\)\. Restore these files\.$"):
        verify(result, federations / "fed" / "a")
    (result / name).unlink()
    (result / "model.safetensors").write_text("another")
    with pytest.raises(DataError) as error:
        verify(result, federations / "fed" / "a")
    assert f"{name} (missing)" in str(error.value)
    assert "model.safetensors (changed)" in str(error.value)


@pytest.mark.xdist_group("kits")
def test_a_file_that_nobody_signed_is_mentioned(
    result: Path, federations: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (result / "report.html").write_text("")
    assert "report.html" not in verify(result, federations / "fed" / "a")["result"]
    assert [record.getMessage() for record in caplog.records] == [f"{result / 'report.html'} is not signed"]


@pytest.mark.xdist_group("kits")
def test_a_signature_without_a_model_is_none_of_a_result(result: Path, federations: Path) -> None:
    model = (result / "model.safetensors").rename(result.with_name("kept"))
    sign(result, federations / "fed" / "admin")
    model.rename(result / "model.safetensors")
    with pytest.raises(DataError, match=r"does not list model\.safetensors"):
        verify(result, federations / "fed" / "a")
