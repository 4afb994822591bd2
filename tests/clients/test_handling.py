"""Which function answers which kind of request."""

from __future__ import annotations

import pickle

import pytest

from fedstrata.base.errors import FedstrataError
from fedstrata.clients.handling import Handlers, handles, handles_hop, handles_relay, handles_sum
from fedstrata.federation.messages import Request
from fedstrata.runs.simulation import HANDLERS
from fedstrata.stratify.messages import Gradient, Steps


class Ask(Request):
    """Asked for."""


class Tell(Ask):
    """Another kind, though it inherits."""


@handles(Ask)
def answer(client, request):
    return "alone"


@handles(Ask)
def again(client, request):
    return "again"


@handles_sum(Ask)
def total(clients, requests):
    return "sum"


@handles_hop(Ask)
def carry(client, task, weights):
    return "hop"


@handles_relay(Ask)
class Journey:
    pass


EVERY_WAY = [answer, total, carry, Journey]


def test_each_way_of_answering_has_its_own_function():
    handlers = Handlers(EVERY_WAY)
    assert [handlers.alone[Ask], handlers.sum[Ask], handlers.hop[Ask], handlers.relay[Ask]] == EVERY_WAY


def test_a_later_one_takes_the_place_of_an_earlier_one():
    before, more = Handlers(EVERY_WAY), [again]
    after = before + more
    assert (before.alone[Ask], after.alone[Ask]) == (answer, again)
    assert after.hop[Ask] is carry


def test_what_nobody_answers():
    handlers = Handlers(EVERY_WAY)
    with pytest.raises(FedstrataError, match=r"cannot answer Tell\. Add a handler for it to Method\.handlers"):
        handlers.alone[Tell]
    with pytest.raises(FedstrataError, match=r"cannot pass on Tell\. Add a handler for it to Method\.handlers"):
        handlers.hop[Tell]
    # One pass for all is a short cut: where there is none, clients answer one by one.
    assert handlers.sum.get(Tell) is handlers.relay.get(Tell) is None


def test_a_function_that_does_not_say_what_it_answers():
    with pytest.raises(FedstrataError, match=r"is not marked as a handler\. Mark the function with @handles"):
        Handlers([answer, test_what_nobody_answers])


def test_they_travel_to_other_processes():
    there = pickle.loads(pickle.dumps(HANDLERS))
    assert there.alone[Gradient] is HANDLERS.alone[Gradient]
    assert there.sum[Gradient] is HANDLERS.sum[Gradient]
    assert there.relay[Steps] is HANDLERS.relay[Steps]
