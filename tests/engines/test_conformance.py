"""What every engine must do alike; a new one is tested by adding its name to ``ENGINES``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fedstrata as fs
from fedstrata.base import outer, records
from fedstrata.clients.client import StateStore
from fedstrata.engines.local import LocalEngine
from fedstrata.federation.engine import Engine
from fedstrata.federation.federation import Federation
from fedstrata.runs.preparation import Prepared
from fedstrata.runs.simulation import make_context

sys.path.insert(0, str(Path(__file__).parent))
from probes import Meet, Probe, Walk

CLIENTS = 4
SPEC = fs.Experiment.from_table(
    {
        "method": "probes:Probes",
        "partition": {"name": "iid", "clients": CLIENTS},
        "data": {"name": "digits", "limit": 40},
        "model": {"name": "mlp", "hidden": []},
        "training": {"rounds": 1, "execution": "per-client"},
        "evaluation": {"metrics": ["accuracy", "auroc", "ece"], "client_test": 0.3},
    }
)
Make = Callable[[Prepared, Path, pytest.FixtureRequest], Engine]


def local(prepared: Prepared, place: Path, request: Any) -> Engine:
    return LocalEngine(make_context(prepared), StateStore())


def workers(prepared: Prepared, place: Path, request: Any) -> Engine:
    return LocalEngine(make_context(prepared), StateStore(), workers=2)


def on_ray(prepared: Prepared, place: Path, request: pytest.FixtureRequest) -> Engine:
    from fedstrata.engines.ray import RayEngine

    return RayEngine(make_context(prepared), StateStore(), pool=request.getfixturevalue("pool"))


ENGINES: dict[str, Make] = {"local": local, "workers": workers, "ray": on_ray}
LARGEST: list[str] = []
"""Where engines say how large a message may be."""
if "sites" in outer.installed():
    from near_sites import near_sites, through_the_server

    ENGINES |= {"sites": near_sites, "sites, through the server": through_the_server}
    LARGEST.append("fedstrata.sites.site_server.LARGEST_ANSWER")


STARTS_SERVERS = [pytest.mark.slow, pytest.mark.xdist_group("servers")]


@pytest.fixture(params=[pytest.param(name, marks=STARTS_SERVERS if name == "ray" else []) for name in ENGINES])
def federation(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Federation]:
    if request.param == "workers":  # such small work would not pay
        monkeypatch.setattr("fedstrata.engines.local.STARTING_PAYS", -1.0)
        monkeypatch.setattr("fedstrata.engines.local.ASKING_PAYS", -1.0)
    prepared = fs.prepare(SPEC)
    engine = ENGINES[request.param](prepared, tmp_path, request)
    made = Federation(engine, prepared.config, fs.Always(), "conformance")
    made.begin(1)
    yield made
    engine.close()


def times(federation: Federation, request: Probe, who: Any = range(CLIENTS), **how: Any) -> dict[int, int]:
    return {client: reply.times for client, reply in federation.ask(who, request, **how).items()}


def kinds(federation: Federation) -> list[tuple[str, tuple[int, ...]]]:
    return [(event["kind"], tuple(event["clients"])) for event in federation.events]


ALL = dict.fromkeys(range(CLIENTS), 1)


def test_a_state_counts_once_its_answer_did(federation: Federation) -> None:
    assert times(federation, Probe()) == ALL
    assert times(federation, Probe()) == {0: 2, 1: 2, 2: 2, 3: 2}
    assert times(federation, Probe(), [2]) == {2: 3}
    assert times(federation, Probe()) == {0: 3, 1: 3, 2: 4, 3: 3}


@pytest.mark.parametrize("how", ["raise", "nan", "kind", "type", "check"])
def test_an_answer_that_does_not_count_leaves_no_trace(federation: Federation, how: str) -> None:
    assert times(federation, Probe()) == ALL
    assert times(federation, Probe(culprits=(1, 3), how=how)) == {0: 2, 2: 2}
    assert [clients for _, clients in kinds(federation)] == [(1,), (3,)]
    assert federation.log.failed == {1, 3}
    assert times(federation, Probe()) == {0: 3, 1: 2, 2: 3, 3: 2}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "nan", "kind"])
def test_a_sum_is_of_those_that_count(federation: Federation, how: str) -> None:
    summed = federation.ask_sum(range(CLIENTS), Probe(culprits=(0,), how=how))
    assert (summed.clients, summed.reply.times) == ([1, 2, 3], 3)
    assert times(federation, Probe()) == {0: 1, 1: 2, 2: 2, 3: 2}


def test_a_group_adds_up(federation: Federation) -> None:
    replies = federation.ask(range(CLIENTS), Meet(), together=True)
    assert {client: reply.values.tolist() for client, reply in replies.items()} == {
        client: [6.0] for client in range(CLIENTS)
    }
    assert times(federation, Meet(), [1, 3], together=True) == {1: 2, 3: 2}


@pytest.mark.parametrize(("how", "late"), [("raise", False), ("raise", True), ("nan", True), ("check", True)])
def test_a_group_stands_or_falls_together(federation: Federation, how: str, late: bool) -> None:
    """Everybody's answer holds parts of a sum to which the culprit has added, or for which it is missing."""
    assert times(federation, Meet(), together=True) == ALL
    assert times(federation, Meet(culprits=(2,), how=how, late=late), together=True) == {}
    assert federation.log.failed == {2}
    assert times(federation, Meet(), together=True) == dict.fromkeys(range(CLIENTS), 2)


def walked(federation: Federation, tasks: list[tuple[int, Walk]]) -> tuple[float, dict[int, int]]:
    model = federation.config.model
    from fedstrata.federation.messages import Weights

    start = Weights({name: torch.zeros_like(w) for name, w in model.params().items()}, model.buffers())
    relayed = federation.relay(tasks, start)
    (moved,) = {float(value) for w in relayed.weights.params.values() for value in w.flatten()}
    return moved, {position: reply.times for position, reply in relayed.replies.items()}


def test_a_relay_counts_every_visit(federation: Federation) -> None:
    """Also the last one's, and in the next relay too."""
    tasks = [(client, Walk()) for client in (0, 1, 2, 3, 0, 0, 3)]
    assert walked(federation, tasks) == (7.0, {0: 1, 1: 1, 2: 1, 3: 1, 4: 2, 5: 3, 6: 2})
    assert walked(federation, [(3, Walk()), (0, Walk())]) == (2.0, {0: 3, 1: 4})
    assert times(federation, Probe()) == {0: 5, 1: 2, 2: 2, 3: 4}


@pytest.mark.parametrize("how", ["raise", "nan", "kind", "check"])
def test_a_hop_that_does_not_count_leaves_no_trace(federation: Federation, how: str) -> None:
    """Neither in the model, which goes back to the last good one, nor in its client's state."""
    bad = Walk(culprits=(1,), how=how)
    assert walked(federation, [(0, bad), (1, bad), (2, bad), (0, bad)]) == (3.0, {0: 1, 2: 1, 3: 2})
    assert federation.log.failed == {1}
    assert walked(federation, [(1, Walk()), (2, Walk())]) == (2.0, {0: 1, 1: 2})


def test_a_model_that_is_spoilt_on_its_way_is_not_passed_on(federation: Federation) -> None:
    bad = Walk(culprits=(1,), how="model")
    moved, replies = walked(federation, [(0, bad), (1, bad)])
    assert moved == 1.0
    assert replies == {0: 1}


@pytest.mark.slow
def test_a_slow_client_counts(federation: Federation) -> None:
    assert times(federation, Probe(culprits=(1,), how="slow")) == ALL
    assert times(federation, Meet(culprits=(2,), how="slow"), together=True) == dict.fromkeys(range(CLIENTS), 2)
    assert walked(federation, [(0, Walk()), (1, Walk(culprits=(1,), how="slow"))]) == (2.0, {0: 3, 1: 3})


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 1, 1 << 21])
def test_answers_of_any_size(federation: Federation, size: int) -> None:
    replies = federation.ask(range(CLIENTS), Probe(size=size))
    assert {client: reply.values.shape for client, reply in replies.items()} == dict.fromkeys(
        range(CLIENTS), torch.Size([size])
    )


def test_answers_that_do_not_fit_into_one_message_come_in_several(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in LARGEST:
        monkeypatch.setattr(limit, 1000)
    assert times(federation, Probe(size=200)) == ALL
    assert times(federation, Probe(size=200)) == dict.fromkeys(range(CLIENTS), 2)


@pytest.mark.parametrize("epochs", [0, 2])
def test_a_model_is_measured_alike_and_nothing_changes(federation: Federation, epochs: int) -> None:
    from fedstrata.evaluation.messages import Evaluate
    from fedstrata.federation.messages import Weights

    prepared = fs.prepare(SPEC)
    model = prepared.config.model
    request = Evaluate(1, Weights(model.params(), model.buffers()), "test", True, epochs, 8, 15)
    replies, size = federation.measure(request)
    near = Federation(LocalEngine(make_context(prepared), StateStore()), prepared.config, fs.Always())
    expected, _ = near.measure(request)
    assert replies.keys() == expected.keys() == ALL.keys()
    for client, reply in replies.items():
        assert reply.values == expected[client].values
        assert records.encode(reply.sums) == records.encode(expected[client].sums)
    assert size == records.size(request) * CLIENTS + sum(records.size(reply) for reply in replies.values())
    assert (federation.log.bytes_up, federation.log.invited) == (0, set())
    assert times(federation, Probe()) == ALL


def test_nobody_to_ask(federation: Federation) -> None:
    assert federation.ask({}, {}) == {}
    assert federation.ask_sum({}, {}) is None
    assert walked(federation, []) == (0.0, {})
