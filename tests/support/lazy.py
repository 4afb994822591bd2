"""Modules that take long to import, imported by the first test that needs them and not when tests are collected."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest


class Lazy:
    """Stands for a module; skips the tests of the file that asks for it where it is not installed.

    Args:
        name: The module's.
    """

    def __init__(self, name: str) -> None:
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            pytest.skip(f"needs {name}", allow_module_level=True)
        self._name = name

    def __getattr__(self, key: str) -> Any:
        if key.startswith(("_", "pytest_")):
            raise AttributeError(key)  # collecting looks at everything, whether it is a function or a mock
        return getattr(importlib.import_module(self._name), key)
