"""Write the results of the board: a page, one picture per column, and a JSON file for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedstrata.base.jsonl import replace_file
from fedstrata.methods.base import METHODS
from fedstrata.methods.recipe import CHOICES
from fedstrata.papers.board.judging import BUDGETS, MEASURES, Outcome, Verdicts, contests, judged, overall, p_values
from fedstrata.papers.board.picture import critical_difference_picture
from fedstrata.papers.board.protocol import BASELINE, Column, Entry, Protocol
from fedstrata.papers.board.ranks import ALPHA, Ranking
from fedstrata.papers.comparing import difference_text
from fedstrata.reporting.statistics import MIN_SEEDS, Difference, Estimate, holm
from fedstrata.reporting.tables import markdown_table

PAGE, SUMMARY = "board.md", "board.json"
"""The names of the page and of the JSON file."""
QUICK = "\n**At small scale: these runs test the software, and do not compare the methods.**\n"
INTERVALS = (
    "A difference is significant if p < 0.05 after Holm's correction. The intervals are not corrected, and do not "
    "determine significance (unlike the [intervals of comparisons](../guides/compare.md#statistics))."
)
"""An explanation of the intervals and p-values on the page."""
LESS = ("less accurate", "no significant difference")
"""Two headings of the tables that compare entries with the baseline."""
FRACTIONS = ("accuracy", "worst_class", "worst_client")
"""Measures that are fractions in the JSON file, but percentages in the stored results of runs."""


def write(
    protocol: Protocol, columns: Sequence[Column], entries: Sequence[Entry], out: Path, summary: Path | None = None
) -> list[str]:
    """Write the page, the pictures and the JSON file for the given columns, and return the names of the files.

    Args:
        protocol: Protocol of the board.
        columns: Columns to show.
        entries: Entries (methods and compositions) to show.
        out: Folder that contains the results. The page is written to the same folder.
        summary: Path of the JSON file. Default: ``SUMMARY`` in ``out``.
    """
    out.mkdir(parents=True, exist_ok=True)
    verdicts = [judged(protocol, column, entries, out) for column in columns]
    shown = [each for each in verdicts if each.outcomes]
    rankings = {f"board-{each.column.label}.svg": ("seeds", each.rankings.get("accuracy")) for each in shown}
    rankings["board.svg"] = "columns", _overall(shown)
    names = []
    for name, (blocks, ranking) in rankings.items():
        if ranking is not None:
            replace_file(out / name, critical_difference_picture(ranking, blocks).encode())
            names.append(name)
    replace_file(out / PAGE, page(protocol, verdicts).encode())
    replace_file(summary or out / SUMMARY, _as_json(summarised(protocol, shown)).encode())
    return [*names, PAGE, str(summary or SUMMARY)]


def _overall(shown: Sequence[Verdicts]) -> Ranking | None:
    return overall([each for each in shown if each.complete])


def _as_json(summary: Mapping[str, Any]) -> str:
    """Return the results as JSON text with one line per column."""
    columns = ",\n".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in summary["columns"].items())
    return f'{{"protocol": {json.dumps(summary["protocol"])}, "columns": {{\n{columns}\n}}}}\n'


def summarised(protocol: Protocol, verdicts: Sequence[Verdicts]) -> dict[str, Any]:
    """Return the results of the board as a dict for the JSON file.

    Returns:
        A dict with the keys ``protocol`` (the protocol's name) and ``columns``. Each column has the sections
        ``partition`` and ``availability``, and a mapping ``methods``. Each method has its ``seeds`` and, in the order
        of the seeds, its accuracies as fractions. Costs are means over the seeds. ``hours`` is the number of core hours
        of all trials and runs of the method.
    """
    columns = {
        each.column.label: {
            **{section: each.column.spec[section] for section in ("partition", "availability")},
            "methods": {name: _summary(outcome) for name, outcome in each.outcomes.items()},
            "refused": each.refused,
        }
        for each in verdicts
    }
    return {"protocol": protocol.name, "columns": columns}


def _summary(outcome: Outcome) -> dict[str, Any]:
    runs = [outcome.runs[seed] for seed in sorted(outcome.runs)]
    return {
        "method": outcome.entry.method,
        "seeds": sorted(outcome.runs),
        **{key: [round(run[key] / 100, 4) for run in runs] for key in FRACTIONS},
        **{key: round(outcome.mean(key)) for key in ("bytes_up", "bytes_down", "samples")},
        "hours": round(outcome.hours, 4),
        "settings": outcome.settings,
    }


def page(protocol: Protocol, verdicts: Sequence[Verdicts]) -> str:
    """Return the page: the ranking over all columns, the results of each column, and the protocol."""
    shown = [each for each in verdicts if each.outcomes]
    first = _first_sentence(protocol, shown, len(verdicts))
    lines = [f"# {protocol.title}", *[QUICK] * protocol.is_quick, "", first, ""]
    if (ranking := _overall(shown)) is not None:
        lines += ["## All columns", "", _about_overall(ranking, [each for each in shown if each.complete]), ""]
        lines += ["![Average rank of each method over the columns](board.svg)", ""]
    lines += [*_comparisons(shown), *_learning_rates(protocol, shown), *_compositions(shown)]
    for each in shown:
        lines += [*_column(each), ""]
    return "\n".join([*lines, *_about(protocol, verdicts)]) + "\n"


def _first_sentence(protocol: Protocol, shown: Sequence[Verdicts], columns: int) -> str:
    complete = len(set[str]().union(*(each.complete for each in shown)))
    if not complete:
        return "This page will rank the methods when at least one method has finished all seeds."
    compositions = sum(name in protocol.compositions for name in {name for each in shown for name in each.complete})
    counted = f" (including {compositions} compositions)" if compositions else ""
    finished = sum(not each.missing for each in shown)
    text = (
        f"This page ranks {complete} tuned methods{counted} for training with dropouts ([add "
        f"yours](../guides/board.md)). Each [column](#protocol) is a setting."
    )
    if finished < columns:
        text += f" {finished} of {columns} columns are finished."
    return f"{text}\n\n{INTERVALS}"


def _about_overall(ranking: Ranking, complete: Sequence[Verdicts]) -> str:
    first = next(iter(ranking.ranks))
    p = "" if ranking.p is None else f" Friedman's test gives p = {ranking.p:.2g}."
    sentences = (
        f"The picture ranks the {len(ranking.ranks)} methods that have finished these {len(complete)} columns, by mean "
        f"accuracy.{p}",
        f"`{first}` has the best average rank, {ranking.ranks[first]:.1f}.",
        f"With {len(complete)} columns, {_rank_rule(ranking)}.",
        "The ranking may differ for other data sets and for [more rounds](../methods/absent-clients.md#evidence).",
    )
    return " ".join(sentences)


def _compositions(shown: Sequence[Verdicts]) -> list[str]:
    """Return the lines of the section that compares compositions with methods; empty without a comparison."""
    compared = contests(shown)
    p = holm({place: each.difference.p for place, each in enumerate(compared) if each.difference.p is not None})
    if not compared:
        return []
    better = sum(p.get(place, 1.0) < ALPHA and (each.difference.mean or 0.0) > 0 for place, each in enumerate(compared))
    rows = [
        [
            each.column,
            MEASURES[each.measure],
            f"`{each.composition}`",
            f"`{each.method}`",
            difference_text(each.difference),
            f"{p[place]:.3f}" if place in p else "",
        ]
        for place, each in enumerate(compared)
    ]
    headings = ["column", "cost", "best composition", "best method", "composition − method", "p (Holm)"]
    counted = f"in {better} of the {len(compared)} rows" if better else "in any row"
    about = (
        "For each cost, we choose the composition and the method with the best validation accuracy, and compare their "
        "runs with new seeds. "
        f"The composition is {'' if better else 'not '}significantly more accurate {counted}."
    )
    return ["## Compositions", "", about, "", *markdown_table(headings, rows, left=4).splitlines(), ""]


def _rank_rule(ranking: Ranking) -> str:
    """Return a clause that says which differences of average ranks are significant."""
    if ranking.critical > len(ranking.ranks) - 1:  # n − 1 is the largest possible difference between ranks
        return "the ranks of two methods cannot differ significantly"
    return f"average ranks differ significantly only if their difference is {ranking.critical:.1f} or more"


def _comparisons(shown: Sequence[Verdicts]) -> list[str]:
    """Return a table with one row per column: the entries that differ significantly from the baseline."""
    rows = []
    for each in (each for each in shown if each.complete):
        differences = {name: each.difference(name) for name in each.complete if name != BASELINE}
        link = f"[{each.column.label}](#{each.column.label})"
        rows.append([link, *_significant(differences), str(len(each.missing))])
    headings = ["column", "more accurate than FedAvg", *LESS, "not finished"]
    about = "The table lists the methods whose accuracy differs significantly from FedAvg's (paired t-test)."
    return [about, "", *markdown_table(headings, rows, left=3).splitlines(), ""] if rows else []


def _significant(differences: Mapping[str, Difference]) -> list[str]:
    """Return three cells of a row: the entries above the baseline, the entries below it, and the number of others."""
    means = {name: differences[name].mean or 0.0 for name, p in p_values(differences).items() if p < ALPHA}
    above, below = ([name for name, mean in means.items() if mean * sign > 0] for sign in (1, -1))
    return [_quoted(above), _quoted(below), str(len(differences) - len(means))]


def _learning_rates(protocol: Protocol, shown: Sequence[Verdicts]) -> list[str]:
    """Return lines that compare the entries with a second tuned setting with FedAvg at the learning rates they tried.

    The table has one row for each column in which FedAvg's tuned learning rate is not among these rates.
    """
    rows = []
    for each in (each for each in shown if each.limited_differences):
        change = difference_text(each.limited_change)
        rows.append([each.column.label, change, *_significant(each.limited_differences)])
    tried = " and ".join(map(str, protocol.rates_with_setting))
    about = (
        f"**Learning rates.** Methods with a second tuned setting tried only the learning rates {tried}. For "
        "columns in which FedAvg's tuned rate is neither of them, this table compares such methods with FedAvg at the "
        "better of the two rates. *Change* is the effect of this rate on FedAvg's accuracy, in points."
    )
    headings = ["column", "change", "more accurate", *LESS]
    return [about, "", *markdown_table(headings, rows, left=1).splitlines(), ""] if rows else []


def _column(verdicts: Verdicts) -> list[str]:
    """Return the page's lines about a column, with folded details."""
    lines = [f"## {verdicts.column.label}", ""]
    if verdicts.missing:
        count = len(verdicts.missing)
        has = f"{count} method{'s have' if count > 1 else ' has'} not finished all seeds"
        lines += [f"All verdicts in this column are provisional, because {has}.", ""]
    details = [*_ranking(verdicts), *_table(verdicts)]
    return lines + _folded(f"{len(verdicts.outcomes)} methods: ranks, accuracies in %, and costs", details)


def _ranking(verdicts: Verdicts) -> list[str]:
    """Return lines about the best entries at equal cost, and about the ranking, with a picture of the ranking."""
    if not verdicts.complete:
        return []
    lines, picture = [_best(verdicts, measure) for measure in BUDGETS], list[str]()
    if (ranking := verdicts.rankings.get("accuracy")) is not None:
        lines.append(f"The ranking uses one data set and only {ranking.blocks} seeds, so {_rank_rule(ranking)}.")
        picture = [f"![Average rank of each method over the seeds](board-{verdicts.column.label}.svg)", ""]
    return [*_bullets(lines), "", *picture]


def _bullets(sentences: Sequence[str]) -> list[str]:
    return [f"- {sentence}" for sentence in sentences]


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "–"


def _best(verdicts: Verdicts, measure: str) -> str:
    cost = MEASURES[measure].removeprefix("at FedAvg's ")
    name = verdicts.best_at(measure)
    if name in (None, BASELINE):
        return f"Within FedAvg's {cost}, FedAvg has the best validation accuracy."
    difference = difference_text(verdicts.difference(str(name), measure), "points")
    return (
        f"If methods may use only as many {cost} as FedAvg, `{name}` has the best validation accuracy. With new seeds "
        f"and the same limit, `{name}` differs from FedAvg by {difference}."
    )


def _table(verdicts: Verdicts) -> list[str]:
    """Return a table with one row per entry, sorted by rank. Entries with missing seeds come last."""
    ranked = verdicts.rankings["accuracy"].ranks if "accuracy" in verdicts.rankings else {}
    names = [*ranked, *(name for name in verdicts.outcomes if name not in ranked)]
    headings = [
        "method",
        *MEASURES.values(),
        "− FedAvg",
        "p (Holm)",
        "rank",
        "MB",
        "per-sample gradients",
        "hours",
        "settings",
    ]
    rows = [_row(verdicts, name) for name in names]
    return markdown_table(headings, rows).splitlines()


def _row(verdicts: Verdicts, name: str) -> list[str]:
    outcome, complete = verdicts.outcomes[name], name in verdicts.complete
    measured = [_estimate(verdicts, name, measure) for measure in MEASURES]
    compared = complete and name != BASELINE
    rank = verdicts.rankings["accuracy"].ranks.get(name) if "accuracy" in verdicts.rankings else None
    return [
        f"{name}{' (personal)' * outcome.entry.is_personal}",
        *measured,
        difference_text(verdicts.difference(name)) if compared else "",
        f"{verdicts.corrected[name]:.3f}" if compared and name in verdicts.corrected else "",
        "" if rank is None else f"{rank:.1f}",
        f"{(outcome.mean('bytes_up') + outcome.mean('bytes_down')) / 1e6:,.0f}",
        f"{outcome.mean('samples'):,.0f}",
        f"{outcome.hours:.2f}",
        ", ".join(f"{key} {value}" for part in outcome.settings.values() for key, value in part.items()),
    ]


def _estimate(verdicts: Verdicts, name: str, measure: str) -> str:
    if BASELINE not in verdicts.outcomes:
        return ""
    estimate = Estimate.over(verdicts.values(name, measure), (0.0, 100.0))
    if estimate.mean is None:
        return "–"
    n = f" ({estimate.n} of {len(verdicts.seeds)})" if estimate.n < len(verdicts.seeds) else ""
    spread = "" if estimate.sd is None or estimate.n < MIN_SEEDS else f" ± {estimate.sd:.1f}"
    return f"{estimate.mean:.1f}{spread}{n}"


def _folded(summary: str, lines: Sequence[str]) -> list[str]:
    return [f"<details><summary>{summary}</summary>", "", *lines, "", "</details>"]


def _about(protocol: Protocol, verdicts: Sequence[Verdicts]) -> list[str]:
    """Return the lines about the protocol, the statistical tests, and the methods that cannot be trained."""
    refused: dict[tuple[str, str], list[str]] = {}
    for each in verdicts:
        for name, reason in each.refused.items():
            refused.setdefault((name, reason), []).append(each.column.label)
    rows = [[name, ", ".join(columns), reason] for (name, reason), columns in refused.items()]
    table = markdown_table(["method", "columns", "reason"], rows, left=3).splitlines()
    lines = ["## Methods that cannot run", "", *table, ""] if rows else []
    counts = _entries(protocol) | _numbers(protocol)
    about = files(__package__).joinpath("about.md").read_text(encoding="utf-8")
    return [*lines, *about.format(**counts).splitlines()]


def _entries(protocol: Protocol) -> dict[str, Any]:
    """Return the data for ``about.md``: numbers of entries and columns, and a table of the compositions' parts."""
    methods, rows = [*METHODS], []
    for name, method in protocol.compositions.items():
        parts = [f"{choice.replace('_', ' ')} `{method[choice]}`" for choice in CHOICES if choice in method]
        rows.append([f"`{name}`", ", ".join(parts)])
    return {
        "entries": len(methods) + len(rows),
        "methods": len(methods),
        "combined": len(rows),
        "compositions": markdown_table(["composition", "parts"], rows, left=2).rstrip(),
        "columns": len(protocol.partitions) * len(protocol.availabilities),
        "more": len(protocol.more),
    }


def _numbers(protocol: Protocol) -> dict[str, Any]:
    training, data = protocol.spec["training"], protocol.spec["data"]
    test = protocol.spec["evaluation"]["client_test"]
    clients = protocol.partitions["iid"]["clients"]
    return {
        "protocol": protocol.name,
        "clients": clients,
        "samples": round(data["limit"] * (1 - test) / clients),
        "own": round(data["limit"] * test / clients),
        "validation": round(protocol.tuning["data"]["limit"] * protocol.tuning["evaluation"]["validation"]),
        "trials": len(protocol.rates),
        "seeds": len(protocol.seeds),
        "rounds": training["rounds"],
        "invited": training["clients_per_round"],
        "epochs": training["local_epochs"],
        "late": protocol.spec["evaluation"]["every"],
    }
