"""Server and sites as they speak to each other, without NVFlare: all that crosses between them are bytes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pickle
import re
import sys
import types
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from limits import within
from quick import others_long
from site_engine import make_site_engine

import fedstrata as fs
from fedstrata.base import records
from fedstrata.base.errors import FedstrataError, SpecError
from fedstrata.base.jsonl import read_jsonl
from fedstrata.federation.availability_trace import Trace
from fedstrata.federation.messages import Weights
from fedstrata.methods.fedavg import FedAvg
from fedstrata.objectives.base import CrossEntropy
from fedstrata.runs.predictor import describe_model
from fedstrata.runs.preparation import Prepared, prepare
from fedstrata.runs.simulation import run_prepared
from fedstrata.sampling.client_sizes import SizeReply, SizeReport
from fedstrata.sites.data_schema import description_of, prepare_server, surveyed
from fedstrata.sites.settings import SiteSettings
from fedstrata.sites.site_server import SERVER, SiteServer
from fedstrata.sites.sums import Sums
from fedstrata.sites.wire import (
    Answers,
    Ask,
    Begin,
    Begun,
    Done,
    Envelope,
    Fetch,
    Hop,
    Hopped,
    More,
    Save,
    SiteLostError,
    SiteRefusedError,
    Survey,
    Surveyed,
    read,
)
from fedstrata.stratify.masking.key_store import KeyRing

PATIENCE = 120.0

Hook = Callable[[str, Any, Callable[[], bytes]], bytes]
"""What a test does with a message: to whom, its body, and how to deliver it."""


class Sites:
    """Sites in this process; nothing but bytes goes from one to another."""

    def __init__(self, prepared: Prepared, site_of_client: list[str], folder: Path, **options: Any) -> None:
        self.prepared, self.site_of_client, self.folder = prepared, site_of_client, folder
        self.hook: Hook = lambda site, body, deliver: deliver()
        self.silent: set[tuple[str, str]] = set()
        """Pairs of sites that may not talk."""
        self.sums = Sums(PATIENCE)
        data: dict[str, Path] = options.pop("data", {})
        self.own_data = bool(data) and options.pop("own_data", True)
        names = "allow", "simulated", "tells"
        self.settings: dict[str, Any] = {key: options.pop(key) for key in names if key in options}
        keys = KeyRing(folder / "keys", create=True)
        self.site_servers = {
            name: self._site_server(name, data.get(name), keys) for name in sorted(set(site_of_client))
        }
        spec = prepared.spec.to_toml()
        self.engine = make_site_engine(
            prepared.config, self, site_of_client, self.sums, spec=spec, run="run", patience=PATIENCE, **options
        )

    def _site_server(self, name: str, data: Path | None, keys: KeyRing) -> SiteServer:
        def send(target: str, message: bytes) -> object:
            if target == SERVER:
                return self.sums.add_up(name, message)
            if (name, target) in self.silent:
                raise SiteLostError("they may not talk")
            return self.site_servers[target].call(name, message)

        settings = SiteSettings(patience=PATIENCE, data=data, **self.settings)
        return SiteServer(name, self.folder / name, send, settings, keys=keys)

    def is_reachable(self, site: str) -> bool:
        return True

    def send(self, site: str, data: bytes, patience: float, number: int) -> object:
        body = read(data, Envelope).body
        return self.hook(site, body, lambda: self.site_servers[site].call(SERVER, data))

    def run(self, out: Path | None = None, *, resume: bool = False) -> fs.History:
        prepared = self.prepared
        if self.own_data:
            prepared = surveyed(prepared, self.engine, out or self.folder / "server", resume=resume)
        return run_prepared(prepared, out, self.engine, resume=resume)


def _spec(name: str = "fedavg", clients: int = 3, rounds: int = 2, **table: Any) -> fs.Experiment:
    training = {"rounds": rounds, "local_steps": 3, "execution": "per-client", **table.pop("training", {})}
    return fs.Experiment.from_table(
        {
            "partition": {"name": "dirichlet", "alpha": 0.5, "clients": clients},
            "model": {"name": "mlp", "hidden": [8]},
            "evaluation": {"every": 0},
            **table,
            "method": {"name": name, **table.get("method", {})},
            "training": training,
        }
    )


def _same(one: fs.History, other: fs.History) -> bool:
    return one.params.keys() == other.params.keys() and all(
        torch.equal(one.params[key], other.params[key]) for key in one.params
    )


@pytest.fixture
def sites(tmp_path: Path) -> Callable[..., Sites]:
    def build(spec: fs.Experiment, site_of_client: str = "abc", **options: Any) -> Sites:
        return Sites(prepare(spec), list(site_of_client), tmp_path / "sites", **options)

    return build


def _events(folder: Path, kind: str) -> list[str]:
    return [event.get("reason", "") for event in read_jsonl(folder / "events.jsonl") if event["kind"] == kind]


EXCHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "ask": ("scaffold", {}),
    "relay": ("sfl", {}),
    "long relay": ("stratify", {"method": {"mode": "single", "cap": 8}}),
    "sums": ("stratify", {"method": {"cap": 4}, "model": {"name": "resnet20"}, "training": {"rounds": 1}}),
    "label weights": ("stratify", {"method": {"cap": 4, "label_weights": True}}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "site_of_client"),
    others_long(
        itertools.product(EXCHANGES, ["abc", "aab", "aaa"]),
        [*((way, "aab") for way in EXCHANGES), ("ask", "abc"), ("relay", "aaa")],
    ),
)
def test_clients_at_sites_compute_what_they_compute_here(
    sites: Callable[..., Sites], way: str, site_of_client: str
) -> None:
    method, table = EXCHANGES[way]
    spec = _spec(method, **table)
    assert _same(sites(spec, site_of_client).run(), fs.run(spec))


@pytest.mark.slow
def test_the_books_are_those_of_the_local_engine(sites: Callable[..., Sites]) -> None:
    spec = _spec("stratify", method={"mode": "single", "cap": 8})
    there, here = sites(spec).run(), fs.run(spec)
    for one, other in zip(there, here, strict=True):
        for key in ("bytes_up", "bytes_down", "transfers", "clients_returned", "samples"):
            assert one[key] == other[key], key


@pytest.mark.slow
@pytest.mark.parametrize(
    ("table", "direct"),
    others_long(
        itertools.product([{"method": "sfl"}, {"method": "stratify", "mode": "single", "cap": 8}], [True, False]),
        [({"method": "sfl"}, True), ({"method": "stratify", "mode": "single", "cap": 8}, False)],
    ),
    ids=str,
)
def test_a_relay_goes_through_the_server_where_sites_may_not_talk(
    sites: Callable[..., Sites], direct: bool, table: dict[str, Any]
) -> None:
    """Also with clients' states, which each fetch of the model dropped: loss 2.219 for 2.312."""
    spec = _spec(table["method"], method={key: value for key, value in table.items() if key != "method"})
    made = sites(spec, direct=direct)
    made.silent = {(one, other) for one in "abc" for other in "abc"}
    assert _same(made.run(), fs.run(spec))


@pytest.mark.slow
def test_the_server_hands_out_the_route_and_not_the_model(sites: Callable[..., Sites]) -> None:
    made = sites(_spec("sfl", rounds=1))
    hops: list[Hop] = []

    def hook(site: str, body: Any, deliver: Callable[[], bytes]) -> bytes:
        if isinstance(body, Hop):
            hops.append(body)
        return deliver()

    made.hook = hook
    made.run()
    assert [hop.weights is not None for hop in hops] == [True, False, False]
    assert [hop.holder for hop in hops] == ["", *("abc"[hop.client] for hop in hops[:-1])]


class _Bomb:
    """What nobody must unpickle."""

    gone_off = False

    def __reduce__(self) -> Any:
        return _go_off, ()


def _go_off() -> None:
    _Bomb.gone_off = True


@pytest.mark.slow
@pytest.mark.parametrize("data", [pickle.dumps(_Bomb()), b"", b"\xff" * 40, _Bomb(), {"body": 1}])
def test_a_site_refuses_a_pickle_and_other_garbage(sites: Callable[..., Sites], data: object) -> None:
    made = sites(_spec())
    made.engine.restore(0)
    with pytest.raises(SiteRefusedError, match=r"not a fedstrata message|expected|are missing"):
        read(made.site_servers["a"].call(SERVER, data), Answers)
    assert not _Bomb.gone_off


@pytest.mark.slow
@pytest.mark.parametrize(
    "data",
    [pickle.dumps(_Bomb()), b"garbage", _Bomb(), None, *map(records.encode, (Answers([]), Answers([SizeReply(3)])))],
)
def test_a_site_that_answers_a_pickle_or_garbage_costs_only_its_own_answer(
    sites: Callable[..., Sites], tmp_path: Path, data: Any
) -> None:
    made = sites(_spec(rounds=3))
    asked: list[str] = []

    def hook(site: str, body: Any, deliver: Callable[[], bytes]) -> bytes:
        if site == "b" and isinstance(body, Ask):
            asked.append(site)
            if len(asked) == 2:
                return data
        return deliver()

    made.hook = hook
    history = made.run(tmp_path / "out")
    assert [record["clients_returned"] for record in history] == [3, 2, 3]
    assert not _Bomb.gone_off
    (reason,) = _events(tmp_path / "out", "failed")
    assert "client 1 in round 2" in reason


@pytest.mark.slow
@pytest.mark.parametrize("promised", [1, 10**12])
def test_a_site_that_promises_answers_for_ever_costs_only_its_own(
    sites: Callable[..., Sites], tmp_path: Path, promised: int
) -> None:
    """The server asked it for more without end."""
    made = sites(_spec(rounds=1))

    def hook(site: str, body: Any, deliver: Callable[[], bytes]) -> bytes:
        if site != "a" or not isinstance(body, (Ask, More)):
            return deliver()
        return records.encode(Answers([], promised))

    made.hook = hook
    history = made.run(tmp_path / "run")
    assert history[0]["clients_returned"] == 2
    assert any("announced" in event for event in _events(tmp_path / "run", "failed"))


def _without(folder: Path, spec: fs.Experiment, *lines: str) -> fs.History:
    """The run in this process where clients are there as a trace says: client,first,last."""
    (folder / "trace.csv").write_text("\n".join(["client,first,last", *lines]))
    return fs.run(spec.model_copy(update={"availability": Trace(file=str(folder / "trace.csv"))}))


@pytest.mark.slow
def test_an_answer_that_does_not_count_leaves_no_trace_at_its_site(sites: Callable[..., Sites], tmp_path: Path) -> None:
    # A client whose answer is lost on its way keeps the control variate that the server knows of.
    spec = _spec("scaffold", rounds=3)
    made = sites(spec)
    asked = 0

    def hook(site: str, body: Any, deliver: Callable[[], bytes]) -> bytes:
        nonlocal asked
        if site == "b" and isinstance(body, Ask):
            asked += 1
            if asked == 2:
                deliver()
                raise SiteLostError("lost on its way back")
        return deliver()

    made.hook = hook
    lost = made.run()
    assert _same(lost, _without(tmp_path, spec, "0,1,9", "1,1,1", "1,3,9", "2,1,9"))


@pytest.mark.slow
def test_news_comes_again_until_a_message_was_answered(sites: Callable[..., Sites], tmp_path: Path) -> None:
    # The message that told b that its first answer counts never arrives; the one after it tells it again.
    spec = _spec("scaffold", rounds=3)
    made = sites(spec)
    asked = 0

    def hook(site: str, body: Any, deliver: Callable[[], bytes]) -> bytes:
        nonlocal asked
        if site == "b" and isinstance(body, Ask):
            asked += 1
            if asked == 2:
                raise SiteLostError("lost on its way there")
        return deliver()

    made.hook = hook
    assert _same(made.run(), _without(tmp_path, spec, "0,1,9", "1,1,1", "1,3,9", "2,1,9"))


@pytest.mark.slow
def test_an_exchange_that_nobody_waits_for_any_more_is_refused(sites: Callable[..., Sites]) -> None:
    made = sites(_spec())
    made.engine.restore(0)
    ask = Ask(5, [0], [SizeReport(1, 0, 1.0)], [0], "", [])
    assert isinstance(read(made.site_servers["a"].call(SERVER, records.encode(Envelope([], ask))), Answers), Answers)
    for number in (5, 4):
        late = Envelope([], Ask(number, [0], [SizeReport(1, 0, 1.0)], [0], "", []))
        with pytest.raises(SiteRefusedError, match="but the numbers must increase"):
            read(made.site_servers["a"].call(SERVER, records.encode(late)), Answers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ask", "problem"),
    [
        (Ask(1, [1], [SizeReport(1, 0, 1.0)], [0], "", []), "client 1 is not at site a"),
        (Ask(1, [0], [Done()], [0], "", []), "contains a Done instead of a request"),
        (Ask(1, [0], [], [0], "", []), "does not have exactly one request"),
    ],
)
def test_a_site_answers_only_for_its_own_clients(sites: Callable[..., Sites], ask: Ask, problem: str) -> None:
    made = sites(_spec())
    made.engine.restore(0)
    with pytest.raises(SiteRefusedError, match=problem):
        read(made.site_servers["a"].call(SERVER, records.encode(Envelope([], ask))), Answers)


@pytest.mark.slow
def test_another_site_may_only_fetch_the_model_of_a_relay(sites: Callable[..., Sites]) -> None:
    made = sites(_spec())
    made.engine.restore(0)
    for body in (Save(1), Ask(1, [0], [SizeReport(1, 0, 1.0)], [0], "", [])):
        with pytest.raises(SiteRefusedError, match="instead of a Fetch"):
            read(made.site_servers["a"].call("b", records.encode(Envelope([], body))), Done, Answers)
    with pytest.raises(SiteRefusedError, match="does not have the model"):
        read(made.site_servers["a"].call("b", records.encode(Fetch(1, 0))), Weights)


def test_a_part_that_comes_again_is_added_once() -> None:
    from fedstrata.sites.wire import Part, Total

    sums = Sums(60.0)
    sums.open("g", {"a": {0}, "b": {1}})
    for step in (1, 2):
        with ThreadPoolExecutor(4) as pool:
            parts = [("a", [0], 1.0), ("a", [0], 1.0), ("b", [1], 2.0), ("b", [1], 2.0)]
            sent = [(site, records.encode(Part("g", at, [torch.full((1,), x * step)], step))) for site, at, x in parts]
            answers = list(pool.map(lambda each: read(sums.add_up(*each), Total).tensor.item(), sent))
        assert answers == [3.0 * step] * 4
    with pytest.raises(SiteRefusedError, match="request 1 is late, because the server has already sent request 2"):
        read(sums.add_up("a", records.encode(Part("g", [0], [torch.ones(1)], 1))), Total)
    sums.close("g")


@pytest.mark.slow
def test_a_site_brings_only_its_own_clients_parts_to_a_sum() -> None:
    from fedstrata.sites.wire import Part, Total

    sums = Sums(1.0)
    sums.open("g", {"a": {0}, "b": {1}})
    with pytest.raises(SiteRefusedError, match="one term for each of its own clients"):
        read(sums.add_up("b", records.encode(Part("g", [0], [torch.ones(1)]))), Total)
    with pytest.raises(SiteRefusedError, match="no longer exists"):
        read(sums.add_up("a", records.encode(Part("h", [0], [torch.ones(1)]))), Total)
    with pytest.raises(SiteRefusedError, match="did not add a tensor within"):
        read(sums.add_up("a", records.encode(Part("g", [0], [torch.ones(1)]))), Total)


def test_a_site_that_has_answered_keeps_nobody_waiting_for_its_parts() -> None:
    from fedstrata.sites.wire import Part, Total

    sums = Sums(1000.0)
    sums.open("g", {"a": {0}, "b": {1}})
    sums.leave("g", "b")
    sums.leave("gone", "b")
    with pytest.raises(SiteRefusedError, match=r"member\(s\) 1 ended"):
        read(within(60, lambda: sums.add_up("a", records.encode(Part("g", [0], [torch.ones(1)])))), Total)


@pytest.mark.slow
def test_a_group_that_loses_a_site_is_void_and_nobody_waits_for_it(sites: Callable[..., Sites], tmp_path: Path) -> None:
    spec = _spec("stratify", method={"cap": 4}, model={"name": "resnet20"}, training={"rounds": 1})
    made = sites(spec)
    asked = 0

    def hook(site: str, body: Any, deliver: Callable[[], bytes]) -> bytes:
        nonlocal asked
        if site == "b" and isinstance(body, Ask) and body.group:
            asked += 1
            raise SiteLostError("it died while it worked")
        return deliver()

    made.hook = hook
    history = made.run(tmp_path / "out")
    assert asked == 1, "a client that failed is not asked again in its epoch"
    assert history[0]["clients_returned"] >= 2
    (reason,) = _events(tmp_path / "out", "failed")
    assert "client 1 in round 1" in reason
    assert "it died while it worked" in reason


@pytest.mark.slow
def test_a_lost_site_costs_a_relay_the_hops_since_the_model_was_elsewhere(
    sites: Callable[..., Sites], tmp_path: Path
) -> None:
    # The model goes over all three; the second holder is gone when the third wants it, and the third starts at the
    # first's.
    spec = _spec("sfl", rounds=1)
    made = sites(spec)
    order: list[str] = []

    def hook(site: str, body: Any, deliver: Callable[[], bytes]) -> bytes:
        if len(order) >= 2 and site == order[1]:
            raise SiteLostError("gone")
        if isinstance(body, Hop) and site not in order:
            order.append(site)
            made.silent |= {(order[2], order[1])} if len(order) == 3 else set()
        return deliver()

    made.hook = hook
    history = made.run(tmp_path / "out")
    gone = "abc".index(order[1])
    (reason,) = _events(tmp_path / "out", "failed")
    assert f"client {gone} in round 1" in reason
    assert "lost" in reason
    here = _without(tmp_path, spec, *(f"{client},1,9" for client in range(3) if client != gone))
    assert _same(history, here)


@pytest.mark.slow
def test_a_model_that_is_not_finite_is_not_passed_on(sites: Callable[..., Sites], tmp_path: Path) -> None:
    made = sites(_spec("sfl", rounds=1))
    broken: list[str] = []

    def hook(site: str, body: Any, deliver: Callable[[], bytes]) -> bytes:
        answer = deliver()
        if isinstance(body, Hop) and not broken:
            broken.append(site)
            left = made.site_servers[site]._running().leg._new
            assert left is not None
            next(iter(left.weights.params.values())).fill_(float("nan"))
        return answer

    made.hook = hook
    history = made.run(tmp_path / "out")
    assert all(torch.isfinite(tensor).all() for tensor in history.params.values())
    (reason,) = _events(tmp_path / "out", "failed")
    assert "NaN" in reason


@pytest.mark.slow
def test_a_site_that_cannot_begin_takes_no_part_and_the_events_say_why(
    sites: Callable[..., Sites], tmp_path: Path
) -> None:
    made = sites(_spec())
    made.hook = lambda site, body, deliver: records.encode(Done()) if site == "c" else deliver()
    history = made.run(tmp_path / "out")
    assert [record["clients_returned"] for record in history] == [2, 2]
    (event,) = _events(tmp_path / "out", "absent")
    assert "site c does not take part: " in event
    assert event.count("site c") == 1


def test_no_site_at_all_is_an_error(sites: Callable[..., Sites]) -> None:
    made = sites(_spec())

    def hook(site: str, body: Any, deliver: Callable[[], bytes]) -> bytes:
        raise SiteLostError("it has not joined")

    made.hook = hook
    with pytest.raises(SiteLostError, match="it has not joined; site b does not take part: it has not joined; site c"):
        made.run()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["scaffold", "stratify"])
def test_a_server_that_died_goes_on_with_the_clients_states_of_its_last_checkpoint(
    sites: Callable[..., Sites], tmp_path: Path, method: str
) -> None:
    spec = _spec(method, rounds=5, evaluation={"every": 0, "checkpoint_every": 2})
    made = sites(spec, "aab")
    dead: list[int] = []

    def hook(site: str, body: Any, deliver: Callable[[], bytes]) -> bytes:
        if made.engine.messenger.exchange > 0 and made.prepared and len(dead) == 0 and _round(body) == 4:
            dead.append(1)
            raise KeyboardInterrupt  # the server is gone in round 4; the states of round 3 are at the sites
        return deliver()

    made.hook = hook
    with pytest.raises(KeyboardInterrupt):
        made.run(tmp_path / "out")
    # The other site may still train. A process of its own would not share PyTorch's global random numbers.
    made.engine.messenger._pool.shutdown()
    again = sites(spec, "aab")  # new processes, the same folders
    assert _same(again.run(tmp_path / "out", resume=True), fs.run(spec))


def _round(body: Any) -> int:
    requests = body.requests if isinstance(body, Ask) else []
    return max((getattr(request, "round", 0) for request in requests), default=0)


@pytest.mark.slow
def test_a_site_that_lost_its_states_says_so(sites: Callable[..., Sites], tmp_path: Path) -> None:
    import shutil

    spec = _spec("scaffold", rounds=2, evaluation={"every": 0, "checkpoint_every": 1})
    made = sites(spec)
    made.run(tmp_path / "out")
    shutil.rmtree(tmp_path / "sites" / "b")
    sites(spec.model_copy(update={"training": spec.training})).run(tmp_path / "out", resume=True)
    made = sites(spec)
    made.engine.restore(2)
    assert [(kind, clients) for kind, clients, _ in made.engine.events] == [("state lost", [1])]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["scaffold", "fedavg"])
def test_a_run_does_not_go_on_where_its_clients_states_are_not(
    sites: Callable[..., Sites], tmp_path: Path, method: str
) -> None:
    spec = _spec(method, evaluation={"every": 0, "checkpoint_every": 1})
    sites(spec).run(tmp_path / "there")
    before = (tmp_path / "there" / "metrics.jsonl").read_bytes()
    with pytest.raises(SpecError, match=r"engine = 'local': .* at the sites, .*'nvflare'"):
        fs.run(spec, out=tmp_path / "there", resume=True)
    assert (tmp_path / "there" / "metrics.jsonl").read_bytes() == before
    fs.run(spec, out=tmp_path / "here")
    with pytest.raises(SpecError, match=r"engine = 'NVFlareEngine': .* in the checkpoint, .*'local' or 'ray'"):
        sites(spec).run(tmp_path / "here", resume=True)


@pytest.mark.slow
def test_clients_that_are_dealt_to_other_sites_have_lost_their_states_and_the_events_say_so(
    sites: Callable[..., Sites], tmp_path: Path
) -> None:
    spec = _spec("scaffold", rounds=2, evaluation={"every": 0, "checkpoint_every": 1})
    sites(spec, "abb").run(tmp_path / "out")

    def resumed(site_of_client: str) -> tuple[list[tuple[str, list[int]]], set[int]]:
        """What is said, and who has a state."""
        made = sites(spec, site_of_client)
        made.engine.restore(2)
        made.engine.save(2)
        notes = [(kind, clients) for kind, clients, _ in made.engine.events]
        left = {client for site_server in made.site_servers.values() for client in site_server._running().store.clients}
        return notes, left

    assert resumed("abb") == ([], {0, 1, 2})
    assert resumed("aab") == ([("state lost", [1])], {0, 2})
    assert resumed("abb") == ([("state lost", [1])], {0, 2}), "b's state of client 1 is older than the checkpoint"
    assert resumed("abb") == ([], {0, 2}), "it was said, and that old state does not come back"


# --- code that a spec names --------------------------------------------------------------------------------------


CODE = """
from fedstrata.methods.fedavg import FedAvg
import pathlib
pathlib.Path("run").touch()
class Own(FedAvg): ...
"""


def _begin(spec: str, **settings: Any) -> Begun:
    site_server = SiteServer("a", Path("states"), lambda target, data: b"", SiteSettings(patience=1.0, **settings))
    begin = Begin("run", spec, None, [0, 1, 2], 3, 0)
    return read(site_server.call(SERVER, records.encode(Envelope([], begin))), Begun)


@pytest.mark.slow
@pytest.mark.parametrize("named", ["method", "model"])
def test_a_site_loads_only_what_its_own_list_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    # Where NVFlare's processes are, lies what came with other jobs.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    (tmp_path / f"brought_{named}.py").write_text(CODE)
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / f"own_{named}.py").write_text(CODE)
    text = _spec().to_toml()
    for module in (f"brought_{named}", "os.path", "fedstrata.methods.fedavg"):
        kinds = {
            "method": text.replace('"fedavg"', f'"{module}:Own"'),
            "model": text.replace('"mlp"', f'"{module}:Own"'),
        }
        assert kinds[named] != text
        for allow, accepted in ([], "is empty"), ([f"own_{named}"], f"contains only own_{named}"):
            with pytest.raises(SiteRefusedError, match=rf"{named}.name = '{module}:Own': is not .* 'allow' {accepted}"):
                _begin(kinds[named], allow=allow)
    assert "" not in sys.path
    # What is listed is not looked for in the working directory either.
    brought = text.replace('"fedavg"', f'"brought_{named}:Own"')
    with pytest.raises(SiteRefusedError, match=f"the module 'brought_{named}'"):
        _begin(brought, allow=[f"brought_{named}"])
    assert not (tmp_path / "run").exists()
    monkeypatch.syspath_prepend(tmp_path / "installed")
    assert _begin(text.replace('"fedavg"', f'"own_{named}:Own"'), allow=[f"own_{named}"]) == Begun(0, [])
    monkeypatch.syspath_prepend(tmp_path)
    assert _begin(brought, simulated=True) == Begun(0, []), "a simulation is the user's own"


class _Broken(CrossEntropy):
    def client_init(self, model: Any, context: Any) -> Any:
        raise ValueError("labels 3, 5 and 8")


class Broken(FedAvg):
    """A method whose clients raise what they see."""

    def parts(self) -> fs.Parts:
        return {"objective": _Broken()}


@pytest.mark.slow
@pytest.mark.parametrize("frank", [False, True])
def test_what_a_client_raises_stays_in_its_sites_log(
    sites: Callable[..., Sites], caplog: pytest.LogCaptureFixture, frank: bool
) -> None:
    spec = _spec().model_copy(update={"method": Broken()})
    made = sites(spec, allow=[__name__.partition(".")[0]], simulated=frank)
    with pytest.raises(FedstrataError) as raised:
        made.run()
    assert "ValueError" in str(raised.value)
    assert ("labels 3, 5 and 8" in str(raised.value)) == frank
    assert (__file__ in str(raised.value)) == frank
    assert ("labels 3, 5 and 8" in caplog.text) != frank


# --- data that sites bring ---------------------------------------------------------------------------------------


Own = tuple[fs.Experiment, dict[str, Path], Path]


@pytest.fixture
def own(tmp_path: Path) -> Own:
    """The digits' partition as a file for each site, and what the spec says about them."""
    spec = _spec("scaffold", data={"name": "digits", "shape": [1, 8, 8], "classes": 10, "range": [0, 255]})
    prepared = prepare(spec)
    data = prepared.data
    files = {}
    for client, name in enumerate("abc"):
        files[name] = tmp_path / f"{name}.npz"
        mine = prepared.assignment[client]
        np.savez(files[name], x_train=data.x_train[mine].numpy(), y_train=data.y_train[mine].numpy())
    np.savez(tmp_path / "test.npz", x_test=data.x_test.numpy(), y_test=data.y_test.numpy())
    return spec, files, tmp_path / "test.npz"


def _owning(prepared: Prepared, files: dict[str, Path], tmp_path: Path, **options: Any) -> Sites:
    return Sites(prepared, sorted(files), tmp_path / "sites", data=files, **options)


@pytest.mark.slow
def test_sites_with_files_of_their_own_compute_the_same(own: Own, tmp_path: Path) -> None:
    spec, files, test = own
    prepared = prepare_server(spec, test, 3)
    assert prepared.config.sizes is None, "the server knows no site's size"
    there = _owning(prepared, files, tmp_path).run(tmp_path / "out")
    here = fs.run(spec)
    assert _same(there, here)
    assert there[-1]["accuracy"] == here[-1]["accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize("augment", [{"name": "crop-flip", "padding": 2}, "augmentations:noise"], ids=str)
def test_each_site_augments_its_own_data(own: Own, tmp_path: Path, augment: Any) -> None:
    plain, files, test = own
    spec = plain.replace(data={"augment": augment})
    made = _owning(prepare_server(spec, test, 3), files, tmp_path, allow=["augmentations"])
    assert _same(made.run(tmp_path / "out"), fs.run(spec))
    assert description_of(spec) == description_of(plain), "it is irrelevant for whether the data fit"


@pytest.mark.slow
def test_shift_and_scale_may_be_known_beforehand(own: Own, tmp_path: Path) -> None:
    """Then sites tell nothing of their samples, as where a method keeps sizes private."""
    plain, files, test = own
    spec = plain.model_copy(update={"data": plain.data.model_copy(update={"shift": (77.9,), "scale": (0.0104,)})})
    made = _owning(prepare_server(spec, test, 3), files, tmp_path)
    assert _same(made.run(tmp_path / "out"), fs.run(spec))
    assert made.engine.statistics is not None
    assert made.engine.statistics.samples == 0


def _refusal(spec: fs.Experiment, files: dict[str, Path], test: Path | None, tmp_path: Path) -> str:
    """What the server's events say of the one site whose file is wrong, while the others go on."""
    history = _owning(prepare_server(spec, test, len(files)), files, tmp_path).run(tmp_path / "out")
    assert [record["clients_returned"] for record in history] == [len(files) - 1] * len(history)
    (reason,) = _events(tmp_path / "out", "absent")
    assert str(tmp_path) not in reason, "where a site's files are is its own business"
    return reason


X, Y = np.zeros((4, 8, 8)), np.zeros(4, int)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arrays", "private", "told"),
    [
        ({"x_train": X}, "b.npz lacks the arrays y_train, and has only x_train", "these arrays are missing: y_train"),
        ({"x_train": np.zeros((4, 8, 9)), "y_train": Y}, "has the shape [1, 8, 9], ", "shape: data.shape is [1, 8"),
        ({"x_train": X, "y_train": np.full(4, 10)}, "y_train: 10 is not a class. ", "y_train: some labels are out of"),
        ({"x_train": X, "y_train": np.full(4, -1)}, "y_train: -1 is not a class. ", "Use 0…9, because data.classes"),
        ({"x_train": X, "y_train": Y[:3]}, "one integer for each of 4", "one integer for each sample"),
        ({"x_train": X, "y_train": np.full(4, "a")}, "y_train: is of type <U1", "y_train: must have one integer"),
        ({"x_train": np.full((4, 8, 8), np.nan), "y_train": Y}, "256 values are", "some values are NaN or infinite"),
        ({"x_train": np.array([{}], dtype=object), "y_train": Y}, "Object arrays cannot be", "the data cannot be used"),
        ({"x_train": X + 16e3, "y_train": Y}, "x_train: 16000 is out of", "Use 0 to 255 (data.range). Run 'fedst"),
        ({"x_train": X[:1], "y_train": Y[:1]}, "only 1 training samples", "few training samples. Provide at least 2"),
        ({"x_train": X, "y_train": Y, "x_test": X}, "b.npz: x_test has no labels", "x_test has no labels"),
    ],
)  # fmt: skip
def test_arrays_that_are_not_what_the_spec_says_are_refused_in_words(
    own: Own, tmp_path: Path, caplog: pytest.LogCaptureFixture, arrays: Any, private: str, told: str
) -> None:
    spec, files, test = own
    np.savez(files["b"], **arrays)
    reason = _refusal(spec, files, test, tmp_path)
    assert told in reason
    assert private not in reason
    assert private in caplog.text, "the site's log has all of it"


@pytest.mark.slow
def test_where_no_site_can_be_used_the_one_who_submitted_reads_why(own: Own, tmp_path: Path) -> None:
    spec, files, test = own
    for file in files.values():
        file.unlink()
    made = _owning(prepare_server(spec, test, 3), files, tmp_path)
    with pytest.raises(
        FedstrataError, match=r"the site's data do not fit the spec: the data cannot be used\. Run 'fedstrata"
    ):
        made.run(tmp_path / "out")


@pytest.mark.slow
def test_statistics_that_are_none_are_refused(own: Own, tmp_path: Path) -> None:
    spec, files, test = own
    made = _owning(prepare_server(spec, test, 3), files, tmp_path)

    def lie(site: str, body: Any, deliver: Callable[[], bytes]) -> bytes:
        if site != "b" or not isinstance(body, Survey):
            return deliver()
        true = read(deliver(), Surveyed).statistics
        return records.encode(Surveyed(dataclasses.replace(true, mean=true.mean * torch.nan)))

    made.hook = lie
    history = made.run(tmp_path / "out")
    assert [record["clients_returned"] for record in history] == [2, 2]
    assert "contain NaN or infinity" in _events(tmp_path / "out", "absent")[0]


# --- tables that sites bring -------------------------------------------------------------------------------------

COLUMNS = {
    "age": {"range": [18, 110], "unit": "years", "impute": "mean", "indicator": True},
    "dose": {"range": [0, 2], "unit": "g", "impute": "median", "step": 0.25},
    "smoker": {"type": "boolean", "impute": "most-frequent"},
    "kind": {"type": "category", "categories": ["x", "y", "z"], "impute": "most-frequent"},
    "ward": {"categories": ["acute", "ER"], "impute": "separate-category"},
}
SCHEMA = {"label": "sick", "client": "site", "classes": ["no", "yes"], "columns": COLUMNS, "missing": ["?"]}


def _cells(count: int, seed: int = 0) -> dict[str, list[str]]:
    draw = np.random.default_rng(seed)
    cells = {
        "site": draw.choice(["north", "south", "west"], count).tolist(),
        "age": [f"{age:.1f}" for age in draw.normal(60, 12, count).clip(18, 110)],
        "dose": [f"{dose:.2f}" for dose in draw.random(count) * 2],
        "smoker": draw.choice(["yes", "no"], count).tolist(),
        "kind": draw.choice(["x", "y", "z"], count).tolist(),
        "ward": draw.choice(["acute", "ER"], count).tolist(),
        "sick": draw.choice(["no", "yes"], count).tolist(),
    }
    for name in COLUMNS:
        cells[name] = ["?" if gone else cell for gone, cell in zip(draw.random(count) < 0.2, cells[name], strict=True)]
    return cells


def _write(path: Path, cells: dict[str, list[str]], rows: Sequence[int], names: Sequence[str]) -> Path:
    lines = [names, *([cells[name][row] for name in names] for row in rows)]
    path.write_text("".join(",".join(line) + "\n" for line in lines), encoding="utf-8")
    return path


Tables = tuple[Callable[..., fs.Experiment], dict[str, Path], dict[str, list[str]]]


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    """A table of three clients, and the same rows in a file for each, one with a column that the spec does not name."""
    cells = _cells(120)
    pooled = _write(tmp_path / "pooled.csv", cells, range(120), list(cells))
    files = {}
    for name in ("north", "south", "west"):
        rows = [row for row, site in enumerate(cells["site"]) if site == name]
        names = list(cells) if name == "north" else sorted(set(cells) - {"site"})
        names += ["note"] if name == "west" else []
        files[name] = _write(tmp_path / f"{name}.csv", {**cells, "note": ["free text"] * 120}, rows, names)

    def spec(evaluation: Any = None, normalize: str = "standard", **table: Any) -> fs.Experiment:
        data = {"name": str(pooled), "schema": SCHEMA, "normalize": normalize}
        settings = {"partition": "natural", "model": "tabular", "evaluation": evaluation or {"metrics": ["auroc"]}}
        return _spec(**{"name": "scaffold", "data": data, **settings, **table})

    return spec, files, cells


HELD_OUT: list[dict[str, float]] = [{}, {"client_test": 0.25}, {"validation": 0.2, "client_test": 0.25}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("evaluation", "normalize"),
    others_long(
        itertools.product(HELD_OUT, ["standard", "unit", "none"]),
        [*((held_out, "standard") for held_out in HELD_OUT), (HELD_OUT[-1], "unit"), (HELD_OUT[-1], "none")],
    ),
)
def test_tables_at_sites_and_the_pooled_table_give_the_same_model(
    tables: Tables, tmp_path: Path, evaluation: Any, normalize: str
) -> None:
    build, files, _ = tables
    spec = build({"metrics": ["accuracy", "macro-f1"], **evaluation}, normalize)
    here = fs.run(spec, out=tmp_path / "here")
    there = _owning(prepare_server(spec, None, 3), files, tmp_path, tells=True).run(tmp_path / "out")
    assert _same(there, here), "to the last bit, though the cells were counted at three places"
    near, far = (json.loads((tmp_path / name / "model.json").read_text()) for name in ("here", "out"))
    assert near == far
    for far, near in zip(there, here, strict=True):
        assert far["clients"] == near["clients"]
        assert far["accuracy"] == pytest.approx(near["clients"]["accuracy"]["weighted_mean"])


@pytest.mark.slow
def test_parquet_is_read_as_csv_is_and_a_server_may_have_a_table_of_test_samples(
    tables: Tables, tmp_path: Path
) -> None:
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.parquet

    build, files, cells = tables
    rows = [row for row, site in enumerate(cells["site"]) if site == "south"]
    columns = {name: [None if values[row] == "?" else values[row] for row in rows] for name, values in cells.items()}
    files["south"] = tmp_path / "south.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), files["south"])
    spec, here = build(), fs.run(build())
    test = _write(tmp_path / "test.csv", _cells(20, seed=1), range(20), list(cells))
    there = _owning(prepare_server(spec, test, 3), files, tmp_path).run(tmp_path / "out")
    assert _same(there, here)
    assert there.confusion["last"].counts.sum() == 20
    # The server's rows are scaled as the sites' are: by hand, with the model of the simulation.
    prepared = prepare(spec)
    assert there.path is not None
    about = json.loads((there.path / "model.json").read_text(encoding="utf-8"))
    assert prepared.data.shift is not None
    assert about["normalisation"]["shift"] == prepared.data.shift.tolist()
    # Its model takes rows, by the sums of the sites.
    assert about["table"] == describe_model(prepared)["table"]
    assert about["table"]["imputed"].keys() == COLUMNS.keys()
    raw = _cells(20, seed=1)
    assert (fs.load(there.path).predict(raw) == np.array(raw["sick"])).mean() == there.final_accuracy


@pytest.mark.slow
def test_a_run_goes_on_with_what_it_began_with(tables: Tables, tmp_path: Path) -> None:
    """A site whose file has other rows by then is left out: statistics and states are those of the old ones."""
    build, files, cells = tables
    short = build({"metrics": ["accuracy"], "checkpoint_every": 1}, training={"rounds": 1})
    full = build({"metrics": ["accuracy"], "checkpoint_every": 1}, training={"rounds": 2})
    _owning(prepare_server(short, None, 3), files, tmp_path).run(tmp_path / "out")
    before = (tmp_path / "out" / "statistics").read_bytes()
    _write(files["west"], cells, range(60, 120), sorted(set(cells) - {"site"}))
    made = _owning(prepare_server(full, None, 3), files, tmp_path)
    asked: list[object] = []
    made.hook = lambda site, body, deliver: (asked.append(body), deliver())[1]
    history = made.run(tmp_path / "out", resume=True)
    assert not any(isinstance(body, Survey) for body in asked)
    assert records.encode(made.engine.statistics) == before
    reasons = [event["reason"] for event in read_jsonl(tmp_path / "out" / "events.jsonl") if event["kind"] == "absent"]
    assert len(reasons) == 1
    assert (
        "site west does not take part: the site's data have changed since the run began, or the site has lost its"
        in reasons[0]
    )
    assert [record["clients_returned"] for record in history] == [3, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"age": None}, "data.schema.columns.age = 'age': .*south.csv has no such column. Use one of: dose, kind,"),
        ({"sick": None}, "data.schema.label = 'sick': .*south.csv has no such column"),
        ({"kind": "w"}, "south.csv, line 2, column 'kind' = 'w': is not a category. Use one of 'x', 'y', 'z'"),
        ({"sick": "maybe"}, "column 'sick' = 'maybe': is not a class. Use one of 'no', 'yes'"),
        ({"age": "130"}, "column 'age' = '130': is out of range. Use numbers from 18 to 110 years"),
        ({"dose": "500"}, "column 'dose' = '500': is out of range. Use numbers from 0 to 2 g. Check the unit"),
        ({"dose": "0.5 g"}, "column 'dose' = '0.5 g': is not a finite number. Use numbers from 0 to 2 g"),
        ({"sick": "?"}, r"column 'sick' = '\?': the label is missing"),
    ],
)  # fmt: skip
def test_a_table_that_is_not_what_the_schema_says_is_refused_by_column_and_rule(
    tables: Tables, tmp_path: Path, caplog: pytest.LogCaptureFixture, change: dict[str, str | None], problem: str
) -> None:
    build, files, cells = tables
    ((name, value),) = change.items()
    left = sorted(set(cells) - {"site"} - ({name} if value is None else set()))
    _write(files["south"], {**cells, name: [value or ""] * 120}, range(9), left)
    reason = _refusal(build(), files, None, tmp_path)
    named = f" = '{name}': there is no such column" if value is None else f"column '{name}': "
    assert named in reason
    assert not re.search(r"line \d|out of range|thousandth|there are:", reason)
    assert f"= {value!r}:" not in reason
    assert re.search(problem, caplog.text), "the site's log has all of it"


@pytest.mark.slow
def test_a_site_with_too_few_rows_or_with_those_of_two_clients_is_refused(tables: Tables, tmp_path: Path) -> None:
    build, files, cells = tables
    spec = build(partition={"name": "natural", "min_size": 20})
    _write(files["south"], cells, range(20), sorted(set(cells) - {"site"}))
    assert "too few training samples. Provide at least 20 (partition.min_size)" in _refusal(spec, files, None, tmp_path)
    _write(files["south"], cells, range(40), list(cells))
    other, few = tmp_path / "other", tmp_path / "few"
    other.mkdir()
    few.mkdir()
    assert "column 'site': the rows belong to several clients. Use the rows of one client." in _refusal(
        build(), files, None, other
    )
    # The mean of one sample is that sample.
    _write(files["south"], cells, range(4), sorted(set(cells) - {"site"}))
    held = build(evaluation={"client_test": 0.75}, partition={"name": "natural", "min_size": 1})
    assert "Provide at least 2" in _refusal(held, files, None, few)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({"schema": {"label": "sick"}}, "data.schema.classes: is required in a deployment, because the sites' rows "),
        ({"schema": {"label": "sick", "classes": ["no", "yes"]}}, "data.schema.columns: is required in a deployment,"),
        (
            {"schema": {**SCHEMA, "columns": {"kind": "category"}}},
            "data.schema.columns.kind.categories: is required in a deployment, because the sites' rows cannot be "
            "read in advance.",
        ),
        (
            {"schema": {**SCHEMA, "columns": {"age": {}}, "features": ["age", "weight"]}},
            "data.schema.columns.weight: is required in a deployment, because the sites' rows cannot be read in ",
        ),
        (
            {"schema": {**SCHEMA, "columns": {"age": {"impute": "median"}}}},
            "data.schema.columns.age.step: is required in a deployment, because impute = 'median'",
        ),
        ({"schema": SCHEMA, "limit": 9}, "data.limit = 9: has no effect, because sites use their own data."),
        ({"name": "digits"}, "data: the sites' own data must be described. Set [data.schema] for tables, or"),
    ],
)  # fmt: skip
def test_a_spec_that_does_not_say_what_sites_bring(tables: Tables, data: Any, problem: str) -> None:
    with pytest.raises(SpecError) as error:
        prepare_server(_spec(data={"name": "a.csv", **data}), None, 3)
    assert problem in str(error.value)


# --- a model measured where the data are -------------------------------------------------------------------------

MEASURED = {"metrics": ["accuracy", "macro-f1", "auroc", "ece"], "client_test": 0.25, "validation": 0.1}


def _measuring(prepared: Prepared, own: Own, tmp_path: Path, **options: Any) -> fs.History:
    return _owning(prepared, own[1], tmp_path, **options).run(tmp_path / "out")


def _simulated(spec: fs.Experiment, whole: Prepared) -> fs.History:
    """The same clients with the same samples in one process."""
    lists = [whole.assignment[client].tolist() for client in range(3)]
    return fs.run(spec.model_copy(update={"partition": fs.Given(indices=lists)}))


@pytest.mark.slow
@pytest.mark.parametrize("tells", [False, True])
def test_a_server_without_test_samples_measures_at_the_sites(own: Any, tmp_path: Path, tells: bool) -> None:
    plain, _, _ = own
    spec = plain.model_copy(update={"evaluation": fs.Evaluation(**MEASURED)})
    there = _measuring(prepare_server(spec, None, 3), own, tmp_path, tells=tells)
    here = _simulated(spec, prepare(plain))
    assert _same(there, here)
    for far, near in zip(there, here, strict=True):
        # All test parts together: each client's accuracy, weighted by its samples.
        assert far["accuracy"] == pytest.approx(near["clients"]["accuracy"]["weighted_mean"], abs=1e-12)
        assert far["validation"]["accuracy"] == near["validation"]["accuracy"]
        assert far["validation"]["macro-f1"] == pytest.approx(near["validation"]["macro-f1"], abs=1e-12)
        assert far["validation"]["loss"] == pytest.approx(near["validation"]["loss"], rel=1e-6)
        error = far["validation"]["auroc_error"]
        assert 0 < error < 0.1, "two rounds: scores are near each other still"
        assert abs(far["validation"]["auroc"] - near["validation"]["auroc"]) <= error
        assert ("clients" in far) == tells
        if tells:
            assert far["clients"] == near["clients"]
    assert [row["accuracy"] for row in there.clients] == ([row["accuracy"] for row in here.clients] if tells else [])
    assert there.confusion["last"].counts.sum() == sum(row["samples"] for row in here.clients)
    assert there.best_on == "validation"


@pytest.mark.slow
def test_a_site_may_bring_test_samples(own: Any, tmp_path: Path) -> None:
    plain, files, test = own
    spec = plain.model_copy(update={"evaluation": fs.Evaluation()})
    with np.load(test) as loaded:
        x, y = loaded["x_test"], loaded["y_test"]
    for place, name in enumerate("abc"):
        with np.load(files[name]) as loaded:
            mine = dict(loaded)
        np.savez(files[name], **mine, x_test=x[place::3], y_test=y[place::3])
    there = _measuring(prepare_server(spec, None, 3), own, tmp_path)
    here = fs.run(plain)
    assert _same(there, here), "nothing was taken from what it trains on"
    assert there[-1]["accuracy"] == here[-1]["accuracy"]


@pytest.mark.slow
def test_a_personal_model_is_measured_at_its_site(own: Any, tmp_path: Path) -> None:
    plain, _, test = own
    settings = fs.Evaluation(client_test=0.25, fine_tune=2, metrics=["accuracy", "log-loss"])
    spec = plain.model_copy(update={"evaluation": settings})
    there = _measuring(prepare_server(spec, test, 3), own, tmp_path, tells=True)
    here = _simulated(spec, prepare(plain))
    assert [record["personal"] for record in there] == [record["personal"] for record in here]
    assert there[-1]["accuracy"] == here[-1]["accuracy"], "the server has test samples of its own too"


@pytest.mark.parametrize(
    ("evaluation", "problem"),
    [
        (
            {"client_test": 0.2, "metrics": ["functions:spread"]},
            r"'spread': cannot be computed from sums, and sites send only sums\. Use one of:",
        ),
        (
            {"client_test": 0.2, "test_clients": 0.5},
            r"evaluation.test_clients = 0.5: has no effect in a deployment\. Remove the key\.",
        ),
    ],
)
def test_what_cannot_be_measured_at_sites(own: Any, evaluation: Any, problem: str, monkeypatch: Any) -> None:
    module = types.ModuleType("functions")
    module.spread = lambda labels, shares: float(shares.std())  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "functions", module)
    plain, _, _ = own
    with pytest.raises(SpecError, match=problem):
        prepare_server(plain.model_copy(update={"evaluation": fs.Evaluation(**evaluation)}), None, 3)


@pytest.mark.parametrize(
    ("method", "what"),
    [
        ({"name": "stratify", "masking": "prf"}, "labels"),
        ({"name": "fedstas", "epsilon": 3.0, "bound": 700, "strata": 2}, "numbers of samples"),
    ],
)
def test_what_a_method_keeps_private_no_evaluation_tells(own: Any, method: Any, what: str) -> None:
    plain, _, test = own
    spec = _spec(method["name"], method=method, data=plain.data.to_spec())
    measured = spec.model_copy(update={"evaluation": fs.Evaluation(client_test=0.2)})
    with pytest.raises(SpecError, match=f"client_test = 0.2: replies would disclose the sites' {what}, which"):
        prepare_server(measured, test, 3)
    with pytest.raises(SpecError, match=f"evaluation.client_test = None: replies would disclose the sites' {what}"):
        prepare_server(spec, None, 3)
    if what == "numbers of samples":
        with pytest.raises(SpecError, match=r"data.normalize = 'standard': statistics of the samples would"):
            prepare_server(spec, test, 3)
        spec = spec.model_copy(update={"data": plain.data.model_copy(update={"normalize": "none"})})
    prepare_server(spec, test, 3)


def test_a_site_with_a_file_does_not_take_part_in_a_run_about_other_data(
    sites: Callable[..., Sites], tmp_path: Path
) -> None:
    made = sites(_spec(), data={"a": tmp_path / "secret.npz"}, own_data=False)
    made.engine.restore(0)
    (note,) = made.engine.events
    assert "data: this site has its own data file, but the run uses the data set of" in note[2]


def test_a_run_must_have_a_plain_name(tmp_path: Path) -> None:
    site_server = SiteServer("a", tmp_path, lambda target, data: b"", SiteSettings())
    begin = Begin("../../elsewhere", _spec().to_toml(), None, [0], 3, 0)
    with pytest.raises(SiteRefusedError, match="is not the name of a run"):
        read(site_server.call(SERVER, records.encode(Envelope([], begin))), Done)


def test_dropout_layers_are_refused_before_anybody_is_asked(sites: Callable[..., Sites]) -> None:
    made = sites(_spec())
    object.__setattr__(made.prepared.config, "random", True)  # as preparation finds of a model with dropout
    with pytest.raises(SpecError, match="draws random numbers"):
        made.engine.ask({0: SizeReport(1, 0, 1.0)}, together=True)


def test_hops_without_a_model_are_refused(sites: Callable[..., Sites]) -> None:
    made = sites(_spec("sfl"))
    made.engine.restore(0)
    hop = Hop(1, 1, 0, 0, SizeReport(1, 0, 1.0), "", 0, None, True)
    with pytest.raises(FedstrataError, match="a request that asks for the model back must contain the model"):
        read(made.site_servers["a"].call(SERVER, records.encode(Envelope([], hop))), Hopped)
