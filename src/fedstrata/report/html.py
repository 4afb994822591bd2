"""One HTML page about runs, with everything in it: no network, light and dark, fit to print."""

from __future__ import annotations

import base64
import io
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstrata.history import STANDARD, History
from fedstrata.jsonl import replace_file, write_json
from fedstrata.report import plots, tables
from fedstrata.report.draw import GRID, INK
from fedstrata.report.runs import Run, by_data, histories, load_runs
from fedstrata.report.summary import summary_lines

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.figure import Figure

PANELS = 12
"""A method's own columns that are drawn; the names of the others are listed."""
EVENTS = 10
"""Events that are shown in full."""
NAMED = 12
"""Clients of an event, or entries of a list, that are shown."""
PNG = b"\x89PNG\r\n\x1a\n"


def write_report(folders: Sequence[Path | str], out: Path | str) -> Path:
    """Write a page about run folders and compare folders.

    Args:
        folders: Run folders and compare folders, mixed as you like.
        out: The file, or a folder that gets a ``report.html``.

    Returns:
        The file.

    Raises:
        DataError: A folder holds no run, or its files are damaged.
    """
    out = Path(out)
    out = out / "report.html" if out.is_dir() else out
    page = render(load_runs(folders))
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_file(out, page.encode())
    return out


def write_comparison(folder: Path | str) -> list[tables.Row]:
    """Write ``table.md``, ``table.json``, ``accuracy.png`` and ``report.html`` of a compare folder into it.

    Of finished runs, where there are any: one that was broken off would stand there with the accuracy that it had, and
    in means over seeds.

    Returns:
        The table.

    Raises:
        DataError: The folder holds no runs, or their files are damaged.
    """
    folder = Path(folder)
    runs = load_runs([folder])
    finished = {label: done for label, members in runs.items() if (done := [run for run in members if run.finished])}
    runs = finished or runs
    rows = tables.compare_table(histories(runs))
    replace_file(folder / "table.md", tables.to_markdown(rows).encode())
    write_json(folder / "table.json", tables.to_json(rows))
    plots.plot_curves(histories(runs), "accuracy", folder / "accuracy.png")
    replace_file(folder / "report.html", render(runs).encode())
    return rows


def render(runs: Mapping[str, Sequence[Run]]) -> str:
    """The page about the runs of each label, as text."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("fedstrata.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(
        title=", ".join(runs) if len(runs) <= 4 else f"{len(runs)} methods",
        comparisons=[
            _comparison(data, members, f"overview{i or ''}") for i, (data, members) in enumerate(by_data(runs).items())
        ],
        sections=[_section(label, members, f"run{i}") for i, (label, members) in enumerate(runs.items())],
    )


def _comparison(data: str, runs: Mapping[str, Sequence[Run]], key: str) -> dict[str, Any]:
    """The table of one data set's runs, and their curves where there are several methods."""
    rows = tables.compare_table(histories(runs))
    return {
        "data": data,
        "headings": [tables.measure(name).heading for name in tables.keys(rows)],
        "rows": [(row.label, [tables.show(row, name) for name in tables.keys(rows)]) for row in rows],
        "caption": tables.caption(rows),
        "overview": inline_svg(plots.overview(histories(runs)), key) if len(runs) > 1 else None,
    }


def _section(label: str, runs: Sequence[Run], key: str) -> dict[str, Any]:
    members = [run.history for run in runs]
    drawn, constant, left = own_columns(members)
    pictures = [run for run in runs if run.partition is not None]
    return {
        "label": label,
        "key": key,
        "seeds": [(_seed(run), summary_lines(_unplaced(run.history))) for run in runs],
        "panels": inline_svg(plots.panels(members), f"{key}-panels"),
        "own": inline_svg(plots.grid(members, drawn), f"{key}-own") if drawn else None,
        "constant": constant,
        "left": left,
        "lists": last_lists(members),
        "partition": _data_uri(pictures[0].partition) if pictures else None,
        "partition_of": _seed(pictures[0]) if pictures else "",
        "events": _events(runs),
        "spec": runs[0].spec,
        "spec_of": _seed(runs[0]),
    }


def own_columns(members: Sequence[History]) -> tuple[list[str], dict[str, str], list[str]]:
    """A method's own columns of numbers.

    Returns:
        Those to draw, those that are the same in every round with their value, and those left over.
    """
    names = dict.fromkeys(name for history in members for name in history.columns if name not in STANDARD)
    changing, constant = [], {}
    for name in names:
        values = {value for h in members if name in h.columns for value in h.column(name)[1].tolist()}
        if len(values) == 1:
            constant[name] = f"{values.pop():g}"
        else:
            changing.append(name)
    return changing[:PANELS], constant, changing[PANELS:]


def last_lists(members: Sequence[History]) -> list[tuple[str, str]]:
    """The lists and texts that the last round of the first seed recorded, cut to the first entries."""
    records = members[0][-1:] if len(members[0]) else []
    return [
        (name, _brief(value) if isinstance(value, list) else str(value))
        for record in records
        for name, value in record.items()
        if name not in STANDARD and isinstance(value, (list, str))
    ]


def _brief(values: Sequence[Any]) -> str:
    shown = ", ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in values[:NAMED])
    return shown + (f", … ({len(values)} in all)" if len(values) > NAMED else "")


def _events(runs: Sequence[Run]) -> dict[str, Any]:
    every = [(run, event) for run in runs for event in run.events]
    kinds = Counter(str(event.get("kind", "")) for _, event in every)
    clients: Counter[str] = Counter()
    for _, event in every:
        clients[str(event.get("kind", ""))] += len(event.get("clients", []))
    # What went wrong comes before what was expected: a client that drops out gives no reason.
    telling = sorted(every, key=lambda pair: not pair[1].get("reason"))
    return {
        "kinds": [(kind, count, clients[kind]) for kind, count in kinds.most_common()],
        "first": [
            (
                _seed(run),
                event["round"],
                event.get("kind", ""),
                _brief(event.get("clients", [])),
                event.get("reason", ""),
            )
            for run, event in telling[:EVENTS]
        ],
        "more": max(len(every) - EVENTS, 0),
    }


def _seed(run: Run) -> str:
    return run.folder.name if run.history.seed is None else f"seed {run.history.seed}"


def _unplaced(history: History) -> History:
    """The history without its folder: a page that is passed on says nothing about where it was made."""
    return History(history, method=history.method, seed=history.seed, targets=history.targets, stopped=history.stopped)


def _data_uri(path: Path | None) -> str | None:
    data = path.read_bytes() if path is not None else b""
    return f"data:image/png;base64,{base64.b64encode(data).decode()}" if data.startswith(PNG) else None


def inline_svg(figure: Figure, key: str) -> Markup:
    """A figure as SVG to put into a page: its ids are its own, its ink and grid follow the page's colours.

    Args:
        figure: The figure.
        key: Put before every id, so that no two figures of a page share one.
    """
    import matplotlib
    from markupsafe import Markup

    buffer = io.StringIO()
    # Text stays text, and the ids that matplotlib makes up are the same every time.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": key}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', text))
    text = re.sub(r' id="([^"]+)"', lambda m: f' id="{key}-{m[1]}"' if m[1] in used else "", text)
    text = re.sub(r'(url\(#|href="#)', rf"\g<1>{key}-", text)
    text = text.replace(INK, "currentColor").replace(GRID, "var(--grid)")
    return Markup(text)


__all__ = ["inline_svg", "last_lists", "own_columns", "render", "write_comparison", "write_report"]
