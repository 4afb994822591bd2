"""What the tests of all engines share."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import matrix
import pytest

import fedstrata as fs


@pytest.fixture(scope="session")
def local() -> Callable[[str], fs.History]:
    """What the local engine makes of a spec of the matrix; computed once."""
    return cache(lambda label: fs.run(matrix.MATRIX[label]))
