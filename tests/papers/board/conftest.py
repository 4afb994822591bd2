from __future__ import annotations

import pytest

from fedstrata.papers.board.protocol import read


@pytest.fixture
def small():
    """The protocol at small scale."""
    return read().small()
