from __future__ import annotations

import numpy as np
import torch
from torch import nn

import fedstrata as fs
from fedstrata.federation.messages import Weights
from fedstrata.handlers.evaluation import evaluate


def test_evaluation_with_batch_statistics_has_no_batch_of_one():
    norm = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    prepared = fs.prepare(fs.Experiment(), model=norm)
    model = prepared.config.model
    weights = Weights(model.params(), model.buffers())
    size = len(prepared.data.y_test) - 1
    score = evaluate(model, weights, prepared.data, batch_size=size, batch_statistics=True)
    assert np.isfinite(score.loss)
    assert torch.equal(model.buffers()["2.running_mean"], torch.zeros(8))
