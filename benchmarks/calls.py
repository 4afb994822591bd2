"""Count the functions that a round calls, and the lines and statements of the package.

    python benchmarks/calls.py                      # print both
    python benchmarks/calls.py --json > FILE        # print both as JSON
    python benchmarks/calls.py --against FILE       # also print the numbers in FILE

Only functions of the package ``fedstrata`` are counted, in the second round on digits (20 clients, 10 invited, one
worker, one epoch, no evaluation). Comprehensions and lambdas count as calls, but not as functions. A change of file is
a call into a file other than the previous call's file. The first call also counts. Numbers from different versions of
Python cannot be compared, because Python 3.12 inlines comprehensions.
"""

from __future__ import annotations

import argparse
import ast
import io
import itertools
import json
import platform
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np

import fedstrata as fs

METHODS = {"FedAvg": "fedavg", "SCAFFOLD": "scaffold", "ReBaFL": "rebafl", "FedSTaS": "fedstas", "Stratify": "stratify"}
PACKAGE = Path(fs.__file__).parent
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
CONSTRUCTION = ("__init__", "__new__", "__post_init__", "model_post_init")
Call = tuple[CodeType, str]
"""A called function, and the file of the calling function; "" if no function of the package called it."""


def calls_of(method: str, invited: int) -> list[Call]:
    """Return all calls of the second round of a run, in order."""
    training = {"rounds": 3, "clients_per_round": invited, "workers": 1, "local_epochs": 1}
    partition = {"name": "dirichlet", "alpha": 0.3, "clients": 20}
    table = {"seed": 0, "method": method, "data": "digits", "partition": partition, "training": training}
    spec = fs.Experiment.from_table({**table, "evaluation": {"every": 0}})
    root, found = f"{PACKAGE}/", list[Call]()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(root):
            caller = frame.f_back
            while caller is not None and not caller.f_code.co_filename.startswith(root):
                caller = caller.f_back
            found.append((frame.f_code, "" if caller is None else caller.f_code.co_filename))

    with fs.Simulation(fs.prepare(spec)) as simulation:
        simulation.step()
        sys.setprofile(note)
        try:
            simulation.step()
        finally:
            sys.setprofile(None)
    return found


def layers() -> dict[str, int]:
    """Return a mapping from each module in the layers of pyproject.toml to its layer; 0 is the lowest."""
    content = tomllib.loads((PACKAGE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = content["tool"]["importlinter"]["contracts"]
    names = next(each["layers"] for each in contracts if each["type"] == "layers")
    split = (line.replace("|", " ").replace(":", " ").split() for line in reversed(names))
    return {name.strip("()"): height for height, line in enumerate(split) for name in line}


def layer_of(file: str, known: Mapping[str, int]) -> int | None:
    """Return the layer of a file; None if it does not belong to a layer."""
    parts = ("fedstrata", *Path(file).relative_to(PACKAGE).with_suffix("").parts)
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((known[name] for name in names if name in known), None)


def path_of(method: str) -> dict[str, float]:
    """Count the calls, functions and files of a method's round."""
    calls, known = calls_of(method, 10), layers()
    functions = {code for code, _ in calls if not code.co_name.startswith("<")}
    files = [code.co_filename for code, _ in calls]
    lengths = {place: length for place, _, length in function_lengths(set(files))}
    upwards = 0
    for code, caller in calls:
        here, below = layer_of(code.co_filename, known), layer_of(caller, known) if caller else None
        upwards += here is not None and below is not None and here > below
    return {
        "functions": len(functions),
        "files": len(set(files)),
        "calls": len(calls),
        "file changes": sum(a != b for a, b in itertools.pairwise(["", *files])),
        "calls per further client": (len(calls) - len(calls_of(method, 5))) / 5,
        "calls up the layers": upwards,
        "longest function": max(lengths.get((c.co_filename, c.co_firstlineno), 0) for c in functions),
    }


def function_lengths(files: Iterable[str]) -> Iterator[tuple[tuple[str, int], ast.AST, int]]:
    """Yield for each function of some files its place (file and first line), its node and its number of lines.

    The first line includes decorators, but the number of lines does not.
    """
    for file in sorted(files):
        for node in nodes_of(file):
            if isinstance(node, FUNCTIONS):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                yield (file, first), node, lines_of(node)


@cache
def nodes_of(file: str) -> list[ast.AST]:
    """Return all nodes of a file's syntax tree."""
    return list(ast.walk(ast.parse(Path(file).read_text(encoding="utf-8"))))


def lines_of(node: Any) -> int:
    """Return the number of lines from the first to the last line of a node."""
    return int(node.end_lineno - node.lineno + 1)


def code_lines(text: str) -> int:
    """Count the lines that are not blank, comments or docstrings."""
    lines: set[int] = set()
    silent = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in silent:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        for statement in getattr(node, "body", []) if isinstance(getattr(node, "body", None), list) else []:
            value = getattr(statement, "value", None)
            if isinstance(statement, ast.Expr) and isinstance(value, ast.Constant) and isinstance(value.value, str):
                lines.difference_update(range(statement.lineno, (statement.end_lineno or 0) + 1))
    return len(lines)


def parts_of(node: ast.ClassDef, classes: Sequence[ast.ClassDef]) -> list[ast.ClassDef]:
    """Return a class and, recursively, its base classes that are private or mixins."""
    names = {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases}
    private = [
        each for each in classes if each.name in names and each.name.startswith("_") | each.name.endswith("Mixin")
    ]
    return [node, *(part for base in private for part in parts_of(base, classes))]


def reassigned(node: ast.ClassDef) -> set[str]:
    """Return the names of the attributes that methods other than constructors assign."""
    methods = [each for each in node.body if isinstance(each, FUNCTIONS) and each.name not in CONSTRUCTION]
    inner = (each for method in methods for each in ast.walk(method) if isinstance(each, ast.Attribute))
    stores = (each for each in inner if isinstance(each.ctx, ast.Store))
    return {each.attr for each in stores if isinstance(each.value, ast.Name) and each.value.id == "self"}


def parameters(node: Any) -> int:
    """Count the parameters of a function without ``self`` and ``cls``."""
    given = node.args
    named = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len([name for name in named if name not in ("self", "cls")]) + sum(map(bool, (given.vararg, given.kwarg)))


def size_of_package() -> dict[str, Any]:
    """Return the numbers of lines and statements of the package, and lists of large classes and functions."""
    packages, lengths, statements = Counter[str](), [], 0
    files = sorted(PACKAGE.rglob("*.py"))
    for file in files:
        text = file.read_text(encoding="utf-8")
        packages[file.relative_to(PACKAGE).parts[0].removesuffix(".py")] += code_lines(text)
        lengths.append(len(text.splitlines()))
        statements += sum(isinstance(node, ast.stmt) for node in nodes_of(str(file)))
    functions = [length for *_, length in function_lengths(map(str, files))]
    return {
        "code lines": sum(packages.values()),
        "statements": statements,
        "function length, 95th percentile": float(np.percentile(functions, 95)),
        "file length, 95th percentile": float(np.percentile(lengths, 95)),
        **large(),
        "code lines by package": dict(sorted(packages.items(), key=lambda pair: -pair[1])),
    }


def large() -> dict[str, dict[str, int]]:
    """Return the classes and functions of the package that are larger than allowed, by rule and name."""
    files = [str(file) for file in PACKAGE.rglob("*.py")]
    classes = [node for file in files for node in nodes_of(file) if isinstance(node, ast.ClassDef)]
    whole = [(node.name, parts_of(node, classes)) for node in classes]
    tall = [(name, sum(map(lines_of, parts))) for name, parts in whole]
    moving = [(name, len(set[str]().union(*map(reassigned, parts)))) for name, parts in whole]
    wide = [
        (f"{Path(place[0]).relative_to(PACKAGE)}:{node.name}", parameters(node))  # type: ignore[attr-defined]
        for place, node, _ in function_lengths(files)
    ]
    return {
        "classes over 300 lines": over(tall, 300),
        "classes with more than 12 reassigned attributes": over(moving, 12),
        "functions with more than 8 parameters": over(wide, 8),
    }


def over(counts: Iterable[tuple[str, int]], limit: int) -> dict[str, int]:
    """Return the counts above a limit, the largest first. If a name occurs several times, its largest count is used."""
    largest = dict(sorted(counts, key=lambda pair: pair[1]))
    return {name: count for name, count in reversed(largest.items()) if count > limit}


def flat(content: Mapping[str, Any]) -> dict[str, float]:
    """Return all numbers of a result by name; for a list of large items, the number is its length."""
    found: dict[str, float] = {}
    for key, value in content.get("size", {}).items():
        if key == "code lines by package":
            found |= {f"code lines, {name}": lines for name, lines in value.items()}
        else:
            found[key] = len(value) if isinstance(value, dict) else value
    return found


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table as text, with the first column aligned to the left and the other columns to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows)
    return "\n".join("  ".join(line).rstrip() for line in lines)


def printed(found: Mapping[str, Any], before: Mapping[str, Any] | None) -> str:
    """Return the result as tables; if there is an earlier result, a cell shows ``old → new``."""

    def cell(new: float, old: float | None) -> str:
        text = f"{new:,.1f}".removesuffix(".0")
        return text if old is None or old == new else f"{old:,.1f}".removesuffix(".0") + f" → {text}"

    parts = [f"Python {found['python']}"]
    if path := found.get("path"):
        old = (before or {}).get("path", {})
        keys = list(next(iter(path.values())))
        rows = [[key, *(cell(path[m][key], old.get(m, {}).get(key)) for m in path)] for key in keys]
        parts.append(table([["second round", *path], *rows]))
    if "size" in found:
        old = flat(before or {})
        parts.append(table([["size", ""], *([key, cell(value, old.get(key))] for key, value in flat(found).items())]))
        large = {key: value for key, value in found["size"].items() if isinstance(value, dict)}
        large.pop("code lines by package")
        parts += [f"{key}: " + ", ".join(f"{k} {v}" for k, v in value.items()) for key, value in large.items() if value]
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the calls of a round and the size of the package.")
    parser.add_argument("--size", action="store_true", help="print only the size of the package, without a run")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--against", type=Path, metavar="FILE", help="JSON file of an earlier result, to compare the new result with"
    )
    options = parser.parse_args()
    before = json.loads(options.against.read_text(encoding="utf-8")) if options.against else None
    found: dict[str, Any] = {"python": ".".join(platform.python_version_tuple()[:2])}
    if before is not None and before["python"] != found["python"]:
        parser.error(f"--against = {options.against}: counted with Python {before['python']}. Use that version.")
    if not options.size:
        found["path"] = {name: path_of(method) for name, method in METHODS.items()}
    found["size"] = size_of_package()
    print(json.dumps(found, indent=1) if options.json else printed(found, before))


if __name__ == "__main__":
    main()
