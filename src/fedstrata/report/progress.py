"""A progress bar on standard error, as every long command shows one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn


class Bar(ABC):
    """Bars for the time of a ``with`` block; nothing where standard error is no terminal.

    Args:
        quiet: Show nothing at all.
        console: Another place to write to.
    """

    def __init__(self, quiet: bool = False, console: Console | None = None) -> None:
        self.quiet, self._console = quiet, console
        self._progress: Progress | None = None
        """None where nothing is shown."""

    def __enter__(self) -> Self:
        from rich.console import Console
        from rich.progress import Progress

        console = self._console or Console(stderr=True)
        if not self.quiet and console.is_terminal:
            self._progress = Progress(*self._columns(), console=console, refresh_per_second=4)
            self._begin(self._progress)
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    @abstractmethod
    def _columns(self) -> Sequence[ProgressColumn]:
        """What a line shows."""

    @abstractmethod
    def _begin(self, progress: Progress) -> None:
        """Add the first lines."""
