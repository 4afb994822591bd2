"""Code blocks of the README and of the site: commands that exist, specs that can be read, and all of them run.

A page's blocks run one after another in an empty folder, beside copies of ``examples``:

- ``python`` runs, in one namespace a page; ``text`` right after it is what it prints;
- ``bash`` runs, with ``fedstrata`` on the path; so do the lines of ``console`` after a ``$``;
- ``toml`` is a spec or a part of one;
- a first line such as ``# mine.py`` is the name of a file, which the block is written to instead.

``<!-- not run: WHY -->`` above a block says that it is only shown. So are blocks of other languages, or of none.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from fedstrata.base import outer
from fedstrata.base.errors import SpecError
from fedstrata.cli.main import parser
from fedstrata.spec.experiment import Experiment, variants

ROOT = Path(__file__).parents[2]
COPIES = {f"docs/project/{name}.md" for name in ("architecture", "changelog", "contributing", "security")}
"""What building the site copies from the repository's root, where it stands for readers of the code."""
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    if path.relative_to(ROOT).as_posix() not in COPIES
    and not {"gallery", "concepts", "tables"}
    & set(path.relative_to(ROOT / "docs").parts[:-1] if path.is_relative_to(ROOT / "docs") else ())
    and path.name != "command-line.md"
)
FENCE = re.compile(
    r"(?P<note><!-- not run: [^>]*-->\s*\n)?^(?P<indent> *)```(?P<kind>\w*)\n(?P<text>.*?)^ *```", re.M | re.S
)
TYPED = re.compile(r"^\$ (.*)$", re.MULTILINE)
FILE = re.compile(r"# ([\w.-]+\.(?:py|toml|csv))\s*\n")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@dataclass
class Block:
    kind: str
    text: str
    line: int
    shown: bool
    """Whether it is only shown."""

    @property
    def file(self) -> str | None:
        found = FILE.match(self.text)
        return found[1] if found else None


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(found["kind"], found["text"], text.count("\n", 0, found.start()) + 1, found["note"] is not None)
        for found in FENCE.finditer(text)
    ]


def commands(text: str) -> list[list[str]]:
    """The arguments of every line that calls fedstrata."""
    lines = text.replace("\\\n", " ").splitlines()
    found = []
    for line in lines:
        for part in re.split(r"&&|\|", line):
            words = shlex.split(part, comments=True) if re.match(r"\s*(\$ )?(\w+=\S+ )*fedstrata ", part) else []
            if "fedstrata" in words:
                found.append(words[words.index("fedstrata") + 1 :])
    return found


PARSER = parser()
(COMMANDS,) = (action.choices for action in PARSER._actions if action.metavar == "COMMAND")
COMPLETE = outer.installed() == list(outer.OUTER)
"""Whether those of all outer packages are there."""


@pytest.mark.parametrize("page", PAGES)
def test_commands_exist_with_their_arguments(page):
    for block in blocks(page):
        if block.kind in ("", "bash", "console", "text"):
            typed = "\n".join(TYPED.findall(block.text)) if block.kind == "console" else block.text
            for arguments in commands(typed):
                if {"--version", "--help"} & set(arguments) or arguments[:1] == ["COMMAND"]:
                    continue
                if arguments[0] not in COMMANDS and not COMPLETE:
                    continue
                try:
                    PARSER.parse_args(arguments)
                except SystemExit:
                    pytest.fail(f"{page}, line {block.line}: fedstrata {shlex.join(arguments)}")


@pytest.mark.parametrize("page", PAGES)
def test_specs_can_be_read(page):
    for block in blocks(page):
        if block.kind == "toml" and not block.shown:
            table = tomllib.loads(block.text)
            if "federation" in table or ":" in re.sub(r"hub:|https?:", "", str(list(strings(table)))):
                continue  # sites, or a part of the reader's own that is not there
            try:
                variants(table) if "compare" in table else Experiment.from_table(table)
            except SpecError as error:
                pytest.fail(f"{page}, line {block.line}: {error}")


def strings(table: object) -> Iterator[str]:
    """All texts in a table."""
    if isinstance(table, str):
        yield table
    elif isinstance(table, (dict, list)):
        for each in table.values() if isinstance(table, dict) else table:
            yield from strings(each)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where a reader of the repository stands, but empty, and with nothing of the user's own."""
    for name in ("examples", "benchmarks"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "sites"))
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "fedstrata"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m fedstrata "$@"\n')
    program.chmod(0o755)
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("FEDSTRATA_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


RUN = [page for page in PAGES if any(b.kind in ("python", "bash", "console") and not b.shown for b in blocks(page))]


@pytest.mark.long
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("page", RUN)
def test_blocks_run(page, folder, monkeypatch):
    module = ModuleType("__main__")  # as in a notebook: where classes of the page are found
    monkeypatch.setitem(sys.modules, module.__name__, module)
    space = vars(module)
    printed = ""
    for block in blocks(page):
        where = f"{page}, line {block.line}"
        if block.kind == "text" and printed:
            assert alike(block.text, printed), f"{where}: printed\n{printed}"
        printed = ""
        if block.shown:
            continue
        if block.file is not None and block.kind in ("python", "toml"):
            Path(block.file).write_text(block.text, encoding="utf-8")
        elif block.kind == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                try:
                    exec(compile("\n" * block.line + block.text, page, "exec"), space)
                except Exception as error:
                    raise AssertionError(f"{where}: {error!r}") from error
            printed = out.getvalue()
        elif block.kind in ("bash", "console"):
            text = "\n".join(TYPED.findall(block.text)) if block.kind == "console" else block.text
            done = subprocess.run(
                ["bash", "-e", "-o", "pipefail", "-c", text], capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{where}: {done.stderr[-2000:]}"
            printed = done.stdout


def alike(page: str, printed: str) -> bool:
    """Whether a page shows what was printed; numbers may be off by a twentieth, as on another kind of machine."""
    words = [re.sub(r"\s+", " ", NUMBER.sub("#", text)).strip() for text in (page, printed)]
    numbers = [[float(number) for number in NUMBER.findall(text)] for text in (page, printed)]
    close = all(abs(a - b) <= 0.05 * abs(a) for a, b in zip(*numbers, strict=False))
    return words[0] == words[1] and len(numbers[0]) == len(numbers[1]) and close


def test_what_counts_as_alike():
    assert alike("fedavg: 53.6 %\n", "fedavg: 53.9  %")
    assert not alike("fedavg: 53.6 %", "fedavg: 63.9 %")
    assert not alike("fedavg: 53.6 %", "scaffold: 53.6 %")
