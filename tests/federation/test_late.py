from __future__ import annotations

import numpy as np

import fedstrata as fs
from fedstrata.base import records
from fedstrata.clients.handlers.sequential import Visit


def test_what_is_sent_to_a_late_hop_counts(tiny):
    """It was not counted, where that of a late question was."""
    federation = tiny(3, availability=fs.Always(deadline=0.001, seconds_per_sample=1.0))
    task = Visit(1)
    relayed = federation.relay(
        [(client, task) for client in range(3)], federation.weights, work=lambda _, samples: samples
    )
    assert relayed.replies == {}
    assert federation.log.late == {0, 1, 2}
    each = records.size(task) + records.size(federation.weights)
    assert federation.log.metrics()["bytes_down"] == 3 * each
    assert (federation.log.hops, federation.log.exchanges) == (0, 0)


def test_a_hop_to_who_is_away_costs_nothing(tiny):
    federation = tiny(3, availability=fs.Bernoulli(p=1e-9))
    federation.relay([(0, Visit(1))], federation.weights)
    assert federation.log.metrics()["bytes_down"] == 0
    assert np.array_equal(sorted(federation.log.dropped), [0])
