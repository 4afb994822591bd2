from __future__ import annotations

import pytest
import torch
from torch import nn

import fedstrata as fs
from fedstrata.base import records
from fedstrata.runs import checkpoint


@pytest.mark.slow
def test_with_local_statistics_only_batchnorms_buffers_stay_with_the_client(tmp_path):
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(64, 6).requires_grad_(False)
            self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 10)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.seen += 1
            return self.head(self.norm(self.frozen(x.flatten(1))))

    table = {"partition": {"name": "iid", "clients": 3}, "training": {"rounds": 1, "batch_norm": "local"}}
    params = fs.run(fs.Experiment.from_table(table), model=Mixed(), out=tmp_path).params
    kept = records.decode(checkpoint.load(tmp_path / "checkpoint").clients[0].read_bytes())["buffers"]
    assert set(kept) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert params["seen"] > 0
    assert not params["norm.running_mean"].any()
