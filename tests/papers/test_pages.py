from __future__ import annotations

import csv
import io
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from fedstrata.papers import pages
from fedstrata.papers.judging import VERDICTS, Judgement, claims, judged, summary
from fedstrata.papers.pages import overview, page, progress, remaining, speeds
from fedstrata.papers.readings import readings
from fedstrata.papers.running import known
from fedstrata.papers.table_lines import markdown
from fedstrata.papers.tables import PAPERS, read

pytestmark = pytest.mark.xdist_group("readings")  # they take seconds to compute, once per process

DOCS = Path(__file__).parents[2] / "docs" / "results"

TEXT = """
title = "Two methods"
source = "Table 9"
metric = "final"
seeds = [0, 1, 2]
baseline = "a"

[spec.training]
rounds = 360

[columns.x]

[rows.a]
method = { name = "fedavg" }

[rows.b]
method = { name = "fedprox" }

[rows.c]
method = { name = "scaffold" }

[published.a]
x = 76.0

[published.b]
x = 71.25

[seconds]
c = 5
"""


@cache
def judgements() -> list[Judgement]:
    """Return the verdicts on all claims, from the committed results."""
    results = known(DOCS)
    return [judged(claim, results) for claim in claims()]


@cache
def contents() -> dict[str, str]:
    """Return the pages of the committed results."""
    return pages.contents(DOCS)


@pytest.fixture
def table(monkeypatch):
    table = read("rebafl", "mine", TEXT)
    monkeypatch.setattr(pages, "tables", lambda: {"rebafl/mine": table})
    return table


def results(table) -> dict[str, dict]:
    values = {"a": [70.0, 80.0, 75.0], "b": [80.0, 90.2, 84.9]}
    return {
        cell.hash: {"final": values[cell.row][cell.seed], "seconds": 720.0, "rounds": 360}
        for cell in table.cells()
        if cell.row in values
    }


def page_of(table, there) -> str:
    """The page of ReBaFL: its claims without results, and the table of these tests."""
    judgements = [judged(claim, {}) for claim in claims() if claim.kind != "reading"]
    return page("rebafl", judgements, there)


@pytest.mark.slow
def test_a_table_has_the_papers_figure_ours_and_the_difference_but_no_verdict(table):
    text = page_of(table, results(table))
    rows = {line.split(" | ")[1]: line for line in text.splitlines() if line.startswith("| x |")}
    assert rows["a"] == "| x | a | 76.00 |  | 75.00 [62.6, 87.4] | 3 |  |"
    # Differences of 10, 10.2 and 9.9: t with 2 degrees of freedom at 1 − 0.05 / 2 is 4.303, times 0.153 / √3.
    assert rows["b"] == "| x | b | 71.25 | −4.8 | 85.03 [72.4, 97.7] | 3 | +10.0 [+9.7, +10.4] |"
    assert "Differences from the paper" in text
    assert not re.search(r"\b(above|below|not significant)\b", text.partition("## Results")[2].partition("## Diff")[0])


@pytest.mark.slow
def test_a_page_without_results_has_no_empty_table():
    text = page("stratify", [judged(claim, {}) for claim in claims() if claim.kind != "reading"], {})
    assert all(line.count("|") > 2 for line in text.splitlines() if line.startswith("|"))
    assert markdown([["a", "b"]]) == []
    assert markdown([["a", "b"], ["1", ""]]) == ["| a |", "|---|", "| 1 |"]


@pytest.mark.slow
def test_what_is_not_run_is_one_line(table):
    text = page_of(table, results(table))
    assert text.count("3 of 9 runs are missing.") == 1
    assert "| x | c |" not in text, "no row without figures"
    some = dict(list(results(table).items())[:2])
    text = page_of(table, some)
    assert "Two methods" not in text, "a table needs a row with three seeds"
    assert "Unfinished tables are only in [tables.csv](tables.csv): `mine`." in text
    assert "rebafl/mine,x,a,final,76.0,70.0,,,1" in pages.csv_of_tables(some)


@pytest.mark.slow
def test_a_single_published_figure_is_compared_with_the_prediction_interval(table):
    # b has the figures 80, 90.2 and 84.9: mean 85.03, sd 5.1013, t with 2 degrees of freedom 4.3027. The interval of
    # the mean is ± 12.7, and that of another run ± 4.3027 · 5.1013 · √(4/3) = 25.35: from 59.69 to 110.38.
    outside = "the paper's number is outside this range"
    for published, said in ((71.25, False), (59.70, False), (59.68, True)):
        table.published["b"]["x"] = published
        text = f"{outside}:\n\n- `x`: `b`\n"
        assert (text in page_of(table, results(table))) == said


@pytest.mark.slow
def test_a_published_margin_is_compared_with_the_prediction_interval_of_our_differences(table):
    # b − a is 10, 10.2 and 9.9: mean 10.033, sd 0.15275, so another difference lies within ± 4.3027 · 0.15275 · √(4/3)
    # = 0.7589, from 9.274 to 10.792. The paper's figure of a is 76.
    outside = "the paper's difference from `a` is outside this range"
    for published, said in ((85.28, False), (85.27, True), (86.79, False), (86.80, True)):
        table.published["b"]["x"] = published
        text = f"{outside}:\n\n- `x`: `b`\n"
        assert (text in page_of(table, results(table))) == said


@pytest.mark.slow
def test_what_is_compared_beside_the_baseline_has_rows_of_its_own(monkeypatch):
    table = read("rebafl", "mine", TEXT.replace('baseline = "a"', 'baseline = "a"\nagainst = [["b", "c"], ["c", "b"]]'))
    monkeypatch.setattr(pages, "tables", lambda: {"rebafl/mine": table})
    there = results(table)
    for cell in table.cells():
        if cell.row == "c":
            there[cell.hash] = {"final": [79.0, 89.2, 83.9][cell.seed], "seconds": 720.0, "rounds": 360}
    text = page_of(table, there)
    assert "| x | b − c | +1.0 [+1.0, +1.0] |" in text
    assert "| x | c − b | −1.0 [−1.0, −1.0] |" in text


@pytest.mark.slow
def test_an_interval_of_accuracies_ends_at_what_is_possible(table):
    there = results(table)
    for cell in table.cells():
        if cell.row == "a":
            there[cell.hash]["final"] = [10.0, 50.0, 99.0][cell.seed]
    assert "| 53.00 [0.0, 100.0] | 3 |" in page_of(table, there)


@pytest.mark.slow
def test_a_page_says_what_an_earlier_version_made_and_how_near_this_one_comes(table):
    there = results(table)
    first, second, *_ = there.values()
    assert "earlier version" not in page_of(table, there)
    for old in (first, second):
        old["source"] = "old.json"
    taken = "† 2 of these runs were made with an earlier version of fedstrata and the same specs (`old.json`)."
    assert f"{taken}\n" in page_of(table, there)
    assert page_of(table, there).count(" | 3† | ") == 2, "one of a and one of b"
    first["repeated"] = {"rounds": 10, "points": 0.25}
    taken += " We repeated"
    repeated = "of these runs with the current version, for the first 10 rounds. The accuracies changed by at most"
    assert f"{taken} 1 {repeated} 0.25 points." in page_of(table, there)
    second["repeated"] = {"rounds": 12, "points": 0.5}
    assert f"{taken} 2 {repeated} 0.5 points." in page_of(table, there)


@pytest.mark.slow
def test_a_page_names_the_gpu_of_its_runs_and_their_times_are_not_those_of_a_core(table):
    there = results(table)
    assert "GPU" not in page_of(table, there)
    first, second, *_ = there.values()
    first["versions"], second["versions"] = {"gpu": "H100"}, {"gpu": "H100"}
    assert "Clients trained on a GPU (H100) in 2 runs.\n" in page_of(table, there)
    first["seconds"] = 1e6
    assert speeds(table, there)["a", "x"] == 2.0


def test_hours_are_those_of_the_rows_that_are_done(table):
    assert speeds(table, results(table)) == {("a", "x"): 2.0, ("b", "x"): 2.0, ("c", "x"): 5.0}
    assert speeds(table, {}) == {("c", "x"): 5.0}
    assert overview([table], results(table)).splitlines()[-1] == "| `rebafl/mine` | 9 | 6 | 1.5 h |"
    assert overview([table], {}).splitlines()[-1] == "| `rebafl/mine` | 9 | 0 | 1.5 h and more |"
    assert remaining(progress([table], results(table))) == "Missing runs: 3 (about 1.5 h on one core)"
    assert remaining(progress([table], {})) == "Missing runs: 9 (more than 1.5 h on one core)"
    assert remaining(progress([table], {}, seeds=[0])) == "Missing runs: 3 (more than 30 min on one core)"


def test_a_setting_that_nobody_timed_takes_as_long_as_its_samples_per_round(monkeypatch):
    more = "[columns.y]\ntraining = { local_epochs = 5 }\n[columns.z]\npartition = { clients = 1000 }\n"
    more += "training = { clients_per_round = 100 }\n"
    text = TEXT.replace("[columns.x]", f"clients_per_round = 10\n[spec.partition]\nclients = 100\n[columns.x]\n{more}")
    table = read("rebafl", "mine", text)
    there = {
        cell.hash: {"seconds": 720.0, "rounds": 360} for cell in table.cells() if (cell.row, cell.column) == ("a", "x")
    }
    found = speeds(table, there)
    assert (found["a", "x"], found["a", "y"], found["b", "y"], found["c", "y"]) == pytest.approx((2.0, 10.0, 10.0, 5.0))
    # A tenth of 1,000 clients has as many samples as a tenth of 100 clients.
    assert found["a", "z"] == pytest.approx(2.0)


@pytest.mark.slow
def test_every_claim_is_once_on_the_page_of_claims_and_in_its_csv():
    judgements = [judged(claim, {}) for claim in claims()]
    text = pages.page_of_claims(judgements)
    rows = list(csv.DictReader(io.StringIO(contents()["claims.csv"])))
    assert len(rows) == len(claims())
    for claim in claims():
        assert text.count(f"<span>{claim.statement}</span></summary>") == 1
        assert sum((row["paper"], row["claim"]) == (claim.paper, claim.statement) for row in rows) == 1
    assert "not tested" in text


CLAIM = re.compile(r'<details class="claim ([a-z-]+)"><summary><span class="chip ([a-z-]+)">. ([^<]+)</span>')


@pytest.mark.slow
def test_claims_with_results_come_first_and_figures_are_behind_a_click():
    for group in pages.page_of_claims(judgements()).split("\n## ")[1:5]:
        claims_of_paper = CLAIM.findall(group)
        assert all(kind == chip == verdict.replace(" ", "-") for kind, chip, verdict in claims_of_paper)
        order = [verdict for *_, verdict in claims_of_paper]
        assert order == sorted(order, key=VERDICTS.index)
        for verdict, count in Counter(order).items():
            assert f"{pages.SIGNS[verdict]} {count} {verdict}</span>" in group.partition("<details")[0]


@pytest.mark.slow
def test_the_filter_of_the_claims_has_all_verdicts_and_each_has_a_rule_in_the_style_sheet():
    text = pages.page_of_claims(judgements())
    count = Counter(verdict for *_, verdict in CLAIM.findall(text))
    choices = re.findall(
        r'<input type="radio" name="verdict" value="([a-z-]+)"( checked)?> (?:. )?([^<]+)</label>', text
    )
    wanted = [("all", " checked", f"all {len(claims())}")]
    wanted += [(each.replace(" ", "-"), "", f"{count[each]} {each}") for each in VERDICTS if count[each]]
    assert choices == wanted
    sheet = (DOCS.parent / "_static" / "site.css").read_text(encoding="utf-8")
    for verdict in VERDICTS:
        kind = verdict.replace(" ", "-")
        assert f'.bd-article:has(.filter [value="{kind}"]:checked) details.claim:not(.{kind})' in sheet


@pytest.mark.slow
def test_the_first_page_has_twelve_headlines_and_a_sentence_for_each_paper():
    text = pages.first_page([judged(claim, {}) for claim in claims()], {})
    headlines = text.partition("## Headline claims")[2]
    assert len(re.findall(r"^\| (?:Stratify|FedSTaS|FedSSAR|ReBaFL): ", headlines, re.MULTILINE)) == 12
    for paper in PAPERS:
        assert summary(paper) in text
        assert summary(paper).count(".") == 1
        assert summary(paper) not in pages.first_page([], {}, quick=True), "it is about the committed results"


@pytest.mark.slow
def test_pages_keep_what_is_around_the_generated_part(tmp_path):
    index = tmp_path / "index.md"
    pages.write(tmp_path)
    assert index.read_text(encoding="utf-8").startswith(f"# Do the papers' claims hold?\n\n{pages.BEGIN}\n")
    index.write_text(f"# Mine\n\n{pages.BEGIN}\nold\n{pages.END}\n\nMy list\n", encoding="utf-8")
    pages.write(tmp_path)
    text = index.read_text(encoding="utf-8")
    assert text.startswith(f"# Mine\n\n{pages.BEGIN}\n")
    assert text.endswith(f"{pages.END}\n\nMy list\n")
    assert "old" not in text.splitlines()
    assert "## Headline claims" in text


HEADLINES = {
    "stratify": ["confirmed", "partly", "confirmed", "partly"],
    "fedstas": ["contradicted", "contradicted", "contradicted"],
    "fedssar": ["inconclusive", "contradicted"],
    "rebafl": ["confirmed", "inconclusive", "confirmed"],
}


@pytest.mark.slow
def test_the_sentences_about_the_papers_are_of_these_verdicts():
    """The sentences are written by hand: read ``summary`` in claims.toml again if a verdict has changed."""
    found = known(DOCS)
    for paper, verdicts in HEADLINES.items():
        headlines = [claim for claim in claims() if claim.paper == paper and "headline" in claim.about]
        assert [judged(claim, found).verdict for claim in headlines] == verdicts, paper


@pytest.mark.slow
def test_the_pages_of_the_documentation_are_those_of_the_results_beside_them():
    for name, text in contents().items():
        if not name.endswith(".svg"):  # their paths depend on the version of Matplotlib
            assert (DOCS / name).read_text(encoding="utf-8") == text, "fedstrata reproduce --show --out docs/results"


@pytest.mark.slow
@pytest.mark.long
def test_the_forest_plot_has_a_row_for_each_difference_of_accuracies():
    wanted = [
        f"− {comparison.than}, {comparison.column}"
        for each in judgements()
        if each.claim.kind in ("above", "near")
        for comparison, _ in each.decisive
    ]
    committed, drawn = (DOCS / pages.FOREST).read_text(encoding="utf-8"), pages.forest(judgements())
    assert len(wanted) > 30
    for text in (committed, drawn):
        assert sorted(re.findall(r">(− [^<]*, [^<]*)</text>", text)) == sorted(wanted)
        for paper in ("Stratify", "FedSTaS", "FedSSAR", "ReBaFL"):
            assert f">{paper}</text>" in text
    assert pages.forest(judgements()) == drawn, "the same picture each time"


@pytest.mark.slow
def test_the_picture_of_a_paper_has_each_row_of_its_tables_that_has_a_figure_of_the_paper():
    results, there = known(DOCS), contents()
    drawn = 0
    for paper in PAPERS:
        text = there[f"{paper}.md"].partition("## Results")[2].partition("## Differences")[0]
        tables = [table for table in text.split("\n### ")[1:] if "| setting | method | paper |" in table]
        lines = [line.split(" | ") for table in tables for line in table.splitlines() if line.startswith("| ")]
        wanted = [[c.strip("| "), r, figure] for c, r, figure, *_ in lines if re.fullmatch(r"\d+\.\d\d", figure)]
        rows = [row for panel in pages.panels_of(paper, results) for row in panel.rows]
        assert [[row.setting, row.method, f"{row.paper:.2f}"] for row in rows] == wanted
        drawn += len(rows)
        assert (f"![The paper's figure and ours with its interval, {len(rows)} lines]({paper}.svg)" in text) == bool(
            rows
        )
        if rows:
            places = [line for panel in pages.panels_of(paper, results) for line in panel.lines()]
            labels = [line if isinstance(line, str) else line.method for line in places]
            for picture in (there[f"{paper}.svg"], (DOCS / f"{paper}.svg").read_text(encoding="utf-8")):
                texts = re.findall(">([^<]+)</text>", picture)
                assert [text for text in texts if text in labels] == labels
    assert drawn > 30


@pytest.mark.slow
def test_no_verdict_is_of_fewer_than_three_seeds():
    for found in judgements():
        if found.verdict in ("confirmed", "partly", "contradicted", "inconclusive"):
            assert all(comparison.alone.n >= 3 for comparison, _ in found.decisive)


@pytest.mark.slow
def test_every_reading_is_on_the_page_of_its_paper():
    cited = [claim.about["reading"] for claim in claims() if claim.kind == "reading"]
    assert sorted(cited) == sorted(readings())
    for claim in claims():
        if claim.kind == "reading":
            assert readings()[claim.about["reading"]].figure in (DOCS / f"{claim.paper}.md").read_text(encoding="utf-8")
