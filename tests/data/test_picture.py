from __future__ import annotations

import io

import pytest
from canvas import assert_inside
from matplotlib.figure import Figure
from quick import others_long
from rich.console import Console

from fedstrata.data.partitions.picture import draw_partition, render_table
from fedstrata.data.partitions.schemes import Dirichlet, Given


def read(table):
    console = Console(width=200, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


def rows(text):
    cells = [line.split() for line in text.splitlines()[3:]]
    return {row[0]: row[1:] for row in cells if len(row) > 1 and row[0] != "The"}


def test_the_table_by_hand(labelled):
    dataset = labelled([0, 1, 1, 2, 1, 0])
    assignment = Given(indices=[[0, 1, 2], [3, 4, 5]]).split(dataset, 0)
    assert assignment.counts(dataset.y_train.numpy(), 3).tolist() == [[1, 2, 0], [1, 1, 1]]
    text = read(render_table(assignment, dataset))
    assert rows(text) == {
        "0": ["3", "1", "2", "·"],
        "1": ["3", "1", "1", "1"],
        "min": ["3", "1", "1", "0"],
        "mean": ["3.0", "1.0", "1.5", "0.5"],
        "max": ["3", "1", "2", "1"],
    }
    assert "arrays: 6 samples at 2 clients" in text


def test_many_clients_and_many_labels_are_summarised(labelled):
    dataset = labelled([number % 20 for number in range(2000)])
    text = read(render_table(Dirichlet(clients=50).split(dataset, 0), dataset))
    assert [*rows(text)] == [*map(str, range(30)), "min", "mean", "max"]
    assert "The first 30 of 50 clients" in text
    assert "number of labels" in text


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("clients", "classes"), [(1, 2), (10, 3), (100, 10), (101, 10), (1500, 60)])
def test_pictures_are_written(labelled, tmp_path, clients, classes):
    from matplotlib.image import imread

    dataset = labelled([number % classes for number in range(3000)])
    path = tmp_path / "partition.png"
    draw_partition(Dirichlet(clients=clients, min_size=0).split(dataset, 0), dataset, path)
    pixels = imread(path)[..., :3]
    assert pixels.shape[1] > 600
    ink = (pixels[..., 2] - pixels[..., 0] > 0.15).mean()  # bluish: bars, and bubbles or cells
    assert 0.02 < ink < 0.9


@pytest.mark.slow
@pytest.mark.parametrize("clients", others_long([1, 10, 100, 130], [10, 130]))
def test_clients_are_whole_numbers_and_nothing_is_cut_off(labelled, tmp_path, monkeypatch, clients):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: figures.append(figure))
    dataset = labelled([number % 10 for number in range(3000)])
    draw_partition(Dirichlet(clients=clients, min_size=0).split(dataset, 0), dataset, tmp_path)
    assert_inside(figures[0])
    main = figures[0].axes[1]
    assert all(place == round(place) for place in main.get_xticks())
    for bubbles in main.collections:
        figure_box, radius = main.get_window_extent(), bubbles.get_sizes() ** 0.5 / 2 * figures[0].dpi / 72
        places = main.transData.transform(bubbles.get_offsets())
        assert (places[:, 0] - radius > figure_box.x0).all()
        assert (places[:, 0] + radius < figure_box.x1).all()
