"""The local engine."""

from __future__ import annotations

import threading

import pytest
import torch
from limits import within
from torch import nn

import fedstrata as fs
from fedstrata.base.errors import FedstrataError, SpecError
from fedstrata.base.records import record
from fedstrata.clients.handling import handles
from fedstrata.engines import local
from fedstrata.federation.messages import Reply, Request


def test_random_layers_in_a_group_are_refused_with_advice():
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 10))
    spec = fs.Experiment(
        method="stratify", partition=fs.IID(clients=3), training={"rounds": 1, "execution": "per-client"}
    )
    with pytest.raises(SpecError, match=r"model: the model draws random numbers.*fused"):
        fs.run(spec, model=module)


@record("test/Gather")
class Gather(Request):
    """For tests: add up twice, unless something else is to happen to a client before the second sum."""

    instead: str = ""
    to: int = 2


@record("test/Gathered")
class Gathered(Reply):
    total: float


RELEASE = threading.Event()


@handles(Gather)
def gather(client, request):
    total = client.group.all_reduce_sum(torch.ones(1))
    if client.number == request.to:
        if request.instead == "return":
            return Gathered(0.0)
        if request.instead == "raise":
            raise ValueError("client of a test")
        if request.instead == "exit":
            raise SystemExit(3)
        if request.instead == "hang":
            RELEASE.wait(60)
    return Gathered(float(client.group.all_reduce_sum(total)))


def gathered(federation, **fields):
    request = Gather(**fields)
    return within(60, lambda: federation.ask(range(4), request, together=True))


def test_a_group_adds_up(tiny):
    assert [reply.total for reply in gathered(tiny(4, handlers=(gather,))).values()] == [16.0] * 4


@pytest.mark.parametrize("instead", ["return", "raise", "exit"])
def test_a_group_ends_when_a_member_does_before_its_sum(tiny, instead):
    federation = tiny(4, handlers=(gather,))
    assert gathered(federation, instead=instead) == {}
    if instead == "return":
        assert len(federation.reasons("failed")) == 4
        assert all("member(s) 2 ended before they added" in reason for reason in federation.reasons("failed")[:2])
    else:
        (reason,) = federation.reasons("failed")  # the others only waited for it
        assert reason.startswith("client 2 in round 1")
    # The next group has nothing of it.
    assert [reply.total for reply in gathered(federation).values()] == [16.0] * 4


@pytest.mark.slow
def test_a_group_that_gets_nowhere_ends_the_run_as_the_last_resort(tiny, monkeypatch):
    for name in ("PATIENCE", "SLOWEST", "GRACE"):
        monkeypatch.setattr(local, name, 0.0)
    federation = tiny(4, handlers=(gather,))
    RELEASE.clear()
    try:
        with pytest.raises(FedstrataError, match="clients 2 neither finished nor contributed to a sum"):
            gathered(federation, instead="hang")
    finally:
        RELEASE.set()
    # Its thread has a model of its own, so that others can go on.
    assert [reply.total for reply in gathered(federation).values()] == [16.0] * 4
