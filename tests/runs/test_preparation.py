"""What can be wrong is found before anything is written."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from torch import nn

import fedstrata as fs
from fedstrata.base.errors import SpecError


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            {"data": ([[1.0]], [0])},
            "data = '2 items': must be a Dataset, a mapping, or four arrays: x_train, y_train, x_test,",
        ),
        ({"data": {"x_train": [[1.0]], "labels": [0]}}, r"data = \['labels', 'x_test', 'y_test', 'y_train'\]"),
        ({"data": 3}, "data = 'int': must be a Dataset, a mapping, or four arrays: x_train, y_train, x_test,"),
        ({"model": "cnn"}, r"model = 'cnn': must be an nn\.Module, a fedstrata Model, or a class or function that"),
        (
            {"model": nn.Sequential(nn.Flatten(), nn.Linear(64, 9))},
            r"outputs of shape \(B, 10\), but returned \(2, 9\)",
        ),
        ({"model": nn.Linear(64, 10)}, r"batches of shape \(B, 1, 8, 8\) .*, but the model failed"),
    ],
)
def test_data_and_models_that_cannot_be_used_are_found_before_the_first_round(how, message):
    with pytest.raises(SpecError, match=message):
        fs.prepare(fs.Experiment(), **how)


@pytest.mark.slow
def test_a_model_that_no_reply_can_be_like_is_refused():
    class Masked(nn.Linear):
        def __init__(self, persistent: bool) -> None:
            super().__init__(64, 10)
            self.register_buffer("mask", torch.full((3,), -torch.inf), persistent=persistent)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.flatten(1))

    spec = fs.Experiment(method="fedavg", partition=fs.IID(clients=4), training={"rounds": 1})
    with pytest.raises(SpecError, match=r"^model: mask contains NaN or infinity.*persistent=False"):
        fs.run(spec, model=Masked(persistent=True))
    assert fs.run(spec, model=Masked(persistent=False))[-1]["clients_trained"] == 4


def test_statistics_of_a_batch_of_one_are_refused_before_training():
    norm = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    table = {"training": {"batch_norm": "local"}, "evaluation": {"batch_size": 1}}
    with pytest.raises(
        SpecError,
        match=r"^evaluation\.batch_size = 1: with training\.batch_norm = 'local', statistics are computed per batch",
    ):
        fs.prepare(fs.Experiment.from_table(table), model=norm)
    with pytest.raises(SpecError, match=r"^training\.batch_norm = 'local': Stratify computes BatchNorm statistics"):
        fs.prepare(fs.Experiment.from_table({**table, "method": "stratify", "evaluation": {}}), model=norm)
    with pytest.raises(
        SpecError,
        match=r"^training\.batch_size = 1: BatchNorm requires at least two samples per batch\. Set batch_size to at",
    ):
        fs.prepare(fs.Experiment.from_table({"method": "stratify", "training": {"batch_size": 1}}), model=norm)


def test_what_another_thread_draws_meanwhile_does_not_make_a_model_random():
    class Waiting(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            other = threading.Thread(target=torch.rand, args=(3,))
            other.start()
            other.join()
            return super().forward(x.flatten(1))

    random = [
        fs.prepare(fs.Experiment(), model=model).config.random
        for model in (Waiting(64, 10), nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.RReLU()))
    ]
    assert random == [False, True]


TABLE = {"label": "y", "client": "who", "test": 0.2, "columns": {"a": {"impute": "mean"}}}


@pytest.fixture
def table(tmp_path):
    """Three clients' rows, each fourth without a value."""
    draw = np.random.default_rng(0)
    lines = [f"{draw.normal(50, 20):.6}" if n % 4 else "" for n in range(120)]
    rows = "".join(f"{cell},{'abc'[n % 3]},{n % 2}\n" for n, cell in enumerate(lines))
    (tmp_path / "a.csv").write_text(f"a,who,y\n{rows}", encoding="utf-8")
    return {"name": str(tmp_path / "a.csv"), "schema": TABLE}


@pytest.mark.parametrize(
    ("partition", "evaluation"),
    [
        ("natural", {"validation": 0.25}),
        ("natural", {"client_test": 0.25}),
        ("natural", {"client_test": 0.25, "validation": 0.25}),
        ("natural", {"client_test": 0.25, "test_clients": 0.34}),
        ("natural", {}),
        ({"name": "iid", "clients": 4}, {"validation": 0.25, "client_test": 0.25}),
        ({"name": "single-client", "of": "natural", "only": 1}, {"client_test": 0.25}),
    ],
)
def test_nothing_that_is_held_out_says_what_stands_in_or_what_is_normal(table, partition, evaluation):
    """By hand from the cells: they were those of all training rows, held out or not."""
    spec = fs.Experiment.from_table(
        {"data": table, "partition": partition, "evaluation": evaluation, "model": "tabular"}
    )
    prepared = fs.prepare(spec)
    cells = spec.data.load(spec.seed).unfitted.train[:, 0].numpy()
    used = np.setdiff1d(np.arange(len(cells)), prepared.held.samples)
    mean = np.nanmean(cells[used])
    assert not np.isclose(mean, np.nanmean(cells)) or not evaluation
    expected = np.where(np.isnan(cells), mean, cells)
    assert prepared.data.x_train[:, 0].tolist() == pytest.approx(expected.tolist(), rel=1e-6)
    assert prepared.data.shift.tolist() == pytest.approx([expected[used].mean()], rel=1e-6)
    assert prepared.data.scale.tolist() == pytest.approx([1 / expected[used].std()], rel=1e-6)


def test_a_client_that_trains_alone_is_scaled_as_all_of_them(table):
    """References differ in who trains together, and in nothing else."""
    specs = [{"name": "single-client", "of": "natural", "only": 1}, {"name": "single-client", "of": "natural"}]
    prepared = [
        fs.prepare(fs.Experiment.from_table({"data": table, "partition": each, "model": "tabular"}))
        for each in ("natural", *specs)
    ]
    assert all(torch.equal(each.data.x_train, prepared[0].data.x_train) for each in prepared)
    assert all(torch.equal(each.data.scale, prepared[0].data.scale) for each in prepared)
