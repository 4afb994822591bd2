"""What the terminal shows while an audit goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedstrata.report.progress import Bar

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn


class AuditProgress(Bar):
    """A bar for the rounds that are played again, then for the attacks.

    >>> with AuditProgress(quiet=True) as progress:
    ...     progress.update(0, 4, "round 9 again")
    """

    def update(self, done: int, total: int, text: str) -> None:
        """Show what comes now; ``done`` of ``total`` parts are over."""
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=done, total=total, description=text)

    def _columns(self) -> Sequence[ProgressColumn]:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

        return TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn(), TimeElapsedColumn()

    def _begin(self, progress: Progress) -> None:
        progress.add_task("audit", total=None)
