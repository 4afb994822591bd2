"""Labels beside a baseline: figures by hand, what is said of few seeds, and LaTeX that a parser takes."""

from __future__ import annotations

import csv
import io
import re

import pytest
from rich.console import Console
from scipy import stats

from fedstrata.base.errors import SpecError
from fedstrata.evaluation.history import History
from fedstrata.reporting import contrasts
from fedstrata.reporting.contrasts import (
    caption,
    contrast,
    to_csv,
    to_json,
    to_latex,
    to_markdown,
    to_screen,
    value_at,
)
from fedstrata.reporting.tables import compare_table


def run(accuracies: list[float | None], seed: int | None = 0, **costs: float) -> History:
    records = [{"round": i + 1, "accuracy": a, **costs} for i, a in enumerate(accuracies)]
    return History(records, method="m", seed=seed, targets=[0.5])


def runs_of(**finals: list[float]) -> dict[str, list[History]]:
    """Labels whose seeds end with these accuracies."""
    return {label: [run([value], seed) for seed, value in enumerate(values)] for label, values in finals.items()}


THREE = runs_of(base=[0.50, 0.60, 0.55], better=[0.62, 0.70, 0.69], same=[0.51, 0.59, 0.56])


def test_differences_by_hand() -> None:
    found = contrast(THREE)
    base, better, same = found.groups["final_accuracy"]
    assert found.baseline == "base"
    assert base.difference is None
    assert better.difference is not None
    assert better.difference.mean == pytest.approx(0.12)  # 0.12, 0.10 and 0.14
    # Two differences hold together: the 98.75 % quantile of t with two degrees of freedom.
    reach = stats.t.ppf(1 - 0.05 / 2 / 2, 2) * 0.02 / 3**0.5
    assert better.difference.interval == pytest.approx((0.12 - reach, 0.12 + reach))
    # t = 0.12 / (0.02 / √3) = 6 √3 with two degrees of freedom
    p = 2 * stats.t.sf(6 * 3**0.5, 2)
    assert better.difference.p == pytest.approx(p)
    assert same.difference is not None
    assert better.difference.corrected == pytest.approx(2 * p)
    assert same.difference.p == pytest.approx(2 * stats.t.sf(0.5, 2))  # (1, -1, 1) / 300
    assert same.difference.corrected == 1
    assert base.value.interval is not None
    assert base.value.interval[0] == pytest.approx(0.55 - stats.t.ppf(0.975, 2) * 0.05 / 3**0.5)


def test_pairs_are_seeds_and_not_places() -> None:
    swapped = {"a": [run([0.1], 1), run([0.9], 2)], "b": [run([0.95], 2), run([0.2], 1), run([0.5], 3)]}
    [_, b] = contrast(swapped).rows
    assert b.difference is not None
    assert b.difference.n == 2
    assert b.difference.mean == pytest.approx(0.075)


def test_accuracy_at_a_budget_by_hand() -> None:
    history = run([0.2, None, 0.6, 0.7], bytes_up=10, bytes_down=5)  # 15, 30, 45 and 60 bytes in all
    assert [value_at(history, "bytes", budget) for budget in (14, 15, 44, 45, 60, 61)] == [
        None, 0.2, 0.2, 0.6, 0.7, None,
    ]  # fmt: skip
    assert value_at(run([None], bytes_up=1), "bytes", 1) is None


def test_equal_bytes_are_the_most_that_all_runs_reached() -> None:
    runs = {
        "cheap": [run([0.3, 0.5, 0.6], s, bytes_up=10, samples=7) for s in (0, 1)],
        "dear": [run([0.4, 0.8], s, bytes_up=15 + 5 * s, samples=7) for s in (0, 1)],
        "lavish": [run([0.9], s, bytes_up=100, samples=700) for s in (0, 1)],
    }
    found = contrast(runs)
    # cheap ends at 30 bytes and 21 samples, dear at 30 or 40 and 14.
    assert found.budgets == {"accuracy_at_bytes": 30, "accuracy_at_samples": 14}
    means = [row.value.mean for row in found.groups["accuracy_at_bytes"]]
    assert means == [0.6, pytest.approx(0.6), None]  # 0.8 within 30 bytes, 0.4 where a round takes 20
    assert [row.value.n for row in found.groups["accuracy_at_samples"]] == [2, 2, 0]
    given = contrast(runs, at={"bytes": 35})
    assert list(given.measures) == ["accuracy_at_bytes"]
    assert [row.value.n for row in given.rows] == [0, 1, 0]  # who never spent as much has no number
    assert "accuracy at equal bytes (3.5e-05 MB), %" in to_markdown(given)


def test_budgets_that_say_nothing_are_left_out() -> None:
    assert list(contrast(THREE).measures) == ["final_accuracy"]  # nothing was recorded
    alike = {label: [run([0.1, value], bytes_up=5)] for label, value in (("a", 0.5), ("b", 0.6))}
    assert list(contrast(alike).measures) == ["final_accuracy"]  # equal bytes are the end
    assert list(contrast(alike, at={"bytes": None}).measures) == ["accuracy_at_bytes"]


def test_the_primary_metric_is_compared() -> None:
    def rounds(seed: int, *aurocs: float) -> History:
        records = [
            {"round": n, "accuracy": 0.98, "test": {"auroc": value}, "bytes_up": 10}
            for n, value in enumerate(aurocs, 1)
        ]
        return History(records, seed=seed, primary="auroc")

    runs = {"base": [rounds(0, 0.5, 0.6), rounds(1, 0.5, 0.7)], "other": [rounds(0, 0.7), rounds(1, 0.9)]}
    found = contrast(runs)
    assert list(found.measures) == ["final_auroc", "auroc_at_bytes"]
    assert [row.value.mean for row in found.rows] == pytest.approx([0.65, 0.8, 0.5, 0.8])
    assert found.rows[1].difference is not None
    assert found.rows[1].difference.mean == pytest.approx(0.15)
    text = to_markdown(found)
    assert "| final auroc | base | 0.6500 ± 0.0707 |" in text
    assert "| auroc at equal bytes (1e-05 MB) | other | 0.8000 ± 0.1414 |" in text
    assert "Auroc at an equal budget is the value of the last evaluation within the budget" in text
    named = contrast(runs, ["best_auroc", "final_accuracy"])
    assert [row.value.mean for row in named.rows] == pytest.approx([0.65, 0.8, 0.98, 0.98])
    with pytest.raises(SpecError, match="metric = 'best_aurok'"):
        contrast(runs, ["best_aurok"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"baseline": "bas"},
            r"baseline = 'bas': is not a label of these runs; did you mean 'base'\? Use one of: base, better, same",
        ),
        (
            {"metrics": ["acuracy"]},
            r"metric = 'acuracy': is not a result of these runs; did you mean 'accuracy'\? Use one of: final_accuracy,",
        ),
        ({"metrics": ["rounds_to_go"]}, "metric = 'rounds_to_go'"),
        (
            {"at": {"byte": None}},
            r"at = 'byte': is not a budget\. Use one of: bytes, samples, seconds, simulated_seconds,",
        ),
        ({"at": {"bytes": None}}, r"at = 'bytes': at least one run did not record bytes\. Use another budget\."),
        ({"at": {"bytes": -1.0}}, r"at = 'bytes=-1': the amount of a budget must be above 0\."),
        ({"test": "z"}, r"test = 'z': is not a statistical test\. Use one of: t, wilcoxon\."),
    ],
)
def test_what_there_is_not(arguments: dict, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        contrast(THREE, **arguments)


def test_an_unknown_measure_is_answered_by_few_of_many_columns() -> None:
    runs = {"a": [run([0.4, 0.6], 0, **{f"column_{number}": 1.0 for number in range(60)})]}
    with pytest.raises(SpecError, match=r"column_8, … \(61 columns of metrics\.jsonl\)") as caught:
        contrast(runs, ["colum"])
    assert len(caught.value.problem) < 400
    with pytest.raises(SpecError, match="did you mean 'column_59'"):
        contrast(runs, ["colum_59"])


def test_any_column_can_be_compared() -> None:
    runs = {"a": [run([0.4, 0.6], 0, loss=1.5)], "b": [run([0.6, 0.9], 0, loss=1.0)]}
    found = contrast(runs, ["loss", "rounds_to_0.5", "best_accuracy"], baseline="b")
    assert [row.value.mean for row in found.rows] == [1.5, 1.0, 2, 1, 0.6, 0.9]
    text = to_markdown(found)
    assert "| final test loss | a | 1.5000 | +0.5000 |" in text
    assert "| rounds to 50 % | a | 2 | +1 |" in text


def test_few_seeds_are_said() -> None:
    one = caption(contrast(runs_of(a=[0.5], b=[0.6])))
    assert one == "With one seed, intervals and tests are not possible."
    assert to_markdown(contrast(runs_of(a=[0.5], b=[0.6]))).splitlines()[0] == "|  |  | mean ± sd | minus a |"
    two = caption(contrast(runs_of(a=[0.5, 0.6], b=[0.6, 0.8])))
    assert "over 2 seeds" in two
    assert "Student" not in two
    assert "Intervals need at least three seeds" in two
    assert "interval |" not in to_markdown(contrast(runs_of(a=[0.5, 0.6], b=[0.6, 0.8])))
    three = caption(contrast(THREE))
    assert "Their 95 % intervals hold simultaneously for all 2 differences of a measure" in three
    assert "paired t-test, multiplied by 2 (Bonferroni)" in three
    six = [0.1, 0.2, 0.4, 0.3, 0.6, 0.5]
    many = runs_of(a=six, b=[value + 0.01 * (1 + i) for i, value in enumerate(six)])
    assert "too" not in caption(contrast(many))
    assert "Their 95 % intervals are Student's t" in caption(contrast(many))
    assert "Bonferroni" not in caption(contrast(many))
    ranks = contrast(many, test="wilcoxon")
    assert ranks.rows[1].difference is not None
    assert ranks.rows[1].difference.corrected == 2 / 2**6
    assert "Wilcoxon signed-rank" in caption(ranks)
    assert "needs six pairs" not in caption(ranks)
    few = contrast(THREE, test="wilcoxon")
    assert "Wilcoxon's test needs six pairs" in caption(few)
    assert all(row.difference is None or row.difference.corrected is None for row in few.rows)
    assert "| p |" not in to_markdown(few)
    apart = contrast({"a": [run([0.5], 0), run([0.4], 1)], "b": [run([0.5], 2), run([0.6], 3)]})
    assert "and tests at least two" in caption(apart)


def test_differences_that_are_alike_have_no_p_and_no_interval() -> None:
    found = contrast(runs_of(a=[0.5, 0.6, 0.7], b=[0.6, 0.7, 0.8]))
    assert "+10.00 |" in to_markdown(found)
    assert "interval | p" not in to_markdown(found)
    assert "Intervals and p-values are missing if all pairs have the same difference" in caption(found)


def test_intervals_end_at_what_is_possible() -> None:
    records = [{"round": 1, "accuracy": a, "loss": 3 * a, "test": {"auroc": a}} for a in (0.2, 0.9, 0.99)]
    runs = {"a": [History([record], seed=seed, primary="auroc") for seed, record in enumerate(records)]}
    found = contrast(runs, ["final_auroc", "final_accuracy", "test.auroc", "final_loss"])
    *shares, loss = [row.value.interval for row in found.rows]
    assert all(interval is not None and interval[0] >= 0 and interval[1] == 1 for interval in shares)
    assert "[0.0000, 1.0000]" in to_markdown(found)
    assert loss is not None
    assert loss[0] < 0  # a loss has no such range
    assert loss[1] > 3


def test_one_label_alone_has_an_interval_and_no_difference() -> None:
    found = contrast(runs_of(a=[0.5, 0.6, 0.7]))
    assert found.baseline is None
    assert "| final accuracy, % | a | 60.00 ± 10.00 | [35.16, 84.84] |" in to_markdown(found)


def test_a_terminal_of_80_columns_shows_whole_numbers_and_labels_as_they_are() -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(to_screen(contrast({"[one]": THREE["base"], "two": THREE["better"]})))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    for shown in ("[one]", "55.00 ± 5.00", "[42.58, 67.42]", "+12.00", "[+7.03, +16.97]", "0.009"):
        assert shown in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_row_of_csv_has_every_digit() -> None:
    text = to_csv({"digits": contrast(THREE)})
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["label"] for row in rows] == ["base", "better", "same"]
    assert float(rows[1]["difference"]) == contrast(THREE).rows[1].difference.mean  # type: ignore[union-attr]
    assert rows[0]["baseline"] == rows[0]["p_corrected"] == ""
    assert (rows[1]["baseline"], rows[1]["pairs"], rows[1]["test"]) == ("base", "3", "t")
    assert all(None not in row and None not in row.values() for row in rows)


def test_json_keeps_what_the_table_had() -> None:
    rows = compare_table(THREE)
    plain = to_json(rows, contrast(THREE))
    assert plain[0]["rounds_to_0.5"] == {"mean": 1.0, "sd": 0.0, "n": 3}
    assert plain[0]["final_accuracy"].keys() == {"mean", "sd", "n", "interval"}
    difference = plain[1]["final_accuracy"]["difference"]
    assert (difference["to"], difference["n"], difference["test"]) == ("base", 3, "t")


EVIL = r"a_b & 50% $x$ #1 {y} ~ ^ \end{tabular} <|> * ±"


def tabular(text: str) -> list[list[str]]:
    """The rows of a tabular, after checks of everything that LaTeX would stumble over."""
    comment, _, text = text.partition(r"\begin{table}")
    assert all(line.startswith("%") for line in comment.splitlines())
    assert text.count("{") - text.count(r"\{") == text.count("}") - text.count(r"\}")
    head, _, rest = text.partition(r"\toprule" + "\n")
    body, _, foot = rest.partition(r"\bottomrule" + "\n")
    assert foot == "\\end{tabular}\n\\end{table}\n"
    [width] = re.findall(r"\\begin\{tabular\}\{l(r+)\}", head)
    assert re.findall(r"(?<!\\)[%#&_^~]|[^\x00-\x7f]", head.split(r"\caption")[1]) == []
    rows = []
    for line in body.splitlines():
        if line == r"\midrule":
            continue
        assert line.endswith(r" \\")
        inner = line.removesuffix(r" \\")
        assert re.match(r"\s*[\[*]", inner) is None  # would be an argument of the line's end before
        plain = re.sub(r"\\textbackslash\{\}|\\[{}%&#_$]", "", inner)
        assert re.findall(r"[%#_^~]|[^\x00-\x7f]", plain) == []
        assert plain.count("$") % 2 == 0
        cells = plain.split("&")
        if inner.startswith(r"\multicolumn"):
            assert inner.startswith(rf"\multicolumn{{{len(width) + 1}}}{{l}}")
            assert len(cells) == 1
        else:
            assert len(cells) == len(width) + 1
        rows.append(cells)
    return rows


def test_latex_has_whole_rows_whatever_the_labels_are() -> None:
    runs = {EVIL: THREE["base"], "[one]": THREE["better"], "*": runs_of(a=[0.4])["a"]}
    text = to_latex(contrast(runs, ["final_accuracy", "rounds_to_0.9"]))
    rows = tabular(text)
    assert [len(row) for row in rows] == [3, 3, 3, 3]
    assert "$\\mathbf{67.00} \\pm 4.36$" in text
    assert text.count("mathbf") == 1  # no label reached 90 %
    assert "$40.00$ (1 of 3)" not in text  # one of one
    assert r"\end{tabular} <" not in text.partition(r"\begin{table}")[2]


def test_latex_has_labels_by_measures_with_the_best_in_bold() -> None:
    def one(accuracy: float, loss: float, seed: int) -> History:
        return History([{"round": 1, "accuracy": accuracy, "loss": loss, "bytes_up": 10**6}], seed=seed)

    runs = {"a": [one(0.5, 0.25, s) for s in range(3)], "b": [one(0.75, 0.5, s) for s in range(3)]}
    runs["c"] = [one(0.75, 0.75, s) for s in range(3)]
    text = to_latex(contrast(runs, ["final_accuracy", "loss", "bytes_up", "best_round"]))
    body = text.partition("\\midrule\n")[2].splitlines()[:3]
    assert body == [
        r"a & $50.00$ & $\mathbf{0.2500}$ & $\mathbf{1.0}$ & $1$ \\",
        r"b & $\mathbf{75.00}$ & $0.5000$ & $\mathbf{1.0}$ & $1$ \\",
        r"c & $\mathbf{75.00}$ & $0.7500$ & $\mathbf{1.0}$ & $1$ \\",
    ]
    assert r"\caption{Mean $\pm$ standard deviation over 3 seeds. The best mean of each measure is bold.}" in text
    assert "% | final accuracy, % | b | 75.00 |" in text.partition(r"\begin{table}")[0]


def test_a_parser_of_latex_reads_the_same_table() -> None:
    walker = pytest.importorskip("pylatexenc.latexwalker", reason="pylatexenc is an extra of the developers'")
    to_text = pytest.importorskip("pylatexenc.latex2text").LatexNodes2Text()
    text = to_latex(contrast({EVIL: THREE["base"], "[one]": THREE["better"]}))
    nodes, _, length = walker.LatexWalker(text, tolerant_parsing=False).get_latex_nodes()
    assert length == len(text)
    [table] = [node for node in nodes if node.isNodeType(walker.LatexEnvironmentNode)]
    [inner] = [node for node in table.nodelist if node.isNodeType(walker.LatexEnvironmentNode)]
    assert (table.environmentname, inner.environmentname) == ("table", "tabular")
    read = to_text.latex_to_text(contrasts.escape(EVIL)).replace("ˆ", "^")  # it takes the sign for the accent
    assert "".join(read.split()) == "".join(EVIL.split())
    macros = [node.macroname for node in inner.nodelist if node.isNodeType(walker.LatexMacroNode)]
    assert macros.count("\\") == 3
    assert [macros.count(name) for name in ("toprule", "midrule", "bottomrule")] == [1, 1, 1]
