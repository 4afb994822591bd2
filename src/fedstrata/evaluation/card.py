"""Show a run in a notebook: its summary, a curve of the primary metric, and a table of the last rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

import numpy as np

from fedstrata.base.style import MIDDLE
from fedstrata.evaluation.history import History, Record, column_of, number_in
from fedstrata.evaluation.summary import MISSING, percent, summary_lines

LAST = 10
"""The maximum number of rounds in the table, which shows the most recent rounds."""

WIDTH, HEIGHT, MARGIN = 240, 48, 3
"""The width and the height of the curve, and the margin around the curve, in pixels."""


def card(history: History) -> str:
    """Return the HTML that a notebook shows for a run: at most 900 pixels wide, without scripts."""
    title = " · ".join([history.method or "run", *([f"seed {history.seed}"] if history.seed is not None else [])])
    parts = [f"<p><b>{escape(title)}</b></p>"]
    if len(history):
        parts += [_summary(history), _curve(history), _rounds(history)]
    else:
        parts.append("<p>no rounds yet</p>")
    return f'<div style="max-width: 900px">{"".join(parts)}</div>'


def _summary(history: History) -> str:
    rows = (
        f'<tr><th style="text-align: left">{escape(name)}</th><td style="text-align: left">{escape(text)}</td></tr>'
        for name, text in summary_lines(history)
    )
    return f"<table>{''.join(rows)}</table>"


def _curve(history: History) -> str:
    """Return a curve of the primary metric over the rounds, as SVG. For fewer than two values, the string is empty."""
    rounds, values = history.points(column_of(history.primary))
    if len(rounds) < 2:
        return ""
    low, high = float(values.min()), float(values.max())
    across = (rounds - rounds[0]) / (rounds[-1] - rounds[0]) * (WIDTH - 2 * MARGIN) + MARGIN
    down = np.full(len(values), HEIGHT / 2)
    if high > low:
        down = (high - values) / (high - low) * (HEIGHT - 2 * MARGIN) + MARGIN
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(across, down, strict=True))
    shown = _formatter(history.primary)
    label = f"{history.primary} in rounds {rounds[0]} to {rounds[-1]}, from {shown(low)} to {shown(high)}"
    return (
        f'<svg role="img" aria-label="{escape(label)}" width="{WIDTH}" height="{HEIGHT}">'
        f'<polyline points="{points}" fill="none" stroke="{MIDDLE}" stroke-width="2"/></svg>'
        f"<p>{escape(label)}</p>"
    )


def _formatter(metric: str) -> Callable[[float | None], str]:
    if metric == "accuracy":
        return percent
    return lambda value: MISSING if value is None else f"{value:.4g}"


def _rounds(history: History) -> str:
    """Return a table of the last rounds. Leave out columns in which all values are 0 or missing."""

    def share(record: Record) -> str:
        invited, returned = (number_in(record, f"clients_{name}") for name in ("invited", "returned"))
        return f"{returned or 0:g}/{invited:g}" if invited else MISSING

    def megabytes(record: Record) -> str:
        sent = sum(number_in(record, name) or 0 for name in ("bytes_up", "bytes_down"))
        return f"{sent * 1e-6:,.2f}" if sent else MISSING

    def numbers(name: str, show: Callable[[float | None], str]) -> Callable[[Record], str]:
        return lambda record: show(number_in(record, name))

    def plain(value: float | None) -> str:
        return f"{value:.4g}" if value else MISSING

    columns: Sequence[tuple[str, Callable[[Record], str]]] = (
        ("round", lambda record: str(record["round"])),
        (history.primary, numbers(column_of(history.primary), _formatter(history.primary))),
        ("loss", numbers("loss", plain)),
        ("returned/invited", share),
        ("MB", megabytes),
        ("s", numbers("seconds", plain)),
    )
    last = history[-LAST:]
    shown = [(name, cells) for name, cell in columns if set(cells := [cell(record) for record in last]) != {MISSING}]
    if history.primary == "loss":
        shown = [each for index, each in enumerate(shown) if each[0] not in [name for name, _ in shown[:index]]]
    head = "".join(f"<th>{escape(name)}</th>" for name, _ in shown)
    body = ("".join(f"<td>{escape(cells[row])}</td>" for _, cells in shown) for row in range(len(last)))
    left_out = f"<p>The last {LAST} of {len(history)} rounds.</p>" if len(history) > LAST else ""
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in body)}</table>{left_out}"
