from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedstrata as fs
from fedstrata.base.errors import ClientsFailedError, FedstrataError, QuorumError, ReplyRefusedError
from fedstrata.base.records import encode, record
from fedstrata.clients.client import Client, StateStore
from fedstrata.clients.handlers.fit import fit
from fedstrata.clients.handling import handles, handles_hop
from fedstrata.engines.local import LocalEngine
from fedstrata.federation.engine import Failure
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import Fit, Reply, Request, Requests, WeightedFitReply, Weights
from fedstrata.objectives.base import CrossEntropy
from fedstrata.runs.simulation import make_context
from fedstrata.sampling.client_sizes import SizeReply, SizeReport
from fedstrata.sampling.label_counts import LabelReply, LabelReport
from fedstrata.stratify.messages import Gradient, Reserve


@record("test/Said")
class Said(Reply):
    number: int
    values: Tensor


@record("test/Say")
class Say(Request):
    reply_type: ClassVar[type[Reply]] = Said

    what: str


def unwanted(reply: Said) -> None:
    if reply.number == 1:
        raise ReplyRefusedError("not you")


@handles(Say)
def say(client: Client, request: Say) -> Said:
    """Whatever the test asks for."""
    client.state["said"] = {"times": client.state.get("said", {"times": 0})["times"] + 1}
    if request.what == "nothing":
        return None  # type: ignore[return-value]
    if request.what == "another":
        return SizeReport(1, 1, 1.0)  # type: ignore[return-value]
    if request.what == "raise":
        raise LookupError(f"client {client.number} cannot")
    if request.what == "text":
        return Said("seven", torch.ones(1))  # type: ignore[arg-type]
    if request.what == "array":
        return Said(np.int64(7), np.ones(1))  # type: ignore[arg-type]
    return Said(client.number, torch.full((2,), float(request.what)))


@record("test/Unheard")
class Unheard(Request):
    pass


@record("test/federation/Meet")
class Meet(Request):
    raises: int


@handles(Meet)
def meet(client: Client, request: Meet) -> Said:
    """Two sums over the group; one client may raise between them."""
    assert client.group is not None
    once = client.group.all_reduce_sum(torch.tensor([float(client.number)]))
    client.state["met"] = {"sum": once}
    if client.number == request.raises:
        raise LookupError("left the meeting")
    return Said(client.group.size, client.group.all_reduce_sum(once))


@record("test/Pass")
class Pass(Request):
    culprit: int
    way: str


@handles_hop(Pass)
def carry(client: Client, task: Pass, weights: Weights) -> tuple[Weights, Said]:
    """Add the client's number to every parameter."""
    if client.number == task.culprit and task.way == "raise":
        raise LookupError("stumbled")
    client.state["carried"] = {"times": 1}
    params = {name: w + client.number for name, w in weights.params.items()}
    if client.number == task.culprit:
        name = next(iter(params))
        params[name] = {"nan": params[name] * torch.nan, "shape": params[name][:1]}[task.way]
    return Weights(params, weights.buffers), Said(client.number, torch.ones(1))


@pytest.fixture
def tiny(tiny):
    """Builds a federation whose clients know these requests as well."""
    return partial(tiny, handlers=(say, meet, carry))


# Asking.


def test_replies_are_sorted_by_client_and_those_of_the_asked(tiny):
    federation = tiny(6)
    replies = federation.ask([5, 0, 3], {5: Say("1"), 0: Say("2"), 3: Say("3")})
    assert [(k, r.number, r.values.tolist()) for k, r in replies.items()] == [
        (0, 0, [2.0, 2.0]),
        (3, 3, [3.0, 3.0]),
        (5, 5, [1.0, 1.0]),
    ]
    assert federation.ask({}, {}) == {}
    assert federation.events == []


def test_every_byte_is_counted(tiny):
    federation = tiny()
    requests = {0: Say("1"), 1: Say("1.0000"), 3: Say("2")}
    replies = federation.ask(requests, requests)
    assert federation.log.bytes_down == sum(len(encode(request)) for request in requests.values())
    assert federation.log.bytes_up == sum(len(encode(reply)) for reply in replies.values())
    before = federation.log.bytes_down
    fits = federation.fits()
    replies = federation.ask(fits, fits[0])
    assert federation.log.bytes_down - before == 4 * len(encode(fits[0]))
    assert federation.log.exchanges == 2
    federation.begin(2)
    assert (federation.log.bytes_up, federation.log.exchanges, federation.events) == (0, 0, [])


def test_who_is_gone_costs_no_bytes(tiny):
    federation = tiny(availability=fs.Bernoulli(p=1e-9))
    assert federation.fit() == {}
    assert (federation.log.bytes_up, federation.log.bytes_down) == (0, 0)


def test_a_quorum_is_kept_to(tiny):
    federation = tiny()
    assert len(federation.ask(range(4), {k: Say("raise" if k == 0 else "1") for k in range(4)}, quorum=3)) == 3
    with pytest.raises(QuorumError, match=r"round 1 of toy: 2 of 4 clients answered, but the method needs 3\."):
        federation.ask(range(4), {k: Say("raise" if k < 2 else "1") for k in range(4)}, quorum=3)


def test_there_are_only_so_many_clients(tiny):
    for wrong in (-1, 4):
        with pytest.raises(ValueError, match=r"only the clients 0 … 3 exist"):
            tiny().ask([0, wrong], Say("1"))


def test_a_question_that_nobody_declared(tiny):
    with pytest.raises(FedstrataError, match=r"cannot answer Unheard. Add a handler for it to"):
        tiny().ask([0], Unheard())
    federation = tiny()
    with pytest.raises(ClientsFailedError, match=r"cannot pass on Unheard. Add a handler for it"):
        federation.relay([(0, Unheard()), (1, Unheard())], federation.weights)


# Bad clients.


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("nothing", "the reply is a NoneType, which is not a message"),
        ("another", "the reply to Say must be a Said, not a SizeReport"),
        ("text", "Said.number: input should be a valid integer"),
        ("array", "Said.values: input should be an instance of tensor"),
        ("nan", "the reply contains NaN or infinity. Reduce training.lr, or set training.clip."),
        ("inf", "the reply contains NaN or infinity. Reduce training.lr, or set training.clip."),
        ("-inf", "the reply contains NaN or infinity. Reduce training.lr, or set training.clip."),
    ],
)
def test_a_handlers_nonsense_is_refused(tiny, what, reason):
    federation = tiny()
    federation.begin(9)
    replies = federation.ask(range(4), {k: Say(what if k == 2 else "1") for k in range(4)})
    assert list(replies) == [0, 1, 3]
    assert federation.events == [
        {"round": 9, "kind": "refused", "clients": [2], "reason": f"client 2 in round 9 of toy: {reason}"}
    ]
    assert (federation.log.failed, federation.log.returned) == ({2}, {0, 1, 3})
    assert federation.store.get(2) == {}
    assert federation.store.get(3) == {"said": {"times": 1}}


def test_the_largest_finite_numbers_are_not_refused(tiny):
    federation = tiny()
    assert len(federation.ask(range(4), Say("3e38"))) == 4  # whose sum is infinite


def test_a_request_checks_its_own_reply_at_the_server(tiny):
    federation = tiny()
    assert list(federation.ask(range(4), Say("1"), check=unwanted)) == [0, 2, 3]
    assert federation.reasons("refused") == ["client 1 in round 1 of toy: not you"]


WAYS = {
    "raise": "ZeroDivisionError: on purpose",
    "nan": "the reply contains NaN or infinity",
    "inf": "the reply contains NaN or infinity",
    "shape": r"params\['0.weight'\] has shape (6, 4) and type torch.float32, but must have shape (6, 5)",
    "broadcast": r"params\['0.weight'\] has shape (1, 1) and type torch.float32, but must have shape (6, 5)",
    "dtype": r"params\['0.weight'\] has shape (6, 5) and type torch.float64, but must have shape (6, 5) and",
    "complex": r"params\['0.weight'\] has shape (6, 5) and type torch.complex64, but must have",
    "missing": "params lacks the tensor '0.weight'",
    "unknown": "params has an unknown tensor 'another'",
    "list": "Weights.params.0.weight: input should be an instance of tensor",
    "message": r"the message has the entries \['extra'\], but must have the entries \[\]",
    "none": "FitReply.message: input should be a valid dictionary",
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_one_clients_bad_model_is_left_out_and_the_others_aggregate_is_right(tiny, broken, way):
    sizes = [8, 16, 24]
    good = tiny(sizes=sizes, objective=CrossEntropy(), local_epochs=2)
    expected = good.fit(0, 2)
    federation = tiny(sizes=sizes, objective=broken(), local_epochs=2, clients_per_round=3)
    federation.fit()
    federation.begin(1)
    federation.engine.context = type(federation.engine.context)(
        **{**vars(federation.engine.context), "objective": broken(culprits=[1], how=way), "prepared": {}}
    )
    method = fs.FedAvg(objective=broken())
    state, metrics = method.run_round(federation, method.init(federation, federation.weights))
    # n = 8 and 24: a quarter and three quarters.
    for name, w in state.weights.params.items():
        by_hand = 0.25 * expected[0].weights.params[name] + 0.75 * expected[2].weights.params[name]
        torch.testing.assert_close(w, by_hand, rtol=1e-6, atol=1e-7)
    assert metrics["samples"] == 2 * (8 + 24)
    [event] = federation.events
    assert event["clients"] == [1]
    assert event["kind"] == ("failed" if way == "raise" else "refused")
    prefix = "client 1 in round 1 of toy: "
    assert event["reason"].startswith(prefix + WAYS[way].replace("\\", "")), event["reason"]
    assert (federation.log.failed, federation.log.returned) == ({1}, {0, 2})
    # Its state is that of the visit before.
    assert [federation.store.get(k)["objective"]["visits"] for k in range(3)] == [2, 1, 2]


def test_the_place_of_an_exception_is_named(tiny, broken):
    federation = tiny(sizes=[8, 16], objective=broken(culprits=[0]))
    federation.fit()
    assert "conftest.py:" in federation.reasons("failed")[0]


def test_when_all_clients_raise_the_program_is_at_fault(tiny, broken):
    federation = tiny(sizes=[8, 16], objective=broken(culprits=[0, 1]))
    with pytest.raises(
        ClientsFailedError,
        match=r"all 2 clients failed in round 1 of toy. For example, client 0: ZeroDivisionError: on purpose",
    ) as caught:
        federation.fit()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_when_all_clients_raise_after_others_answered_the_round_goes_on(tiny):
    federation = tiny()
    federation.ask([0, 1], {0: Say("1"), 1: Say("raise")})
    assert federation.ask([0, 1], Say("raise")) == {}
    assert federation.log.failed == {0, 1}


def test_one_client_that_raises_is_no_proof_that_the_program_is_at_fault(tiny):
    federation = tiny()
    assert federation.ask([2], Say("raise")) == {}
    assert federation.log.failed == {2}
    with pytest.raises(ClientsFailedError):
        federation.ask([0, 1], Say("raise"))
    federation.exchanges.resumed = True  # what was answered before the checkpoint is not known
    assert federation.ask([0, 1], Say("raise")) == {}


@pytest.mark.slow
def test_a_missed_quorum_leaves_no_trace_at_the_clients():
    spec = fs.Experiment(method="scaffold", training={"clients_per_round": 4}, partition=fs.IID(clients=4))
    prepared = fs.prepare(spec)
    store = StateStore()
    federation = Federation(
        LocalEngine(make_context(prepared), store), prepared.config, fs.Bernoulli(p=0.5), "scaffold"
    )
    weights = Weights(prepared.config.model.params(), prepared.config.model.buffers())
    federation.begin(1)
    request = Fit(1, weights, {"c": {n: torch.zeros_like(w) for n, w in weights.params.items()}}, 1.0)
    with pytest.raises(QuorumError):
        federation.ask(range(4), request, quorum=4)
    assert federation.log.dropped
    assert len(store.clients) == 0


def test_when_all_clients_send_nan_nothing_changes(tiny, broken):
    federation = tiny(sizes=[8, 16], objective=broken(culprits=[0, 1], how="nan"))
    method = fs.FedAvg()
    before = method.init(federation, federation.weights)
    after, metrics = method.run_round(federation, before)
    assert all(torch.equal(after.weights.params[n], w) for n, w in before.weights.params.items())
    assert metrics == {"clients_trained": 0, "samples": 0, "train_loss": None}
    assert len(federation.reasons("refused")) == 2


@pytest.mark.slow
def test_a_run_with_a_bad_client_goes_to_its_end(tmp_path, broken):
    spec = fs.Experiment(
        partition=fs.Given(indices=[list(range(8 * k, 8 * k + 8)) for k in range(3)] + [list(range(100, 140))]),
        method=fs.FedAvg(objective=broken(culprits=[4], how="nan")),
        training={"rounds": 2},
    )
    history = fs.run(spec, out=tmp_path / "run")
    assert [record["clients_failed"] for record in history] == [1, 1]
    assert [record["clients_returned"] for record in history] == [3, 3]
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert "client 3 in round 2 of fedavg: the reply contains NaN or infinity" in lines[1]


# Together.


def test_a_group_adds_up_in_the_middle_of_an_answer(tiny):
    federation = tiny(5)
    replies = federation.ask((1, 2, 4), Meet(-1), together=True)
    assert {k: (r.number, r.values.tolist()) for k, r in replies.items()} == dict.fromkeys((1, 2, 4), (3, [21.0]))


def test_a_member_that_raises_releases_the_others_and_is_the_only_one_that_failed(tiny):
    federation = tiny(5)
    before = threading.active_count()
    assert federation.ask((1, 2, 4), Meet(2), together=True) == {}
    assert federation.log.failed == {2}
    assert federation.log.returned == set()
    [event] = federation.events
    assert (event["kind"], event["clients"]) == ("failed", [2])
    assert event["reason"].startswith("client 2 in round 1 of toy: LookupError: left the meeting")
    assert [federation.store.get(k) for k in (1, 2, 4)] == [{}, {}, {}]
    assert threading.active_count() == before
    # Without it the others go on.
    assert len(federation.ask((1, 4), Meet(2), together=True)) == 2


def test_a_member_whose_reply_does_not_count_voids_those_of_the_others(tiny, monkeypatch):
    """What the others say holds sums to which it has added."""
    federation = tiny(5)
    ask = federation.engine.ask

    def spoilt(requests, **how):
        outcomes = dict(ask(requests, **how))
        return outcomes | {2: replace(outcomes[2], values=torch.tensor([float("nan")]))}

    monkeypatch.setattr(federation.engine, "ask", spoilt)
    assert federation.ask((1, 2, 4), Meet(-1), together=True) == {}
    assert federation.log.failed == {2}
    assert federation.log.returned == set()
    assert [event["clients"] for event in federation.events] == [[2]]


def test_where_all_of_a_group_only_waited_all_of_them_failed(tiny):
    """A client that only waited for a failed client has not failed. If no client failed, the whole group broke."""
    federation = tiny(5)
    asked = Requests.of((1, 2), Meet(-1))
    waited, raised = Failure("waited", bystander=True), Failure("raised")
    assert federation.exchanges.collect(asked, {1: waited, 2: raised}, True, None) == {}
    assert federation.log.failed == {2}
    federation.begin(2)
    assert federation.exchanges.collect(asked, {1: waited, 2: waited}, True, None) == {}
    assert federation.log.failed == {1, 2}
    # A refused reply is somebody's fault.
    federation.begin(3)
    assert federation.exchanges.collect(asked, {1: waited, 2: Said("two", torch.ones(1))}, True, None) == {}
    assert federation.log.failed == {2}


def test_a_measurement_changes_nothing_at_a_client_and_is_none_of_the_rounds_costs(tiny):
    federation = tiny(3, availability=fs.Bernoulli(p=1e-9))
    request = Say("1")
    replies, size = federation.measure(request, check=unwanted)
    assert list(replies) == [0, 2]
    assert size == 3 * len(encode(request)) + sum(len(encode(reply)) for reply in replies.values())
    assert [federation.store.get(client) for client in range(3)] == [{}, {}, {}]
    assert federation.log.metrics() == dict.fromkeys(federation.log.metrics(), 0)
    [event] = federation.events
    assert (event["kind"], event["clients"]) == ("not measured", [1])


# Relays.


# Relays.


def test_a_relay_hands_the_model_on(tiny):
    federation = tiny(5)
    start = federation.weights
    tasks = [(3, Pass(-1, "")), (1, Pass(-1, "")), (3, Pass(-1, ""))]
    relayed = federation.relay(tasks, start)
    assert all(torch.equal(relayed.weights.params[n], w + 3 + 1 + 3) for n, w in start.params.items())
    assert {position: reply.number for position, reply in relayed.replies.items()} == {0: 3, 1: 1, 2: 3}
    log = federation.log
    assert log.hops == 3
    assert log.bytes_down == 3 * (len(encode(start)) + len(encode(tasks[0][1])))
    assert log.bytes_up == sum(len(encode(reply)) for reply in relayed.replies.values())
    assert federation.store.get(1) == {"carried": {"times": 1}}


def test_when_every_hop_raises_the_program_is_at_fault(tiny):
    federation = tiny(5)
    with pytest.raises(ClientsFailedError, match=r"in round 1 of toy. For example, client 3: LookupError: stumbled"):
        federation.relay([(3, Pass(3, "raise")), (2, Pass(2, "raise"))], federation.weights)
    federation.relay([(1, Pass(3, "raise")), (3, Pass(3, "raise"))], federation.weights)
    assert federation.log.returned == {1}
    relayed = federation.relay([(3, Pass(3, "raise"))], start := federation.weights)
    assert all(torch.equal(relayed.weights.params[n], w) for n, w in start.params.items())


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("raise", "LookupError: stumbled"),
        ("nan", "the reply contains NaN"),
        ("shape", "params['0.weight'] has shape (1, 5)"),
    ],
)
def test_a_hop_that_fails_costs_one_hop(tiny, way, reason):
    federation = tiny(5)
    start = federation.weights
    relayed = federation.relay([(k, Pass(2, way)) for k in (1, 2, 4)], start)
    assert all(torch.equal(relayed.weights.params[n], w + 1 + 4) for n, w in start.params.items())
    assert list(relayed.replies) == [0, 2]
    [event] = federation.events
    assert event["clients"] == [2]
    assert event["reason"].startswith(f"client 2 in round 1 of toy: {reason}")
    assert (federation.log.failed, federation.log.returned) == ({2}, {1, 4})
    assert federation.store.get(2) == {}


def test_a_hop_whose_client_is_gone_is_skipped(tiny):
    availability = fs.Bernoulli(p=0.5)
    federation = tiny(8, availability=availability)
    there = np.flatnonzero(availability.online(np.arange(8), 1, 0)).tolist()
    assert 0 < len(there) < 8
    relayed = federation.relay([(k, Pass(-1, "")) for k in range(8)], federation.weights)
    assert list(relayed.replies) == there
    assert federation.log.hops == len(there)
    assert federation.log.dropped == set(range(8)) - set(there)


# Sums.


class Poison(fs.Objective):
    """NaN wherever a certain sample is in the batch."""

    where: float = float("inf")

    def loss(self, model, params, batch, context):
        loss = super().loss(model, params, batch, context)
        return loss * torch.nan if bool((batch.x == self.where).any()) else loss


def reserved(federation, clients):
    """Four samples of every label set aside by each client for batch 0."""
    labels = torch.arange(3).repeat_interleave(2)
    request = Reserve(1, torch.zeros(6, dtype=torch.int64), labels, torch.empty(0, dtype=torch.int64), True)
    federation.ask(clients, request)
    federation.begin(1)
    return dict.fromkeys(clients, Gradient(1, 0, federation.weights))


def books(federation):
    log = federation.log
    return log.metrics(), log.invited, log.returned


@pytest.mark.parametrize("norm", [False, True])
def test_a_fused_sum_is_that_of_the_parts_and_the_books_are_the_same(tiny, norm):
    found = {}
    for execution in ("fused", "per-client"):
        module = None
        if norm:
            torch.manual_seed(0)
            module = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
        federation = tiny(4, module=module, execution=execution)
        summed = federation.ask_sum(requests := reserved(federation, (0, 1, 3)), requests, together=norm)
        found[execution] = summed, books(federation)
    (fused, fused_books), (single, single_books) = found.values()
    assert fused.clients == single.clients == [0, 1, 3]
    assert fused_books == single_books
    assert fused_books[0]["bytes_up"] > 0
    assert fused.reply.samples == single.reply.samples == 18
    assert fused.reply.loss == pytest.approx(single.reply.loss, rel=1e-6)
    assert set(fused.reply.gradient) == set(single.reply.gradient)
    for name, gradient in single.reply.gradient.items():
        torch.testing.assert_close(fused.reply.gradient[name], gradient, rtol=1e-5, atol=1e-6)
    for name, buffer in single.reply.buffers.items():
        torch.testing.assert_close(fused.reply.buffers[name], buffer, rtol=1e-5, atol=1e-6)


def test_without_a_fused_form_a_sum_is_taken_one_by_one(tiny):
    federation = tiny()
    summed = federation.ask_sum((0, 2, 3), Say("1.5"))
    assert (summed.reply.number, summed.reply.values.tolist(), summed.clients) == (5, [4.5, 4.5], [0, 2, 3])
    assert federation.ask_sum((0, 2, 3), Say("nan")) is None
    assert federation.ask_sum({}, {}) is None


def test_the_client_that_spoils_a_fused_sum_is_found_and_left_out(tiny):
    federation = tiny(4)
    requests = reserved(federation, (0, 1, 3))
    good = federation.ask_sum((0, 3), requests)
    context = federation.engine.context
    chosen = context.assignment[1][federation.store.get(1)["stratify"].places]
    poison = Poison(where=float(context.data.inputs(torch.from_numpy(chosen)).flatten()[0]))
    federation.engine.context = type(context)(**{**vars(context), "objective": poison, "prepared": {}})
    federation.begin(1)
    summed = federation.ask_sum(requests, requests)
    assert summed.clients == [0, 3]
    for name, gradient in good.reply.gradient.items():
        torch.testing.assert_close(summed.reply.gradient[name], gradient)
    assert federation.reasons("refused") == [
        "client 1 in round 1 of toy: the reply contains NaN or infinity. Reduce training.lr, or set training.clip."
    ]
    assert (federation.log.failed, federation.log.returned) == ({1}, {0, 3})
    assert federation.log.exchanges == 1


# The usual questions.


def test_sizes_and_labels(tiny):
    federation = tiny(sizes=[8, 3])
    sizes: dict[int, SizeReply] = federation.ask((0, 1), SizeReport(1, 0, 1.0))
    assert {k: reply.samples for k, reply in sizes.items()} == {0: 8, 1: 3}
    labels: dict[int, LabelReply] = federation.ask((0, 1), LabelReport())
    held = {k: dict(zip(r.labels.tolist(), r.counts.tolist(), strict=True)) for k, r in labels.items()}
    assert held == {0: {0: 3, 1: 3, 2: 2}, 1: {0: 1, 1: 1, 2: 1}}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"samples": 2**70}, "an integer of more than 64 bits"),
        ({"samples": 2**62}, f"samples in the reply is {2**62}, but the client has 8"),
        ({"samples": 9}, "samples in the reply is 9, but the client has 8"),
        ({"weight": 2.0**62}, "a weight of 4.61169e+18, but must have at most 1 for each of its 8 samples"),
        ({"dtype": torch.float8_e4m3fn}, "a tensor of the unsupported type torch.float8_e4m3fn"),
        ({"layout": "sparse"}, "a tensor with the layout torch.sparse_coo on"),
        ({"device": "meta"}, "on the device 'meta'"),
    ],
    ids=str,
)
def test_a_reply_that_no_arithmetic_can_use_costs_its_sender_alone(tiny, change, reason):
    @handles(Fit)
    def strange(client, request):
        reply = fit(client, request)
        if client.number != 1:
            return reply
        if "samples" in change:
            return replace(reply, samples=change["samples"])
        if "weight" in change:  # the share of a task with tokens
            return WeightedFitReply(**vars(reply), weight=change["weight"])
        params = dict(reply.weights.params)
        first = next(iter(params))
        if "dtype" in change:
            params[first] = params[first].to(change["dtype"])
        elif "layout" in change:
            params[first] = params[first].to_sparse()
        else:
            params[first] = params[first].to("meta")
        return replace(reply, weights=Weights(params, reply.weights.buffers))

    federation = tiny(3, handlers=(strange,))
    assert sorted(federation.fit()) == [0, 2]
    assert reason in federation.reasons("refused")[0]
