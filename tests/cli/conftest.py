"""Commands write to the working directory unless told otherwise: each test has an empty one."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("FEDSTRATA_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
