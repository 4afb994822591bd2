"""Write Markdown pages about the papers' tables: published numbers, our results, and the verdicts on claims."""

from __future__ import annotations

import csv
import html
import io
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any

from fedstrata.base.jsonl import replace_file
from fedstrata.papers import judging
from fedstrata.papers.comparing import cells_of, over_seeds
from fedstrata.papers.forest import forest
from fedstrata.papers.judging import Judgement
from fedstrata.papers.published import Panel, draw_published
from fedstrata.papers.readings import FEW_MORE
from fedstrata.papers.running import Results, known
from fedstrata.papers.table_lines import folded, lines_of_table, markdown, rows_of
from fedstrata.papers.tables import PAPERS, Table, tables
from fedstrata.reporting.statistics import MIN_SEEDS, Estimate

FILES = INDEX, CLAIMS, CLAIMS_CSV, TABLES_CSV, FOREST = (
    "index.md",
    "claims.md",
    "claims.csv",
    "tables.csv",
    "forest.svg",
)
BEGIN, END = "<!-- written by `fedstrata reproduce` from here -->", "<!-- to here -->"
"""Two marks in the file ``INDEX``. Only the lines between the marks are generated."""
QUICK = "\n**At small scale: these runs test the software, not the papers' claims.**\n"

ABOUT_FOREST = f"""\
![Differences in accuracy with their intervals, one panel per paper]({FOREST})

Blue differences in accuracy support the claim, orange differences show the opposite, and grey differences are
not significant. A thick line is the 95 % interval of one comparison. The thin lines are Bonferroni-corrected: with
95 % confidence, all thin intervals of a claim contain the true values. *#C=1* means one class per client."""
DOWNLOADS = (
    f"See also [all claims]({CLAIMS}) and [how we judge]({CLAIMS}#how-we-judge). "
    f"Download [all claims]({CLAIMS_CSV}) and [all tables]({TABLES_CSV}) as CSV."
)
ABOUT_TABLES = f"""\
The tables show 95 % intervals over seeds. Differences are between runs with the same seed. The intervals are not
corrected for multiple comparisons ([verdicts]({CLAIMS}#how-we-judge) partly use corrected ones).
"""


def write(out: Path, *, quick: bool = False) -> list[str]:
    """Write all pages about the results into a folder.

    Args:
        out: Folder that contains the results, and will contain the pages.
        quick: Whether the results come from the small experiments of ``--quick``.

    Returns:
        The names of the written files.
    """
    out.mkdir(parents=True, exist_ok=True)
    pages = contents(out, quick=quick)
    for name, text in pages.items():
        replace_file(out / name, text.encode())
    return list(pages)


def contents(out: Path, *, quick: bool = False) -> dict[str, str]:
    """Return the contents of all files that ``write`` creates, as a mapping from file names to texts."""
    results = known(out)
    judgements = [judging.judged(claim, results, quick=quick) for claim in judging.claims()]
    path = out / INDEX
    index = path.read_text(encoding="utf-8") if path.is_file() else f"# Do the papers' claims hold?\n\n{BEGIN}\n{END}\n"
    before, _, after = index.partition(BEGIN)
    generated = f"{BEGIN}\n\n{first_page(judgements, results, quick=quick)}\n\n"
    pages = {INDEX: before + generated + END + after.partition(END)[2]}
    pages |= {
        CLAIMS: page_of_claims(judgements, quick=quick),
        CLAIMS_CSV: _csv([HEADS, *map(_row, judgements)]),
    }
    pages |= {TABLES_CSV: csv_of_tables(results, quick=quick), FOREST: forest(judgements)}
    for paper in PAPERS:
        pages[f"{paper}.md"] = page(paper, judgements, results, quick=quick)
        if panels := panels_of(paper, results, quick=quick):
            pages[f"{paper}.svg"] = draw_published(panels)
    return pages


def missing(wanted: Iterable[Table], out: Path, *, quick: bool = False) -> dict[str, str]:
    """Find missing files, and runs that do not have results.

    Args:
        wanted: Tables that were run.
        out: Folder with the results and the pages.
        quick: Whether the results come from the small experiments of ``--quick``.

    Returns:
        A mapping from the name of each affected file or run to a description of its problem.
    """
    results, problems, texts = known(out), dict[str, str](), dict[str, str]()
    for name in [*FILES, *(f"{paper}.md" for paper in PAPERS)]:
        path = out / name
        texts[name] = path.read_text(encoding="utf-8") if path.is_file() else ""
        if not texts[name]:
            problems[str(path)] = "the file is missing"
    for table in wanted:
        for cell in table.cells(quick=quick):
            result, name = results.get(cell.hash), f"{table.paper}/{table.name}/{cell.key}"
            if result is None or table.metric not in result:
                problems[name] = "the run does not have a result"
            elif quick and f"{result[table.metric]:.2f}" not in texts[f"{table.paper}.md"]:
                problems[name] = "the page does not show the result of this run"
    return problems


def first_page(judgements: Sequence[Judgement], results: Results, *, quick: bool = False) -> str:
    """Return the generated lines of the first page: summaries of the papers, and verdicts on the headline claims."""
    runs = progress(tables().values(), results, quick=quick)
    cells, done, hours = (sum(row[key] for row in runs) for key in ("cells", "done", "hours"))
    lines = [QUICK] * quick + [_counts(each.verdict for each in judgements), ""]
    rows = [["paper", "our results in one sentence", "verdicts"]]
    for paper in PAPERS:
        counts = " ".join(_chips(each.verdict for each in judgements if each.claim.paper == paper))
        link = f"[{PAPERS[paper].partition(' ')[0]}]({paper}.md)"
        rows.append([link, "" if quick else judging.summary(paper), counts])
    claims = [["claim", "verdict", "difference or figure", "data"]]
    for each in judgements:
        if title := each.claim.about.get("headline"):
            seeds = sorted({f"{comparison.alone.n} seeds" for comparison, _ in each.decisive})
            data = ", ".join([each.claim.about["data"], *seeds])
            claims.append([title, chip(each.verdict), each.evidence[:1].upper() + each.evidence[1:], data])
    lines += [*markdown(rows), "", "## Headline claims", "", *markdown(claims), "", ABOUT_FOREST, ""]
    left = f"{cells - done:,} of {cells:,} runs are missing. The missing runs need about {hours:.0f} core hours"
    return "\n".join([*lines, f"{left} (`fedstrata reproduce --list`). {DOWNLOADS}"])


SIGNS: dict[judging.Verdict, str] = {
    "confirmed": "▲",
    "partly": "◐",
    "contradicted": "▼",
    "inconclusive": "○",
    "not tested": "…",
    "not testable here": "–",
}
"""A mapping from each verdict to the sign that the pages show beside the verdict."""
UNTESTED = ("not tested", "not testable here")
"""The two verdicts for claims that our results can neither confirm nor refute."""


def chip(verdict: judging.Verdict, count: int | None = None) -> str:
    """Return HTML that shows a verdict with its sign and, if given, the number of claims with the verdict.

    >>> chip("partly", 2)
    '<span class="chip partly">◐ 2 partly</span>'
    """
    number = "" if count is None else f"{count} "
    return f'<span class="chip {_class(verdict)}">{SIGNS[verdict]} {number}{verdict}</span>'


def _class(verdict: str) -> str:
    """Return the name of the CSS class of a verdict."""
    return verdict.replace(" ", "-")


def _chips(verdicts: Iterable[judging.Verdict]) -> list[str]:
    """Return the HTML of each verdict that occurs (see ``chip``), with its number of claims."""
    count = Counter(verdicts)
    return [chip(each, count[each]) for each in judging.VERDICTS if count[each]]


def _counts(verdicts: Iterable[judging.Verdict]) -> str:
    """Return one line of HTML with the total number of claims and the number of claims for each verdict."""
    verdicts = list(verdicts)
    return f"{len(verdicts)} claims: {' '.join(_chips(verdicts))}"


def page_of_claims(judgements: Sequence[Judgement], *, quick: bool = False) -> str:
    """Return the page that lists the claims of each paper, and explains how claims are judged."""
    about = f"This page lists all quantitative claims of the four papers, with our verdicts ([CSV]({CLAIMS_CSV}))."
    how = files(__package__).joinpath("how.md").read_text(encoding="utf-8")
    how = how.format(MIN_SEEDS=MIN_SEEDS, FEW_MORE=FEW_MORE)
    lines = [NARROW, "# All claims", QUICK if quick else "", WIDE, "", about]
    lines += ["", *_filter(each.verdict for each in judgements), "", "Click on a claim to see our numbers."]
    for paper in PAPERS:
        of_paper = [each for each in judgements if each.claim.paper == paper]
        lines += ["", f"## {PAPERS[paper].partition(' ')[0]}", "", _counts(each.verdict for each in of_paper), ""]
        lines += _claims(of_paper)
    return "\n".join([*lines, "", how.rstrip()]) + "\n"


def _filter(verdicts: Iterable[judging.Verdict]) -> list[str]:
    """Return HTML with a control that shows all claims, or only the claims with one verdict.

    The style sheet of the site hides the claims with other verdicts. Without the style sheet, all claims are visible.
    """
    count = Counter(verdicts)
    texts = {"all": f"all {count.total()}"} | {
        each: f"{SIGNS[each]} {n} {each}" for each in judging.VERDICTS if (n := count[each])
    }
    lines = ['<fieldset class="filter"><legend>Show claims by verdict</legend>']
    for verdict, text in texts.items():
        kind, checked = _class(verdict), " checked" * (verdict == "all")
        button = f'<input type="radio" name="verdict" value="{kind}"{checked}>'
        lines.append(f'<label class="chip {kind}">{button} {text}</label>')
    return [*lines, "</fieldset>"]


NARROW = "---\nhtml_theme.sidebar_secondary.remove: true\n---\n"
"""The first lines of a page, which hide its table of contents."""
WIDE = '<div class="wide-page"></div>'
"""An HTML element that makes a page as wide as the window."""


def _claims(judgements: Sequence[Judgement]) -> list[str]:
    """Return an HTML element for each claim, sorted by verdict. An expanded element also shows the numbers."""
    lines = []
    for each in sorted(judgements, key=lambda each: judging.VERDICTS.index(each.verdict)):
        _, statement, where, _, figures, _ = _row(each)
        summary = f"{chip(each.verdict)} <span>{html.escape(statement, quote=False)}</span>"
        place = f"The claim is in the paper's {where.replace(', ', ' and ')}."
        judged = f" See [how we judge margins]({CLAIMS}#published-margins)." if each.claim.kind == "margin" else ""
        lines += folded(summary, [f"{figures}. {place}{judged}"], f"claim {_class(each.verdict)}")
    return lines


def _untested(judgements: Sequence[Judgement]) -> list[str]:
    """Return one collapsed HTML element that lists all claims that our results cannot judge."""
    if not judgements:
        return []
    summary = f"{' '.join(_chips(each.verdict for each in judgements))} <span>Claims that we did not test</span>"
    lines = [f"- {each.verdict}: {html.escape(each.claim.statement, quote=False)}" for each in judgements]
    return folded(summary, lines, "claim not-tested")


HEADS = ["paper", "claim", "where", "verdict", "figures", "command"]


def _row(judgement: Judgement) -> list[str]:
    """Return the texts of a judgement's table row, one for each heading in ``HEADS``."""
    claim = judgement.claim
    figures = f"{judgement.measure} {judgement.evidence}" if judgement.measure else judgement.evidence
    return [claim.paper, claim.statement, claim.where, judgement.verdict, figures, judgement.command]


def csv_of_tables(results: Results, *, quick: bool = False) -> str:
    """Return the rows of all tables as CSV, including rows that the pages omit because they have too few seeds."""
    rows: list[Sequence[Any]] = [["table", "setting", "method", "metric", "paper", "mean", "low", "high", "seeds"]]
    for name, table in tables().items():
        cells = cells_of(table, results, quick=quick)
        for column in table.columns:
            for row in table.rows_of(column):
                estimate = Estimate.over(over_seeds(cells, row, column, table.metric).values(), (0.0, 100.0))
                low, high = estimate.interval or (None, None)
                figures = [None if each is None else round(each, 2) for each in (estimate.mean, low, high)]
                paper = table.published.get(row, {}).get(column)
                rows.append([name, column, row, table.metric, paper, *figures, estimate.n])
    return _csv(rows)


def _csv(rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def progress(
    wanted: Iterable[Table], results: Results, *, quick: bool = False, seeds: Collection[int] | None = None
) -> list[dict[str, Any]]:
    """Count the finished runs of each table, and estimate the time for the missing runs.

    Args:
        wanted: Tables whose runs are counted.
        results: Results of finished runs.
        quick: Whether to count the small experiments of ``--quick``.
        seeds: Seeds to count; None for all seeds.

    Returns:
        A dict for each table. ``table`` is the name of the table, and ``cells`` is its number of cells. A cell is the
        run of one row and column with one seed. ``done`` is the number of finished cells. ``hours`` is the expected
        time for the missing cells on one core. ``unknown`` is the number of missing cells whose time cannot be
        estimated.
    """
    rows = []
    for table in wanted:
        cells = [cell for cell in table.cells(quick=quick) if seeds is None or cell.seed in seeds]
        missing = [cell for cell in cells if cell.hash not in results]
        seconds = speeds(table, results)
        rates = [(cell, seconds.get((cell.row, cell.column))) for cell in missing]
        hours = [rate * cell.spec["training"]["rounds"] / 3600 for cell, rate in rates if rate is not None]
        counts = {"cells": len(cells), "done": len(cells) - len(missing), "unknown": len(missing) - len(hours)}
        rows.append({"table": f"{table.paper}/{table.name}", **counts, "hours": sum(hours)})
    return rows


def overview(wanted: Iterable[Table], results: Results) -> str:
    """List the papers' tables in Markdown, with the number of finished runs and the remaining time of each table."""
    lines = ["| table | runs | done | time left on one core |", "|---|---:|---:|---:|"]
    for row in progress(wanted, results):
        missing = row["cells"] - row["done"]
        text = duration(row["hours"]) + (" and more" if row["unknown"] else "")
        text = "–" if not missing else text if row["unknown"] < missing else "?"
        lines.append(f"| `{row['table']}` | {row['cells']} | {row['done']} | {text} |")
    return "\n".join(lines)


def remaining(rows: Iterable[Mapping[str, Any]]) -> str:
    """State the number of missing runs, and the expected time for them.

    Args:
        rows: Dicts with the keys ``cells``, ``done``, ``hours`` and, optionally, ``unknown``; see ``progress``.
    """
    counts: Counter[str] = Counter()
    for row in rows:
        counts.update({"missing": row["cells"] - row["done"], "unknown": row.get("unknown", 0), "hours": row["hours"]})
    text = f"Missing runs: {counts['missing']:,}"
    if counts["unknown"] == counts["missing"]:
        return text
    return f"{text} ({'more than' if counts['unknown'] else 'about'} {duration(counts['hours'])} on one core)"


def speeds(table: Table, results: Results) -> dict[tuple[str, str], float]:
    """Estimate the seconds per round on one core for each pair of a row and a column.

    The estimate comes from the first of these sources that exists: finished runs of the row and column, finished runs
    of the row in other columns, the table's file, and finished runs of other rows. Times from other columns are scaled
    by the number of samples per round: the product of local epochs, clients per round, and samples per client. Pairs
    without an estimate are left out.
    """
    measured: dict[tuple[str, str], list[float]] = {}
    work = {}
    for cell in table.cells():
        place, training = (cell.row, cell.column), cell.spec["training"]
        partition = cell.spec.get("partition", {})
        samples = partition.get("size", 1 / partition.get("clients", 1))
        work[place] = training.get("local_epochs", 1) * training.get("clients_per_round", 1) * samples
        result = results.get(cell.hash, {})
        if "seconds" in result and "gpu" not in result.get("versions", {}):
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


def page(paper: str, judgements: Sequence[Judgement], results: Results, *, quick: bool = False) -> str:
    """Return the page of a paper: claims, tables, and differences between our experiments and the paper's."""
    of_paper = [each for each in judgements if each.claim.paper == paper]
    counts = (
        f"{_counts(each.verdict for each in of_paper)} ([all claims]({CLAIMS}), [how we judge]({CLAIMS}#how-we-judge))."
    )
    lines = [f"# {PAPERS[paper]}", QUICK if quick else "", WIDE, "", counts, "", "## Claims", ""]
    shown = [each for each in of_paper if each.decisive or each.verdict not in UNTESTED]
    computed = [each for each in shown if each.claim.kind == "reading"]
    lines += _claims([each for each in shown if each.claim.kind != "reading"])
    lines += _untested([each for each in of_paper if each not in shown])
    if computed:
        lines += [
            "",
            "## Computed without training",
            "",
            *_claims(computed),
        ]
    tables_shown, waiting = [], []
    for name, table in tables().items():
        if table.paper == paper:
            section = lines_of_table(name, table, results, quick=quick)
            tables_shown += ["", f"### {table.title}", "", *section] if section else []
            waiting += [] if section else [f"`{table.name}`"]
    if tables_shown:
        lines += ["", "## Results", "", ABOUT_TABLES.strip()]
        if panels := panels_of(paper, results, quick=quick):
            figures = sum(len(panel.rows) for panel in panels)
            lines += ["", f"![The paper's figure and ours with its interval, {figures} lines]({paper}.svg)"]
        lines += tables_shown
    differences = files(__package__).joinpath(paper, "differs.md").read_text(encoding="utf-8")
    lines += ["", differences.strip()]
    if waiting:
        where = f"[{TABLES_CSV}]({TABLES_CSV})"
        lines += ["", f"Unfinished tables are only in {where}: {', '.join(waiting)}."]
    return "\n".join(lines) + "\n"


def panels_of(paper: str, results: Results, *, quick: bool = False) -> list[Panel]:
    """Return one panel per table of a paper. A panel contains only rows for which the paper gives a number."""
    of_paper = [table for table in tables().values() if table.paper == paper]
    rows = [
        (table, [row for row in rows_of(table, results, quick=quick) if row.paper is not None]) for table in of_paper
    ]
    return [Panel(table, of_table) for table, of_table in rows if of_table]


def duration(hours: float) -> str:
    """Format a duration as text, in minutes or hours.

    >>> duration(0.04), duration(2.34)
    ('2 min', '2.3 h')
    """
    return f"{max(1, round(60 * hours))} min" if hours < 1 else f"{hours:.1f} h"
