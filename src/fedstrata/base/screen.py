"""Print tables in terminals: headings are bold and stand above a line, and names and numbers do not wrap.

If a terminal is too narrow for all columns, the table omits the least important columns. A line below the table then
says how many columns are not shown.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

from fedstrata.base.printable import printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.text import Text

NAME = 22
"""Maximum width of names, in characters, if the terminal is too narrow for longer names."""
WORDS = 24
"""Minimum width of a column with wrapped text, in characters."""
READABLE = 100
"""Maximum width of notes, in characters; longer lines wrap."""


class Block(NamedTuple):
    """The layout of columns side by side: the width of each column, and the spaces between columns."""

    widths: dict[int, int]
    gap: int


@dataclass(frozen=True)
class ScreenTable:
    """A table that fits the width of the terminal.

    Args:
        headings: The headings of the columns.
        rows: The cells of each row. A row with one cell is the title of the rows below it, and an empty row is a
            horizontal line. Cells of the type ``Text`` keep their style.
        left: The number of columns that contain names. These columns come first, and are aligned to the left.
        words: The indices of the columns whose text may wrap.
        order: The indices of the columns to show if they fit, in order of importance. All other columns are shown only
            with ``every``. Default: all columns, from left to right. Columns of names are always shown.
        every: Whether to show all columns. If the terminal is too narrow, the columns are printed in several blocks.
        one_line: Whether to cut off long texts, instead of wrapping them, if the output is a terminal.
        more: A text that says how to see the omitted columns.
        title: The line above the table.
        note: The sentences below the table.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str | Text]]
    left: int = 1
    words: Collection[int] = ()
    order: Sequence[int] | None = None
    every: bool = False
    one_line: bool = False
    more: str = "--columns all"
    title: str = ""
    note: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.text import Text

        if self.title:
            yield from Text(printable(self.title), style="bold").wrap(console, options.max_width)
        blocks = self._blocks(options.max_width)
        for number, block in enumerate(blocks):
            if number:
                yield Text()
            yield from self._lines(console, block, cut=self.one_line and options.is_terminal)
        values = len(self.headings) - self.left
        if left_out := values - sum(len(block.widths) - self.left for block in blocks):
            yield Text(f"{left_out} column{'s' if left_out > 1 else ''} more: {self.more}", style="dim")
        if self.note:
            for line in Text(printable(self.note)).wrap(console, min(options.max_width, READABLE)):
                line.rstrip()
                yield line

    @cached_property
    def _cells(self) -> list[list[Text]]:
        from rich.text import Text

        return [[Text(printable(cell)) if isinstance(cell, str) else cell for cell in row] for row in self.rows]

    def _longest(self, column: int) -> int:
        return max((row[column].cell_len for row in self._cells if len(row) > 1), default=0)

    def _least(self, column: int) -> int:
        """Return the minimum width of a column at which neither its cells nor words of its heading are split."""
        longest = self._longest(column)
        limit = WORDS if column in self.words else NAME if column < self.left else longest
        return max([min(longest, limit), *map(len, self.headings[column].split())])

    def _blocks(self, width: int) -> list[Block]:
        names = list(range(self.left))
        every = range(self.left, len(self.headings))
        rest = list(every if self.order is None or self.every else self.order)
        least = [self._least(column) for column in range(len(self.headings))]
        blocks = list[Block]()
        while rest or not blocks:
            wide, narrow = (self._fitting(rest, least, width, gap) for gap in (2, 1))
            count, gap = max(wide, narrow, 1), 1 if narrow > wide else 2
            shown = sorted([*names, *rest[:count]])
            blocks.append(Block(self._widths(shown, least, width - gap * (len(shown) - 1)), gap))
            rest = rest[count:] if self.every else []
        return blocks

    def _fitting(self, columns: Sequence[int], least: Sequence[int], width: int, gap: int) -> int:
        """Return how many of ``columns``, counted from the first, fit beside the names."""
        total = sum(least[: self.left]) + gap * (self.left - 1)
        for count, column in enumerate(columns):
            total += gap + least[column]
            if total > width:
                return count
        return len(columns)

    def _widths(self, columns: Sequence[int], least: Sequence[int], room: int) -> dict[int, int]:
        """Distribute unused width: first to columns of names and texts, then to columns with long headings."""
        widths = {column: least[column] for column in columns}
        flexible = [column for column in columns if column < self.left or column in self.words]
        for column in flexible:
            widths[column] += max(min(self._longest(column) - widths[column], room - sum(widths.values())), 0)
        for column in columns:
            missing = len(self.headings[column]) - widths[column]
            widths[column] += missing if 0 < missing <= room - sum(widths.values()) else 0
        widths[0] = max(min(widths[0], widths[0] + room - sum(widths.values())), 2)
        return widths

    def _lines(self, console: Console, block: Block, cut: bool) -> Iterator[Text]:
        from rich.text import Text

        rule = Text("─" * (sum(block.widths.values()) + block.gap * (len(block.widths) - 1)), style="dim")
        heads = list[list[Text]]()
        for column, width in block.widths.items():
            head = Text(printable(self.headings[column]), style="bold")
            head.highlight_regex(r"(?<=, )\S+$", "not bold dim")
            heads.append(list(head.wrap(console, width)))
        tallest = max(map(len, heads))
        yield from self._side_by_side([[Text("")] * (tallest - len(lines)) + lines for lines in heads], block)
        yield rule
        for number, row in enumerate(self._cells):
            if len(row) < 2:
                yield from ([Text()] if row and number else []) + (row or [rule])
                continue
            lines = list[list[Text]]()
            for column, width in block.widths.items():
                cell = row[column].copy()
                if column in self.words and not cut:
                    lines.append(list(cell.wrap(console, width)))
                else:
                    cell.truncate(width, overflow="ellipsis")
                    lines.append([cell])
            yield from self._side_by_side(lines, block)

    def _side_by_side(self, cells: Sequence[Sequence[Text]], block: Block) -> Iterator[Text]:
        """Yield the lines of a row whose cells may have several lines."""
        from rich.text import Text

        for parts in zip_longest(*cells, fillvalue=Text("")):
            line = Text(no_wrap=True, overflow="ignore")
            for part, (column, width) in zip(parts, block.widths.items(), strict=True):
                cell = part.copy()
                cell.rstrip()
                cell.align("left" if column < self.left or column in self.words else "right", width)
                line.append(" " * block.gap if line else "")
                line.append_text(cell)
            line.rstrip()
            yield line
