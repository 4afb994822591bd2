from __future__ import annotations

import pickle

import numpy as np
import torch
from skewed import LEFT_OVER

import fedstrata as fs
from fedstrata.runs.preparation import prepare


def test_the_servers_samples_are_balanced_and_nobody_elses():
    prepared = prepare(fs.Experiment.from_table(LEFT_OVER))
    server_data, held = prepared.config.server_data, set(prepared.assignment.indices.tolist())
    assert not held & set(server_data.indices().tolist())
    assert len(held) + len(server_data.indices()) == prepared.data.train_size
    x, y = server_data.balanced(5, np.random.default_rng(0))
    assert torch.bincount(y).tolist() == [5] * 10
    mine = {tuple(row) for row in prepared.data.inputs(server_data.indices()).flatten(1).tolist()}
    assert all(tuple(row) in mine for row in x.flatten(1).tolist())


def test_the_servers_samples_do_not_travel():
    config = prepare(fs.Experiment.from_table(LEFT_OVER)).config
    assert pickle.loads(pickle.dumps(config.server_data)) is None
