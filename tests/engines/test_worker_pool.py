"""Worker processes: the same bits, whoever answers, whoever fails and whoever dies."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys

import pytest
import torch
from processes import started
from torch import nn

import fedstrata as fs
from fedstrata.base.locking import occupied
from fedstrata.base.records import record
from fedstrata.clients.handling import handles
from fedstrata.engines import local
from fedstrata.engines.local import LocalEngine
from fedstrata.engines.worker_pool import cores
from fedstrata.federation.messages import Reply, Request
from fedstrata.sampling.client_sizes import SizeReport

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked")


@pytest.fixture
def eager(monkeypatch):
    """Workers for the smallest task."""
    monkeypatch.setattr(local, "STARTING_PAYS", -1.0)
    monkeypatch.setattr(local, "ASKING_PAYS", -1.0)


def table(**sections):
    return {
        "data": "digits",
        "partition": {"name": "dirichlet", "alpha": 0.5, "clients": 6},
        "model": {"name": "mlp", "hidden": [8]},
        "evaluation": {"every": 0},
        **sections,
        "training": {
            "rounds": 3,
            "clients_per_round": 5,
            "local_epochs": 1,
            "lr": 0.05,
            **sections.get("training", {}),
        },
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({"training": {"momentum": 0.9}}, marks=pytest.mark.long),
        {"training": {"optimizer": "adamw", "optimizer_state": "keep", "accumulate": 2}},
        pytest.param({"method": {"name": "scaffold"}}, marks=pytest.mark.long),
        {"method": {"name": "fedstas", "strata": 2, "fraction": 0.5}},
        {"model": {"name": "resnet20"}, "training": {"batch_norm": "local", "local_steps": 1, "local_epochs": None}},
        {"availability": {"name": "bernoulli", "p": 0.6}},
    ],
    ids=str,
)
def test_the_number_of_workers_changes_no_bit(eager, sections):
    def run(workers):
        spec = table(**sections)
        spec["training"] = {k: v for k, v in {**spec["training"], "workers": workers}.items() if v is not None}
        return fs.run(spec)

    alone, three = run(1), run(3)
    assert alone.params.keys() == three.params.keys()
    assert all(torch.equal(alone.params[name], w) for name, w in three.params.items())
    for a, b in zip(alone, three, strict=True):
        assert {k: v for k, v in a.items() if k != "seconds"} == {k: v for k, v in b.items() if k != "seconds"}
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_dropout_layers_draw_the_same_numbers_in_a_worker(eager):
    def run(workers):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Dropout(0.5), nn.Linear(8, 10))
        return fs.run(table(training={"workers": workers}), model=module).params

    alone, two = run(1), run(2)
    assert all(torch.equal(w, two[name]) for name, w in alone.items())


@record("test/WhoAreYou")
class WhoAreYou(Request):
    """For tests: who answers, unless it cannot."""

    fails: int = -1
    dies: int = -1


@record("test/Me")
class Me(Reply):
    pid: int
    client: int


HERE = os.getpid()


@handles(WhoAreYou)
def me(client, request):
    if client.number == request.dies and os.getpid() != HERE:
        os.kill(os.getpid(), signal.SIGKILL)
    if client.number == request.fails:
        raise ValueError("client of a test")
    # Long enough for everybody to get something to do.
    torch.randn(400, 400).mm(torch.randn(400, 400))
    client.state["asked"] = client.state.get("asked", 0) + 1
    return Me(os.getpid(), client.number)


def asked(federation, **fields):
    return federation.ask(range(40), WhoAreYou(**fields), work=float)


@pytest.fixture
def federation(tiny, eager):
    """Forty clients, two processes."""
    made = tiny(40, handlers=(me,))
    made.engine = LocalEngine(made.engine.context, made.store, workers=2)
    yield made
    made.engine.close()
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_workers_share_in_the_work_and_states_are_kept(federation):
    replies = asked(federation)
    assert list(replies) == list(range(40)) == [reply.client for reply in replies.values()]
    assert len({reply.pid for reply in replies.values()}) > 1
    asked(federation)
    assert [federation.store.get(client)["asked"] for client in range(40)] == [2] * 40


@pytest.mark.slow
def test_a_failure_in_a_worker_is_raised_where_it_can_be_seen(federation):
    assert len(asked(federation, fails=7)) == 39
    (reason,) = federation.reasons("failed")
    assert "client 7" in reason
    assert "client of a test" in reason


@pytest.mark.slow
def test_a_worker_that_dies_loses_nobody(federation):
    asked(federation)
    replies = asked(federation, dies=20)
    assert len(replies) == 40
    assert len(asked(federation)) == 40
    assert [federation.store.get(client)["asked"] for client in range(40)] == [3] * 40


@pytest.mark.slow
def test_an_interrupted_question_leaves_nothing_behind(federation, monkeypatch):
    asked(federation)

    def interrupted(number):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(federation.engine, "_client", interrupted)
        with pytest.raises(KeyboardInterrupt):
            asked(federation)
    assert multiprocessing.active_children() == []
    assert [reply.client for reply in asked(federation).values()] == list(range(40))


def test_questions_that_take_no_gradients_are_answered_here(federation):
    federation.ask(range(40), SizeReport(1, 0, 1.0))
    assert federation.engine._pool is None


def test_little_work_is_done_here(tiny):
    federation = tiny(4)
    federation.engine = LocalEngine(federation.engine.context, federation.store, workers=3)
    federation.fit()
    assert federation.engine._pool is None


def test_a_process_among_several_starts_no_workers(monkeypatch):
    assert cores() == len(os.sched_getaffinity(0))
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    assert cores() == 1


SLOW = """
import sys
import fedstrata as fs
from fedstrata.cli import main
from fedstrata.engines import local

local.STARTING_PAYS = local.ASKING_PAYS = -1.0
sys.exit(main(["run", "spec.toml", "--out", "out", "--quiet"]))
"""
"""A run of many clients and workers."""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGKILL], ids=lambda kind: kind.name)
def test_workers_end_with_their_parent(tmp_path, kind):
    spec = table(training={"workers": 3, "rounds": 100_000}, evaluation={"every": 0, "checkpoint_every": 2})
    (tmp_path / "spec.toml").write_text(fs.Experiment.from_table(spec).to_toml())
    metrics = tmp_path / "out" / "metrics.jsonl"
    with started("-c", SLOW, cwd=tmp_path) as command:
        command.wait_until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") > 5)
        assert len(command.alive()) == 3
        command.process.send_signal(kind)
        assert command.ended() == (143 if kind == signal.SIGTERM else -signal.SIGKILL)
        assert command.leaves_nothing()
    # Nobody holds the folder.
    with occupied(tmp_path / "out"):
        pass
