"""What a result was made from, signed: whoever changes a file, or is of another federation, is found out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import fedstrata as fs
from fedstrata.cli import main
from fedstrata.deploy.manifest import CERTIFICATE, FINGERPRINTS, MANIFEST, SECRET, fingerprint, sign, verify
from fedstrata.errors import DataError


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
    assert set(found["result"]) == {"model.safetensors", "metrics.jsonl"}
    assert found["versions"]["fedstrata"]
    with pytest.raises(DataError, match="not signed by this federation"):
        verify(tmp_path / "run", federations / "other" / "a")
    assert main(["verify", str(tmp_path / "run"), "--kit", str(federations / "fed" / "a")]) == 0
    said = capsys.readouterr().out
    assert "signed by the administrator; model.safetensors, metrics.jsonl as signed" in said
    assert "data of b 4567" in said
    assert main(["verify", str(tmp_path / "run"), "--kit", str(federations / "fed" / "a"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found
    sign(tmp_path / "run", federations / "fed" / "b")
    assert main(["verify", str(tmp_path / "run"), "--kit", str(federations / "fed" / "a")]) == 2
    assert "is signed by b; accepted: the administrator, admin@fedstrata.local" in capsys.readouterr().err
    sign(tmp_path / "run", federations / "fed" / "admin")
    text = (tmp_path / "run" / MANIFEST).read_text()
    (tmp_path / "run" / MANIFEST).write_text(text.replace("0123", "0124"))
    with pytest.raises(DataError, match="not signed by this federation: InvalidSignature"):
        verify(tmp_path / "run", federations / "fed" / "a")
    (tmp_path / "run" / MANIFEST).write_text(json.dumps(json.loads(text), indent=2) + "\n")
    (tmp_path / "run" / "model.safetensors").write_bytes(b"another")
    with pytest.raises(DataError, match=r"model\.safetensors is not the one"):
        verify(tmp_path / "run", federations / "fed" / "a")
    (tmp_path / "run" / CERTIFICATE).unlink()
    with pytest.raises(DataError, match="no certificate can be read"):
        verify(tmp_path / "run", federations / "fed" / "a")
