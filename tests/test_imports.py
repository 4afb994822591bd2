from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fedstrata.base.outer import OUTER

ROOT = Path(__file__).resolve().parents[1]
OUTER_MODULES = tuple(f"fedstrata.{name}" for name in OUTER)


@pytest.mark.slow
def test_imports_point_downwards_only(tmp_path):
    pytest.importorskip("importlinter")
    code = "from importlinter.cli import lint_imports; import sys; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


NAMES = {"pil": "pillow", "sklearn": "scikit-learn", "skimage": "scikit-image", "mlflow": "mlflow-skinny"}
"""Distributions that are not called what one imports."""

WITH_OTHERS = {"pydantic-core", "markupsafe", "psutil", "ipython"}
"""They come with pydantic, Jinja, Ray and notebooks."""


def imported() -> set[str]:
    """Every distribution that the package imports, wherever in a module."""
    roots = set()
    for path in (ROOT / "src" / "fedstrata").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                roots |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                roots.add(node.module.partition(".")[0])
    roots -= {*sys.stdlib_module_names, "fedstrata"}
    return {NAMES.get(root.lower(), root.lower().replace("_", "-")) for root in roots}


@pytest.mark.slow
def test_what_is_imported_is_declared():
    """lazy_loader came with a tool for developers only, and a new environment could not import fedstrata."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {name: lines for name, lines in project["optional-dependencies"].items() if name not in ("dev", "docs")}
    declared = [*project["dependencies"], *(line for lines in extras.values() for line in lines)]
    names = {re.split(r"[<>=\[ ]", line)[0].lower().replace("_", "-") for line in declared}
    assert imported() - names - WITH_OTHERS == set()


@pytest.mark.slow
def test_test_modules_need_no_outer_package_to_be_collected():
    """The copy without outer packages has all other tests; a module that imports one at its top cannot be collected."""
    wrong = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if path.relative_to(ROOT / "tests").parts[0] in (*OUTER, "hostile"):
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if any(f"{module}.{name}".strip(".").startswith(OUTER_MODULES) for name in names):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert wrong == []
