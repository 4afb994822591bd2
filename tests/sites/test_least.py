"""The fewest sites that must answer: before the first round, in every one, and what happens when there are fewer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from site_engine import make_site_engine

import fedstrata as fs
from fedstrata.base import records
from fedstrata.base.errors import FedstrataError
from fedstrata.base.jsonl import read_jsonl
from fedstrata.federation.messages import FitReply
from fedstrata.runs.preparation import prepare
from fedstrata.runs.simulation import run_prepared
from fedstrata.sites import directory
from fedstrata.sites import engine as engines
from fedstrata.sites.data_schema import prepare_server, surveyed
from fedstrata.sites.engine import NVFlareEngine
from fedstrata.sites.policy import Policy
from fedstrata.sites.settings import SiteSettings
from fedstrata.sites.site_server import SERVER, SiteServer
from fedstrata.sites.sums import Sums
from fedstrata.sites.wire import Ask, Envelope, Hop, SiteLostError, read


class Transport:
    """Sites in this process, which a test takes away and brings back."""

    def __init__(self) -> None:
        self.site_servers: dict[str, SiteServer] = {}
        self.gone: set[str] = set()
        self.hook: Callable[[str, Any], None] = lambda site, body: None

    def is_reachable(self, site: str) -> bool:
        return site not in self.gone

    def send(self, site: str, data: bytes, patience: float, number: int) -> object:
        self.hook(site, read(data, Envelope).body)
        if site in self.gone:
            raise SiteLostError("nothing was heard of it")
        return self.site_servers[site].call(SERVER, data)


@pytest.fixture
def transport(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Transport:
    monkeypatch.setattr(directory, "WAIT", 0.01)
    monkeypatch.setattr(engines, "BEGIN_AGAIN", 0.05)
    return Transport()


def spec(method: str = "scaffold", **table: Any) -> fs.Experiment:
    return fs.Experiment.from_table(
        {
            "method": method,
            "data": {"limit": 90},
            "partition": {"name": "iid", "clients": 3},
            "model": {"name": "mlp", "hidden": [4]},
            "training": {"rounds": 4, "execution": "per-client", "local_steps": 1},
            "evaluation": {"every": 0},
            **table,
        }
    )


def run(
    transport: Transport,
    place: Path,
    spec: fs.Experiment,
    least: int,
    fewer: Any,
    made: list[NVFlareEngine] | None = None,
) -> fs.History:
    prepared, sums = prepare(spec), Sums(60.0)
    for name in "abc":

        def carry(target: str, data: bytes, name: str = name) -> object:
            return sums.add_up(name, data) if target == SERVER else transport.site_servers[target].call(name, data)

        transport.site_servers[name] = SiteServer(name, place / name, carry, SiteSettings(simulated=True))
    common = {"spec": spec.to_toml(), "run": "run", "patience": 60.0, "least": least, "fewer": fewer}
    engine = make_site_engine(prepared.config, transport, list("abc"), sums, **common)
    if made is not None:
        made.append(engine)
    return run_prepared(prepared, None, engine)


def dies_in_round(transport: Transport, round: int, *, back: float | None, kind: type = Ask) -> None:
    """Site b is gone in a round, and back after so many seconds; its answer of that round is lost on its way."""
    asked: list[str] = []

    def hook(site: str, body: Any) -> None:
        if site == "b" and isinstance(body, kind) and not transport.gone:
            asked.append(site)
            if len(asked) == round:
                transport.gone.add("b")
                if back is not None:
                    threading.Timer(back, transport.gone.clear).start()

    transport.hook = hook


@pytest.mark.slow
@pytest.mark.parametrize(("method", "kind"), [("scaffold", Ask), ("sfl", Hop)])
def test_a_run_waits_for_those_that_it_needs(transport: Transport, tmp_path: Path, method: str, kind: type) -> None:
    experiment = spec(method)
    dies_in_round(transport, 2, back=0.3, kind=kind)
    history = run(transport, tmp_path, experiment, 3, "wait")
    returned = [record["clients_returned"] for record in history]
    assert returned == ([3] * 4 if kind is Ask else [3, 2, 3, 3])  # a hop is not made twice
    if kind is Ask:
        here = fs.run(experiment)
        assert all(bool((history.params[key] == here.params[key]).all()) for key in here.params)


@pytest.mark.slow
def test_a_run_that_is_to_end_with_fewer_ends_and_says_who_is_away(transport: Transport, tmp_path: Path) -> None:
    dies_in_round(transport, 2, back=None)
    with pytest.raises(FedstrataError, match=r"only 2 sites answered, but .* requires 3: site b cannot be reached"):
        run(transport, tmp_path, spec(), 3, "abort")


@pytest.mark.slow
def test_a_run_that_may_go_on_with_fewer_does(transport: Transport, tmp_path: Path) -> None:
    dies_in_round(transport, 2, back=None)
    history = run(transport, tmp_path, spec(), 3, "go-on")
    assert [record["clients_returned"] for record in history] == [3, 2, 2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("fewer", ["wait", "abort", "go-on"])
@pytest.mark.parametrize("method", ["scaffold", "sfl"])
def test_who_refuses_to_answer_is_not_in(transport: Transport, tmp_path: Path, fewer: Any, method: str) -> None:
    """A site whose policy was used up counted as one that answers, and stood as one that is in."""
    policy = Policy(jobs="within-policy", exchanges=1, min_samples=1)
    engine: list[NVFlareEngine] = []

    def seen(site: str, body: Any) -> None:
        transport.site_servers["b"].policy = policy

    transport.hook = seen
    if fewer == "go-on":
        history = run(transport, tmp_path, spec(method), 3, fewer, engine)
        assert [record["clients_returned"] for record in history] == [3, 2, 2, 2]
        state, why = engine[0].directory.status("b")
        assert state == "refused"
        assert "policy.exchanges" in why
        assert engine[0].directory.status("a") == ("in", "")
    else:
        with pytest.raises(FedstrataError, match=r"refused by the rule 'policy\.exchanges': the job sent 1 messages"):
            run(transport, tmp_path, spec(method), 3, fewer, engine)


def test_who_refuses_at_the_beginning_is_not_waited_for(transport: Transport, tmp_path: Path) -> None:
    """Its policy is read when a job begins, so that it was asked every ten seconds for ever."""
    transport.hook = lambda site, body: setattr(
        transport.site_servers["b"], "policy", Policy(jobs="within-policy", methods=["fedavg"], min_samples=1)
    )
    with pytest.raises(
        FedstrataError,
        match=r"rule 'policy\.methods': this site does not accept the method 'scaffold'\. Use one of: fedavg",
    ):
        run(transport, tmp_path, spec(), 3, "wait")


@pytest.mark.slow
def test_enough_are_enough(transport: Transport, tmp_path: Path) -> None:
    dies_in_round(transport, 2, back=None)
    for fewer in ("wait", "abort"):
        transport.gone.clear()
        assert len(run(transport, tmp_path / fewer, spec(), 2, fewer)) == 4


HEAD = "age,ill\n"
OWN = {
    "data": {
        "name": "own.csv",
        "schema": {
            "label": "ill",
            "classes": ["no", "yes"],
            "test": 0.2,
            "columns": {"age": {"type": "number", "range": [0, 120]}},
        },
    },
    "partition": {"name": "natural"},
}


def own_data(transport: Transport, place: Path, least: int, fewer: Any) -> tuple[fs.History, NVFlareEngine]:
    """Two hospitals, of which one has a file that is not what the spec says."""
    rows = "".join(f"{20 + n},{'yes' if n % 2 else 'no'}\n" for n in range(40))
    (place / "a.csv").write_text(HEAD + rows)
    (place / "b.csv").write_text(HEAD + "900,no\n" + rows)
    experiment = spec("fedavg", **OWN)
    prepared, sums = prepare_server(experiment, None, 2), Sums(60.0)
    for name in "ab":
        transport.site_servers[name] = SiteServer(
            name, place / name, lambda to, data: b"", SiteSettings(data=place / f"{name}.csv")
        )
    common = {"spec": experiment.to_toml(), "run": "run", "patience": 60.0, "least": least, "fewer": fewer}
    engine = make_site_engine(prepared.config, transport, list("ab"), sums, **common)
    return run_prepared(surveyed(prepared, engine, place / "out", resume=False), None, engine), engine


def test_one_hospital_of_two_with_a_bad_file_is_fewer_than_two(transport: Transport, tmp_path: Path) -> None:
    """The run was completed with one hospital, because connections were counted."""
    with pytest.raises(
        FedstrataError, match="the site's data do not fit the spec: column 'age': some cells are not allowed"
    ):
        own_data(transport, tmp_path, 2, "abort")


@pytest.mark.slow
@pytest.mark.parametrize("fewer", ["wait", "abort", "go-on"])
def test_who_refuses_one_kind_of_question_is_in(transport: Transport, tmp_path: Path, fewer: Any) -> None:
    """A hospital that trains and has too few test samples to tell how a model does on them ended the run of all."""
    refused: list[str] = []
    send = transport.send

    def listen(site: str, *question: Any) -> object:
        answer = send(site, *question)
        said = records.decode(answer)  # type: ignore[arg-type]
        refused.extend(each.reason for each in getattr(said, "outcomes", ()) if getattr(each, "refused", False))
        return answer

    transport.send = listen  # type: ignore[method-assign]
    rows = [f"{20 + n},{'yes' if n % 2 else 'no'}\n" for n in range(40)]
    for name, count in (("a", 40), ("b", 20)):
        (tmp_path / f"{name}.csv").write_text(HEAD + "".join(rows[:count]))
    experiment = spec("fedavg", **OWN | {"evaluation": {"every": 1}})
    prepared, sums = prepare_server(experiment, None, 2), Sums(60.0)
    for name in "ab":
        settings, policy = SiteSettings(data=tmp_path / f"{name}.csv"), Policy(jobs="within-policy", min_samples=5)
        transport.site_servers[name] = SiteServer(name, tmp_path / name, lambda to, data: b"", settings, policy=policy)
    common: dict[str, Any] = {"spec": experiment.to_toml(), "run": "run", "patience": 60.0, "least": 2, "fewer": fewer}
    engine = make_site_engine(prepared.config, transport, list("ab"), sums, **common)
    history = run_prepared(surveyed(prepared, engine, tmp_path / "out", resume=False), None, engine)
    assert [record["clients_returned"] for record in history] == [2, 2, 2, 2]
    assert engine.directory.status("b") == ("in", "")
    assert refused, "it told how the model does on four samples"


@pytest.mark.slow
def test_a_site_cannot_claim_more_samples_than_it_reported_before_the_run(transport: Transport, tmp_path: Path) -> None:
    send = transport.send

    def lie(site: str, *question: Any) -> object:
        answer = records.decode(send(site, *question))  # type: ignore[arg-type]
        if site == "b" and any(isinstance(each, FitReply) for each in getattr(answer, "outcomes", ())):
            answer = replace(answer, outcomes=[replace(each, samples=2**62) for each in answer.outcomes])
        return records.encode(answer)

    transport.send = lie  # type: ignore[method-assign]
    rows = "".join(f"{20 + n},{'yes' if n % 2 else 'no'}\n" for n in range(40))
    experiment = spec("fedavg", **OWN)
    prepared, sums = prepare_server(experiment, None, 2), Sums(60.0)
    for name in "ab":
        (tmp_path / f"{name}.csv").write_text(HEAD + rows)
        settings = SiteSettings(data=tmp_path / f"{name}.csv")
        transport.site_servers[name] = SiteServer(name, tmp_path / name, lambda to, data: b"", settings)
    common: dict[str, Any] = {"spec": experiment.to_toml(), "run": "run", "patience": 60.0, "least": 1, "fewer": "wait"}
    engine = make_site_engine(prepared.config, transport, list("ab"), sums, **common)
    ready = surveyed(prepared, engine, tmp_path / "out", resume=False)
    history = run_prepared(ready, tmp_path / "out", engine)
    assert {(record["clients_returned"], record["clients_failed"]) for record in history} == {(1, 1)}
    reasons = [event["reason"] for event in read_jsonl(tmp_path / "out" / "events.jsonl") if event["kind"] == "refused"]
    assert f"samples in the reply is {2**62}, but the client has 32" in reasons[0]
    engine.most_samples.clear()  # as in a new process, which resumes the run
    resumed = surveyed(prepared, engine, tmp_path / "out", resume=True)
    assert resumed.config.most_samples.tolist() == [64, 64]


@pytest.mark.slow
def test_a_hospital_that_mends_its_file_is_taken_in(transport: Transport, tmp_path: Path) -> None:
    def mend() -> None:
        (tmp_path / "b.csv").write_text((tmp_path / "a.csv").read_text())

    threading.Timer(0.5, mend).start()
    history, engine = own_data(transport, tmp_path, 2, "wait")
    assert {record["clients_returned"] for record in history} == {2}
    assert not [event for event in engine.events if event[0] == "absent"]
