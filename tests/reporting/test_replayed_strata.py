"""Looking at the strata of a run: from a spec, from a folder, and as a picture."""

from __future__ import annotations

import numpy as np
import pytest
from canvas import assert_inside
from matplotlib.figure import Figure
from matplotlib.image import imread

import fedstrata as fs
from fedstrata.base import style
from fedstrata.base.errors import CheckpointError, SpecError
from fedstrata.cli import main
from fedstrata.reporting.replayed_strata import View, strata_after, strata_of_folder
from fedstrata.reporting.strata import draw_strata, outline, plane


def spec(method: object, **training: object) -> fs.Experiment:
    return fs.Experiment(
        method=method,
        partition=fs.Shards(clients=20, per_client=1),
        training={"rounds": 3, "lr": 0.1, "clients_per_round": 10} | training,
    )


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedsts", "fedssar", "clustered"])
def test_a_runs_folder_gives_what_running_it_again_gives(method, tmp_path):
    fs.run(spec(method), out=tmp_path)
    prepared, view = fs.prepare(spec(method)), strata_of_folder(tmp_path)
    again = strata_after(prepared, 3)
    assert view.round == 3
    for name in ("clients", "points", "strata", "labels"):
        np.testing.assert_array_equal(getattr(view, name), getattr(again, name))
    assert view.labels.sum() == prepared.data.train_size


@pytest.mark.slow
def test_strata_of_gradients_are_the_labels():
    """Two clients a label, ten strata: nearly all samples bear their stratum's label."""
    view = strata_after(fs.prepare(spec("fedsts")), 1)
    assert view.purity() > 0.9
    assert view.strata.max() == 9


def test_purity_by_hand():
    labels = np.array([[4, 0], [1, 3], [0, 2]])
    view = View(1, np.arange(3), np.zeros((3, 1), np.float32), np.array([0, 0, 1]), labels)
    assert view.purity() == (5 + 2) / 10


@pytest.mark.slow
def test_the_metrics_of_a_round_are_the_strata(tmp_path):
    """FedSSAR: what was recorded in round 2 are the clusters of the state after round 1."""
    history = fs.run(spec("fedssar"))
    view = strata_after(fs.prepare(spec("fedssar")), 1)
    assert history[1]["strata_sizes"] == np.bincount(view.strata).tolist()


@pytest.mark.parametrize("method", ["fedavg", {"name": "clustered", "algorithm": 1}, "stratify"])
def test_methods_without_strata_say_so(method):
    with pytest.raises(SpecError, match=r"does not form strata\. Use the client sampler fedsts, fedssar, or clustered"):
        strata_after(fs.prepare(spec(method)), 1)


@pytest.mark.slow
def test_folders_that_are_no_use(tmp_path):
    with pytest.raises(SpecError, match="is not a run folder"):
        strata_of_folder(tmp_path)
    unkept = spec("fedsts").model_copy(update={"evaluation": fs.Evaluation(checkpoint_every=0)})
    fs.run(unkept, out=tmp_path)
    with pytest.raises(CheckpointError, match="checkpoint_every"):
        strata_of_folder(tmp_path)


def test_the_plane_keeps_what_varies():
    g = np.random.default_rng(0)
    flat = np.zeros((30, 8), dtype=np.float32)
    flat[:, :2] = 3 * g.normal(size=(30, 2))
    where, share = plane(flat)
    assert share == pytest.approx(1)
    apart = np.linalg.norm(flat[:, None] - flat, axis=2)
    np.testing.assert_allclose(np.linalg.norm(where[:, None] - where, axis=2), apart, atol=1e-4)
    assert plane(np.ones((1, 3), dtype=np.float32))[0].tolist() == [[0, 0]]


@pytest.mark.slow
@pytest.mark.parametrize("clients", [12, 300])
def test_a_picture_of_pies_or_of_dots(clients, tmp_path):
    """Two strata far apart, each with a label of its own, in that label's colour on the right half."""
    strata = np.arange(clients) % 2
    points = np.stack([strata * 10.0, np.arange(clients) / clients], axis=1).astype(np.float32)
    labels = np.where(strata[:, None] == [0, 1], 5, 0)
    view = View(1, np.arange(clients), points, strata, labels, "two", ("ant", "bee"))
    draw_strata(view, tmp_path / "strata.png")
    picture = imread(tmp_path / "strata.png")[..., :3]
    right = picture[:, picture.shape[1] // 2 :].reshape(-1, 3)
    for colour in (bytes.fromhex(each.light[1:]) for each in style.categories(2)):
        assert (np.abs(right * 255 - [*colour]).max(axis=1) < 3).sum() > 200


@pytest.mark.parametrize("n", [1, 2, 3, 4])  # one point, and two or three on a line, have a hull only with a margin
def test_an_outline_has_a_margin_around_every_point(n):
    points, pad = np.array([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0], [4.0, 0.0]])[:n], np.array([0.5, 0.25])
    corners = outline(points, pad)
    np.testing.assert_allclose(corners.min(axis=0), points.min(axis=0) - pad)
    np.testing.assert_allclose(corners.max(axis=0), points.max(axis=0) + pad)


@pytest.mark.long
@pytest.mark.slow
def test_no_text_leaves_the_picture_of_strata(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: figures.append(figure))
    points = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    labels, names = np.ones((40, 20), dtype=np.int64), tuple(f"a very long name of label {n}" for n in range(20))
    draw_strata(View(1, np.arange(40), points, np.arange(40) % 20, labels, "a long title " * 20, names), tmp_path)
    assert_inside(figures[0])


@pytest.mark.slow
def test_the_command(tmp_path, capsys, monkeypatch):
    settings = ["--set", "method.name=fedsts", "--set", "partition.clients=12"]
    assert main(["strata", *settings, "--out", str(tmp_path / "a.png")]) == 0
    assert "10 strata" in capsys.readouterr().out
    assert (tmp_path / "a.png").stat().st_size > 5000
    assert main(["strata", "--rounds", "0"]) == 2
    assert main(["strata", "--set", "method.name=fedavg"]) == 2
    assert "does not form strata" in capsys.readouterr().err
    assert main(["strata", str(tmp_path), "--set", "seed=1"]) == 2
