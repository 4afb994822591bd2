"""Choose the cases of a test that quick runs have; the others repeat the same code with other values."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def others_long(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Return all cases; those that are not in ``quick`` are marked ``long``."""
    every = list(cases)
    missing = [case for case in quick if case not in every]
    if missing:
        raise ValueError(f"quick cases that do not exist: {missing}")
    return [case if case in quick else _long(case) for case in every]


def _long(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
