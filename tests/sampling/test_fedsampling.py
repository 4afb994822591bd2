"""FedSampling: one sample of the data of all clients together."""

from __future__ import annotations

import numpy as np
import pytest

import fedstrata as fs
from fedstrata.base import records
from fedstrata.base.errors import SpecError
from fedstrata.sampling.fedsampling import Everyone, FedSamplingData


def test_everybody_takes_part(tiny):
    federation = tiny(5, clients_per_round=2)
    selection, _ = Everyone().select(federation, None, federation.weights)
    assert selection.clients.tolist() == [0, 1, 2, 3, 4]


def test_the_probability_is_wanted_over_there(tiny):
    federation = tiny(3, sizes=[10, 20, 70])
    sampler = FedSamplingData(samples=25)
    keep, state, metrics = sampler.keep(federation, sampler.init(federation), [0, 1, 2])
    assert keep == 0.25
    assert metrics == {"estimated_samples": 100.0, "requested_samples": 25.0, "keep": 0.25}
    assert records.decode(records.encode(state)).answers.tolist() == [10, 20, 70]
    assert FedSamplingData(samples=500).keep(federation, state, [0, 1, 2])[0] == 1.0


def test_a_client_answers_once_unless_it_shall_answer_anew(tiny):
    federation = tiny(4)
    once, anew = FedSamplingData(epsilon=2.0, bound=50), FedSamplingData(epsilon=2.0, bound=50, reuse=False)
    state, other = once.init(federation), anew.init(federation)
    estimates = []
    for round in range(1, 5):
        federation.begin(round)
        _, state, metrics = once.keep(federation, state, [0, 2] if round == 1 else [0, 1, 2, 3])
        # Round 1: two answers; round 2: those of the two others; then none.
        assert sorted(federation.log.invited) == {1: [0, 2], 2: [1, 3]}.get(round, [])
        federation.begin(round)
        _, other, _ = anew.keep(federation, other, [0, 1, 2, 3])
        assert len(federation.log.invited) == 4
        estimates.append((metrics["estimated_samples"], tuple(other.answers)))
    assert len({estimate for estimate, _ in estimates[1:]}) == 1
    assert len({answers for _, answers in estimates}) == 4


@pytest.mark.parametrize(("reuse", "known"), [(True, [0, 1, 2, 3]), (False, [1, 3])])
def test_an_answer_is_kept_only_where_it_is_used_again(tiny, reuse, known):
    federation = tiny(4)
    sampler = FedSamplingData(epsilon=2.0, bound=50, reuse=reuse)
    state = sampler.init(federation)
    for round, clients in ((1, [0, 2]), (2, [1, 3])):
        federation.begin(round)
        _, state, _ = sampler.keep(federation, state, clients)
    assert state.known.tolist() == known


@pytest.mark.slow
def test_the_estimate_is_unbiased_under_privacy(tiny):
    """Mean over 400 rounds within four standard errors of the truth, 60 clients of 8 samples."""
    federation = tiny(60)
    sampler = FedSamplingData(epsilon=3.0, bound=30, reuse=False)
    state, found = sampler.init(federation), []
    for round in range(1, 401):
        federation.begin(round)
        _, state, metrics = sampler.keep(federation, state, range(60))
        found.append(metrics["estimated_samples"])
    assert abs(np.mean(found) - 480) < 4 * np.std(found) / 20


def test_settings_without_sense_are_refused():
    for settings, key in (({"bound": 1}, "bound"), ({"epsilon": 0.0}, "epsilon"), ({"samples": 0}, "samples")):
        table = {"name": "fedavg", "data_sampler": {"name": "fedsampling", **settings}}
        with pytest.raises(SpecError, match="greater than") as caught:
            fs.Experiment.from_table({"method": table})
        assert caught.value.key == f"method.data_sampler.{key}"


def test_a_bound_that_clips_is_said():
    method = {"name": "fedsampling", "epsilon": 1.0, "bound": 5}
    with pytest.warns(UserWarning, match="samples is clipped for 10 of 10 clients"):
        fs.prepare(fs.Experiment(method=method, partition=fs.IID(clients=10)))
