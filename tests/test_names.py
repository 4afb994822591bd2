"""The code says the field's words: no name that was given up comes back in the place and sense that it had."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedstrata
from fedstrata.base import outer

SRC = Path(fedstrata.__file__).parent

MODULES = {
    "seam", "tally", "screening", "answers", "tandem", "visiting", "reserving", "stepping", "grouping", "chain",
    "straightline", "holding", "dealing", "spare", "squeeze", "segments", "moving", "rows", "sizes", "keys", "serving",
    "printed", "packed", "grid", "agreed", "trial", "vectorised", "stratification",
    "line", "turns", "host", "asks",
}  # fmt: skip
PLACES = {"nn/layout.py", "sampling/privacy.py", "labels/__init__.py"}
"""These words are given up there alone: a later room may be called ``privacy``."""

CLASSES = {
    "World", "Job", "Ride", "Carriage", "Luggage", "Crewman", "Errand", "Similar", "Requested", "Pooled", "Margins",
    "Noting", "Remote", "Tally", "Plan", "Group",
    "Line", "CollabLine", "Turns", "Host", "Stay", "Left", "Spent", "Books", "Question", "Settled", "Kept",
}  # fmt: skip
FUNCTIONS = {
    "answers", "carries", "ride", "ask_fused", "go", "bury", "squeeze", "fit_check", "check_like", "insist", "beat",
}  # fmt: skip
HOOKS = {"survey", "begin", "finish", "absorb"}
"""What an objective's hooks were called; a run folder begins and finishes all the same."""

NAMES = {"cargo", "worn", "strangers", "told", "luggage", "crew", "errand", "homes", "standing", "journey"}
"""Neither a parameter nor a variable nor a field."""

SAY_WHAT_THEY_HOLD = ("base", "models", "data", "cli", "reporting")
VAGUE = {"found", "own", "placed", "made", "mine", "news", "here"}
"""In these packages a variable or parameter is named after what it holds."""

OF_OPTIMISERS = "memory"
"""An optimiser has a state; a store and a process have memory."""

PARAMETERS = {"near"}
"""As a folder; a distance may be near."""


def leftovers(where: str, tree: ast.Module) -> Iterator[str]:
    """What a module still calls as it was called before."""
    module = Path(where)
    names = NAMES | VAGUE if module.parts[0] in SAY_WHAT_THEY_HOLD else NAMES
    if where in PLACES or {part.removeprefix("_") for part in [*module.parts[:-1], module.stem]} & MODULES:
        yield f"{where}: the module"
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            if node.name.lstrip("_") in CLASSES:
                yield f"{where}:{node.lineno}: class {node.name}"
            if where.startswith("objectives/"):
                methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
                yield from (f"{where}:{part.lineno}: hook {part.name}" for part in methods if part.name in HOOKS)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if node.name.lstrip("_") in FUNCTIONS:
                yield f"{where}:{node.lineno}: function {node.name}"
        elif isinstance(node, ast.arg):
            if node.arg in names | PARAMETERS:
                yield f"{where}:{node.lineno}: parameter {node.arg}"
            if node.arg == "draw" and node.annotation is not None and "Generator" in ast.unparse(node.annotation):
                yield f"{where}:{node.lineno}: generator {node.arg}"
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            name = node.id if isinstance(node, ast.Name) else node.attr
            given_up = names | {OF_OPTIMISERS} if module.parts[0] in ("aggregation", "stratify", "methods") else names
            if name.lstrip("_") in given_up:
                yield f"{where}:{node.lineno}: variable {name}"
        elif isinstance(node, ast.Assign) and is_generator(node.value):
            drawn = [target for target in node.targets if isinstance(target, ast.Name) and target.id == "draw"]
            yield from (f"{where}:{node.lineno}: generator {target.id}" for target in drawn)


def is_generator(value: ast.expr) -> bool:
    """Whether an expression makes a generator of random numbers."""
    made = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
    return made.rpartition(".")[2] in ("rng", "default_rng", "Generator")


@pytest.mark.slow
def test_no_name_that_was_given_up_is_left() -> None:
    found = []
    for path in sorted(SRC.rglob("*.py")):
        where = path.relative_to(SRC).as_posix()
        found += leftovers(where, ast.parse(path.read_text(encoding="utf-8")))
    assert found == []


@pytest.mark.parametrize(
    ("where", "code", "found"),
    [
        ("federation/seam.py", "", "the module"),
        ("sampling/privacy.py", "", "the module"),
        ("privacy/ldp.py", "", None),
        ("clients/client.py", "class World: ...", "class World"),
        ("sites/settings.py", "class Plan: ...", "class Plan"),
        ("stratify/batch.py", "class BatchPlan: ...", None),
        ("objectives/moon.py", "class Objective:\n def absorb(self): ...", "hook absorb"),
        ("run_folder.py", "class RunFolder:\n def begin(self): ...", None),
        ("simulation.py", "def go(): ...", "function go"),
        ("engines/ray.py", "class A:\n def _bury(self): ...", "function _bury"),
        ("config.py", "def build(near: Path): ...", "parameter near"),
        ("objectives/moon.py", "near = far", None),
        ("objectives/fedprox.py", "def message(told): ...", "parameter told"),
        ("sites/engine.py", "self._cargo = None", "variable _cargo"),
        ("methods/fedtan.py", "after, memory = combine()", "variable memory"),
        ("clients/client.py", "self.memory = 1", None),
        ("sampling/stratified.py", "for worn in range(3): ...", "variable worn"),
        ("data/hub.py", "found = load()", "variable found"),
        ("sites/check.py", "found = load()", None),
        ("stratify/selection.py", "def assign(draw: np.random.Generator): ...", "generator draw"),
        ("stratify/selection.py", "draw = np.random.default_rng(0)", "generator draw"),
        ("sampling/variance.py", "def moments(draw: Callable[..., Any]): ...", None),
    ],
)
def test_what_it_finds(where: str, code: str, found: str | None) -> None:
    says = [line.partition(": ")[2] for line in leftovers(where, ast.parse(code))]
    assert says == ([] if found is None else [found])


def test_modules_that_the_docs_name_exist() -> None:
    root, absent = SRC.parents[1], set(outer.OUTER) - set(outer.installed())
    others = {root / "docs" / "why.md"}  # it names modules of other packages
    pages = {*(root / "docs").rglob("*.md"), *root.glob("*.md")} - others
    if not pages:
        pytest.skip("no docs beside an installed package")
    for page in pages:
        for name in re.findall(r"`([a-z_]+/[a-z_0-9/]+\.py)`", page.read_text(encoding="utf-8")):
            if absent & set(Path(name).parts):
                continue
            places = [root / name, SRC / name]
            assert any(place.is_file() for place in places), f"{page.name} names {name}"
