"""The layout of ``--help`` at four widths."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

from fedstrata.cli.layout import say, wrapped
from fedstrata.cli.main import REAL_SITES, main, parser


def helps(width: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The help of ``fedstrata`` and of each command, without the usage."""

    def inside(whole: argparse.ArgumentParser) -> Iterator[str]:
        yield whole.format_help().partition("\n\n")[2]
        for action in whole._actions:
            if isinstance(action, argparse._SubParsersAction):
                for command in action.choices.values():
                    yield from inside(command)

    monkeypatch.setenv("COLUMNS", str(width))
    return list(inside(parser()))


@pytest.mark.slow
@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_help_fits_the_terminal_without_splitting_a_word_or_a_command(width, monkeypatch):
    for shown, whole in zip(helps(width, monkeypatch), helps(1000, monkeypatch), strict=True):
        assert shown.split() == whole.split()
        lines = shown.splitlines()
        # A command to copy stays on one line, even if the line is longer than the terminal is wide.
        assert [line for line in lines if len(line) > min(width, 100) and "fedstrata " not in line] == []
        _, _, examples = whole.partition("\nexamples:\n")
        commands = [line.partition("    ")[0].strip() for line in examples.splitlines()]
        assert all(any(line.strip().startswith(each) for line in lines) for each in commands)


def test_a_text_beside_a_name_wraps_in_its_column_or_below_the_name():
    beside = wrapped("  run   run one experiment and store its results", 36)
    assert beside == ["  run   run one experiment and store", "        its results"]
    below = wrapped("  fedstrata new spec    write a spec and no-more", 36)
    assert below == ["  fedstrata new spec", "      write a spec and no-more"]
    command = "  fedstrata run spec.toml --set method=scaffold"
    assert wrapped(command, 36) == [command]
    assert wrapped("A paragraph that is longer than the line", 36) == ["A paragraph that is longer than the", "line"]


@pytest.mark.parametrize("width", [60, 80, 100, 160])
@pytest.mark.parametrize(
    "arguments",
    [["run", "--set", "training.momentm=1"], ["compar"], ["run", "--rounds", "3"], ["compare", "--jobs", "many"]],
)
def test_an_error_wraps_between_words_in_a_terminal_only(arguments, width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    shown = []
    for is_terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda is_terminal=is_terminal: is_terminal)
        with suppress(SystemExit):  # argparse exits, and other errors are returned as a code
            assert main(arguments) == 2
        lines = capsys.readouterr().err.splitlines()
        start = next(number for number, line in enumerate(lines) if ": error: " in line)
        shown.append(lines[start:])  # argparse prints the usage before
    piped, lines = shown
    assert len(piped) == 1
    assert " ".join(line.strip() for line in lines) == piped[0]
    assert max(map(len, lines)) <= min(width, 100)
    assert all(line.startswith("  ") for line in lines[1:])


def test_a_word_that_is_wider_than_the_terminal_is_not_split(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    path = "/" + "folder/" * 12 + "spec.toml"
    say(f"fedstrata: note: the settings were read from\n{path}")
    assert path in capsys.readouterr().err.replace("\\n", " ").split()


def test_commands_for_real_sites_stand_last_below_a_sentence():
    before, _, after = str(parser().description).partition(f"\n\n{REAL_SITES}:\n")
    assert "\n  run  " in before
    assert "\n  keys  " in f"\n{after}"
    assert "\n\n" not in after
