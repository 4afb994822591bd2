"""How tests are spread over processes."""

from __future__ import annotations

import pytest


def test_a_file_stays_in_one_process(request: pytest.FixtureRequest) -> None:
    """With a pytest that pytest-xdist does not know, groups are lost without a word, and servers start three times."""
    if not hasattr(request.config, "workerinput"):
        pytest.skip("nothing is spread here")
    assert request.node.nodeid.endswith("@test_conftest")
