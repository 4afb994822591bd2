"""Pictures of runs, as Matplotlib figures and as files. Neither a screen nor ``pyplot`` is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedstrata.base import style
from fedstrata.base.errors import SpecError
from fedstrata.evaluation.history import column_of
from fedstrata.reporting import draw
from fedstrata.reporting.draw import Curves
from fedstrata.reporting.tables import primary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fedstrata.evaluation.history import History


def plot(
    history: History | Mapping[str, Sequence[History]],
    column: str = "accuracy",
    path: Path | str | None = None,
    *,
    against: str = "round",
) -> Figure:
    """Draw a column over the rounds: the mean over seeds as a line, and one standard deviation as a band.

    Args:
        history: The history of a run, or a mapping from each label to its histories, as ``compare`` returns it.
        column: A column of numbers, such as ``accuracy`` or ``bytes_up``.
        path: The file to write; optional. Its suffix is the format, such as ``.png`` or ``.pdf``.
        against: ``"round"``, or ``"bytes"`` for the data sent since the start.

    Raises:
        SpecError: No run has the column.
    """
    if against not in ("round", "bytes"):
        raise SpecError("against", "must be 'round' or 'bytes'.", against)
    curves = history if isinstance(history, Mapping) else {history.method or "run": [history]}
    figure = _figure()
    draw.draw_curves(figure.subplots(), curves, column, against=against)
    _legend(figure, curves)
    return _saved(figure, path)


def plot_comparison(curves: Curves, folder: Path | str) -> list[Path]:
    """Write the primary metric over the rounds and over the data sent, as PNG and as PDF.

    The files of the first figure are named after the metric, such as ``accuracy.png``; the others are ``traffic.*``.

    Returns:
        The paths of the files.
    """
    files, metric = [], primary(curves)
    for name, against in ((metric, "round"), ("traffic", "bytes")):
        figure = plot(curves, column_of(metric), against=against)
        for suffix in (".png", ".pdf"):
            files.append(Path(folder) / f"{name}{suffix}")
            _saved(figure, files[-1])
    return files


def plot_run(history: History, folder: Path | str) -> list[Path]:
    """Write ``accuracy.png``, ``loss.png``, ``participation.png`` and ``communication.png`` of a run.

    If the accuracy is not the primary metric, the first figure shows the primary metric and has its name.

    Returns:
        The paths of the files.
    """
    pictures: dict[str, Callable[[Axes], None]] = {
        history.primary: lambda axes: draw.draw_curves(axes, {"": [history]}, column_of(history.primary)),
        "loss": lambda axes: draw.draw_losses(axes, [history]),
        "participation": lambda axes: draw.draw_participation(axes, [history]),
        "communication": lambda axes: draw.draw_communication(axes, [history]),
    }
    files = []
    for name, draw_into in pictures.items():
        figure = _figure()
        draw_into(figure.subplots())
        files.append(Path(folder) / f"{name}.png")
        _saved(figure, files[-1])
    return files


def _figure() -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(7.0, 4.2), dpi=130, layout="constrained")


def _saved(figure: Figure, path: Path | str | None) -> Figure:
    if path is None:
        return figure
    import matplotlib

    # Journals require TrueType fonts (type 42). The date is omitted, so that equal pictures are equal files.
    metadata = {"CreationDate": None} if Path(path).suffix.lower() == ".pdf" else None
    with matplotlib.rc_context({"pdf.fonttype": 42}):
        figure.savefig(path, metadata=metadata)
    return figure


def _legend(figure: Figure, curves: Curves) -> None:
    from matplotlib.lines import Line2D

    if len(curves) == 1 and not any(len(histories) > 1 for histories in curves.values()):
        return
    handles = []
    lines = style.lines(list(curves))
    for label, histories in curves.items():
        colour, dash = draw.light(lines[label])
        seeds = f" ({len(histories)} seeds)" if len(histories) > 1 else ""
        handles.append(
            Line2D([], [], color=colour, linestyle=dash, linewidth=1.6, label=" " + draw.literal(label + seeds))
        )
    columns = min(len(handles), 4)
    figure.legend(
        handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=9, labelcolor=draw.INK
    )
