from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from canvas import assert_inside
from matplotlib.figure import Figure
from matplotlib.text import Text
from quick import others_long

import fedstrata as fs
from fedstrata.base import style
from fedstrata.base.errors import SpecError
from fedstrata.evaluation.history import History
from fedstrata.reporting.axes import log_ticks
from fedstrata.reporting.draw import draw_communication, draw_curves, draw_losses, draw_participation, over_seeds, sent
from fedstrata.reporting.plots import _cheapest, _verdict, plot, plot_comparison, plot_run


def run(values: list[float | None], column: str = "accuracy", **more: float) -> History:
    return History([{"round": i + 1, column: value} | more for i, value in enumerate(values)])


def test_mean_and_deviation_over_the_rounds_that_all_seeds_have() -> None:
    band = over_seeds([run([0.2, 0.4, 0.6]), run([0.4, None, 0.8, 0.9]), run([None])], "accuracy")
    assert band.rounds.tolist() == [1, 3]
    assert band.mean.tolist() == pytest.approx([0.3, 0.7])
    assert band.sd.tolist() == pytest.approx([0.02**0.5, 0.02**0.5])


@pytest.mark.slow
def test_curves_show_percent_and_a_band_only_for_several_seeds(tmp_path: Path) -> None:
    curves = {"two": [run([0.2, 0.4]), run([0.4, 0.6])], "one": [run([0.5, 0.7])]}
    figure = plot(curves, "accuracy", tmp_path / "a.svg")
    axes = figure.axes[0]
    assert [line.get_ydata().tolist() for line in axes.lines] == [pytest.approx([30, 50]), pytest.approx([50, 70])]
    assert len(axes.collections) == 1
    assert axes.get_ylabel() == "test accuracy, %"
    assert [text.get_text() for text in axes.texts] == ["two", "one"]
    assert axes.get_title(loc="left") == "mean of 1–2 seeds, band 1 sd"
    assert "<svg" in (tmp_path / "a.svg").read_text()


@pytest.mark.slow
def test_a_history_or_the_histories_of_a_comparison_are_drawn(tmp_path: Path) -> None:
    figure = fs.plot(History(run([0.5, 0.8]), method="fedavg"), path=str(tmp_path / "a.png"))
    assert figure.axes[0].lines[0].get_ydata().tolist() == [50, 80]
    assert not figure.axes[0].texts
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    figure = fs.plot({"two": [run([0.2]), run([0.4])], "one": [run([0.5])]}, "accuracy")
    assert [line.get_ydata().tolist() for line in figure.axes[0].lines] == [pytest.approx([30]), pytest.approx([50])]
    with pytest.raises(
        SpecError,
        match=r"column = 'accurasy': is not a column of numbers; did you mean 'accuracy'\? Use one of: accuracy",
    ):
        fs.plot(run([0.5]), "accurasy")


@pytest.mark.slow
def test_labels_are_shown_as_they_are(tmp_path: Path) -> None:
    figure = plot({"_a$b$": [run([0.5])], "$\\bad{": [run([0.5])]}, path=tmp_path / "a.png")
    assert [text.get_text() for text in figure.axes[0].texts] == [r"_a\$b\$", r"\$\bad{"]


@pytest.mark.slow
def test_a_column_of_one_method_only_and_of_none() -> None:
    curves = {"a": [run([1.0, 2.0], "drift")], "b": [run([0.5])]}
    assert len(plot(curves, "drift").axes[0].lines) == 1
    with pytest.raises(SpecError, match=r"is not a column of numbers\. Use one of: accuracy"):
        plot(curves, "nothing")


def test_bytes_since_the_start() -> None:
    history = run([None, 0.5, 0.6], bytes_up=1_000_000, bytes_down=500_000)
    rounds, _ = history.column("accuracy")
    assert sent([history], rounds).tolist() == [3.0, 4.5]
    assert sent([run([0.5])], rounds).tolist() == [0, 0]


def test_participation_stacks_to_the_invited() -> None:
    fates = {"clients_returned": 6, "clients_dropped": 3, "clients_late": 1, "clients_failed": 0}
    history = run([0.5, 0.6], clients_invited=10, **fates)
    axes = Figure().subplots()
    draw_participation(axes, [history])
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["returned", "dropped out", "late", "invited"]
    tops = [area.get_datalim(axes.transData).y1 for area in axes.collections]
    assert tops == [6, 9, 10]


@pytest.mark.slow
def test_pictures_of_a_run_and_of_one_without_rounds(make_run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    folder = make_run("run", rounds=3)
    files = plot_run(History.load(folder), folder)
    assert [file.name for file in files] == ["accuracy.png", "loss.png", "participation.png", "communication.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)
    for empty in (History(), History([{"round": 1}])):
        drawn = Figure().subplots(4)
        draw_curves(drawn[0], {"": [empty]}, "accuracy")
        for draw, axes in zip((draw_losses, draw_participation, draw_communication), drawn[1:], strict=True):
            draw(axes, [empty])
        assert [axes.texts[0].get_text() for axes in drawn] == ["not recorded"] * 4


@pytest.mark.slow
def test_the_main_pictures_show_the_primary_metric(tmp_path: Path) -> None:
    records = [{"round": n, "accuracy": 0.9, "test": {"auroc": u}, "bytes_up": 9} for n, u in enumerate((0.5, 0.7), 1)]
    history = History(records, primary="auroc")
    assert plot_run(history, tmp_path)[0].name == "auroc.png"
    assert [file.name for file in plot_comparison({"a": [history]}, tmp_path)[::2]] == ["auroc.png", "traffic.png"]
    axes = Figure().subplots()
    draw_curves(axes, {"a": [history]}, "test.auroc")
    assert axes.get_ylabel() == "test auroc"
    assert axes.lines[0].get_ydata().tolist() == [0.5, 0.7]
    # A run without any value of the metric, for example without test samples, has an empty picture.
    assert plot_run(History([{"round": 1, "accuracy": 0.9}], primary="auroc"), tmp_path)[0].name == "auroc.png"


def test_a_single_round_can_be_seen() -> None:
    history = History([{"round": 1, "accuracy": 0.5, "loss": 1.0, "train_loss": 2.0, "bytes_up": 9, "bytes_down": 9}])
    drawn = Figure().subplots(3)
    draw_curves(drawn[0], {"": [history]}, "accuracy")
    draw_losses(drawn[1], [history])
    draw_communication(drawn[2], [history])
    lines = [line for axes in drawn for line in axes.lines]
    assert [line.get_marker() for line in lines] == ["o"] * 5


@pytest.mark.slow
def test_traffic_has_a_logarithmic_axis_on_which_nothing_has_no_place() -> None:
    first = History([{"round": 1, "accuracy": 0.1}, *run([0.5, 0.6, 0.7], bytes_up=1_000_000)[1:]])
    runs = {"little": [first], "much": [run([0.5, 0.8], bytes_up=10**9)]}
    axes = fs.plot(runs, against="bytes").axes[0]
    assert axes.get_xscale() == "log"
    assert [line.get_xdata().tolist() for line in axes.lines] == [[1, 2], [1000, 2000]]
    assert [line.get_ydata().tolist() for line in axes.lines] == [pytest.approx([60, 70]), pytest.approx([50, 80])]
    silent = fs.plot(run([0.5, 0.6]), against="bytes").axes[0]
    assert silent.get_xscale() == "linear"
    with pytest.raises(SpecError, match=r"against = 'time': must be 'round' or 'bytes'\."):
        fs.plot(run([0.5]), against="time")


@pytest.mark.long
@pytest.mark.slow
def test_pictures_of_a_comparison_are_png_and_pdf_and_the_same_again(tmp_path: Path) -> None:
    curves = {"two": [run([0.2, 0.4], bytes_up=9), run([0.4, 0.6], bytes_up=9)], "one": [run([0.5, 0.7], bytes_up=5)]}
    files = plot_comparison(curves, tmp_path)
    assert [file.name for file in files] == ["accuracy.png", "accuracy.pdf", "traffic.png", "traffic.pdf"]
    before = [file.read_bytes() for file in files]
    assert [data[:4] for data in before] == [b"\x89PNG", b"%PDF"] * 2
    assert b"/Type3" not in before[1]  # journals refuse those fonts
    assert b"/FontFile2" in before[1]
    assert [file.read_bytes() for file in plot_comparison(curves, tmp_path)] == before


def many(labels: list[str], seeds: int = 2, rounds: int = 12) -> dict[str, list[History]]:
    """The final accuracies grow from label to label; the first label sends the most."""
    return {
        label: [
            run([0.5 + 0.02 * place + 0.01 * seed - 0.4 / n for n in range(1, rounds + 1)], bytes_up=10**6 - place)
            for seed in range(seeds)
        ]
        for place, label in enumerate(labels)
    }


LONG = "a method with a very long name, codec powersgd of rank "


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "narrow", "against"),
    others_long(
        itertools.product([1, 6, 20], [False, True], ["round", "bytes"]),
        [(1, True, "round"), (6, True, "bytes"), (20, True, "round"), (20, True, "bytes")],
    ),
)
def test_no_text_leaves_the_picture(count: int, narrow: bool, against: str) -> None:
    labels = {1: [LONG], 6: [f"{LONG}{n}" for n in range(6)], 20: ["fedavg", *map(str, range(19))]}[count]
    title = f"{labels[0]} reaches a test accuracy of 92.1 % with the fewest bytes, 1.23 MB"
    figure = plot(many(labels), against=against, title=title, narrow=narrow)
    assert_inside(figure)
    if narrow:
        assert figure.get_size_inches()[0] == 3.5
        assert min(text.get_fontsize() for text in figure.findobj(Text) if text.get_text()) >= 8  # type: ignore[attr-defined]
    names = [note for note in figure.axes[0].texts if note.get_text()]
    assert len(names) == {1: 0, 6: 6, 20: 6}[len(labels)]
    boxes = sorted((Text.get_window_extent(name) for name in names), key=lambda box: box.y0)
    assert all(low.y1 <= high.y0 + 1 for low, high in itertools.pairwise(boxes))


@pytest.mark.slow
def test_of_twenty_methods_the_baseline_and_the_five_best_have_a_name() -> None:
    figure = plot(many(["fedavg", *map(str, range(19))]))
    assert [note.get_text() for note in figure.axes[0].texts] == ["fedavg", "14", "15", "16", "17", "18"]
    assert [line.get_color() for line in figure.axes[0].lines].count(style.OTHER.colour.light) == 14
    assert figure.axes[0].get_title(loc="left") == "mean of 2 seeds, band 1 sd (fedavg, 18), grey: 14 others"


@pytest.mark.slow
def test_a_method_has_its_colour_and_dashes() -> None:
    lines = plot(many(["moon", "fedavg", "stratify"])).axes[0].lines
    chosen = style.lines(["moon", "fedavg", "stratify"]).values()
    assert [(line.get_color(), line.get_linestyle()) for line in lines] == [(s.colour.light, s.dash) for s in chosen]
    assert lines[1].get_color() == style.SERIES[0].colour.light


@pytest.mark.slow
def test_percentages_stay_within_0_and_100_and_the_view_begins_where_lines_differ() -> None:
    assert plot(run([1.0, 1.0])).axes[0].get_ylim()[1] == 100
    assert plot(run([0.0])).axes[0].get_ylim()[0] == 0
    rise = [min(0.9, 0.1 * n) for n in range(1, 101)]
    low, high = plot({"a": [run(rise)], "b": [run([0.95 * value for value in rise])]}).axes[0].get_ylim()
    assert (low, high) == (pytest.approx(84, abs=2), pytest.approx(90, abs=1))
    low, high = plot({"bad": [run([0.1] * 100)], "good": [run(rise)]}).axes[0].get_ylim()
    assert low < 10, "the line of a method that fails stays in view"
    falling = plot(History([{"round": n, "loss": 10.0 if n < 5 else 1.0 + 1 / n} for n in range(1, 101)]), "loss")
    assert falling.axes[0].get_ylim()[1] < 2


def test_titles_say_what_is_seen(tmp_path: Path) -> None:
    curves = {label: [run([0.5, 0.8], bytes_up=sent)] for label, sent in (("a", 2_000_000), ("b", 1_000_000))}
    assert _cheapest(curves, "accuracy") == "b reaches a test accuracy of 80.0 % with the fewest bytes, 2 MB"
    assert _cheapest({"a": curves["a"], "same": curves["a"]}, "accuracy") == ""
    assert _verdict(curves) == "1 seed is too few to rank the methods"


@pytest.mark.parametrize(
    ("high", "expected"), [(80, ["1", "3", "10", "30"]), (6, ["1", "2", "3", "5"]), (1.9, ["1", "1.25", "1.5", "1.75"])]
)
def test_ticks_of_logarithmic_axes_are_plain_numbers(high: float, expected: list[str]) -> None:
    axes = Figure().subplots()
    axes.set(xscale="log", xlim=(0.9, high))
    log_ticks(axes.xaxis)
    places = [place for place in axes.xaxis.get_majorticklocs() if 0.9 < place <= high]
    assert axes.xaxis.get_major_formatter().format_ticks(places) == expected
