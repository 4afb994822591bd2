"""The loop over rounds, driven by hand and by those who stand on it."""

from __future__ import annotations

import fedstrata as fs


def test_a_method_cannot_write_over_the_books():
    class Liar(fs.FedAvg):
        def run_round(self, federation, state):
            state, metrics = super().run_round(federation, state)
            return state, {**metrics, "round": 99, "accuracy": 1.0, "own": 7}

    (record,) = fs.run(fs.Experiment(method=Liar(), training={"rounds": 1}))
    assert (record["round"], record["own"]) == (1, 7)
    assert record["accuracy"] < 1
