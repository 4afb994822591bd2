"""What the command line knows without importing PyTorch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fedstrata.cli.known import collect, known


def test_the_table_is_what_the_code_says_now():
    assert known() == collect(), "src/fedstrata/cli/known.json is out of date: run 'make reference'"


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["--help"],
        ["run", "--help"],
        ["methods"],
        ["datasets"],
        ["settings"],
        ["settings", "method"],
        ["settings", "availability", "bernoulli"],
    ],
    ids=" ".join,
)
def test_what_there_is_comes_without_what_is_slow_to_import(command):
    slow = "{'torch', 'numpy', 'sklearn', 'matplotlib', 'pydantic', 'jinja2', 'datasets', 'scipy'}"
    code = (
        "import sys; from fedstrata.cli import main\n"
        f"try: main({command})\n"
        "except SystemExit: pass\n"
        f"print(sorted({slow} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout
    assert done.stderr.strip() == "[]"
