"""What stays in float32 where a model computes in bf16."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fedstrata as fs


@pytest.mark.slow
def test_statistics_of_batchnorm_are_not_rounded_to_bf16() -> None:
    """They were, in 8 bits, where clients trained side by side: 0.8063 for 0.8005."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))
    for execution in ("fused", "per-client"):
        training = {"rounds": 1, "local_steps": 2, "execution": execution, "workers": 1}
        exact, rough = (
            fs.run(fs.Experiment(method="fedavg", training={**training, "precision": name}), model=module).params
            for name in ("float32", "bf16")
        )
        for name in ("1.running_mean", "1.running_var"):
            assert rough[name].dtype == torch.float32
            # The layer sees the inputs themselves, so that nothing before it was rounded but they.
            torch.testing.assert_close(rough[name], exact[name], rtol=1e-3, atol=1e-3)
            assert not torch.equal(rough[name], rough[name].bfloat16().float())
