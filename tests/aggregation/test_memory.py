"""Aggregators that remember clients between rounds."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import nn

import fedstrata as fs
from fedstrata.aggregation.base import Aggregator, Mean
from fedstrata.base.records import decode, encode


class Absences(Mean):
    """The plain mean, which counts for each client the rounds in which it was invited but did not answer."""

    def init(self, config):
        return {"server": None, "absences": np.zeros(config.clients, dtype=np.int64)}

    def combine(self, weights, state, selection, replies):
        absences = state["absences"].copy()
        absences[np.setdiff1d(selection.clients, list(replies))] += 1
        after, server = super().combine(weights, state["server"], selection, replies)
        return after, {"server": server, "absences": absences}


def spec(aggregator: Aggregator, availability: Any = "always", **training: Any) -> fs.Experiment:
    """Three clients with one, two and four of the seven samples, all invited in each round."""
    return fs.Experiment(
        partition={"name": "given", "indices": [[0], [1, 2], [3, 4, 5, 6]]},
        availability=availability,
        method={"name": "fedavg", "aggregator": aggregator},
        training={"clients_per_round": 3, "local_steps": 2, "lr": 0.5, **training},
        evaluation={"every": 0, "checkpoint_every": 1},
    )


def test_a_memory_sees_who_was_absent_also_if_nobody_answers(start, seven, trace):
    started = start(spec(Absences(), trace({0: [1, 3], 1: [3], 2: [1, 3]})), seven, nn.Linear(2, 3))
    seen = [started.state.aggregator["absences"].tolist()]
    for _ in range(3):
        started.step()
        seen.append(started.state.aggregator["absences"].tolist())
    assert seen == [[0, 0, 0], [0, 1, 0], [1, 2, 1], [1, 2, 1]]


def test_a_client_whose_reply_is_late_or_refused_is_absent(start, seven):
    late = {"name": "always", "deadline": 1.0, "seconds_per_sample": 0.2}
    started = start(spec(Absences(), late, local_steps=None, local_epochs=2), seven, nn.Linear(2, 3))
    started.step()
    assert started.state.aggregator["absences"].tolist() == [0, 0, 1]  # 2 × 4 × 0.2 s is more than 1 s


def same(one: Any, two: Any) -> bool:
    return encode(one) == encode(two)


def test_a_state_survives_encoding(start, seven):
    started = start(spec(Absences()), seven, nn.Linear(2, 3))
    started.step()
    assert same(decode(encode(started.state)), started.state)
