from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

import fedstrata as fs
from fedstrata.base.errors import SpecError
from fedstrata.evaluation.history import History
from fedstrata.reporting.draw import (
    draw_communication,
    draw_curves,
    draw_losses,
    draw_participation,
    over_seeds,
    sent,
)
from fedstrata.reporting.plots import plot, plot_comparison, plot_run


def run(values: list[float | None], column: str = "accuracy", **more: float) -> History:
    return History([{"round": i + 1, column: value} | more for i, value in enumerate(values)])


def test_mean_and_deviation_over_the_rounds_that_all_seeds_have() -> None:
    band = over_seeds([run([0.2, 0.4, 0.6]), run([0.4, None, 0.8, 0.9]), run([None])], "accuracy")
    assert band.rounds.tolist() == [1, 3]
    assert band.mean.tolist() == pytest.approx([0.3, 0.7])
    assert band.sd.tolist() == pytest.approx([0.02**0.5, 0.02**0.5])


def test_curves_show_percent_and_a_band_only_for_several_seeds(tmp_path: Path) -> None:
    curves = {"two": [run([0.2, 0.4]), run([0.4, 0.6])], "one": [run([0.5, 0.7])]}
    figure = plot(curves, "accuracy", tmp_path / "a.svg")
    axes = figure.axes[0]
    assert [line.get_ydata().tolist() for line in axes.lines] == [pytest.approx([30, 50]), pytest.approx([50, 70])]
    assert len(axes.collections) == 1
    assert axes.get_ylabel() == "test accuracy, %"
    assert [text.get_text().strip() for text in figure.legends[0].get_texts()] == ["two (2 seeds)", "one"]
    assert "<svg" in (tmp_path / "a.svg").read_text()


def test_a_history_or_the_histories_of_a_comparison_are_drawn(tmp_path: Path) -> None:
    figure = fs.plot(History(run([0.5, 0.8]), method="fedavg"), path=str(tmp_path / "a.png"))
    assert figure.axes[0].lines[0].get_ydata().tolist() == [50, 80]
    assert not figure.legends
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    figure = fs.plot({"two": [run([0.2]), run([0.4])], "one": [run([0.5])]}, "accuracy")
    assert [line.get_ydata().tolist() for line in figure.axes[0].lines] == [pytest.approx([30]), pytest.approx([50])]
    with pytest.raises(
        SpecError,
        match=r"column = 'accurasy': is not a column of numbers\. Use one of: accuracy; did you mean 'accuracy'\?",
    ):
        fs.plot(run([0.5]), "accurasy")


def test_labels_are_shown_as_they_are(tmp_path: Path) -> None:
    figure = plot({"_a$b$": [run([0.5])], "$\\bad{": [run([0.5])]}, path=tmp_path / "a.png")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [r" _a\$b\$", r" \$\bad{"]


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


@pytest.mark.slow
def test_pictures_of_a_comparison_are_png_and_pdf_and_the_same_again(tmp_path: Path) -> None:
    curves = {"two": [run([0.2, 0.4], bytes_up=9), run([0.4, 0.6], bytes_up=9)], "one": [run([0.5, 0.7], bytes_up=5)]}
    files = plot_comparison(curves, tmp_path)
    assert [file.name for file in files] == ["accuracy.png", "accuracy.pdf", "traffic.png", "traffic.pdf"]
    before = [file.read_bytes() for file in files]
    assert [data[:4] for data in before] == [b"\x89PNG", b"%PDF"] * 2
    assert b"/Type3" not in before[1]  # journals refuse those fonts
    assert b"/FontFile2" in before[1]
    fs.plot(curves, path=tmp_path / "again.pdf")
    assert (tmp_path / "again.pdf").read_bytes() == before[1]
