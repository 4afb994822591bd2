"""Import slow modules when a test first uses them, and not when tests are collected."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest


class Lazy:
    """A stand-in for a module; if the module is not installed, the tests of the file are skipped.

    Args:
        name: The name of the module.
    """

    def __init__(self, name: str) -> None:
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            pytest.skip(f"needs {name}", allow_module_level=True)
        self._name = name

    def __getattr__(self, key: str) -> Any:
        if key.startswith(("_", "pytest_")):
            raise AttributeError(key)  # pytest asks for such attributes when it collects tests
        return getattr(importlib.import_module(self._name), key)
