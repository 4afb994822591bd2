"""What the terminal shows while an audit goes on."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


class AuditProgress:
    """A bar on standard error: the rounds that are played again, then the attacks; nothing where that is no terminal.

    Args:
        quiet: Show nothing at all.
        console: Another place to write to.

    >>> with AuditProgress(quiet=True) as progress:
    ...     progress.update(0, 4, "round 9 again")
    """

    def __init__(self, quiet: bool = False, console: Console | None = None) -> None:
        self.quiet, self._console = quiet, console
        self._progress: Progress | None = None

    def __enter__(self) -> AuditProgress:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        console = self._console or Console(stderr=True)
        if not self.quiet and console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn())
            self._progress = Progress(*columns, TimeElapsedColumn(), console=console, refresh_per_second=4)
            self._progress.add_task("audit", total=None)
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def update(self, done: int, total: int, text: str) -> None:
        """Show what comes now; ``done`` of ``total`` parts are over."""
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=done, total=total, description=text)
