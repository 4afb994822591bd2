"""One HTML page about runs, with everything in it: no network, light and dark, fit to print."""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstrata.base.jsonl import replace_file, write_json
from fedstrata.evaluation.history import STANDARD, History
from fedstrata.reporting import contrasts, plots, tables
from fedstrata.reporting.charts import DASHES, FATE_NAMES, chart_data, is_own
from fedstrata.reporting.draw import look
from fedstrata.reporting.runs import Run, by_data, histories, load_runs
from fedstrata.reporting.summary import summary_lines

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup

EVENTS = 10
"""Events of a method that are shown in full."""
NAMED = 12
"""Clients of an event, or entries of a list, that are shown."""
PICTURES = 1_000_000
"""Bytes of all pictures of partitions together, at most."""
PNG = b"\x89PNG\r\n\x1a\n"
SCRIPTS, STYLES = ("uPlot.iife.min.js", "base.js", "report.js"), ("uPlot.min.css", "report.css")


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
    """Write the tables, pictures and page of a compare folder into it.

    They are ``table.md``, ``table.json``, ``accuracy`` and ``traffic`` as PNG and PDF, and ``report.html``; all of
    finished runs, where there are any.

    Returns:
        The table.

    Raises:
        DataError: The folder holds no runs, or their files are damaged.
    """
    folder = Path(folder)
    runs = load_runs([folder]).finished()
    rows = tables.compare_table(histories(runs))
    text, plain = tables.to_markdown(rows), list[dict[str, Any]]()
    for data, members in (several := by_data(runs)).items():
        found = contrasts.contrast(histories(members))
        text += f"\nOn {data}:\n\n" if len(several) > 1 else "\n"
        text += contrasts.to_markdown(found)
        plain += contrasts.to_json([row for row in rows if row.label in members], found)
    replace_file(folder / "table.md", text.encode())
    write_json(folder / "table.json", plain)
    plots.plot_comparison(histories(runs), folder)
    replace_file(folder / "report.html", render(runs).encode())
    return rows


def template(name: str) -> Template:
    """One of the package's pages, in which what is not marked as markup is text."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("fedstrata.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def assets(names: Sequence[str]) -> dict[str, Any]:
    """A page's styles and scripts, and the hashes by which a browser knows them.

    Args:
        names: Of the scripts, uPlot first.
    """
    from markupsafe import Markup

    scripts = [_asset(name) for name in names]
    # The licence of a library goes where the library goes.
    scripts[0] = Markup(f"/*\n{_asset('uPlot.LICENSE')}*/\n{scripts[0]}")
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    # Nothing but these scripts may run, whatever a name in a spec says.
    trusted = " ".join(f"'sha256-{each}'" for each in hashes)
    return {"styles": [_asset(name) for name in STYLES], "scripts": scripts, "trusted": trusted}


def render(runs: Mapping[str, Sequence[Run]]) -> str:
    """The page about the runs of each label, as text."""
    several = by_data(runs)
    return template("report.html.j2").render(
        title=_title(runs, list(several)),
        **assets(SCRIPTS),
        data=_embedded([chart_data(members) for members in several.values()]),
        comparisons=[_comparison(data, members) for data, members in several.items()],
        fates=FATE_NAMES,
        partitions=_partitions(runs),
        events=_event_counts(runs),
        methods=[_method(label, members) for label, members in runs.items()],
    )


def _title(runs: Mapping[str, Sequence[Run]], data: Sequence[str]) -> str:
    names = ", ".join(runs) if len(runs) <= 4 else f"{len(runs)} methods"
    return f"{names} on {', '.join(data)}" if all(data) and len(data) <= 4 else names


def _asset(name: str) -> Markup:
    """The text of a file that comes with the package, which is no untrusted one."""
    from markupsafe import Markup

    return Markup((resources.files("fedstrata.reporting") / "assets" / name).read_text(encoding="utf-8"))


def _embedded(data: object) -> Markup:
    """Data as JSON to stand in a page: no text in it can end the element that it stands in."""
    from markupsafe import Markup

    return Markup(json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"))


def _comparison(data: str, runs: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """The tables of one data set's runs."""
    members = histories(runs)
    rows, found = tables.compare_table(members), contrasts.contrast(members)
    keys = tables.keys(rows)
    other = [key for key in keys if key not in tables.MEASURES and not tables.is_target(key)]
    main = [
        key
        for key in keys
        if key not in (*other, "best_round", "rounds")
        and (key != "seconds" or any(row.cells[key].mean for row in rows))
    ]
    equal = [column for key in found.measures if key not in tables.MEASURES for column in _contrasted(found, key)]
    summary = [column for key in main for column in _columns(rows, key, found)]
    more = equal + [column for key in other for column in _columns(rows, key, found)]
    return {
        "data": data,
        "labels": [(row.marked, look(i)[0], " ".join(map(str, DASHES[look(i)[1]]))) for i, row in enumerate(rows)],
        "tables": [(title, columns) for title, columns in (("Summary", summary), ("More measures", more)) if columns],
        "caption": contrasts.caption(found),
        "seeds": list(dict.fromkeys(run.name for each in runs.values() for run in each)),
    }


def _columns(rows: Sequence[tables.Row], key: str, found: contrasts.Contrasts) -> list[dict[str, Any]]:
    """A measure as columns of the page's table: one, or two where it is compared with the baseline."""
    if key in found.measures:
        return _contrasted(found, key)
    cells = [_cell(tables.show(row, key), row.cells[key].mean) for row in rows]
    return [{"heading": tables.measure(key).heading, "cells": cells}]


def _contrasted(found: contrasts.Contrasts, key: str) -> list[dict[str, Any]]:
    rows, how = found.groups[key], found.measures[key]
    cells = [
        _cell(
            tables.shown(row.value, how, row.seeds),
            row.value.mean,
            contrasts.range_text(row.value.interval, how) if row.value.interval else "",
        )
        for row in rows
    ]
    columns = [{"heading": how.heading, "cells": cells}]
    differences = [row.difference for row in rows]
    if any(each is not None and each.mean is not None for each in differences):
        cells = [
            _cell(*(("baseline", 0.0) if row.label == found.baseline else (tables.MISSING, None)))
            if (each := row.difference) is None or each.mean is None
            else _cell(
                tables.number(each.mean, how, "+"),
                each.mean,
                contrasts.range_text(each.interval, how, "+") if each.interval else "",
                f"p {contrasts.p_text(each.corrected)}" if each.corrected is not None else "",
            )
            for row in rows
        ]
        columns.append({"heading": f"minus {found.baseline}", "cells": cells})
    return columns


def _cell(text: str, value: float | None, *below: str) -> dict[str, Any]:
    return {"text": text, "value": "" if value is None else f"{value:.10g}", "below": [line for line in below if line]}


def _partitions(runs: Mapping[str, Sequence[Run]]) -> list[dict[str, Any]]:
    """Each picture once, with the runs whose partition it is; those that would make the page large by name only."""
    owners: dict[bytes, list[tuple[str, str]]] = {}
    for label, members in runs.items():
        for run in members:
            data = run.partition.read_bytes() if run.partition is not None else b""
            if data.startswith(PNG):
                owners.setdefault(data, []).append((label, run.name))
    found, left = [], PICTURES
    for data, of in owners.items():
        left -= len(data)
        who = list(dict.fromkeys(name for _, name in of))
        labels = list(dict.fromkeys(label for label, _ in of))
        whose = (
            "all methods"
            if len(labels) == len(runs)
            else ", ".join(labels[:NAMED]) + ("" if len(labels) <= NAMED else ", …")
        )
        found.append(
            {
                "of": ", ".join(who[:NAMED]) + (", …" if len(who) > NAMED else ""),
                "whose": whose if len(runs) > 1 else "",
                "source": f"data:image/png;base64,{base64.b64encode(data).decode()}" if left >= 0 else None,
            }
        )
    return found


def _event_counts(runs: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """How many events of each kind there are of each method, and how many clients they name, counted each time."""
    counts = {label: Counter[str]() for label in runs}
    clients = {label: Counter[str]() for label in runs}
    for label, members in runs.items():
        for event in (event for run in members for event in run.events):
            kind = str(event.get("kind", ""))
            counts[label][kind] += 1
            clients[label][kind] += len(event.get("clients", []))
    total: Counter[str] = sum(counts.values(), Counter())
    kinds = [kind for kind, _ in total.most_common()]
    return {
        "kinds": kinds,
        "rows": [(label, [(counts[label][kind], clients[label][kind]) for kind in kinds]) for label in runs],
    }


def _method(label: str, runs: Sequence[Run]) -> dict[str, Any]:
    """What is told of one label alone: its runs in words, what it recorded, events and spec."""
    members = [run.history for run in runs]
    every = [(run, event) for run in runs for event in run.events]
    # What went wrong comes before what was expected: a client that drops out gives no reason.
    telling = sorted(every, key=lambda pair: not pair[1].get("reason"))
    return {
        "label": label,
        "runs": [(run.name, summary_lines(_unplaced(run.history))) for run in runs],
        "constant": constants(members),
        "lists": last_lists(members),
        "first": [
            (run.name, event["round"], event.get("kind", ""), _brief(event.get("clients", [])), event.get("reason", ""))
            for run, event in telling[:EVENTS]
        ],
        "events": len(every),
        "spec": runs[0].spec,
        "spec_of": runs[0].name,
    }


def constants(members: Sequence[History]) -> dict[str, str]:
    """A method's own columns whose number is the same in every round, with it."""
    values: dict[str, set[float]] = {}
    for history in members:
        for name in filter(is_own, history.columns):
            values.setdefault(name, set()).update(history.column(name)[1].tolist())
    return {name: f"{each.pop():g}" for name, each in values.items() if len(each) == 1}


def last_lists(members: Sequence[History]) -> list[tuple[str, str]]:
    """The lists and texts that the last round of the first seed recorded, cut to the first entries."""
    records = members[0][-1:] if len(members[0]) else []
    return [
        (name, _brief(value) if isinstance(value, list) else str(value))
        for record in records
        for name, value in record.items()
        if name not in (*STANDARD, "per_class") and isinstance(value, (list, str))
    ]


def _brief(values: Sequence[Any]) -> str:
    shown = ", ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in values[:NAMED])
    return shown + (f", … ({len(values)} in all)" if len(values) > NAMED else "")


def _unplaced(history: History) -> History:
    """The history without its folder: a page that is passed on says nothing about where it was made."""
    return History(history, method=history.method, seed=history.seed, targets=history.targets, stopped=history.stopped)


__all__ = ["constants", "last_lists", "render", "write_comparison", "write_report"]
