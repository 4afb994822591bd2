"""Write HTML reports about runs.

A report is a single, printable file that does not load anything from the network.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstrata.base import style
from fedstrata.base.jsonl import replace_file, write_json
from fedstrata.base.printable import printable
from fedstrata.evaluation.history import STANDARD, History
from fedstrata.evaluation.summary import summary_lines
from fedstrata.reporting import contrasts, plots, setting, tables
from fedstrata.reporting.answer import answer, number
from fedstrata.reporting.charts import DASHES, FATE_NAMES, chart_data, has_costs, is_own, strokes
from fedstrata.reporting.overview import display, overview
from fedstrata.reporting.runs import Run, by_data, histories, load_runs
from fedstrata.reporting.statistics import Estimate

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup

EVENTS = 10
"""The maximum number of events per method that are shown in full."""
NAMED = 12
"""The maximum number of entries shown per list, such as the clients of an event."""
PICTURES = 1_000_000
"""The maximum total size of all pictures of partitions, in bytes."""
PNG = b"\x89PNG\r\n\x1a\n"
SCRIPTS, STYLES = ("uPlot.iife.min.js", "base.js", "report.js"), ("uPlot.min.css", "report.css")


def write_report(folders: Sequence[Path | str], out: Path | str) -> Path:
    """Write an HTML report about the runs in the given folders.

    Args:
        folders: Run folders, and folders that ``fedstrata compare`` wrote.
        out: The path of the report, or an existing folder in which ``report.html`` is written.

    Returns:
        The path of the report.

    Raises:
        DataError: A folder does not contain a run, or its files are damaged.
    """
    out = Path(out)
    out = out / "report.html" if out.is_dir() else out
    page = render(load_runs(folders), folder=Path(folders[0]) if len(folders) == 1 else None)
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_file(out, page.encode())
    return out


def write_comparison(folder: Path | str) -> list[tables.Row]:
    """Write the report of a comparison into its folder: tables, pictures and an HTML page.

    The files are ``table.md``, ``table.json``, two figures (see ``plot_comparison``) and ``report.html``. The files
    show only finished runs, or all runs if none is finished.

    Returns:
        The rows of the table.

    Raises:
        DataError: The folder does not contain runs, or their files are damaged.
    """
    folder = Path(folder)
    every = load_runs([folder])
    runs = every.finished()
    rows = tables.compare_table(histories(runs))
    text, plain = tables.to_markdown(rows), list[dict[str, Any]]()
    for data, members in (several := by_data(runs)).items():
        comparison = contrasts.contrast(histories(members))
        text += f"\nOn {printable(data)}:\n\n" if len(several) > 1 else "\n"
        text += contrasts.to_markdown(comparison)
        plain += contrasts.to_json([row for row in rows if row.label in members], comparison)
    replace_file(folder / "table.md", text.encode())
    write_json(folder / "table.json", plain)
    plots.plot_comparison(histories(runs), folder)
    replace_file(folder / "report.html", render(runs, every=every, folder=folder).encode())
    return rows


def template(name: str) -> Template:
    """Load an HTML template. The template escapes all values except values of the class ``Markup``."""
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
    """Return a page's styles and scripts, and hashes of the scripts for the page's content security policy.

    Args:
        names: The file names of the scripts, beginning with uPlot.
    """
    from markupsafe import Markup

    scripts = [_asset(name) for name in names]
    scripts[0] = Markup(f"/*\n{_asset('uPlot.LICENSE')}*/\n{scripts[0]}")
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    # These hashes make the browser run only these scripts, so a script that is hidden in a method's name does not run.
    trusted = " ".join(f"'sha256-{each}'" for each in hashes)
    return {"styles": [Markup(style.style_sheet()), *map(_asset, STYLES)], "scripts": scripts, "trusted": trusted}


def render(
    runs: Mapping[str, Sequence[Run]], *, every: Mapping[str, Sequence[Run]] | None = None, folder: Path | None = None
) -> str:
    """Return the HTML report about the runs of each method.

    Args:
        runs: The runs to show.
        every: All runs, including unfinished runs that are not shown. Default: ``runs``.
        folder: The comparison's folder. The report needs it to suggest a command that adds seeds.
    """
    every, runs = every or runs, _named(runs)
    several = by_data(runs)
    blocks = [_comparison(data, members, folder) for data, members in several.items()]
    return template("report.html.j2").render(
        title=_title(runs, list(several)),
        **assets(SCRIPTS),
        data=_embedded([block.pop("charts") for block in blocks]),
        comparisons=blocks,
        setup=setting.setting_line(runs),
        count=setting.count_runs(every),
        differences=setting.differences(runs) if len(runs) > 1 else [],
        fates=FATE_NAMES,
        partitions=_partitions(runs),
        events=_event_counts(runs),
        methods=[_method(label, members) for label, members in runs.items()],
    )


def _named(runs: Mapping[str, Sequence[Run]]) -> Mapping[str, Sequence[Run]]:
    """If there is only one run and its label is the folder's name, use the method's name as the label."""
    members = [run for each in runs.values() for run in each]
    if len(members) == 1 and (method := members[0].history.method) and not members[0].folder.name.startswith("seed-"):
        return {method: [replace(members[0], label=method)]}
    return runs


def _title(runs: Mapping[str, Sequence[Run]], data: Sequence[str]) -> str:
    names = ", ".join(runs) if len(runs) <= 4 else f"{len(runs)} methods"
    members = [run for each in runs.values() for run in each]
    if len(members) == 1 and members[0].history.seed is not None:
        names += f", {members[0].name},"
    return f"{names} on {', '.join(data)}" if all(data) and len(data) <= 4 else names.removesuffix(",")


def _asset(name: str) -> Markup:
    """Read a file of this package as trusted markup, which templates do not escape."""
    from markupsafe import Markup

    return Markup((resources.files("fedstrata.reporting") / "assets" / name).read_text(encoding="utf-8"))


def _embedded(data: object) -> Markup:
    """Return data as JSON with escaped "<", so that the data cannot close the surrounding HTML element."""
    from markupsafe import Markup

    return Markup(json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"))


def _comparison(data: str, runs: Mapping[str, Sequence[Run]], folder: Path | None) -> dict[str, Any]:
    """Return the values for the template's sections about the runs on one data set."""
    members = histories(runs)
    comparison = contrasts.contrast(members)
    labels = ranked(list(runs), comparison)
    lines = strokes(list(runs), labels)
    charts = chart_data({label: runs[label] for label in labels}, lines)
    said = answer(members, comparison)
    return {
        "data": data,
        "charts": charts,
        "answer": said,
        "command": setting.command(folder, runs, said.seeds) if folder is not None and said.seeds else None,
        "swatches": {label: (line.name, " ".join(map(str, DASHES[line.dash]))) for label, line in lines.items()},
        "first": overview(runs, comparison, labels) if comparison.measures else None,
        **_more(members, comparison, labels),
        "summary": summary_lines(_without_folder(next(iter(members.values()))[0])) if _is_single(runs) else [],
        "seeds": list(dict.fromkeys(run.name for each in runs.values() for run in each)),
        "costs": has_costs(charts),
        "heats": charts["classes"] is not None or bool(charts["clients"]),
        "absences": charts["absences"] is not None,
    }


def _is_single(runs: Mapping[str, Sequence[Run]]) -> bool:
    return sum(map(len, runs.values())) == 1


def ranked(labels: Sequence[str], comparison: contrasts.Contrasts) -> list[str]:
    """Sort methods by the first measure of a comparison, from best to worst. Methods without a value come last."""
    if not comparison.measures:
        return list(labels)
    key = next(iter(comparison.measures))
    means = {row.label: row.value.mean for row in comparison.groups[key]}
    sign = comparison.directions[key] or 1
    return sorted(labels, key=lambda each: math.inf if (mean := means[each]) is None else -sign * mean)


def _more(
    members: Mapping[str, Sequence[History]], comparison: contrasts.Contrasts, labels: Sequence[str]
) -> dict[str, Any]:
    """Return the table of additional measures, and sentences about measures that are equal for all methods."""
    every = {row.label: row for row in tables.compare_table(members)}
    rows = [every[label] for label in labels]
    left_out = {"best_round", "rounds", *itertools.islice(comparison.measures, 1)}
    keys = [key for key in tables.keys(rows) if key not in left_out and any(row.cells[key].mean for row in rows)]
    # Show metrics in the order of the spec, which is also their order in the records.
    order = {
        name: i for i, name in enumerate(name for each in members.values() for run in each for name in run.columns)
    }
    plain = [key for key in keys if key not in order]
    measured = sorted((key for key in keys if key in order), key=order.__getitem__)
    columns, equal = list[dict[str, Any]](), list[str]()
    for key in (*plain, *comparison.budgets, *measured):
        for column in _columns(rows, key, comparison):
            texts = {(cell["text"], *cell["below"]) for cell in column["cells"]}
            if len(rows) > 1 and len(texts) == 1:
                equal.append(f"{column['heading']}: {texts.pop()[0]}")
            else:
                columns.append(column)
    notes = ["Values at an equal budget are from the last evaluation within the budget."] if comparison.budgets else []
    notes += [f"Equal for all methods: {'; '.join(equal)}."] if equal else []
    return {"more": columns, "notes": notes}


def _columns(rows: Sequence[tables.Row], key: str, comparison: contrasts.Contrasts) -> list[dict[str, Any]]:
    """Return the columns for one measure: the values and, if methods are compared with a baseline, the differences."""
    if key not in comparison.measures:
        how = display(key)
        cells = [_cell(_estimate(row.cells[key], how, row.seeds), row.cells[key].mean) for row in rows]
        return [{"heading": how.heading, "cells": cells}]
    how, by_label = comparison.measures[key], {row.label: row for row in comparison.groups[key]}
    compared = [by_label[row.label] for row in rows]
    cells = [_cell(_estimate(row.value, how, row.seeds), row.value.mean) for row in compared]
    columns = [{"heading": how.heading, "cells": cells}]
    if any(row.difference is not None and row.difference.mean is not None for row in compared):
        cells = [_difference(row, how, comparison.baseline) for row in compared]
        columns.append({"heading": f"minus {comparison.baseline}", "cells": cells})
    return columns


def _estimate(value: Estimate, how: tables.Measure, seeds: int) -> str:
    if value.mean is None:
        return tables.MISSING
    spread = "" if value.sd is None else number(value.sd, how, "", seeds)
    text = number(value.mean, how, "", seeds) + (f" ± {spread}" if spread.strip("0.") else "")
    return text + (f" ({value.n} of {seeds})" if value.n < seeds else "")


def _difference(row: contrasts.Contrast, how: tables.Measure, baseline: str | None) -> dict[str, Any]:
    difference = row.difference
    if difference is None or difference.mean is None:
        return _cell("baseline", 0.0) if row.label == baseline else _cell(tables.MISSING, None)
    ends = [] if difference.interval is None else [number(end, how, "+", row.seeds) for end in difference.interval]
    return _cell(number(difference.mean, how, "+", row.seeds), difference.mean, " to ".join(ends))


def _cell(text: str, value: float | None, *below: str) -> dict[str, Any]:
    lines = [line for line in below if line not in ("", tables.MISSING)]
    return {"text": text, "value": "" if value is None else f"{value:.10g}", "below": lines}


def _partitions(runs: Mapping[str, Sequence[Run]]) -> list[dict[str, Any]]:
    """Return the pictures of all different partitions, each with the names of the runs that have the partition.

    If the total size of the pictures exceeds ``PICTURES``, the remaining pictures are left out, and only the names of
    their runs are listed.
    """
    owners: dict[bytes, list[tuple[str, str]]] = {}
    for label, members in runs.items():
        for run in members:
            path = run.folder / "partition.png"
            data = path.read_bytes() if path.is_file() else b""
            if data.startswith(PNG):
                owners.setdefault(data, []).append((label, run.name))
    pictures, size = [], 0
    for data, pairs in owners.items():
        size += len(data)
        labels, names = (list(dict.fromkeys(each)) for each in zip(*pairs, strict=True))
        whose = "all methods" if len(labels) == len(runs) else _first(labels)
        source = f"data:image/png;base64,{base64.b64encode(data).decode()}" if size <= PICTURES else None
        pictures.append({"of": _first(names), "whose": whose if len(runs) > 1 else "", "source": source})
    return pictures


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + (", …" if len(names) > NAMED else "")


def _event_counts(runs: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """Count the events and their clients for each method and kind of event. A client is counted once per event.

    Methods with equal counts share a row. Equal counts are frequent, because dropouts depend only on the seed.
    """
    counts = {label: Counter[str]() for label in runs}
    clients = {label: Counter[str]() for label in runs}
    for label, members in runs.items():
        for event in (event for run in members for event in run.events):
            kind = str(event.get("kind", ""))
            counts[label][kind] += 1
            clients[label][kind] += len(event.get("clients", []))
    total: Counter[str] = sum(counts.values(), Counter())
    kinds = [kind for kind, _ in total.most_common()]
    groups: dict[tuple[tuple[int, int], ...], list[str]] = {}
    for label in runs:
        groups.setdefault(tuple((counts[label][kind], clients[label][kind]) for kind in kinds), []).append(label)
    alike = len(runs) > 1 and len(groups) == 1
    return {
        "kinds": kinds,
        "rows": [("all methods" if alike else _first(labels), cells) for cells, labels in groups.items()],
    }


def _method(label: str, runs: Sequence[Run]) -> dict[str, Any]:
    """Return the values for a method's section of the report: runs, events, spec, and results that are not drawn."""
    members = [run.history for run in runs]
    every = [(run, event) for run in runs for event in run.events]
    # Errors come first. An error has the entry ``reason``, but an expected event, such as a dropout, does not.
    ordered = sorted(every, key=lambda pair: not pair[1].get("reason"))
    return {
        "label": label,
        "runs": [(run.name, summary_lines(_without_folder(run.history))) for run in runs],
        "constant": constants(members),
        "lists": last_lists(members),
        "first": [
            (run.name, event["round"], event.get("kind", ""), _brief(event.get("clients", [])), event.get("reason", ""))
            for run, event in ordered[:EVENTS]
        ],
        "events": len(every),
        "spec": runs[0].spec,
        "spec_of": runs[0].name,
    }


def constants(members: Sequence[History]) -> dict[str, str]:
    """Return the name and value of each method-specific column whose value is the same in all rounds and seeds."""
    values: dict[str, set[float]] = {}
    for history in members:
        for name in filter(is_own, history.columns):
            values.setdefault(name, set()).update(history.column(name)[1].tolist())
    return {name: f"{each.pop():g}" for name, each in values.items() if len(each) == 1}


def last_lists(members: Sequence[History]) -> list[tuple[str, str]]:
    """Return the names and values of lists and strings in the last record of the first seed, and shorten long lists."""
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


def _without_folder(history: History) -> History:
    """Copy a history without the path of its folder, because the report must not disclose this path."""
    copied = copy.copy(history)
    copied.path = None
    return copied
