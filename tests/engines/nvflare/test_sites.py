"""Server and sites as they speak to each other, without NVFlare: all that crosses between them are bytes."""

from __future__ import annotations

import pickle
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from limits import within

import fedstrata as fs
from fedstrata import records
from fedstrata.deploy.data_schema import prepare_server, read_own
from fedstrata.deploy.host import SERVER, Host
from fedstrata.engines.nvflare.engine import NVFlareEngine
from fedstrata.engines.nvflare.sums import Sums
from fedstrata.engines.nvflare.wire import (
    Agreed,
    Answers,
    Ask,
    Begin,
    Begun,
    Done,
    Envelope,
    Fetch,
    Hop,
    Hopped,
    Save,
    SiteLostError,
    SiteRefusedError,
    read,
)
from fedstrata.errors import DataError, FedstrataError, SpecError
from fedstrata.federation.availability import Trace
from fedstrata.federation.messages import Weights
from fedstrata.jsonl import read_jsonl
from fedstrata.methods.fedavg import FedAvg
from fedstrata.objectives.base import CrossEntropy
from fedstrata.preparation import Prepared, prepare
from fedstrata.sampling.messages import SizeReply, SizeReport
from fedstrata.simulation import run_prepared
from fedstrata.stratify.masking.key_store import KeyRing

PATIENCE = 120.0

Hook = Callable[[str, Any, Callable[[], bytes]], bytes]
"""What a test does with a message: to whom, its body, and how to deliver it."""


class Sites:
    """Sites in this process; nothing but bytes goes from one to another."""

    def __init__(self, prepared: Prepared, homes: list[str], folder: Path, **options: Any) -> None:
        self.prepared, self.homes, self.folder = prepared, homes, folder
        self.hook: Hook = lambda site, body, deliver: deliver()
        self.silent: set[tuple[str, str]] = set()
        """Pairs of sites that may not talk."""
        self.sums = Sums(PATIENCE)
        data: dict[str, Path] = options.pop("data", {})
        self.settings: dict[str, Any] = {key: options.pop(key) for key in ("allow", "frank", "tells") if key in options}
        keys = KeyRing(folder / "keys", create=True)
        self.hosts = {name: self._host(name, data.get(name), keys) for name in sorted(set(homes))}
        spec = prepared.spec.to_toml()
        self.engine = NVFlareEngine(
            prepared.config, self, homes, self.sums, spec=spec, run="run", patience=PATIENCE, **options
        )

    def _host(self, name: str, data: Path | None, keys: KeyRing) -> Host:
        def send(target: str, message: bytes) -> object:
            if target == SERVER:
                return self.sums.add_up(name, message)
            if (name, target) in self.silent:
                raise SiteLostError("they may not talk")
            return self.hosts[target].call(name, message)

        return Host(name, self.folder / name, send, patience=PATIENCE, data=data, keys=keys, **self.settings)

    def send(self, site: str, data: bytes, patience: float) -> object:
        body = read(data, Envelope).body
        return self.hook(site, body, lambda: self.hosts[site].call(SERVER, data))

    def run(self, out: Path | None = None, *, resume: bool = False) -> fs.History:
        return run_prepared(self.prepared, out, self.engine, resume=resume)


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
    def build(spec: fs.Experiment, homes: str = "abc", **options: Any) -> Sites:
        return Sites(prepare(spec), list(homes), tmp_path / "sites", **options)

    return build


def _events(folder: Path, kind: str) -> list[str]:
    return [event.get("reason", "") for event in read_jsonl(folder / "events.jsonl") if event["kind"] == kind]


@pytest.mark.slow
@pytest.mark.parametrize("homes", ["abc", "aab", "aaa"])
@pytest.mark.parametrize(
    ("method", "table"),
    [
        ("scaffold", {}),
        ("sfl", {}),
        ("stratify", {"method": {"mode": "single", "cap": 8}}),
        ("stratify", {"method": {"cap": 4}, "model": {"name": "resnet20"}, "training": {"rounds": 1}}),
    ],
    ids=["ask", "relay", "long relay", "sums"],
)
def test_clients_at_sites_compute_what_they_compute_here(
    sites: Callable[..., Sites], method: str, table: dict[str, Any], homes: str
) -> None:
    spec = _spec(method, **table)
    assert _same(sites(spec, homes).run(), fs.run(spec))


def test_the_books_are_those_of_the_local_engine(sites: Callable[..., Sites]) -> None:
    spec = _spec("stratify", method={"mode": "single", "cap": 8})
    there, here = sites(spec).run(), fs.run(spec)
    for one, other in zip(there, here, strict=True):
        for key in ("bytes_up", "bytes_down", "transfers", "clients_returned", "samples"):
            assert one[key] == other[key], key


@pytest.mark.parametrize("direct", [True, False])
def test_a_relay_goes_through_the_server_where_sites_may_not_talk(sites: Callable[..., Sites], direct: bool) -> None:
    spec = _spec("sfl")
    made = sites(spec, direct=direct)
    made.silent = {(one, other) for one in "abc" for other in "abc"}
    assert _same(made.run(), fs.run(spec))


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


@pytest.mark.parametrize("data", [pickle.dumps(_Bomb()), b"", b"\xff" * 40, _Bomb(), {"body": 1}])
def test_a_site_refuses_a_pickle_and_other_garbage(sites: Callable[..., Sites], data: object) -> None:
    made = sites(_spec())
    made.engine.restore(0)
    with pytest.raises(SiteRefusedError, match=r"not a message of fedstrata|expected|too early"):
        read(made.hosts["a"].call(SERVER, data), Answers)
    assert not _Bomb.gone_off


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


def _without(folder: Path, spec: fs.Experiment, *lines: str) -> fs.History:
    """The run in this process where clients are there as a trace says: client,first,last."""
    (folder / "trace.csv").write_text("\n".join(["client,first,last", *lines]))
    return fs.run(spec.model_copy(update={"availability": Trace(file=str(folder / "trace.csv"))}))


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


def test_an_exchange_that_nobody_waits_for_any_more_is_refused(sites: Callable[..., Sites]) -> None:
    made = sites(_spec())
    made.engine.restore(0)
    ask = Ask(5, [0], [SizeReport(1, 0, 1.0)], [0], "", [])
    assert isinstance(read(made.hosts["a"].call(SERVER, records.encode(Envelope([], ask))), Answers), Answers)
    for number in (5, 4):
        late = Envelope([], Ask(number, [0], [SizeReport(1, 0, 1.0)], [0], "", []))
        with pytest.raises(SiteRefusedError, match="nobody waits"):
            read(made.hosts["a"].call(SERVER, records.encode(late)), Answers)


@pytest.mark.parametrize(
    ("ask", "problem"),
    [
        (Ask(1, [1], [SizeReport(1, 0, 1.0)], [0], "", []), "client 1 does not live at site a"),
        (Ask(1, [0], [Done()], [0], "", []), "a Done is no request"),
        (Ask(1, [0], [], [0], "", []), "do not match"),
    ],
)
def test_a_site_answers_only_for_its_own_clients(sites: Callable[..., Sites], ask: Ask, problem: str) -> None:
    made = sites(_spec())
    made.engine.restore(0)
    with pytest.raises(SiteRefusedError, match=problem):
        read(made.hosts["a"].call(SERVER, records.encode(Envelope([], ask))), Answers)


def test_another_site_may_only_fetch_the_model_of_a_relay(sites: Callable[..., Sites]) -> None:
    made = sites(_spec())
    made.engine.restore(0)
    for body in (Save(1), Ask(1, [0], [SizeReport(1, 0, 1.0)], [0], "", [])):
        with pytest.raises(SiteRefusedError, match="expected Fetch"):
            read(made.hosts["a"].call("b", records.encode(Envelope([], body))), Done, Answers)
    with pytest.raises(SiteRefusedError, match="does not have the model"):
        read(made.hosts["a"].call("b", records.encode(Fetch(1, 0))), Weights)


def test_a_site_brings_only_its_own_clients_parts_to_a_sum() -> None:
    from fedstrata.engines.nvflare.wire import Part, Total

    sums = Sums(1.0)
    sums.open("g", {"a": {0}, "b": {1}})
    with pytest.raises(SiteRefusedError, match="not its own"):
        read(sums.add_up("b", records.encode(Part("g", [0], [torch.ones(1)]))), Total)
    with pytest.raises(SiteRefusedError, match="over"):
        read(sums.add_up("a", records.encode(Part("h", [0], [torch.ones(1)]))), Total)
    with pytest.raises(SiteRefusedError, match="did not come within"):
        read(sums.add_up("a", records.encode(Part("g", [0], [torch.ones(1)]))), Total)


def test_a_site_that_has_answered_keeps_nobody_waiting_for_its_parts() -> None:
    from fedstrata.engines.nvflare.wire import Part, Total

    sums = Sums(1000.0)
    sums.open("g", {"a": {0}, "b": {1}})
    sums.leave("g", "b")
    sums.leave("gone", "b")
    with pytest.raises(SiteRefusedError, match=r"member\(s\) 1 ended"):
        read(within(60, lambda: sums.add_up("a", records.encode(Part("g", [0], [torch.ones(1)])))), Total)


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


def test_a_model_that_is_not_finite_is_not_passed_on(sites: Callable[..., Sites], tmp_path: Path) -> None:
    made = sites(_spec("sfl", rounds=1))
    broken: list[str] = []

    def hook(site: str, body: Any, deliver: Callable[[], bytes]) -> bytes:
        answer = deliver()
        if isinstance(body, Hop) and not broken:
            broken.append(site)
            left = made.hosts[site]._running().stay._new
            assert left is not None
            next(iter(left.weights.params.values())).fill_(float("nan"))
        return answer

    made.hook = hook
    history = made.run(tmp_path / "out")
    assert all(torch.isfinite(tensor).all() for tensor in history.params.values())
    (reason,) = _events(tmp_path / "out", "failed")
    assert "NaN" in reason


def test_a_site_that_cannot_begin_takes_no_part_and_the_events_say_why(
    sites: Callable[..., Sites], tmp_path: Path
) -> None:
    made = sites(_spec())
    made.hook = lambda site, body, deliver: records.encode(Done()) if site == "c" else deliver()
    history = made.run(tmp_path / "out")
    assert [record["clients_returned"] for record in history] == [2, 2]
    assert "site c takes no part" in _events(tmp_path / "out", "absent")[0]


def test_no_site_at_all_is_an_error(sites: Callable[..., Sites]) -> None:
    made = sites(_spec())

    def hook(site: str, body: Any, deliver: Callable[[], bytes]) -> bytes:
        raise SiteLostError("it has not joined")

    made.hook = hook
    with pytest.raises(SiteLostError, match="no site can be reached"):
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
        if made.engine._exchange > 0 and made.prepared and len(dead) == 0 and _round(body) == 4:
            dead.append(1)
            raise KeyboardInterrupt  # the server is gone in round 4; the states of round 3 are at the sites
        return deliver()

    made.hook = hook
    with pytest.raises(KeyboardInterrupt):
        made.run(tmp_path / "out")
    again = sites(spec, "aab")  # new processes, the same folders
    assert _same(again.run(tmp_path / "out", resume=True), fs.run(spec))


def _round(body: Any) -> int:
    requests = body.requests if isinstance(body, Ask) else []
    return max((getattr(request, "round", 0) for request in requests), default=0)


def test_a_site_that_lost_its_states_says_so(sites: Callable[..., Sites], tmp_path: Path) -> None:
    import shutil

    spec = _spec("scaffold", rounds=2, evaluation={"every": 0, "checkpoint_every": 1})
    made = sites(spec)
    made.run(tmp_path / "out")
    shutil.rmtree(tmp_path / "sites" / "b")
    sites(spec.model_copy(update={"training": spec.training})).run(tmp_path / "out", resume=True)
    made = sites(spec)
    made.engine.restore(2)
    assert [(kind, clients) for kind, clients, _ in made.engine.events()] == [("state lost", [1])]


@pytest.mark.parametrize("method", ["scaffold", "fedavg"])
def test_a_run_does_not_go_on_where_its_clients_states_are_not(
    sites: Callable[..., Sites], tmp_path: Path, method: str
) -> None:
    spec = _spec(method, evaluation={"every": 0, "checkpoint_every": 1})
    sites(spec).run(tmp_path / "there")
    before = (tmp_path / "there" / "metrics.jsonl").read_bytes()
    with pytest.raises(SpecError, match=r"engine = 'local': .* at its sites, .*'nvflare'"):
        fs.run(spec, out=tmp_path / "there", resume=True)
    assert (tmp_path / "there" / "metrics.jsonl").read_bytes() == before
    fs.run(spec, out=tmp_path / "here")
    with pytest.raises(SpecError, match=r"engine = 'NVFlareEngine': .* in its checkpoint, .*'local' or 'ray'"):
        sites(spec).run(tmp_path / "here", resume=True)


def test_clients_that_are_dealt_to_other_sites_have_lost_their_states_and_the_events_say_so(
    sites: Callable[..., Sites], tmp_path: Path
) -> None:
    spec = _spec("scaffold", rounds=2, evaluation={"every": 0, "checkpoint_every": 1})
    sites(spec, "abb").run(tmp_path / "out")

    def resumed(homes: str) -> tuple[list[tuple[str, list[int]]], set[int]]:
        """What is said, and who has a state."""
        made = sites(spec, homes)
        made.engine.restore(2)
        made.engine.save(2)
        notes = [(kind, clients) for kind, clients, _ in made.engine.events()]
        return notes, {client for host in made.hosts.values() for client in host._running().store}

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
    host = Host("a", Path("states"), lambda target, data: b"", patience=1.0, **settings)
    begin = Begin("run", spec, None, [0, 1, 2], 3, 0)
    return read(host.call(SERVER, records.encode(Envelope([], begin))), Begun)


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
        for allow, accepted in ([], "from no package"), ([f"own_{named}"], f"only from own_{named}"):
            with pytest.raises(
                SiteRefusedError, match=rf"{named}.name = '{module}:Own': .* {accepted} here, .*'allow'"
            ):
                _begin(kinds[named], allow=allow)
    assert "" not in sys.path
    # What is listed is not looked for in the working directory either.
    brought = text.replace('"fedavg"', f'"brought_{named}:Own"')
    with pytest.raises(SiteRefusedError, match=f"no module 'brought_{named}'"):
        _begin(brought, allow=[f"brought_{named}"])
    assert not (tmp_path / "run").exists()
    monkeypatch.syspath_prepend(tmp_path / "installed")
    assert _begin(text.replace('"fedavg"', f'"own_{named}:Own"'), allow=[f"own_{named}"]) == Begun(0, [])
    assert _begin(brought, allow=None) == Begun(0, []), "a simulation is the user's own"


class _Broken(CrossEntropy):
    def client_init(self, model: Any, context: Any) -> Any:
        raise ValueError("labels 3, 5 and 8")


class Broken(FedAvg):
    """A method whose clients raise what they see."""

    objective = _Broken()


@pytest.mark.parametrize("frank", [False, True])
def test_what_a_client_raises_stays_in_its_sites_log(
    sites: Callable[..., Sites], caplog: pytest.LogCaptureFixture, frank: bool
) -> None:
    spec = _spec().model_copy(update={"method": Broken()})
    made = sites(spec, allow=None, frank=frank)
    with pytest.raises(FedstrataError) as raised:
        made.run()
    assert "ValueError" in str(raised.value)
    assert ("labels 3, 5 and 8" in str(raised.value)) == frank
    assert (__file__ in str(raised.value)) == frank
    assert ("labels 3, 5 and 8" in caplog.text) != frank


# --- data that sites bring ---------------------------------------------------------------------------------------


@pytest.fixture
def own(tmp_path: Path) -> tuple[fs.Experiment, Agreed, dict[str, Path], Path]:
    """The digits' partition as a file for each site, and what was agreed about them."""
    spec = _spec("scaffold")
    prepared = prepare(spec)
    data = prepared.data
    assert data.shift is not None
    assert data.scale is not None
    files = {}
    for client, name in enumerate("abc"):
        files[name] = tmp_path / f"{name}.npz"
        mine = prepared.assignment[client]
        np.savez(files[name], x_train=data.x_train[mine].numpy(), y_train=data.y_train[mine].numpy())
    np.savez(tmp_path / "test.npz", x_test=data.x_test.numpy(), y_test=data.y_test.numpy())
    agreed = Agreed(list(data.shape), data.classes, data.shift.tolist(), data.scale.tolist())
    return spec, agreed, files, tmp_path / "test.npz"


def test_sites_with_files_of_their_own_compute_the_same(
    own: tuple[fs.Experiment, Agreed, dict[str, Path], Path], tmp_path: Path
) -> None:
    spec, agreed, files, test = own
    prepared = prepare_server(spec, agreed, test, 3)
    assert prepared.config.sizes is None, "the server knows no site's size"
    there = Sites(prepared, list("abc"), tmp_path / "sites", agreed=agreed, data=files).run(tmp_path / "out")
    here = fs.run(spec)
    assert _same(there, here)
    assert there[-1]["accuracy"] == here[-1]["accuracy"]


@pytest.mark.parametrize(
    ("arrays", "problem"),
    [
        ({"x_train": np.zeros((4, 8, 8))}, "has no y_train; it holds: x_train"),
        ({"x_train": np.zeros((4, 8, 9)), "y_train": np.zeros(4, int)}, r"shape \[1, 8, 9\]; agreed is \[1, 8, 8\]"),
        ({"x_train": np.zeros((4, 8, 8)), "y_train": np.full(4, 10)}, r"other labels than 0…9, which are agreed$"),
        ({"x_train": np.zeros((4, 8, 8)), "y_train": np.zeros(3, int)}, "one whole number for each of 4"),
        ({"x_train": np.zeros((4, 8, 8)), "y_train": np.full(4, "a")}, "one whole number for each of 4"),
        ({"x_train": np.full((4, 8, 8), np.nan), "y_train": np.zeros(4, int)}, "x_train"),
        ({"x_train": np.array([{}], dtype=object), "y_train": np.zeros(1, int)}, "without pickle"),
    ],
)
def test_a_file_that_is_not_what_was_agreed_is_refused(tmp_path: Path, arrays: Any, problem: str) -> None:
    np.savez(tmp_path / "own.npz", **arrays)
    with pytest.raises(DataError, match=problem):
        read_own(tmp_path / "own.npz", Agreed([1, 8, 8], 10, [], []), "train")


def test_a_site_whose_file_is_wrong_takes_no_part(
    own: tuple[fs.Experiment, Agreed, dict[str, Path], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec, agreed, files, test = own
    files["b"].unlink()
    made = Sites(prepare_server(spec, agreed, test, 3), list("abc"), tmp_path / "sites", agreed=agreed, data=files)
    history = made.run(tmp_path / "out")
    assert [record["clients_returned"] for record in history] == [2, 2]
    (reason,) = _events(tmp_path / "out", "absent")
    assert "DataError; the log of site b says more" in reason
    assert str(files["b"]) not in reason, "where a site's files are is its own business"
    assert f"there is no file {files['b']}" in caplog.text


# --- a model measured where the data are -------------------------------------------------------------------------

MEASURED = {"metrics": ["accuracy", "macro-f1", "auroc", "ece"], "client_test": 0.25, "validation": 0.1}


def _measuring(prepared: Prepared, own: Any, tmp_path: Path, **options: Any) -> fs.History:
    _, agreed, files, _ = own
    return Sites(prepared, list("abc"), tmp_path / "sites", agreed=agreed, data=files, **options).run(tmp_path / "out")


def _simulated(spec: fs.Experiment, whole: Prepared) -> fs.History:
    """The same clients with the same samples in one process."""
    lists = [whole.assignment[client].tolist() for client in range(3)]
    return fs.run(spec.model_copy(update={"partition": fs.Given(indices=lists)}))


@pytest.mark.parametrize("tells", [False, True])
def test_a_server_without_test_samples_measures_at_the_sites(own: Any, tmp_path: Path, tells: bool) -> None:
    plain, agreed, _, _ = own
    spec = plain.model_copy(update={"evaluation": fs.Evaluation(**MEASURED)})
    there = _measuring(prepare_server(spec, agreed, None, 3), own, tmp_path, tells=tells)
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


def test_a_site_may_bring_test_samples(own: Any, tmp_path: Path) -> None:
    plain, agreed, files, test = own
    settings = fs.Evaluation(client_test=0.5)
    spec = plain.model_copy(update={"evaluation": settings})
    with np.load(test) as loaded:
        x, y = loaded["x_test"], loaded["y_test"]
    for place, name in enumerate("abc"):
        with np.load(files[name]) as loaded:
            mine = dict(loaded)
        np.savez(files[name], **mine, x_test=x[place::3], y_test=y[place::3])
    there = _measuring(prepare_server(spec, agreed, None, 3), own, tmp_path)
    here = fs.run(plain)
    assert _same(there, here), "nothing was taken from what it trains on"
    assert there[-1]["accuracy"] == here[-1]["accuracy"]


def test_a_personal_model_is_measured_at_its_site(own: Any, tmp_path: Path) -> None:
    plain, agreed, _, test = own
    settings = fs.Evaluation(client_test=0.25, fine_tune=2, metrics=["accuracy", "log-loss"])
    spec = plain.model_copy(update={"evaluation": settings})
    there = _measuring(prepare_server(spec, agreed, test, 3), own, tmp_path, tells=True)
    here = _simulated(spec, prepare(plain))
    assert [record["personal"] for record in there] == [record["personal"] for record in here]
    assert there[-1]["accuracy"] == here[-1]["accuracy"], "the server has test samples of its own too"


@pytest.mark.parametrize(
    ("evaluation", "problem"),
    [
        ({}, "evaluation.client_test: the server's settings name no file with test samples"),
        (
            {"client_test": 0.2, "metrics": ["functions:spread"]},
            "'spread': cannot be computed from sums, which is what",
        ),
        ({"client_test": 0.2, "test_clients": 0.5}, "evaluation.test_clients = 0.5: every client is a real site"),
    ],
)
def test_what_cannot_be_measured_at_sites(own: Any, evaluation: Any, problem: str, monkeypatch: Any) -> None:
    module = types.ModuleType("functions")
    module.spread = lambda labels, shares: float(shares.std())  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "functions", module)
    plain, agreed, _, _ = own
    with pytest.raises(SpecError, match=problem):
        prepare_server(plain.model_copy(update={"evaluation": fs.Evaluation(**evaluation)}), agreed, None, 3)


@pytest.mark.parametrize(
    ("method", "what"),
    [
        ({"name": "stratify", "masking": "prf"}, "labels"),
        ({"name": "fedstas", "epsilon": 3.0, "bound": 700}, "sizes"),
    ],
)
def test_what_a_method_keeps_private_no_evaluation_tells(own: Any, method: Any, what: str) -> None:
    _, agreed, _, test = own
    spec = _spec(method["name"], method=method).model_copy(update={"evaluation": fs.Evaluation(client_test=0.2)})
    with pytest.raises(
        SpecError, match=f"client_test = 0.2: what sites answer tells their {what}, which the method keeps"
    ):
        prepare_server(spec, agreed, test, 3)


def test_a_site_with_a_file_does_not_take_part_in_a_run_about_other_data(
    sites: Callable[..., Sites], tmp_path: Path
) -> None:
    made = sites(_spec(), data={"a": tmp_path / "secret.npz"})
    made.engine.restore(0)
    (note,) = made.engine.events()
    assert "a data file of its own" in note[2]


def test_a_run_must_have_a_plain_name(tmp_path: Path) -> None:
    host = Host("a", tmp_path, lambda target, data: b"", patience=1.0)
    begin = Begin("../../elsewhere", _spec().to_toml(), None, [0], 3, 0)
    with pytest.raises(SiteRefusedError, match="names no run"):
        read(host.call(SERVER, records.encode(Envelope([], begin))), Done)


def test_dropout_layers_are_refused_before_anybody_is_asked(sites: Callable[..., Sites]) -> None:
    made = sites(_spec())
    object.__setattr__(made.prepared.config, "random", True)  # as preparation finds of a model with dropout
    with pytest.raises(SpecError, match="draws random numbers"):
        made.engine.ask({0: SizeReport(1, 0, 1.0)}, together=True)


def test_hops_without_a_model_are_refused(sites: Callable[..., Sites]) -> None:
    made = sites(_spec("sfl"))
    made.engine.restore(0)
    hop = Hop(1, 1, 0, 0, SizeReport(1, 0, 1.0), "", 0, None, True)
    with pytest.raises(FedstrataError, match="without a model"):
        read(made.hosts["a"].call(SERVER, records.encode(Envelope([], hop))), Hopped)
