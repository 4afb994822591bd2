"""Give each test an empty working directory, because commands write there by default."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _empty_folder(in_an_empty_folder: None) -> None:
    """Use the fixture ``in_an_empty_folder`` in every test of this folder."""
