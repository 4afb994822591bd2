"""The programs in ``tools``, as modules."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def tool(name: str) -> ModuleType:
    """Return a program in ``tools`` as a module; skip the test if only the installed package is there."""
    file = ROOT / "tools" / f"{name}.py"
    if not file.exists():
        pytest.skip("no tools beside an installed package")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
