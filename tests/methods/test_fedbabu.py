"""FedBABU: the head stays, and may be tuned for evaluation."""

from __future__ import annotations

import pytest
import torch
from skewed import LEFT_OVER, ONE_CLASS

import fedstrata as fs
from fedstrata.base.errors import SpecError
from fedstrata.methods.head_tuning import HeadTuning
from fedstrata.runs import checkpoint
from fedstrata.runs.preparation import prepare

SERVER = {"name": "size", "server": {"optimizer": "adam", "lr": 0.1, "weight_decay": 0.1}}


@pytest.mark.parametrize("aggregator", ["size", SERVER])
def test_the_head_of_fedbabu_never_moves(aggregator, start):
    method = {"name": "fedbabu", "aggregator": aggregator}
    training = {**ONE_CLASS["training"], "weight_decay": 0.01, "momentum": 0.5}
    started = start(fs.Experiment.from_table({**ONE_CLASS, "method": method, "training": training}))
    before = started.state.weights.params
    for _ in range(2):
        started.step()
    after = started.state.weights.params
    for name in after:
        in_head = name in started.config.model.head_names
        assert (after[name].numpy().tobytes() == before[name].numpy().tobytes()) == in_head


@pytest.mark.slow
def test_fedbabus_head_is_tuned_for_evaluation_alone(tmp_path):
    """The runs' bodies are the same, and the plain one's model with its head tuned is what the other one leaves."""
    tuning = {"per_class": 5, "steps": 20}
    plain = fs.run({**LEFT_OVER, "method": "fedbabu"}, out=tmp_path / "plain")
    table = {**LEFT_OVER, "method": {"name": "fedbabu", "fine_tune": tuning}}
    tuned = fs.run(table, out=tmp_path / "tuned")
    config = prepare(fs.Experiment.from_table(table)).config
    kept = [checkpoint.load(tmp_path / name / "checkpoint").state.weights for name in ("plain", "tuned")]
    assert all(torch.equal(w, kept[1].params[name]) for name, w in kept[0].params.items())
    expected, _ = HeadTuning(**tuning).tuned(config, kept[0])
    for name, w in expected.params.items():
        assert torch.equal(tuned.params[name], w)
        assert torch.equal(plain.params[name], w) == (name not in config.model.head_names)
    assert tuned.best_accuracy > plain.best_accuracy


def test_fedbabu_needs_a_body_and_samples_to_tune_with():
    with pytest.raises(SpecError, match=r"^model = .*has only a head"):
        fs.run({**LEFT_OVER, "method": "fedbabu", "model": {"name": "mlp", "hidden": []}})
    with pytest.raises(SpecError, match=r"^method\.fine_tune\.per_class = 100: .* of the rarest class"):
        fs.run({**LEFT_OVER, "method": {"name": "fedbabu", "fine_tune": {"per_class": 100}}})
