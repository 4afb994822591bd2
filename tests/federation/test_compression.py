from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from quick import others_long

import fedstrata as fs
from fedstrata.base import records
from fedstrata.base.errors import FedstrataError, SpecError
from fedstrata.base.records import record
from fedstrata.clients.client import Client, StateStore
from fedstrata.clients.handlers.encoded import MEMORY, MODEL, PENDING
from fedstrata.clients.handling import handles
from fedstrata.engines.local import LocalEngine
from fedstrata.federation.communication.codecs import Communication
from fedstrata.federation.communication.compression import Compression
from fedstrata.federation.communication.messages import Coefficients, Encoded, EncodedReply
from fedstrata.federation.engine import Failure
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import ClientId, Extra, ModelRequest, Params, Reply, Request, Weights
from fedstrata.objectives.base import CrossEntropy
from fedstrata.runs.simulation import Simulation, make_context
from fedstrata.stratify.messages import GradientReply

N = 4


@record("test/Told")
class Told(Reply):
    """A change that the test knows."""

    change: Params
    trained: bool = True

    def has_update(self) -> bool:
        return self.trained

    def split_update(self, sent: Weights) -> tuple[Params, Told]:
        return self.change, replace(self, change={})

    def merge_update(self, sent: Weights, change: Params) -> Told:
        return replace(self, change=change)


@record("test/Tell")
class Tell(ModelRequest):
    reply_type: ClassVar[type[Reply]] = Told

    round: int
    weights: Weights
    idle: int = -1

    def changes(self, message: Extra) -> Params:
        return self.weights.params


@handles(Tell)
def tell(client: Client, request: Tell) -> Told:
    """A change that depends on the client and the round; the model that came is kept for the test to see."""
    client.state["seen"] = dict(request.weights.params)
    client.state["answers"] = client.state.get("answers", 0) + 1
    client.authorize_release(10 + client.number)
    return Told(truth(client.number, request.round, request.weights.params), client.number != request.idle)


def truth(client: ClientId, round: int, like: Params) -> Params:
    draw = np.random.default_rng([client, round])
    return {name: torch.from_numpy(draw.standard_normal(tuple(t.shape), np.float32)) for name, t in like.items()}


class Flaky(LocalEngine):
    """The local engine, in which some clients are lost at some kind of question."""

    lost: Mapping[type[Request], set[ClientId]] = {}
    behind: Mapping[ClientId, int] = {}
    """The samples behind each of the last answers, as a site records them."""

    def ask(self, requests: Mapping[ClientId, Request], *, together: bool, group: Any = None) -> Any:
        outcomes = dict(super().ask(requests, together=together))
        self.behind = {client: self.n_contributing(client) for client in requests}
        for client, request in requests.items():
            if client in self.lost.get(type(request), ()):
                outcomes[client] = Failure("lost on the way")
        return outcomes


class World:
    """A federation of N clients that tell known changes."""

    def __init__(self, up: Any = "none", down: Any = "none") -> None:
        spec = fs.Experiment.from_table(
            {
                "partition": {"name": "iid", "clients": N},
                "data": {"name": "digits", "limit": 80},
                "model": {"name": "mlp", "hidden": [12]},
                "communication": {"up": up, "down": down},
            }
        )
        prepared = fs.prepare(spec)
        context = make_context(prepared)
        context = replace(context, handlers=context.handlers + [tell])  # noqa: RUF005
        self.store = StateStore()
        self.engine = Flaky(context, self.store)
        objective = CrossEntropy()
        self.compression = Compression(spec.communication, N, 0, objective.expected, objective.additive)
        legs = self.compression.legs
        self.federation = Federation(self.engine, prepared.config, spec.availability, legs=legs)
        self.params = prepared.config.model.params()
        self.round = 0

    def ask(self, clients: set[int] | None = None, *, summed: bool = False, idle: int = -1) -> Any:
        self.round += 1
        self.federation.begin(self.round)
        request = Tell(self.round, Weights(self.params, {}), idle)
        put = self.federation.ask_sum if summed else self.federation.ask
        return put(sorted(clients or range(N)), request)


CODECS: dict[str, Any] = {
    "bf16": "bf16",
    "qsgd": "qsgd",
    "top-k": {"name": "top-k", "fraction": 0.1},
    "powersgd": {"name": "powersgd", "rank": 2},
    "powersgd, bf16": {"name": "powersgd", "rank": 1, "factors": "bfloat16"},
}
WITH_MEMORY = ["top-k", "powersgd", "powersgd, bf16"]


def test_a_method_that_puts_each_client_another_question_is_told_so() -> None:
    world = World(up="bf16")
    world.federation.begin(1)
    with pytest.raises(FedstrataError, match=r"Pass one request to Federation\.ask"):
        world.federation.ask(range(N), {client: Tell(1, Weights(world.params, {})) for client in range(N)})


@pytest.mark.parametrize("label", WITH_MEMORY)
def test_what_was_decoded_and_what_is_remembered_are_all_changes(label: str) -> None:
    world = World(up=CODECS[label])
    sent = {client: {name: torch.zeros_like(t) for name, t in world.params.items()} for client in range(N)}
    decoded = {client: {name: torch.zeros_like(t) for name, t in world.params.items()} for client in range(N)}
    for number in range(6):
        clients = {0, 1, 2, 3} if number % 2 else {0, 2}
        for client, reply in world.ask(clients).items():
            sent[client] = records.add(sent[client], truth(client, world.round, world.params))
            decoded[client] = records.add(decoded[client], reply.change)
    for client in range(N):
        memory = world.store.get(client)[MEMORY].lost
        torch.testing.assert_close(records.add(decoded[client], memory), sent[client], atol=1e-4, rtol=1e-5)
        assert any(lost.abs().max() > 0.1 for lost in memory.values())


@pytest.mark.parametrize("label", CODECS)
def test_a_sum_is_the_sum_of_the_answers(label: str) -> None:
    one, other = World(up=CODECS[label]), World(up=CODECS[label])
    for _ in range(2):
        summed, replies = one.ask(summed=True), other.ask()
        total: dict[str, torch.Tensor] = {}
        for reply in replies.values():
            total = {name: total.get(name, 0) + t for name, t in reply.change.items()}
        torch.testing.assert_close(summed.reply.change, total, atol=1e-4, rtol=1e-5)
        assert summed.clients == list(range(N))


def test_power_sgd_projects_the_sum_on_the_directions_of_the_sum() -> None:
    world = World(up={"name": "powersgd", "rank": 3})
    name = "1.weight" if "1.weight" in world.params else next(n for n, t in world.params.items() if t.ndim > 1)
    total = sum(truth(client, 1, world.params)[name] for client in range(N))
    found = world.ask(summed=True).reply.change[name]
    assert torch.linalg.matrix_rank(found) == 3
    left = torch.linalg.qr(found).Q[:, :3]
    torch.testing.assert_close(found, left @ (left.T @ total), atol=1e-4, rtol=1e-4)


def spread(changes: list[Params], like: Params) -> float:
    """Return the root mean square error of the mean of some changes."""
    off = [torch.stack([change[name].double() for change in changes]).mean(0) - t for name, t in like.items()]
    return float(torch.cat([part.flatten() for part in off]).square().mean().sqrt())


@pytest.mark.slow
def test_the_errors_of_qsgd_average_out_over_rounds() -> None:
    """Each exchange draws its own numbers, so that the error of the mean over R rounds falls as 1 / √R."""
    world = World(up={"name": "qsgd", "levels": 1})
    always = truth(2, 1, world.params)
    decoded = []
    for round in range(1, 65):
        world.federation.begin(round)
        decoded.append(world.federation.ask([2], Tell(1, Weights(world.params, {})))[2].change)
    once = spread(decoded[:1], always)
    assert spread(decoded[:16], always) == pytest.approx(once / 4, rel=0.1)
    assert spread(decoded, always) == pytest.approx(once / 8, rel=0.1)


@pytest.mark.slow
def test_the_errors_of_the_servers_qsgd_average_out_over_rounds() -> None:
    world = World(down={"name": "qsgd", "levels": 1})
    world.ask({2})
    always, received = truth(9, 1, world.params), []
    for _ in range(64):
        before = world.compression.state.params
        world.params = records.add(before, always)  # always the same distance from what the clients have
        world.ask({2})
        received.append({name: t - before[name] for name, t in world.store.get(2)["seen"].items()})
    once = spread(received[:1], always)
    assert spread(received[:16], always) == pytest.approx(once / 4, rel=0.1)
    assert spread(received, always) == pytest.approx(once / 8, rel=0.1)


def test_two_exchanges_of_a_round_draw_different_numbers() -> None:
    world = World(up="qsgd", down="qsgd")
    world.ask()
    for way in ("up", "down"):
        found = []
        for _ in range(2):
            before = world.compression.state.params
            if way == "down":
                world.params = records.add(before, truth(9, 1, before))
            change = world.federation.ask([0], Tell(1, Weights(world.params, {})))[0].change
            received = {name: t - before[name] for name, t in world.store.get(0)["seen"].items()}
            found.append(change if way == "up" else received)
        off = max(float((found[0][name] - t).abs().max()) for name, t in found[1].items())
        assert off > 0.1, way


def test_each_exchange_of_power_sgd_goes_on_from_the_basis_of_the_one_before() -> None:
    world = World(up={"name": "powersgd", "rank": 1})
    world.ask()
    name = next(name for name, tensor in world.params.items() if tensor.ndim > 1)
    basis, lost = world.compression.state.basis[name]["q"], [world.store.get(k)[MEMORY].lost[name] for k in range(N)]
    total = sum(truth(client, 2, world.params)[name] + lost[client] for client in range(N))
    frame = total @ basis
    frame = frame / frame.norm()
    found = world.ask(summed=True).reply.change[name]
    torch.testing.assert_close(found, frame @ (frame.T @ total), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", [Encoded, Coefficients])
def test_an_answer_that_is_lost_leaves_the_memory_as_it_was(kind: type[Request]) -> None:
    """Also between the two sums: then nothing of the exchange counts for the client."""
    world = World(up=CODECS["powersgd"])
    world.ask()
    before = dict(world.store.get(2))
    world.engine.lost = {kind: {2}}
    assert set(world.ask()) == {0, 1, 3}
    after = world.store.get(2)
    assert after[MEMORY] is before[MEMORY]
    assert after["answers"] == before["answers"] == 1
    assert [event["clients"] for event in world.federation.events] == [[2]]
    world.engine.lost = {}
    assert set(world.ask()) == {0, 1, 2, 3}
    after = world.store.get(2)
    assert after["answers"] == 2
    assert PENDING not in after


def test_the_model_that_came_with_a_first_sum_stays_when_the_second_is_lost() -> None:
    """The server knows that the client has it, and sends only what changed since."""
    world = World(up=CODECS["powersgd"], down="qsgd")
    world.ask()
    for lost, answered in (({2}, {0, 1, 3}), (set(), {0, 1, 2, 3})):
        world.params = {name: tensor + 0.1 for name, tensor in world.params.items()}
        world.engine.lost = {Coefficients: lost}
        assert set(world.ask()) == answered
    assert world.store.get(2)[MODEL].version == 2


@pytest.mark.parametrize("label", WITH_MEMORY)
def test_who_took_no_step_keeps_its_memory(label: str) -> None:
    world = World(up=CODECS[label])
    world.ask()
    before = world.store.get(1)[MEMORY]
    world.ask(idle=1)
    assert world.store.get(1)[MEMORY] is before
    assert world.store.get(0)[MEMORY].round == 2


@pytest.mark.parametrize("label", CODECS)
def test_as_many_samples_are_behind_an_encoded_answer_as_behind_the_answer(label: str) -> None:
    """This holds for the second sum of PowerSGD too, which has its own entry in a site's ledger."""
    world = World(up=CODECS[label])
    world.ask()
    assert world.engine.behind == {0: 10, 1: 11, 2: 12, 3: 13}


def test_memories_grow_old() -> None:
    world = World(up={"name": "top-k", "fraction": 0.1, "forget_after": 2, "damping": 0.5})
    world.ask()
    lost = world.store.get(0)[MEMORY].lost
    world.ask({1})
    codec = world.compression.up
    change = truth(0, 3, world.params)
    half = {name: tensor + 0.25 * lost[name] for name, tensor in change.items()}  # two rounds: 0.5 · 0.5
    reply = world.ask({0})[0]
    expected = codec.decode(codec.encode(half, np.random.default_rng(0)), half)
    torch.testing.assert_close(reply.change, expected)
    for _ in range(2):
        world.ask({1})
    reply = world.ask({0})[0]  # three rounds: forgotten
    change = truth(0, 6, world.params)
    torch.testing.assert_close(reply.change, codec.decode(codec.encode(change, np.random.default_rng(0)), change))


def test_an_uncompressed_beginning() -> None:
    world = World(up={"name": "top-k", "fraction": 0.01, "start": 2})
    first, second = world.ask()[1], world.ask()[1]
    torch.testing.assert_close(first.change, truth(1, 1, world.params))
    assert sum(int((t != 0).sum()) for t in second.change.values()) == round(
        0.01 * sum(t.numel() for t in second.change.values())
    )


def test_going_down_too_the_beginning_may_be_uncompressed() -> None:
    world = World(down={"name": "top-k", "fraction": 0.01, "start": 3})
    exact = []
    for _ in range(4):
        world.params = {name: t + truth(9, world.round, world.params)[name] for name, t in world.params.items()}
        world.ask()
        exact.append(all(torch.equal(world.store.get(1)["seen"][name], t) for name, t in world.params.items()))
    assert exact == [True, True, False, False]


@pytest.mark.parametrize("label", CODECS)
def test_everybody_has_the_model_that_the_server_thinks_they_have(label: str) -> None:
    """Whoever was away gets what was missed, or the whole model where that is smaller."""
    world = World(down=CODECS[label])
    sizes = []
    for number in range(8):
        clients = {0, 1} if number % 3 else {0, 1, 2, 3}
        clients = {*clients, 3} if number == 7 else clients
        world.params = {n: t + 0.01 * truth(9, world.round, world.params)[n] for n, t in world.params.items()}
        assert set(world.ask(clients)) == clients
        sizes.append(world.federation.log.bytes_down / len(clients))
        for client in clients:
            seen = world.store.get(client)["seen"]
            assert all(torch.equal(seen[n], t) for n, t in world.compression.state.params.items())
    # And that is near the server's own, however long this goes on: what was lost once is in the next difference.
    far = max(float((world.compression.state.params[n] - t).abs().max()) for n, t in world.params.items())
    assert far < 0.08
    assert sizes[1] < sizes[0]


def test_whoever_missed_more_than_a_model_is_long_is_sent_the_whole_one() -> None:
    world = World(down="qsgd")
    world.ask({3})
    whole = world.federation.log.bytes_down
    for _ in range(20):
        world.params = {name: tensor + 0.1 for name, tensor in world.params.items()}
        world.ask({0})
    kept = world.compression.state.changes
    assert 0 < sum(map(records.size, kept)) < records.size(world.params)
    world.ask({3})
    assert world.federation.log.bytes_down <= whole + 100  # the digest of a first model is shorter


def test_a_client_that_has_another_model_than_was_thought_is_sent_the_whole_one() -> None:
    world = World(down="qsgd")
    world.ask()
    forgotten = {key: value for key, value in world.store.get(1).items() if key != MODEL}
    world.store.put(1, forgotten)  # as after a site's disk was lost
    world.params = {name: tensor + 0.1 for name, tensor in world.params.items()}
    assert set(world.ask()) == {0, 2, 3}
    assert "apply to version 0 of the model, but this client has no model" in world.federation.events[0]["reason"]
    assert set(world.ask()) == {0, 1, 2, 3}


def test_changes_of_another_line_of_models_are_refused() -> None:
    world, other = World(down="bf16"), World(down="bf16")
    other.params = {name: tensor + 1 for name, tensor in other.params.items()}
    for each in (world, other):
        each.ask()
        each.params = {name: tensor + 0.1 for name, tensor in each.params.items()}
    world.store.put(0, other.store.get(0))  # the right number, and another model
    assert set(world.ask()) == {1, 2, 3}
    assert "differs from the server's version 1" in world.federation.events[0]["reason"]


BASE: dict[str, Any] = {
    "data": {"name": "digits", "limit": 300},
    "partition": {"name": "dirichlet", "alpha": 0.5, "clients": 6},
    "availability": {"name": "bernoulli", "p": 0.7},
    "model": {"name": "mlp", "hidden": [16]},
    "training": {"rounds": 4, "clients_per_round": 4, "local_epochs": 1, "batch_size": 20, "lr": 0.05, "workers": 1},
    "evaluation": {"every": 0},
}
BOTH = {"up": CODECS["powersgd"], "down": CODECS["top-k"]}
METHODS: list[Any] = ["fedavg", "scaffold", "feddyn", "rebafl", {"name": "stratify", "cap": 10}]


@pytest.mark.slow
@pytest.mark.parametrize("method", others_long(METHODS, ["scaffold", "rebafl", METHODS[-1]]), ids=str)
def test_a_run_that_goes_on_ends_in_the_same_bytes(method: Any) -> None:
    spec = fs.Experiment.from_table({**BASE, "method": method, "communication": BOTH})
    whole = fs.run(spec)
    prepared = fs.prepare(spec)
    with Simulation(prepared) as first:
        for _ in range(2):
            first.step()
        saved = records.encode(
            (
                first.state,
                first.saved_loop_state(),
                {client: dict(first.store.get(client)) for client in sorted(first.store.clients)},
            )
        )
    state, loop_state, states = records.decode(saved)
    with Simulation(fs.prepare(spec)) as second:
        second.state, second.round = state, 2
        second._restore(loop_state)
        for client, kept in states.items():
            second.store.put(client, kept)
        figures = [second.step()["bytes_down"] for _ in range(2)]
        assert all(torch.equal(second.state.weights.params[n], t) for n, t in whole.params.items())
    assert figures == [record["bytes_down"] for record in whole][2:]


class Counting(LocalEngine):
    """Counts the bytes of everything that goes over it."""

    up = down = 0

    def ask(self, requests: Mapping[ClientId, Request], *, together: bool, group: Any = None) -> Any:
        outcomes = super().ask(requests, together=together)
        self.down += sum(len(records.encode(request)) for request in requests.values())
        self.up += sum(len(records.encode(outcome)) for outcome in outcomes.values())
        return outcomes


@pytest.mark.slow
@pytest.mark.parametrize("communication", [BOTH, {"up": "qsgd", "down": "bf16"}], ids=["powersgd", "qsgd"])
def test_the_books_are_the_bytes_of_the_wire(communication: dict[str, Any]) -> None:
    spec = fs.Experiment.from_table({**BASE, "availability": "always", "communication": communication})
    prepared = fs.prepare(spec)
    engine = Counting(make_context(prepared), StateStore())
    history = fs.run(spec, engine=engine)
    assert engine.up == sum(record["bytes_up"] for record in history)
    assert engine.down == sum(record["bytes_down"] for record in history)
    plain = fs.run({**BASE, "availability": "always"})
    assert engine.up < 0.5 * sum(record["bytes_up"] for record in plain)


@pytest.mark.slow
def test_prototypes_have_no_place_in_a_memory() -> None:
    """They are no changes: each is what a client's features are now."""
    spec = fs.Experiment.from_table({**BASE, "method": "rebafl", "communication": {"up": CODECS["top-k"]}})
    with Simulation(fs.prepare(spec)) as simulation:
        simulation.step()
        memories = [simulation.store.get(client).get(MEMORY) for client in sorted(simulation.store.clients)]
        assert all(name.startswith("params/") for memory in memories if memory for name in memory.lost)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"method": "sfl"},
            "communication: has no effect, because sfl does not send the same model to all clients",
        ),
        (
            {"method": {"name": "stratify", "mode": "single"}},
            "communication: has no effect, because stratify does not send",
        ),
        (
            {"communication": {"down": {"name": "top-k", "damping": 0.5}}},
            r"communication.down.damping = 0.5: has no effect on models that the server sends\. Remove this key\.",
        ),
        ({"communication": {"up": "zip"}}, "communication.up.name = 'zip': is not a known codec"),
        ({"communication": {"sideways": "qsgd"}}, "communication.sideways"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        fs.run({**BASE, "communication": {"up": "qsgd"}, **change})


def test_nothing_is_said_of_codecs_where_there_are_none() -> None:
    assert "communication" not in fs.Experiment().to_spec()
    spec = fs.Experiment(communication={"up": "qsgd"})
    assert fs.Experiment.from_table(spec.to_spec()) == spec
    assert Communication().plain


@pytest.mark.long
@pytest.mark.slow
def test_codecs_learn_as_much_on_digits_with_a_fraction_of_the_bytes() -> None:
    spec = {
        "partition": {"name": "dirichlet", "alpha": 0.3, "clients": 8},
        "method": "stratify",
        "training": {"rounds": 5, "lr": 0.1, "batch_size": 40},
        "evaluation": {"every": 0},
    }
    codec = {"name": "powersgd", "rank": 1, "factors": "bfloat16"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dense, cheap = fs.run(spec), fs.run({**spec, "communication": {"up": codec, "down": codec}})
    assert cheap[-1]["accuracy"] > dense[-1]["accuracy"] - 0.02
    assert sum(r["bytes_up"] for r in cheap) < 0.03 * sum(r["bytes_up"] for r in dense)
    assert sum(r["bytes_down"] for r in cheap) < 0.08 * sum(r["bytes_down"] for r in dense)


class Liars(LocalEngine):
    """The local engine, in which client 0 answers as the test says."""

    lie: Any = None

    def ask(self, requests: Mapping[ClientId, Request], *, together: bool, group: Any = None) -> Any:
        outcomes = dict(super().ask(requests, together=together))
        for client, outcome in outcomes.items():
            if client == 0:
                outcomes[client] = self.lie(outcome)
        return outcomes


def without_answer(answer: Any) -> Any:
    return replace(answer, reply=None) if isinstance(answer, EncodedReply) else answer


def with_junk(answer: Any) -> Any:
    if isinstance(answer, EncodedReply) and isinstance(answer.reply, GradientReply):
        return replace(answer, reply=replace(answer.reply, gradient={"junk": torch.ones(2)}))
    return answer


def enormous(answer: Any) -> Any:
    if isinstance(answer, EncodedReply) and answer.reply is None:
        return replace(answer, payload=torch.full((len(answer.payload) // 4,), 3e38).view(torch.uint8))
    return answer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lie", "method", "up", "counts"),
    [
        (without_answer, "fedavg", "qsgd", False),
        (without_answer, "fedavg", {"name": "powersgd", "start": 9}, False),
        (with_junk, {"name": "stratify", "cap": 10}, CODECS["powersgd"], True),
        (with_junk, {"name": "stratify", "cap": 10}, "none", True),
        (enormous, "fedavg", CODECS["powersgd"], True),
    ],
)
def test_one_client_that_lies_costs_nobody_else(lie: Any, method: Any, up: Any, counts: bool) -> None:
    table = {**BASE, "availability": "always", "method": method, "communication": {"up": up, "down": "bf16"}}
    table["training"] = {**BASE["training"], "clients_per_round": 6, "rounds": 2}
    spec = fs.Experiment.from_table(table)
    engine = Liars(make_context(fs.prepare(spec)), StateStore())
    engine.lie = lie
    history = fs.run(spec, engine=engine)
    for each in history:
        assert each["clients_failed"] == (0 if counts else 1)
        assert each["clients_returned"] >= 5
    assert all(bool(t.isfinite().all()) for t in history.params.values())


@pytest.mark.parametrize("label", CODECS)
def test_a_change_that_is_not_finite_is_refused_before_a_codec_hides_it(label: str) -> None:
    world = World(up=CODECS[label])
    world.ask()
    memory = world.store.get(1).get(MEMORY)
    good = truth

    def bad(client: ClientId, round: int, like: Params) -> Params:
        found = good(client, round, like)
        if client == 1:
            next(iter(found.values())).view(-1)[:3] = float("nan")
        return found

    globals()["truth"] = bad
    try:
        assert set(world.ask()) == {0, 2, 3}
    finally:
        globals()["truth"] = good
    assert "NaN or infinity" in world.federation.events[0]["reason"]
    assert world.store.get(1).get(MEMORY) is memory


def test_a_sum_that_nobody_finishes_together_is_void() -> None:
    world = World(up=CODECS["powersgd"])
    world.engine.lost = {Coefficients: {2}}
    world.federation.begin(1)
    request = Tell(1, Weights(world.params, {}))
    assert world.federation.ask_sum(range(N), request, together=True) is None
    assert all(MEMORY not in world.store.get(client) for client in range(N))


def test_a_listener_hears_the_answers_behind_a_sum() -> None:
    heard: list[dict[ClientId, Any]] = []
    world = World(up="bf16")
    world.federation.listener = lambda round, replies: heard.append(dict(replies))
    world.ask(summed=True)
    assert [sorted(replies) for replies in heard] == [[0, 1, 2, 3]]
    torch.testing.assert_close(heard[0][2].change, truth(2, 1, world.params), atol=0.02, rtol=0.01)
