"""The local engine."""

from __future__ import annotations

import pytest
from torch import nn

import fedstrata as fs
from fedstrata.errors import SpecError


def test_random_layers_in_a_group_are_refused_with_advice():
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 10))
    spec = fs.Experiment(
        method="stratify", partition=fs.IID(clients=3), training={"rounds": 1, "execution": "per-client"}
    )
    with pytest.raises(SpecError, match=r"model: Dropout.*fused"):
        fs.run(spec, model=module)
