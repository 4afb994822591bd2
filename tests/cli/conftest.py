"""Commands write to the working directory unless told otherwise: each test has an empty one."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _empty_folder(in_an_empty_folder: None) -> None:
    """Give every test of this folder an empty working directory."""
