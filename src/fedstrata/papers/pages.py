"""Markdown pages about the papers' tables: published figures, our results, and the verdicts on claims."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any

from fedstrata.base.jsonl import replace_file
from fedstrata.papers import judging
from fedstrata.papers.judging import Cells, Comparison, difference_text, over_seeds, signed
from fedstrata.papers.readings import FEW_MORE, readings
from fedstrata.papers.running import Results, known
from fedstrata.papers.tables import METRICS, PAPERS, Table, tables
from fedstrata.reporting.statistics import MIN_SEEDS, Estimate, cut

FIRST, READINGS = "claims.md", "readings.md"
MADE = "Written by `fedstrata reproduce`; the figures are in `cells/`, one file a table."
QUICK = "\n**At small scale, to see that everything runs: nothing here says anything of the papers.**\n"

ABOUT_CLAIMS = f"""\
Every quantitative claim of the abstracts and conclusions, in our words, and what came of it here.
Differences are paired by seed and judged from {MIN_SEEDS} seeds on; their 95 % intervals are in brackets. Those between
methods hold together over all comparisons of the table; those between settings of one method, of rounds and of
deviations hold together over the comparisons of the claim. Seeds draw the split, the first model and the batches. The
test set is the same for all of them: nothing here is said of another one.

- *holds*: in all settings; *in part*: in some; *not*: in none, and the opposite in some.
- *not shown*: the runs leave it open.
- *not yet*: cells are not run, or have too few seeds.

Ratios of bytes, what is computed and what other pages have measured need no seeds. These are our choices: how near is
as good (1 point, 2 points under privacy), how many more bytes or operations are few ({FEW_MORE} times), how many more
bytes are many (10 times), and over how many rounds a curve is steady (20).

{MADE} `fedstrata reproduce --show --out docs/results` writes the pages anew of the results that are there.
Whether something beats all four is [a study of its own](study.md).
"""
ABOUT_TABLES = f"""\
In the tables the paper's figure stands beside ours, which has the 95 % interval of its mean over seeds (Student's t).
Differences are paired: they are of the seeds that both methods have, and need not be the difference of the means shown.
Their intervals hold together at 95 % over all comparisons of the table (Bonferroni), and are cut at what is possible.
An order is only stated from {MIN_SEEDS} seeds on and where that interval leaves out zero. p is of the paired t-test,
corrected over the same comparisons (Holm); it decides nothing. Seeds draw the split, the first model and the batches;
the test set is the same for all of them. A cell that is not run has its command and the time of one core that it takes.
{MADE}
"""


def write(out: Path, *, quick: bool = False) -> list[str]:
    """Write all pages about the results in a folder.

    Args:
        out: The folder of the results and the pages.
        quick: Whether the results are at small scale.

    Returns:
        The names of the files.
    """
    results = known(out)
    pages = {FIRST: first_page(results, quick=quick), READINGS: page_of_readings()}
    pages |= {f"{paper}.md": page(paper, results, quick=quick) for paper in PAPERS}
    out.mkdir(parents=True, exist_ok=True)
    for name, text in pages.items():
        replace_file(out / name, text.encode())
    return list(pages)


def missing(wanted: Iterable[Table], out: Path, *, quick: bool = False) -> dict[str, str]:
    """Return a mapping from the name of each missing file, and of each cell without a figure, to the problem as text.

    Args:
        wanted: The tables that were run.
        out: The folder of the results and the pages.
        quick: Whether the results are at small scale.
    """
    results, problems, texts = known(out), dict[str, str](), dict[str, str]()
    for name in [FIRST, READINGS, *(f"{paper}.md" for paper in PAPERS)]:
        path = out / name
        texts[name] = path.read_text(encoding="utf-8") if path.is_file() else ""
        if not texts[name]:
            problems[str(path)] = "is missing"
    for table in wanted:
        for cell in table.cells(quick=quick):
            result, name = results.get(cell.hash), f"{table.paper}/{table.name}/{cell.key}"
            if result is None or table.metric not in result:
                problems[name] = "has no result"
            elif quick and f"{result[table.metric]:.2f}" not in texts[f"{table.paper}.md"]:
                problems[name] = "its figure is not on the page"
    return problems


def first_page(results: Results, *, quick: bool = False) -> str:
    """Return the page with a row for each claim of all papers."""
    lines = ["# The four papers, claim by claim", QUICK if quick else "", ABOUT_CLAIMS]
    lines += ["| paper | claim | where | here | figures | command |", "|---|---|---|---|---|---|"]
    for claim in judging.claims():
        each = judging.judged(claim, results, quick=quick)
        link = f"[{PAPERS[claim.paper].partition(' ')[0]}]({claim.paper}.md)"
        command = f"`{each.command}`" if each.command != "–" else "–"
        cells = [link, claim.statement, claim.where, f"**{each.verdict}**", each.evidence, command]
        lines.append(f"| {' | '.join(cells)} |")
    about = f"[{READINGS}]({READINGS}): biases, weights and privacy, computed."
    lines += ["", "## What follows from the rules alone", "", about]
    lines += ["", "## What is run", "", overview(tables().values(), results, quick=quick)]
    return "\n".join(lines) + "\n"


def progress(wanted: Iterable[Table], results: Results, *, quick: bool = False) -> list[dict[str, Any]]:
    """Return how much of each table has been run.

    Returns:
        A dict for each table: ``table`` is its name, ``cells`` the number of its cells, ``done`` the number of finished
        cells, ``hours`` the expected hours of the missing cells on one core, and ``unknown`` the number of missing
        cells whose duration is unknown.
    """
    rows = []
    for table in wanted:
        cells = list(table.cells(quick=quick))
        missing = [cell for cell in cells if cell.hash not in results]
        seconds = speeds(table, results)
        rates = [(cell, seconds.get((cell.row, cell.column))) for cell in missing]
        hours = [rate * cell.spec["training"]["rounds"] / 3600 for cell, rate in rates if rate is not None]
        counts = {"cells": len(cells), "done": len(cells) - len(missing), "unknown": len(missing) - len(hours)}
        rows.append({"table": f"{table.paper}/{table.name}", **counts, "hours": sum(hours)})
    return rows


def overview(wanted: Iterable[Table], results: Results, *, quick: bool = False) -> str:
    """Return a Markdown table with a row for each table: its progress, and the time that its missing cells take."""
    lines = ["| table | cells | done | left, on one core |", "|---|---:|---:|---:|"]
    for row in progress(wanted, results, quick=quick):
        missing = row["cells"] - row["done"]
        text = duration(row["hours"]) + (" and more" if row["unknown"] else "")
        text = "–" if not missing else text if row["unknown"] < missing else "?"
        lines.append(f"| `{row['table']}` | {row['cells']} | {row['done']} | {text} |")
    return "\n".join(lines)


def speeds(table: Table, results: Results) -> dict[tuple[str, str], float]:
    """Return a mapping from rows and columns to the expected seconds per round on one core; unknown ones are left out.

    The estimate is taken from the first of these sources that is known: finished cells of the row and column; finished
    cells of the row; the table's own estimate; finished cells of other rows. Times from other columns are scaled by the
    number of epochs times the number of clients.
    """
    measured: dict[tuple[str, str], list[float]] = {}
    work = {}
    for cell in table.cells():
        place, training = (cell.row, cell.column), cell.spec["training"]
        work[place] = training.get("local_epochs", 1) * training.get("clients_per_round", 1)
        result = results.get(cell.hash, {})
        if "seconds" in result:
            measured.setdefault(place, []).append(result["seconds"] / result["rounds"])
    expected = {}
    of_all = {place: [speed / work[place] for speed in speeds] for place, speeds in measured.items()}
    for place in work:
        of_row = [speed for other, speeds in of_all.items() if other[0] == place[0] for speed in speeds]
        if place in measured:
            expected[place] = statistics.fmean(measured[place])
        elif of_row:
            expected[place] = statistics.fmean(of_row) * work[place]
        elif (estimate := table.seconds.get(place[0], table.seconds.get(""))) is not None:
            expected[place] = estimate
        elif of_all:
            expected[place] = statistics.fmean(chain(*of_all.values())) * work[place]
    return expected


def page(paper: str, results: Results, *, quick: bool = False) -> str:
    """Return the page of a paper: its claims, its tables, and how our experiments differ from the paper's."""
    lines = [f"# {PAPERS[paper]}", QUICK if quick else "", f"What became of its claims ([more]({FIRST})):", ""]
    lines += ["| claim | here | figures |", "|---|---|---|"]
    for each in (judging.judged(claim, results, quick=quick) for claim in judging.claims() if claim.paper == paper):
        lines.append(f"| {each.claim.statement} | **{each.verdict}** | {each.evidence} |")
    lines += ["", ABOUT_TABLES.strip()]
    for name, table in tables().items():
        if table.paper == paper:
            lines += ["", f"## {table.title}", "", *_table(name, table, results, quick=quick)]
    differences = files(__package__).joinpath(paper, "differs.md").read_text(encoding="utf-8")
    lines += ["", differences.strip()]
    return "\n".join(lines) + "\n"


def _table(name: str, table: Table, results: Results, *, quick: bool) -> list[str]:
    cells = judging.cells_of(table, results, quick=quick)
    lines = [f"Paper: {table.source}. Figures: {METRICS[table.metric]}, %. `fedstrata reproduce {name}`.", ""]
    lines += [table.notes.strip(), ""] if table.notes else []
    also = [key for key in SHOWN if any(result.get(key) for result in cells.values())]
    theirs = [_published(table, row, c) for c in table.columns for row in table.rows_of(c)]
    paper = (["paper"] if table.published else []) + ([f"its − {table.baseline}"] if any(d for _, d in theirs) else [])
    heads = ["setting", "method", *paper, "here", "seeds", *(SHOWN[key] for key in also)]
    heads += [f"− {table.baseline}", "p", "what may be said"]
    lines += ["| " + " | ".join(heads) + " |", "|---|---|" + "---:|" * (len(heads) - 3) + "---|"]
    comparisons = judging.compared(table, cells)
    seconds = speeds(table, results)
    beside = {(each.column, each.row): each for each in comparisons if each.than == table.baseline}
    outside = []
    for column in table.columns:
        for row in table.rows_of(column):
            values = over_seeds(cells, row, column, table.metric)
            estimate = Estimate.over(values.values())
            if _is_outside(table.published.get(row, {}).get(column), estimate):
                outside.append(f"{row} with {column}")
            figures = [*_published(table, row, column)[: len(paper)], _here(estimate), _seeds(cells, row, column)]
            figures += [_mean(cells, row, column, key) for key in also]
            said = _said(beside.get((column, row))) if values else ["", "", _left(table, row, column, seconds)]
            lines.append(f"| {column} | {row} | " + " | ".join([*figures, *said]) + " |")
    more = [each for each in comparisons if each.than != table.baseline and each.difference.n]
    if more:
        lines += ["", "| setting | also compared | difference | p | what may be said |", "|---|---|---:|---:|---|"]
        lines += [f"| {each.column} | {each.row} − {each.than} | " + " | ".join(_said(each)) + " |" for each in more]
    if outside:
        lines += ["", f"The paper's figure lies outside our interval: {'; '.join(outside)}."]
    if len(table.seeds) >= MIN_SEEDS and comparisons and not quick:
        times = judging.needed(len(table.seeds), len(comparisons))
        family = f"With {len(table.seeds)} seeds and {len(comparisons)} comparisons"
        rule = f"a difference must be {times:.1f} times as large as its deviation from seed to seed"
        lines += ["", f"{family}, {rule} for its order to be stated."]
    return lines + _taken_over([result for result in cells.values() if "source" in result])


def _published(table: Table, row: str, column: str) -> tuple[str, str]:
    """Return the paper's figure for a row and column, and its difference from the baseline's, as texts."""
    figure, baseline = (table.published.get(each, {}).get(column) for each in (row, table.baseline))
    if figure is None:
        return "", ""
    return f"{figure:.2f}", "" if baseline is None or row == table.baseline else signed(figure - baseline)


def _is_outside(published: float | None, estimate: Estimate) -> bool:
    if published is None or estimate.interval is None or estimate.n < MIN_SEEDS:
        return False
    return not estimate.interval[0] <= published <= estimate.interval[1]


def _seeds(cells: Cells, row: str, column: str) -> str:
    """Return the number of seeds that were run, with a † if an earlier version of fedstrata made some results."""
    results = [result for (r, c, _), result in cells.items() if (r, c) == (row, column)]
    return (str(len(results)) if results else "") + ("†" if any("source" in result for result in results) else "")


def _taken_over(results: list[Mapping[str, Any]]) -> list[str]:
    """Return lines with a note about the results that an earlier version of fedstrata made.

    The note says how much their first rounds differ from those of a run with this version.
    """
    if not results:
        return []
    sources = ", ".join(f"`{source}`" for source in sorted({str(result["source"]) for result in results}))
    line = f"† {len(results)} cells were made by an earlier version with the same spec ({sources})"
    repeated = [result["repeated"] for result in results if "repeated" in result]
    if not repeated:
        return ["", f"{line}, and not repeated."]
    rounds, points = min(each["rounds"] for each in repeated), max(each["points"] for each in repeated)
    which = "each" if len(repeated) == len(results) else f"{len(repeated)} of them"
    left_out = "Cells that are more than one point off are left out."
    repeats = f"the first {rounds} rounds of {which} were repeated, and are at most {points} points off"
    return ["", f"{line}; {repeats}. {left_out}"]


SHOWN = {"expected_samples": "samples kept", "hops": "hops a round", "strata": "strata, round 1"}
"""A mapping from the name of each additional column to its heading. A table shows the columns that its results have."""


def _mean(cells: Cells, row: str, column: str, key: str) -> str:
    values = over_seeds(cells, row, column, key).values()
    return f"{statistics.fmean(values):,.0f}" if values else ""


def _here(estimate: Estimate) -> str:
    if estimate.mean is None:
        return ""
    interval = cut(estimate.interval, (0.0, 100.0))
    if interval is None or estimate.n < MIN_SEEDS:
        return f"{estimate.mean:.2f}"
    return f"{estimate.mean:.2f} [{interval[0]:.1f}, {interval[1]:.1f}]"


def _left(table: Table, row: str, column: str, seconds: Mapping[tuple[str, str], float]) -> str:
    """Return a text with the command that runs the missing cells of a row and column, and their expected duration."""
    rounds = next(cell.spec["training"]["rounds"] for cell in table.cells() if (cell.row, cell.column) == (row, column))
    a_round = seconds.get((row, column))
    takes = "time unknown" if a_round is None else duration(a_round * rounds * len(table.seeds) / 3600)
    return f"not run: `fedstrata reproduce {table.paper}/{table.name}`, {takes}"


def _said(comparison: Comparison | None) -> list[str]:
    """Return three cells of a table about a comparison: the difference, the corrected p, and the order in words."""
    if comparison is None:
        return ["", "", ""]
    difference, order = comparison.difference, comparison.difference.order()
    text = "" if difference.mean is None else difference_text(difference)
    corrected = difference.corrected
    p = "" if corrected is None else "< 0.001" if corrected < 0.001 else f"{corrected:.3f}"
    if order in ("above", "below"):
        return [text, p, f"{order} {comparison.than}"]
    return [text, p, "no comparison yet" if order == "not run" else order]


def duration(hours: float) -> str:
    """Return a duration as text, in minutes or hours.

    >>> duration(0.04), duration(2.34)
    ('2 min', '2.3 h')
    """
    return f"{max(1, round(60 * hours))} min" if hours < 1 else f"{hours:.1f} h"


def page_of_readings() -> str:
    """Return the page of all readings, which are figures that follow from the rules of the papers."""
    computed = "Computed by `fedstrata.papers.readings` whenever pages are written."
    lines = ["# What follows from the rules alone", "", computed, ""]
    lines += ["| what | figure | does what the paper says of it hold? |", "|---|---|---|"]
    lines += [f"| {each.description} | {each.figure} | {each.holds} |" for each in readings().values()]
    return "\n".join(lines) + "\n"
