"""Commands write to the working directory unless told otherwise: each test has an empty one."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path_factory.mktemp("empty"))
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("FEDSTRATA_DATA", str(home / "data"))
    monkeypatch.setenv("HOME", str(home))
    # A console knows its width when it is made; xdist gives its workers one.
    monkeypatch.setattr("rich._console", None)
    monkeypatch.delenv("COLUMNS", raising=False)
