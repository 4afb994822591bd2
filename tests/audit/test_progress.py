from __future__ import annotations

import io

import pytest
from rich.console import Console

from fedstrata.audit.progress import AuditProgress


@pytest.mark.parametrize(("terminal", "quiet"), [(True, False), (True, True), (False, False)])
def test_the_bar_is_for_terminals(terminal, quiet):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=80)
    with AuditProgress(quiet, console) as progress:
        progress.update(1, 4, "client 7: variational")
    shown = console.file.getvalue()
    assert ("client 7: variational" in shown) == (terminal and not quiet)
    assert ("1/4" in shown) == (terminal and not quiet)
