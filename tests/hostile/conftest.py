"""A real site, with or without its guard, and a hostile server that can send it anything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asked
import pytest
from target import Line, Target, Targets


@pytest.fixture(scope="session")
def line() -> Iterator[Line]:
    made = Line()
    yield made
    made.close()


@pytest.fixture
def target(line: Line, tmp_path: Path) -> Targets:
    def make(table: dict[str, Any] | None = None, *, opened: bool = False, begin: bool = True, **policy: Any) -> Target:
        name = "open" if opened else f"guarded{len(list(tmp_path.iterdir()))}"
        made = Target(line, tmp_path / name, table, policy, opened)
        if begin:
            assert isinstance(made.begin(), asked.Begun)
        return made

    return make
