from __future__ import annotations

import pytest

import fedstrata as fs
from fedstrata.audits.replay import replay
from fedstrata.clients.client import StateStore


@pytest.mark.slow
def test_an_audit_reads_states_that_went_to_disk(tmp_path, monkeypatch):
    """Their files were removed before they were read."""
    experiment = fs.Experiment.from_table(
        {
            "data": {"name": "digits", "limit": 200},
            "partition": {"name": "iid", "clients": 4},
            "method": {"name": "rebafl"},
            "model": {"name": "mlp", "hidden": [8]},
            "training": {"rounds": 2, "local_steps": 1, "batch_norm": "average"},
            "evaluation": {"every": 0, "checkpoint_every": 1},
        }
    )
    fs.run(experiment, out=tmp_path / "run")
    init = StateStore.__init__
    monkeypatch.setattr(StateStore, "__init__", lambda self, memory=1, folder=None: init(self, memory, folder))
    sent = replay(fs.prepare(experiment), tmp_path / "run", 4, 0, lambda *_: None)
    assert len(sent) == 4
    assert all(one.difference == 0 for one in sent)
