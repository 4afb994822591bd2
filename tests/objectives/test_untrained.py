from __future__ import annotations

import pytest
import torch

import fedstrata as fs
from fedstrata.federation.messages import Fit
from fedstrata.objectives.moon import Contrastive


@pytest.mark.slow
def test_a_visit_without_a_step_leaves_moons_previous_model(tiny):
    """It was replaced by the global model, towards which the loss then pulled and pushed at once."""
    federation = tiny(2, objective=Contrastive())
    federation.ask([0], Fit(1, federation.weights, {}, 1.0))
    before = federation.store.get(0)["objective"]
    (reply,) = federation.ask([0], Fit(2, federation.weights, {}, 1e-9)).values()
    assert not reply.trained
    after = federation.store.get(0)["objective"]
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_first_visit_without_a_step_leaves_nothing(tiny):
    federation = tiny(2, objective=Contrastive())
    federation.ask([1], Fit(1, federation.weights, {}, 1e-9))
    assert federation.store.get(1).get("objective") is None


@pytest.mark.slow
def test_a_mean_loss_under_privacy_is_of_those_that_trained():
    spec = fs.Experiment.from_table(
        {
            "partition": {"name": "iid", "clients": 20},
            "method": {"name": "fedstas", "strata": 2, "epsilon": 3.0, "bound": 200, "samples": 20},
            "training": {"rounds": 1, "clients_per_round": 20, "local_steps": 1},
        }
    )
    (record,) = fs.run(spec)
    assert record["train_loss"] > 1.0
