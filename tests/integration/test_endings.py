"""How runs end: by an error, and resumed when they are over."""

from __future__ import annotations

import pytest

import fedstrata as fs
from fedstrata.base.errors import QuorumError
from fedstrata.base.jsonl import read_jsonl


def spec(**tables):
    table = {
        "data": {"name": "digits", "limit": 200},
        "partition": {"name": "iid", "clients": 4},
        "training": {"rounds": 3, "local_steps": 2},
        "evaluation": {"every": 0, "checkpoint_every": 0},
    }
    return fs.Experiment.from_table({**table, **tables})


def test_a_run_that_is_over_is_not_deleted_when_it_is_resumed(tmp_path):
    """Without a checkpoint it started over, and its records, summary and model went first."""
    first = fs.run(spec(), out=tmp_path / "run")
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}
    again = fs.run(spec(), out=tmp_path / "run", resume=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()} == before
    assert [record["round"] for record in again] == [1, 2, 3]
    assert all((again.params[name] == tensor).all() for name, tensor in first.params.items())


def test_the_events_of_the_round_that_ends_a_run_are_written(tmp_path):
    """Just those that say why were missing."""

    class Demanding(fs.FedAvg):
        def run_round(self, federation, state):
            if federation.round == 2:
                federation.note("warning", reason="this is the end")
                raise QuorumError("nobody is left")
            return super().run_round(federation, state)

    with pytest.raises(QuorumError):
        fs.run(fs.Experiment(**{**dict(spec()), "method": Demanding()}), out=tmp_path / "run")
    (event,) = [e for e in read_jsonl(tmp_path / "run" / "events.jsonl") if e["kind"] == "warning"]
    assert (event["round"], event["reason"]) == (2, "this is the end")
    assert [record["round"] for record in fs.History.load(tmp_path / "run")] == [1]


def test_a_step_that_failed_can_be_taken_again():
    with fs.Simulation(fs.prepare(spec())) as simulation:
        simulation.step()
        method, calls = simulation.spec.method, []
        run_round = type(method).run_round

        def once(self, federation, state):
            calls.append(federation.round)
            if len(calls) == 1:
                raise QuorumError("not now")
            return run_round(self, federation, state)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(method), "run_round", once)
            with pytest.raises(QuorumError):
                simulation.step()
            assert simulation.step()["round"] == 2
        assert calls == [2, 2]
