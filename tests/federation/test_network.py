"""Transfers that take time: ten megabits a second are 1,250,000 bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fedstrata as fs
from fedstrata.base import records
from fedstrata.base.errors import SpecError
from fedstrata.clients.handlers.sequential import Visit
from fedstrata.federation.messages import Fit

SLOW: dict[str, Any] = {"bandwidth_up": 0.01, "bandwidth_down": 0.1, "latency": 0.5, "seconds_per_sample": 0.25}


def seconds(size: int, bandwidth: float) -> float:
    return 0.5 + 8 * size / (bandwidth * 1e6)


def asked(federation: Any, **how: Any) -> Any:
    request = Fit(1, federation.weights, {}, 1.0)
    return request, federation.ask(range(federation.config.clients), request, work=float, **how)


def test_an_exchange_takes_down_work_and_up(tiny):
    federation = tiny(3, availability=fs.Always(**SLOW))
    request, replies = asked(federation)
    work = 0.25 * federation.config.sizes.max()
    expected = seconds(records.size(request), 0.1) + work + seconds(records.size(replies[0]), 0.01)
    assert federation.log.simulated_seconds == pytest.approx(expected)


def test_who_gets_the_model_too_late_is_not_asked_and_who_answers_too_late_does_not_count(tiny):
    settings = {**SLOW, "speed_spread": 1.0}
    federation = tiny(3, availability=fs.Always(**settings))
    request, replies = asked(federation)
    clients, sizes = np.arange(3), federation.config.sizes
    arrives = federation.availability.seconds(clients, sizes.astype(float), federation.config.seed)
    arrives = arrives + seconds(records.size(request), 0.1)
    answered = arrives + seconds(records.size(replies[0]), 0.01)
    assert len(set(answered.tolist())) == 3
    for deadline in (arrives.min() - 0.01, answered.min() - 0.01, np.median(answered) + 0.01, 1e6):
        there = set(clients[answered <= deadline].tolist())
        federation = tiny(3, availability=fs.Always(**settings, deadline=deadline))
        _, replies = asked(federation)
        assert set(replies) == there
        assert federation.log.late == {0, 1, 2} - there
        expected = deadline if len(there) < 3 else answered.max()
        assert federation.log.simulated_seconds == pytest.approx(expected)
        # What came too late is no part of the books.
        assert federation.log.bytes_up == sum(records.size(reply) for reply in replies.values())


@pytest.mark.parametrize("network", [False, True])
def test_a_relay_takes_the_way_and_the_work_of_every_hop(tiny, network):
    settings = SLOW if network else {"seconds_per_sample": 0.25, "deadline": 1e6}
    federation, task = tiny(3, availability=fs.Always(**settings)), Visit(1)
    federation.relay([(k, task) for k in range(3)], federation.weights, work=lambda _, samples: samples)
    way = seconds(records.size(task) + records.size(federation.weights), 0.1) if network else 0.0
    assert federation.log.hops == 3
    assert federation.log.simulated_seconds == pytest.approx(3 * (way + 0.25 * 8))


@pytest.mark.slow
@pytest.mark.parametrize("execution", ["fused", "per-client"])
def test_a_part_of_a_sum_may_come_too_late(execution):
    spec = {
        "data": {"name": "digits", "limit": 200},
        "partition": {"name": "iid", "clients": 5},
        "method": {"name": "stratify", "cap": 10},
        "availability": {"name": "always", "bandwidth_up": 1, "speed_spread": 2.0},
        "training": {"rounds": 1, "batch_size": 25, "execution": execution},
    }
    assert fs.run(spec)[0]["clients_late"] == 0
    # To send a gradient takes longer than this, however fast a client computes it.
    hurried = {**spec, "availability": {**spec["availability"], "deadline": 0.01}}
    with pytest.warns(UserWarning, match="never changed"):
        (record,) = fs.run(hurried)
    assert (record["clients_late"], record["clients_returned"]) == (5, 5)


@pytest.mark.slow
def test_codecs_buy_time():
    spec = {
        "data": {"name": "digits", "limit": 200},
        "partition": {"name": "iid", "clients": 5},
        "method": {"name": "stratify", "cap": 10},
        "availability": {"name": "always", "bandwidth_up": 1, "bandwidth_down": 10, "latency": 0.01},
        "training": {"rounds": 1, "batch_size": 25},
    }
    codec = {"name": "powersgd", "rank": 1}
    dense, cheap = fs.run(spec), fs.run({**spec, "communication": {"up": codec, "down": codec}})
    assert cheap[0]["simulated_seconds"] < 0.5 * dense[0]["simulated_seconds"]


@pytest.mark.slow
@pytest.mark.parametrize("execution", ["fused", "per-client"])
def test_a_sum_waits_for_its_last_part(execution):
    spec = {
        "data": {"name": "digits", "limit": 200},
        "partition": {"name": "iid", "clients": 5},
        "method": {"name": "stratify", "cap": 10},
        "availability": {"name": "always", "bandwidth_up": 1},
        "training": {"rounds": 1, "batch_size": 25, "execution": execution},
    }
    assert fs.run(spec)[0]["simulated_seconds"] == pytest.approx(
        fs.run({**spec, "training": {**spec["training"], "execution": "per-client"}})[0]["simulated_seconds"]
    )


@pytest.mark.parametrize(("key", "value"), [("bandwidth_up", 0), ("bandwidth_down", -1), ("latency", -0.1)])
def test_wrong_settings_are_named(key, value):
    with pytest.raises(SpecError, match=f"{key} = {value}"):
        fs.Always(**{key: value})
