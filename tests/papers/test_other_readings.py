"""SCAFFOLD as published code has it, beside ours: what differs, to the last bit where it can be."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedstrata as fs

PUBLISHED = "fedstrata.papers.other_readings:PublishedSCAFFOLD"
LOST = "fedstrata.papers.other_readings:LostSCAFFOLD"


def spec(method: str, clients: int, invited: int, **training) -> fs.Experiment:
    return fs.Experiment(
        data={"name": "digits", "limit": 120},
        partition={"name": "iid", "clients": clients},
        method=method,
        model={"name": "mlp", "hidden": []},
        training={"clients_per_round": invited, "local_epochs": 1, "batch_size": 10, "lr": 0.1, **training},
        evaluation={"every": 0},
    )


def test_c_moves_by_the_mean_of_those_who_are_there(start):
    ours, theirs = start(spec("scaffold", 4, 1)), start(spec(PUBLISHED, 4, 1))
    ours.step()
    theirs.step()
    for name, c in ours.state.objective.items():
        assert c.abs().max() > 0
        torch.testing.assert_close(theirs.state.objective[name], 4 * c)  # |S|/N = 1/4


def test_with_momentum_a_step_counts_as_a_plain_one(start):
    started = start(spec(PUBLISHED, 1, 1, momentum=0.5, clip=10.0))
    before = {name: w.clone() for name, w in started.state.weights.params.items()}
    started.step()
    for name, c in started.state.objective.items():
        moved = before[name] - started.state.weights.params[name]
        torch.testing.assert_close(c, moved / (12 * 0.1))  # K = 12 batches, η = 0.1


def test_ours_refuses_momentum(start):
    with pytest.raises(fs.SpecError, match="plain SGD"):
        start(spec("scaffold", 1, 1, momentum=0.5))


def test_whose_reply_is_lost_has_trained_all_the_same(start):
    started = start(spec(LOST, 6, 6))
    metrics = started.step()
    assert metrics["clients_returned"] == 6
    arrived = fs.Bernoulli(p=0.5).online(np.arange(6), 1, 0).sum()
    assert 0 < arrived < 6
    # Everybody has a c_k of its own, and the server's c knows of those alone whose reply arrived.
    total = {name: torch.zeros_like(c) for name, c in started.state.objective.items()}
    there = set(np.flatnonzero(fs.Bernoulli(p=0.5).online(np.arange(6), 1, 0)).tolist())
    for client in range(6):
        (mine,) = started.store.get(client).values()
        assert any(c.abs().max() > 0 for c in mine.values())
        if client in there:
            total = {name: c + mine[name] for name, c in total.items()}
    for name, c in started.state.objective.items():
        torch.testing.assert_close(c, total[name] / 6)
