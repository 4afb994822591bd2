"""What can be wrong is found before anything is written."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import fedstrata as fs
from fedstrata.errors import SpecError


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"data": ([[1.0]], [0])}, r"data = '2 of them': expected a Dataset, a mapping, or four arrays: x_train"),
        ({"data": {"x_train": [[1.0]], "labels": [0]}}, r"data = \['labels', 'x_test', 'y_test', 'y_train'\]"),
        ({"data": 3}, r"data = 'int': expected a Dataset"),
        ({"model": "cnn"}, r"model = 'cnn': expected an nn\.Module or a fedstrata Model"),
        (
            {"model": nn.Sequential(nn.Flatten(), nn.Linear(64, 9))},
            r"logits of shape \(B, 10\); this one gave \(2, 9\)",
        ),
        ({"model": nn.Linear(64, 10)}, r"a batch of shape \(B, 1, 8, 8\) .*; this one failed"),
    ],
)
def test_data_and_models_that_cannot_be_used_are_found_before_the_first_round(how, message):
    with pytest.raises(SpecError, match=message):
        fs.prepare(fs.Experiment(), **how)


def test_a_model_that_no_reply_can_be_like_is_refused():
    class Masked(nn.Linear):
        def __init__(self, persistent: bool) -> None:
            super().__init__(64, 10)
            self.register_buffer("mask", torch.full((3,), -torch.inf), persistent=persistent)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.flatten(1))

    spec = fs.Experiment(method="fedavg", partition=fs.IID(clients=4), training={"rounds": 1})
    with pytest.raises(SpecError, match=r"^model: mask holds NaN or infinity.*persistent=False"):
        fs.run(spec, model=Masked(persistent=True))
    assert fs.run(spec, model=Masked(persistent=False))[-1]["clients_trained"] == 4


def test_statistics_of_a_batch_of_one_are_refused_before_training():
    norm = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    table = {"training": {"batch_norm": "local"}, "evaluation": {"batch_size": 1}}
    with pytest.raises(SpecError, match=r"^evaluation\.batch_size = 1: .*two samples"):
        fs.prepare(fs.Experiment.from_table(table), model=norm)
    with pytest.raises(SpecError, match=r"^training\.batch_norm = 'local': Stratify's statistics"):
        fs.prepare(fs.Experiment.from_table({**table, "method": "stratify", "evaluation": {}}), model=norm)
    with pytest.raises(SpecError, match=r"^training\.batch_size = 1: BatchNorm needs at least two"):
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
