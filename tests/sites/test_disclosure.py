"""What jobs declare is all that they ask, and no more than they need."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import tomllib
import warnings
from pathlib import Path
from typing import Any

import combinations
import pytest
from recorder import Recorder, labels, recorded
from torch import Tensor

import fedstrata as fs
from fedstrata.base import records
from fedstrata.cli import main
from fedstrata.clients.client import Client
from fedstrata.federation.communication.messages import Coefficients
from fedstrata.federation.messages import Request
from fedstrata.methods.base import METHODS
from fedstrata.models.batchnorm import ReduceGroup
from fedstrata.runs.simulation import Simulation
from fedstrata.sampling.base import CLIENT_SAMPLERS, DATA_SAMPLERS, Uniform
from fedstrata.sites.disclosure import Declaration, declaration_of, hash_of
from fedstrata.sites.policy import RuleError
from fedstrata.stratify.messages import Gradient

HOSPITALS = Path(__file__).parents[2] / "examples" / "hospitals" / "hospitals.toml"
PLAIN = combinations.PLAIN
needs_tenseal = pytest.mark.skipif(importlib.util.find_spec("tenseal") is None, reason="needs the extra he")

ROWS: dict[str, dict[str, str]] = {
    **{name: {"method": name} for name in METHODS if name not in ("fedtan", "stratify")},
    "fedtan": {"method": "fedtan", "norm": "average"},
    **{f"sampler {name}": {"method": "fedavg", "client_sampler": name} for name in combinations.SAMPLERS},
    **{
        f"data {name}": {"method": "fedavg", "data_sampler": name, "aggregator": "mean"}
        for name in combinations.DATA_SAMPLERS
    },
    "sfl power-of-choice": {"method": "sfl", "client_sampler": "power-of-choice"},
    **{f"stratify {mode}": {"method": "stratify", "mode": mode} for mode in combinations.MODES},
    "stratify with BatchNorm": {"method": "stratify", "norm": "average"},
    "stratify weighted": {"method": "stratify", "selection": "weighted"},
}
MASKED = {
    f"stratify {mode} {selection}": {"method": "stratify", "masking": mode, "selection": selection}
    for mode in ("prf", "ckks")
    for selection in combinations.SELECTIONS
}
CODECS: dict[str, dict[str, Any]] = {
    "qsgd": {"up": "qsgd", "down": "qsgd"},
    "powersgd": {"up": {"name": "powersgd", "rank": 2, "start": 2}, "down": "bf16"},
    "top-k": {"up": {"name": "top-k", "fraction": 0.3}},
}


def _table(row: dict[str, str], **sections: Any) -> dict[str, Any]:
    table = combinations.table_of({**PLAIN, **row})
    table["training"]["rounds"] = 3 if row.get("mode") == "hybrid" else 2
    return table | sections


def _recorded(table: dict[str, Any], folder: Path) -> Recorder:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return recorded(table, folder, data=combinations.data())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name == "stratify single" else []) for name in ROWS]
)
def test_a_job_asks_what_it_declares_and_all_of_it(name: str, tmp_path: Path) -> None:
    engine = _recorded(_table(ROWS[name]), tmp_path)
    assert engine.counts
    assert engine.unused() == []


LONG = {name: [pytest.mark.long] if name == "stratify ckks weighted" else [] for name in MASKED}


@needs_tenseal
@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=LONG[name]) for name in MASKED])
def test_enrolment_asks_what_it_declares_and_all_of_it(name: str, tmp_path: Path) -> None:
    table = _table(MASKED[name])
    table["partition"] = {"name": "iid", "clients": 2}
    table["training"] |= {"rounds": 1, "clients_per_round": 2}
    engine = _recorded(table, tmp_path)
    # Positions are asked for once: nobody vanishes. So it is with the other runs' masking.
    assert [part for part in engine.unused() if not part.startswith("Reserve")] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        "fedtan",
        "power-of-choice",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("fedavg", "stratify", "fedsts", "fedssar", "scaffold")
        ),
    ],
)
@pytest.mark.parametrize("codec", CODECS)
def test_encoded_questions_are_declared_as_they_travel(codec: str, method: str, tmp_path: Path) -> None:
    row = {"method": method, **({"norm": "average"} if method == "fedtan" else {})}
    engine = _recorded(_table(row, communication=CODECS[codec]), tmp_path)
    assert engine.unused() == []
    assert any(label.startswith("Encoded of ") for label in labels(engine.asked))


class Lost:
    """A group to which the line breaks after its first sum."""

    def __init__(self, group: ReduceGroup) -> None:
        self.group, self.size, self.sums = group, group.size, 0

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        self.sums += 1
        if self.sums > 1:
            raise ConnectionError("lost")
        return self.group.all_reduce_sum(tensor)


class Losing(Recorder):
    """One client of a group is lost, once, while it answers a kind of question."""

    lost: int | None = None
    victim: int | None = None
    again = 0

    def losing(self, kind: type[Request]) -> None:
        self.kind, table = kind, self.context.handlers.alone
        answer = table[kind]

        def answers(client: Client, request: Any) -> Any:
            if client.number == self.victim:
                assert client.group is not None
                client.group = Lost(client.group)
                if kind is Coefficients:
                    raise ConnectionError("lost")
            return answer(client, request)

        table[kind] = answers

    def ask(self, requests: Any, *, together: bool, **more: Any) -> Any:
        inner = {type(getattr(request, "request", request)) for request in requests.values()}
        self.victim = None
        if self.lost is None and inner == {self.kind} and together and len(requests) > 2:
            self.lost = self.victim = max(requests)
        return super().ask(requests, together=together, **more)

    def note(self, client: int, request: Any, **how: Any) -> Any:
        match = super().note(client, request, **how)
        self.again += match.again
        return match


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "kind"), [*((codec, Gradient) for codec in CODECS), ("powersgd", Coefficients)], ids=str
)
def test_a_group_that_loses_a_client_begins_anew_within_its_declaration(
    codec: str, kind: type[Request], tmp_path: Path
) -> None:
    """The clients of a batch add up in the middle of a pass, for BatchNorm; one is lost between two sums."""
    table = _table({"method": "stratify", "norm": "average"}, communication=CODECS[codec])
    table["training"] |= {"batch_size": 8}
    prepared = fs.prepare(fs.Experiment.from_table(table), data=combinations.data())
    engine = Losing(prepared, tmp_path)
    engine.losing(kind)
    with Simulation(prepared, engine) as simulation:
        records = list(simulation)
        failed = [event["clients"] for event in simulation.federation.events if event["kind"] == "failed"]
    assert engine.lost is not None
    assert failed in ([[engine.lost]], [])  # in the last round, or in the one before
    assert engine.again > 1, "those who are left are asked the very same again"
    assert [record["clients_failed"] for record in records] in ([0, 1], [1, 0])


@pytest.mark.slow
def test_an_evaluation_asks_what_it_declares(tmp_path: Path) -> None:
    evaluation = {"every": 2, "client_test": 0.3, "fine_tune": 1, "metrics": ["accuracy", "ece"]}
    table = _table({"method": "fedavg"}, evaluation=evaluation)
    engine = _recorded({**table, "training": {**table["training"], "rounds": 3}}, tmp_path)
    assert engine.unused() == []
    put = {position for (number, _, position) in engine.counts if labels(engine.asked)[number] == "Evaluate"}
    assert put == {(2, 2), (3, 2)}


@pytest.mark.parametrize("narrower", ["kind", "times", "rounds", "where"])
def test_a_narrower_declaration_is_broken_by_the_run(narrower: str, tmp_path: Path) -> None:
    """The recorder sees what it is there to see."""
    prepared = fs.prepare(fs.Experiment.from_table(_table({"method": "power-of-choice"})), data=combinations.data())
    asked = declaration_of(prepared.spec, agreed=prepared.config, own_data=False)
    assert asked.allowed is not None
    *others, fit = asked.allowed
    changed = {
        "kind": [],
        "times": [dataclasses.replace(fit, times=0)],
        "rounds": [dataclasses.replace(fit, rounds=range(1, 2))],
        "where": [dataclasses.replace(fit, where={**fit.where, "keep": 0.5})],
    }[narrower]
    engine = Recorder(prepared, tmp_path, dataclasses.replace(asked, allowed=[*others, *changed]))
    with Simulation(prepared, engine) as simulation, pytest.raises(RuleError) as raised:
        list(simulation)
    assert raised.value.rule == {"kind": "kind", "times": "repeat", "rounds": "phase", "where": "bounds"}[narrower]


def test_what_nobody_asks_counts_as_declared_too_wide(tmp_path: Path) -> None:
    prepared = fs.prepare(fs.Experiment.from_table(_table({"method": "fedavg"})))
    wider = declaration_of(fs.Experiment(method="power-of-choice"), agreed=prepared.config, own_data=False)
    engine = Recorder(prepared, tmp_path, wider)
    with Simulation(prepared, engine) as simulation:
        simulation.step()
    assert engine.unused() == ["SizeReport: 0 of 1", "LossReport: 0 of 1"]


class Louder(fs.FedAvg):
    """Overrides what is asked, and does not declare it."""

    def run_round(self, federation: Any, state: Any) -> Any:
        return super().run_round(federation, state)


class Choosy(Uniform):
    """The same of a sampler."""

    def select(self, federation: Any, state: Any, weights: Any) -> Any:
        return super().select(federation, state, weights)


class Talkative(fs.Objective):
    """And of an objective, which sends more."""

    def client_final(self, trained: Any, context: Any) -> Any:
        return {"more": {}}, None


@pytest.mark.parametrize(
    "method", [Louder(), fs.FedAvg(client_sampler=Choosy()), fs.FedAvg(objective=Talkative())], ids=str
)
def test_what_is_changed_below_its_declaration_is_not_declared(method: fs.Method) -> None:
    asked = declaration_of(fs.Experiment(method=method))
    assert asked.allowed is None
    assert "does not declare its requests" in "\n".join(asked.lines())


@pytest.mark.slow
def test_everything_that_comes_with_fedstrata_is_declared() -> None:
    for name in METHODS:
        assert declaration_of(fs.Experiment(method=name)).allowed is not None, name
    for key, registry in (("client_sampler", CLIENT_SAMPLERS), ("data_sampler", DATA_SAMPLERS)):
        for name in registry:
            spec = fs.Experiment(method={"name": "fedavg", key: name})
            assert declaration_of(spec).allowed is not None, name


def _asked(**sections: Any) -> Declaration:
    return declaration_of(fs.Experiment.from_table(sections))


def test_what_is_told_in_the_clear() -> None:
    assert _asked(method="fedavg").discloses == {"sizes"}
    private = {"name": "fedstas", "epsilon": 1.0}
    assert (_asked(method=private).discloses, _asked(method=private).conceals) == (frozenset(), {"sizes"})
    assert _asked(method="rebafl").discloses == {"labels", "sizes"}
    assert _asked(method="stratify").discloses == {"labels", "sizes"}
    masked = _asked(method={"name": "stratify", "masking": "prf"})
    assert (masked.discloses, masked.conceals) == ({"sizes"}, {"labels"})


def test_the_hash_of_a_job_is_that_of_what_it_says(tmp_path: Path) -> None:
    one = fs.Experiment.from_table({"method": "fedavg", "training": {"rounds": 3}})
    (tmp_path / "s.toml").write_text("# the same\n[training]\nrounds = 3\n[method]\nname = 'fedavg'\n")
    assert hash_of(fs.Experiment.from_toml(tmp_path / "s.toml")) == hash_of(one)
    assert hash_of(one.model_copy(update={"seed": 1})) != hash_of(one)


def test_asks_says_in_english_what_a_hospital_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["asks", str(HOSPITALS)]) == 0
    text = capsys.readouterr().out
    spec = fs.Experiment.from_table(tomllib.loads(HOSPITALS.read_text()))
    assert f"Job {hash_of(spec)}: method {spec.method.name}, at most {spec.training.rounds} rounds." in text
    assert "answers only these requests" in text
    assert "It sends the model after its local training, with how many samples it used" in text
    assert "Once, before all other requests:\n  - It sends the number of its training samples" in text
    assert "It sends how often the model confuses each pair of classes" in text


def test_asks_as_a_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text("[method]\nname = 'fedstas'\nepsilon = 3.0\n[communication]\nup = 'powersgd'\n")
    assert main(["asks", str(tmp_path / "s.toml"), "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert [question["request"] for question in table["questions"]] == [
        "Encoded of Compress", "SizeReport", "Encoded of Fit", "Coefficients",
    ]  # fmt: skip
    assert table["questions"][1]["where"]["bound"] == 100
    assert (table["discloses"], table["conceals"]) == ([], ["sizes"])


@pytest.mark.parametrize("method", ["soak:Soak", "kills:Slow"])
def test_what_is_measured_over_real_sites_declares_what_it_asks(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites refused the soak, so that nothing could be measured."""
    pytest.importorskip("psutil")
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    # Records that the benchmark declares must be forgotten: Ray's workers of later tests could not import it.
    monkeypatch.setattr(records, "RECORDS", dict(records.RECORDS))
    assert declaration_of(fs.Experiment.from_table({"method": method})).allowed
