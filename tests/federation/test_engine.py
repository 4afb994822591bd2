"""What every engine must do, and the relay that any of them can do."""

from __future__ import annotations

import pytest
import torch

from fedstrata.base.records import record
from fedstrata.federation.engine import Engine, Failure, HopByHop
from fedstrata.federation.messages import Reply, Request, Weights


@record("test/Add")
class Add(Request):
    amount: float


@record("test/Added")
class Added(Reply):
    amount: float


class Adding(Engine):
    """Clients add to the one parameter; an amount of 0 fails, and of infinity or of −1 spoils the model."""

    def __init__(self):
        self.committed = []
        self.sent = []

    def ask(self, requests, *, together):
        return {}

    def hop(self, client, task, weights):
        self.sent.append(weights.params["w"].item())
        if task.amount == 0:
            return Failure("nothing to add")
        moved = weights.params["w"] + task.amount
        if task.amount == -1:
            moved = moved.repeat(2)
        return Weights({"w": moved}, {}), Added(task.amount)

    def commit(self, accepted):
        self.committed.append(list(accepted))

    def close(self):
        pass


def start():
    engine = Adding()
    return engine, engine.relay(Add, Weights({"w": torch.zeros(1)}, {}))


def test_without_a_better_way_a_relay_goes_hop_by_hop():
    engine, relay = start()
    assert isinstance(relay, HopByHop)
    for client, amount in ((3, 1.0), (1, 2.0)):
        assert relay.hop(client, Add(amount)) == Added(amount)
        relay.keep(True)
    weights, replies = relay.finish()
    assert weights.params["w"].item() == 3
    assert replies == [Added(1.0), Added(2.0)]
    assert engine.sent == [0, 1]
    assert engine.committed == [[3], [1]]


def test_what_does_not_count_is_not_passed_on():
    engine, relay = start()
    relay.hop(0, Add(1.0))
    relay.keep(True)
    relay.hop(1, Add(5.0))
    relay.keep(False)
    relay.hop(2, Add(2.0))
    relay.keep(True)
    weights, replies = relay.finish()
    assert weights.params["w"].item() == 3
    assert replies == [Added(1.0), Added(2.0)]
    assert engine.sent == [0, 1, 1]
    assert engine.committed == [[0], [], [2]]


def test_a_hop_that_fails_says_so_and_the_model_stays():
    engine, relay = start()
    assert relay.hop(0, Add(0.0)) == Failure("nothing to add")
    assert relay.hop(1, Add(1.0)) == Added(1.0)
    relay.keep(True)
    assert relay.finish()[0].params["w"].item() == 1
    assert engine.sent == [0, 0]


@pytest.mark.parametrize(
    ("amount", "problem"),
    [
        (float("inf"), "the reply contains NaN"),
        (-1.0, "params['w'] has shape (2,) and type torch.float32, but must have"),
    ],
)
def test_a_model_that_is_not_like_the_one_that_was_sent_is_refused(amount, problem):
    engine, relay = start()
    outcome = relay.hop(0, Add(amount))
    assert isinstance(outcome, Failure)
    assert outcome.refused
    assert outcome.reason.startswith(problem)
    # What changed at the client does not count either.
    assert engine.committed == [[]]
    assert relay.finish()[0].params["w"].item() == 0


def test_what_an_engine_need_not_do():
    engine, _ = start()
    assert engine.ask_sum({0: Add(1.0)}) is None
    assert not engine.keeps_states
    assert engine.events is None
    assert engine.restore(0) is engine.save(1) is None
    with pytest.raises(TypeError, match="abstract"):
        Engine()
