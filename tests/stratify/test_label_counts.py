"""The clients' label counts, for a sampler of a user's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedstrata as fs
from fedstrata.clients.client import StateStore
from fedstrata.engines.local import LocalEngine
from fedstrata.runs.simulation import make_context
from fedstrata.sampling.label_counts import LabelReply


class RareLabels(fs.ClientSampler):
    """The clients with the largest part of the samples of rare classes."""

    def allowed(self, agreed):
        return [fs.allowed_label_counts()]

    def init(self, federation):
        return fs.LabelCounts.ask(federation)

    def select(self, federation, state, weights):
        clients, counts = state.among(federation.candidates())
        share = (counts / counts.sum(axis=0).clip(1)).sum(axis=1)
        return fs.Selection.plain(clients[(-share).argsort()[:1]], len(clients)), state


def spec(**sections):
    return fs.Experiment(
        method=fs.FedAvg(client_sampler=RareLabels()),
        training={"rounds": 2, "local_steps": 1, "clients_per_round": 1},
        evaluation={"every": 0},
        **sections,
    )


def of_three():
    """Client 0 holds labels 0 0 0 1, client 1 labels 0 0 1, client 2 label 2 once."""
    y = np.array([0, 0, 0, 1, 0, 0, 1, 2])
    x = np.arange(16, dtype=np.float32).reshape(8, 2)
    return fs.from_arrays(x, y, x, y, clients=np.array([0, 0, 0, 0, 1, 1, 1, 2]))


def test_counts_are_those_of_the_data():
    with fs.Simulation(fs.prepare(spec(partition=fs.Natural()), data=of_three())) as simulation:
        known = simulation.state.clients
        assert known.known.tolist() == [0, 1, 2]
        assert known.counts.tolist() == [[3, 1, 0], [2, 1, 0], [0, 0, 1]]
        clients, counts = known.among(np.array([2, 0]))
        assert (clients.tolist(), counts.tolist()) == ([0, 2], [[3, 1, 0], [0, 0, 1]])


def test_a_sampler_uses_them():
    with fs.Simulation(fs.prepare(spec(partition=fs.Natural()), data=of_three())) as simulation:
        for _ in simulation:  # shares: 3/5 + 1/2, 2/5 + 1/2 and 1
            assert simulation.federation.log.invited == {0}


def test_rows_add_up_to_sizes_and_classes_below_the_minimum_are_left_out():
    digits = spec(partition=fs.Dirichlet(alpha=0.3, clients=6))
    with fs.Simulation(fs.prepare(digits)) as simulation:
        assert simulation.state.clients.counts.sum(axis=1).tolist() == simulation.prepared.config.sizes.tolist()
        everything = simulation.state.clients.counts
    with fs.Simulation(fs.prepare(digits.replace(privacy={"min_samples": 20}))) as simulation:
        assert (simulation.state.clients.counts == np.where(everything < 20, 0, everything)).all()


@pytest.mark.parametrize("label", [3, -1, 2**62])
def test_a_label_that_the_data_do_not_have_is_refused(label):
    class Lying(LocalEngine):
        def ask(self, requests, **rest):
            outcomes = super().ask(requests, **rest)
            return {**outcomes, 1: LabelReply(torch.tensor([0, label]), outcomes[1].counts)}

    prepared = fs.prepare(spec(partition=fs.Natural()), data=of_three())
    with fs.Simulation(prepared, Lying(make_context(prepared), StateStore())) as simulation:
        assert simulation.state.clients.known.tolist() == [0, 2]
        assert simulation.state.clients.counts.tolist() == [[3, 1, 0], [0, 0, 1]]
