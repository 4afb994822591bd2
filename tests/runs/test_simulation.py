"""The loop over rounds, driven by hand and by those who stand on it."""

from __future__ import annotations

import asking
import numpy as np
import pytest
import safetensors.torch
import torch

import fedstrata as fs
from fedstrata.base.errors import FedstrataError, SpecError
from fedstrata.clients.client import StateStore
from fedstrata.engines.local import LocalEngine
from fedstrata.runs import checkpoint
from fedstrata.runs.simulation import make_context

TABLE = {
    "partition": {"name": "iid", "clients": 4},
    "model": {"name": "mlp", "hidden": [8]},
    "availability": {"name": "bernoulli", "p": 0.7},
    "training": {"rounds": 3, "local_epochs": 1, "clients_per_round": 3},
    "evaluation": {"every": 2, "checkpoint_every": 1},
}


def spec(method="scaffold", **more):
    return fs.Experiment.from_table({**TABLE, "method": method, **more})


def final_bytes(weights):
    return safetensors.torch.save({name: tensor.contiguous() for name, tensor in weights.items()})


def timeless(records):
    return [{key: value for key, value in record.items() if key != "seconds"} for record in records]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["scaffold", "stratify"])
def test_step_by_step_it_is_the_same_run(method):
    history = fs.run(spec(method))
    with fs.Simulation(fs.prepare(spec(method))) as simulation:
        records = []
        while not simulation.done:
            records.append(simulation.step())
            assert records[-1]["round"] == simulation.round == len(records)
        weights = simulation.evaluated()
    assert timeless(records) == timeless(history)
    assert final_bytes({**weights.params, **weights.buffers}) == final_bytes(history.params)
    assert simulation.state.weights.params.keys() == weights.params.keys()


def test_iterating_goes_through_the_rounds_that_are_left():
    with fs.Simulation(fs.prepare(spec())) as simulation:
        simulation.step()
        assert [record["round"] for record in simulation] == [2, 3]
        assert list(simulation) == []
        # Whoever wants more than the spec says may have it.
        assert simulation.step()["round"] == 4


def test_it_is_evaluated_when_the_spec_says_so_and_whenever_asked():
    with fs.Simulation(fs.prepare(spec())) as simulation:
        assert [record["accuracy"] is None for record in simulation] == [True, False, False]
        score = simulation.evaluate()
        assert score.accuracy == simulation.evaluate().accuracy > 0
        assert len(score.per_class) == 10


@pytest.mark.slow
def test_events_are_those_of_the_last_round():
    with fs.Simulation(fs.prepare(spec("stratify"))) as simulation:
        assert [event["kind"] for event in simulation.events] == ["enrolled"]
        for record in simulation:
            away = [event for event in simulation.events if event["kind"] == "dropped"]
            assert sum(len(event["clients"]) for event in away) == record["clients_dropped"]
            assert {event["round"] for event in simulation.events} <= {record["round"]}


def test_the_listener_hears_what_counts():
    heard = []
    with fs.Simulation(
        fs.prepare(spec()), listener=lambda round, replies: heard.append((round, replies))
    ) as simulation:
        returned = [record["clients_returned"] for record in simulation]
    assert [round for round, _ in heard] == [number for number, count in enumerate(returned, 1) if count]
    assert [len(replies) for _, replies in heard] == [count for count in returned if count]


class Closing(LocalEngine):
    """Notes that it was closed."""

    closed = 0

    def close(self):
        self.closed += 1
        super().close()


def engine_of(prepared):
    return Closing(make_context(prepared), StateStore())


def test_an_engine_that_was_handed_in_is_closed_at_the_end_whatever_happens():
    prepared = fs.prepare(spec())
    engine = engine_of(prepared)
    with fs.Simulation(prepared, engine) as simulation:
        simulation.step()
        assert simulation.engine is engine
        assert engine.closed == 0
    assert engine.closed == 1
    engine = engine_of(prepared)
    with pytest.raises(KeyboardInterrupt), fs.Simulation(prepared, engine):
        raise KeyboardInterrupt
    assert engine.closed == 1


def test_an_engine_is_closed_where_the_run_does_not_even_begin():
    class Unready(fs.FedAvg):
        def init(self, federation, weights):
            raise ZeroDivisionError("on purpose")

    prepared = fs.prepare(spec(Unready()))
    engine = engine_of(prepared)
    with pytest.raises(ZeroDivisionError):
        fs.Simulation(prepared, engine)
    assert engine.closed == 1


def test_an_engine_that_there_is_not():
    with pytest.raises(
        SpecError, match=r"engine = 'locl': is not an engine; did you mean 'local'\? Use one of: local, ray, nvflare"
    ):
        fs.Simulation(fs.prepare(spec()), "locl")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["scaffold", "stratify"])
def test_it_goes_on_from_a_checkpoint(tmp_path, method):
    whole = fs.run(spec(method), out=tmp_path)
    kept = checkpoint.load(tmp_path / "checkpoint")
    assert kept.round == 3
    (tmp_path / "checkpoint" / "round-00000003" / "state.bin").write_bytes(b"damaged")
    before = checkpoint.load(tmp_path / "checkpoint")
    with fs.Simulation(fs.prepare(spec(method)), checkpoint=before) as simulation:
        assert (simulation.round, simulation.done, simulation.events) == (2, False, [])
        (record,) = simulation
        weights = simulation.evaluated()
    assert timeless([record]) == timeless(whole)[2:]
    assert final_bytes({**weights.params, **weights.buffers}) == final_bytes(whole.params)


@pytest.mark.slow
def test_states_that_are_elsewhere_are_missed_before_the_first_round(tmp_path):
    class AtSites(Closing):
        keeps_states = True

    fs.run(spec(), out=tmp_path)
    prepared, before = fs.prepare(spec()), checkpoint.load(tmp_path / "checkpoint")
    engine = AtSites(make_context(prepared), StateStore())
    with pytest.raises(
        SpecError, match=r"engine = 'AtSites': the clients' states of this run are in the checkpoint, not at the"
    ):
        fs.Simulation(prepared, engine, before)
    assert engine.closed == 1


def test_a_method_cannot_write_over_the_books():
    class Liar(fs.FedAvg):
        def run_round(self, federation, state):
            state, metrics = super().run_round(federation, state)
            return state, {**metrics, "round": 99, "accuracy": 1.0, "own": 7}

    (record,) = fs.run(fs.Experiment(method=Liar(), training={"rounds": 1}))
    assert (record["round"], record["own"]) == (1, 7)
    assert record["accuracy"] < 1


def test_a_method_brings_its_own_handlers():
    found = fs.run(spec(asking.Counted(), availability="always"))
    assert [record["visits"] for record in found] == [4, 8, 12]


def test_handlers_that_nobody_named_are_missed():
    class Forgetful(asking.Counted):
        handlers = ()

    with pytest.raises(FedstrataError, match=r"cannot answer HowOften. Add a handler for it to"):
        fs.run(spec(Forgetful(), availability="always"))


def test_a_class_is_absent_if_no_client_with_its_samples_returned():
    spec = fs.Experiment.from_table(
        {
            "partition": {"name": "classes", "clients": 8, "per_client": 2},
            "availability": {"name": "bernoulli", "p": 0.4},
            "training": {"rounds": 6, "local_steps": 1, "clients_per_round": 8},
        }
    )
    prepared = fs.prepare(spec)
    labels = [set(prepared.data.y_train[torch.as_tensor(each)].tolist()) for each in prepared.assignment]
    seen = []
    with fs.Simulation(prepared) as simulation:
        for record in simulation:
            away = {client for event in simulation.events for client in event["clients"]}
            trained = set[int]().union(*(labels[client] for client in range(8) if client not in away))
            assert record["classes_absent"] == sorted(set(range(10)) - trained)
            seen.append(len(record["classes_absent"]))
    assert len(set(seen)) > 1


def test_without_classes_none_is_absent():
    data = {f"x_{part}": np.zeros((4, 2)) for part in ("train", "test")}
    data |= {f"y_{part}": np.arange(4.0) for part in ("train", "test")}
    table = {"task": "regression", "partition": {"name": "iid", "clients": 2}, "training": {"rounds": 1}}
    with fs.Simulation(fs.prepare(fs.Experiment.from_table(table), data=data)) as simulation:
        assert "classes_absent" not in simulation.step()
