"""A client that took no step has shown nothing: zero is not a measurement."""

from __future__ import annotations

import numpy as np
import pytest

import fedstrata as fs
from fedstrata.base.errors import SpecError
from fedstrata.federation.messages import Fit
from fedstrata.runs.simulation import Simulation
from fedstrata.sampling.clustered import Clustered
from fedstrata.sampling.fedssar import FedSSARSampler
from fedstrata.sampling.stratified import Stratified

SAMPLERS = {
    "fedsts": Stratified(strata=2, refresh="participants"),
    "clustered": Clustered(),
    "fedssar": FedSSARSampler(),
    "fedssar, updates": FedSSARSampler(features="updates"),
}


def points(state: object) -> np.ndarray:
    return state.points if hasattr(state, "points") else state.sketches.points


@pytest.mark.parametrize("name", SAMPLERS)
def test_what_is_known_of_a_client_stays_when_it_keeps_no_sample(name, tiny):
    federation = tiny(4, clients_per_round=4)
    sampler = SAMPLERS[name]
    _, state = sampler.select(federation, sampler.init(federation), federation.weights)
    request = Fit(1, federation.weights, {}, 1.0)
    state = sampler.observe(state, federation.ask(range(4), request))
    before = points(state).copy()
    assert np.abs(before).sum(axis=1).all()
    # In the next round clients 1 and 2 keep no sample; the others do, and are looked at anew.
    federation.begin(2)
    _, state = sampler.select(federation, state, federation.weights)
    nothing = Fit(2, federation.weights, {}, 1e-9)
    replies = federation.ask(range(3), {0: Fit(2, federation.weights, {}, 1.0), 1: nothing, 2: nothing})
    assert [reply.trained for reply in replies.values()] == [True, False, False]
    after = points(sampler.observe(state, replies))
    np.testing.assert_array_equal(after[[1, 2, 3]], before[[1, 2, 3]])
    assert (after[0] != before[0]).any()


@pytest.mark.slow
def test_nobody_is_starved():
    """Who once kept no sample had Z = 0, was never drawn again, and so could never show another Z."""
    spec = fs.Experiment.from_table(
        {
            "data": "digits",
            "partition": {"name": "iid", "clients": 140},
            "method": {"name": "fedstas", "strata": 5, "refresh": "participants", "fraction": 0.1},
            "model": {"name": "mlp", "hidden": []},
            "training": {"rounds": 60, "clients_per_round": 30, "local_epochs": 1, "lr": 0.05, "workers": 1},
            "evaluation": {"every": 0},
        }
    )
    drawn: list[set[int]] = []
    heard = {}

    def listen(round, replies):
        for client, reply in replies.items():
            if hasattr(reply, "trained"):
                heard.setdefault(round, {})[client] = reply.trained

    with Simulation(fs.prepare(spec), listener=listen) as simulation:
        drawn += [set(heard[record["round"]]) for record in simulation]
    early = {client for round in range(1, 31) for client, trained in heard[round].items() if not trained}
    late = set().union(*drawn[30:])
    assert len(early) > 60  # most of them kept nothing at some time
    assert len(early - late) <= 2  # and nearly all of these were drawn again


@pytest.mark.parametrize(("steps", "longest"), [(None, None), (5, 2.0)])
def test_under_epsilon_updates_do_not_tell_sizes(steps, longest, tiny):
    """Steps are private, so Z was K times the gradient, and who held much was drawn more."""
    spec = {
        "data": {"name": "digits", "limit": 900},
        "partition": {
            "name": "given",
            "indices": [list(range(30 * k, 30 * k + n)) for k, n in enumerate((6, 6, 30, 30))],
        },
        "method": {
            "name": "fedstas",
            "strata": 2,
            "refresh": "participants",
            "epsilon": 3.0,
            "bound": 60,
            "samples": 60,
        },
        "model": {"name": "mlp", "hidden": []},
        "training": {"rounds": 3, "clients_per_round": 4, "batch_size": 6, "lr": 0.01, "workers": 1},
    }
    if steps is None:
        with pytest.raises(SpecError, match="updates would disclose the clients' numbers of samples, which"):
            fs.prepare(fs.Experiment.from_table(spec))
        fs.prepare(fs.Experiment.from_table({**spec, "method": {**spec["method"], "gradients": "asked"}}))
        return
    spec["training"]["local_steps"] = steps
    with Simulation(fs.prepare(fs.Experiment.from_table(spec))) as simulation:
        for _ in simulation:
            pass
        lengths = np.linalg.norm(simulation.state.clients.points, axis=1)
    small, large = lengths[:2].mean(), lengths[2:].mean()
    assert 1 / longest < large / small < longest
