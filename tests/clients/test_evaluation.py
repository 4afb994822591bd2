"""What a client answers about a model on its own test part, and the personal model that it makes for that."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedstrata as fs
from fedstrata.evaluation.messages import Evaluate, Evaluated

TABLE = {
    "partition": {"name": "dirichlet", "alpha": 0.3, "clients": 5, "min_size": 20},
    "model": {"name": "mlp", "hidden": [16]},
    "training": {"rounds": 2, "local_epochs": 1, "clients_per_round": 2, "lr": 0.05},
}


def started(method="fedavg", fine_tune=2, training=None, **more):
    evaluation = {"client_test": 0.3, "fine_tune": fine_tune, "metrics": ["accuracy", "auroc"]}
    table = {**TABLE, "method": method, "evaluation": evaluation, **more}
    table["training"] = {**TABLE["training"], **(training or {})}
    return fs.Simulation(fs.prepare(fs.Experiment.from_table(table)))


def asked(simulation, **fields):
    question = {"part": "test", "personal": False, "epochs": 0, "score_bins": 0, "confidence_bins": 0} | fields
    request = Evaluate(simulation.round, simulation.evaluated(), **question)
    return simulation.federation.measure(request, check=lambda reply: reply.require(10))


@pytest.mark.slow
def test_the_global_model_is_what_the_loop_measures_itself():
    with started() as simulation:
        simulation.step()
        replies, size = asked(simulation)
        score = simulation.evaluate()
        assert sorted(replies) == list(range(5))
        assert size > 5 * sum(w.numel() * 4 for w in simulation.evaluated().params.values())
        for client, reply in replies.items():
            assert reply.values["accuracy"] == score.table["accuracy"][client]
            assert reply.sums.samples == score.table["samples"][client]


@pytest.mark.slow
def test_measuring_leaves_no_trace():
    with started("scaffold") as simulation, started("scaffold", fine_tune=0) as other:
        for _ in range(2):
            a, b = simulation.step(), other.step()
            books = (
                "accuracy",
                "bytes_up",
                "bytes_down",
                "exchanges",
                "samples",
                "clients_invited",
                "clients_returned",
            )
            assert [a[key] for key in books] == [b[key] for key in books]
            assert a["bytes_evaluation"] > 0
        assert a["personal"] != b["personal"]
        assert all(torch.equal(w, other.evaluated().params[name]) for name, w in simulation.evaluated().params.items())


@pytest.mark.slow
def test_tuning_by_hand():
    """One epoch of one batch: a step of gradient descent on the client's training samples."""
    with started(fine_tune=1, training={"batch_size": 10_000}) as simulation:
        simulation.step()
        simulation.evaluate()
        prepared = simulation.prepared
        model, data, weights = prepared.config.model, prepared.data, simulation.evaluated()
        for client in range(5):
            params = {name: w.clone().requires_grad_() for name, w in weights.params.items()}
            mine, own = prepared.assignment[client], prepared.held.own_test[client]
            loss = F.cross_entropy(model(params, data.inputs(mine)), data.y_train[mine])
            gradient = torch.autograd.grad(loss, list(params.values()))
            tuned = {name: w.detach() - 0.05 * g for (name, w), g in zip(params.items(), gradient, strict=True)}
            with torch.no_grad():
                hits = model(tuned, data.inputs(own)).argmax(1) == data.y_train[own]
            assert simulation.score is not None
            found = simulation.score.table["personal_accuracy"][client]
            assert found == pytest.approx(float(hits.double().mean()))


@pytest.mark.slow
def test_tuning_serves_clients_that_differ():
    """Each of few classes: a model of its own knows which."""
    partition = {"name": "classes", "per_client": 2, "clients": 5}
    with started(fine_tune=5, partition=partition, training={"rounds": 3, "clients_per_round": 5}) as simulation:
        *_, record = simulation
    assert record["personal"]["accuracy"]["mean"] > record["clients"]["accuracy"]["mean"] + 0.1


@pytest.mark.slow
def test_fedbabu_tunes_the_head_alone():
    from fedstrata.clients.client import Client
    from fedstrata.clients.handlers.evaluation import personal

    for method, moved in (("fedbabu", "head"), ("fedavg", "all")):
        with started(method) as simulation:
            simulation.step()
            weights, model = simulation.evaluated(), simulation.prepared.config.model
            request = Evaluate(1, weights, "test", True, 2, 0, 0)
            tuned = personal(Client(0, simulation.context), request)
            changed = {name for name, w in weights.params.items() if not torch.equal(w, tuned.params[name])}
            assert changed == (set(model.head_names) if moved == "head" else set(weights.params))


def test_a_clients_own_batchnorm_statistics_are_part_of_its_model():
    layers = [nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10)]
    training = {"batch_norm": "local", "local_steps": 5, "rounds": 1, "clients_per_round": 4}
    table = {**TABLE, "training": training, "evaluation": {"client_test": 0.3, "fine_tune": 0}}
    prepared = fs.prepare(fs.Experiment.from_table(table), model=nn.Sequential(*layers))
    with fs.Simulation(prepared) as simulation:
        simulation.step()
        data, weights, found = prepared.data, simulation.evaluated(), simulation.score.table["personal_accuracy"]
        for client in range(5):
            kept = simulation.store.get(client).get("buffers")
            own = prepared.held.own_test[client]
            buffers = {**weights.buffers, **(kept or {})}
            with prepared.config.model.loaded(weights.params, buffers) as params, torch.no_grad():
                # Who has not trained has no statistics: those of the samples at hand serve.
                prepared.config.model.module.train(kept is None)
                hits = prepared.config.model(params, data.inputs(own)).argmax(1) == data.y_train[own]
            assert found[client] == pytest.approx(float(hits.double().mean()))
        assert sum(bool(simulation.store.get(client)) for client in range(5)) == 4


@pytest.mark.slow
def test_a_reply_that_cannot_be_is_not_counted():
    with started() as simulation:
        simulation.step()
        replies, _ = asked(simulation, score_bins=8)
        request = Evaluate(1, simulation.evaluated(), "test", False, 0, 8, 0)
        good = replies[0]
        request.check(good)
        from dataclasses import replace

        from fedstrata.base.errors import ReplyRefusedError

        bad = {
            "confusion": replace(
                good.sums,
                confusion=good.sums.confusion[:3, :3],
                scores=good.sums.scores[:3],
                samples=int(good.sums.confusion[:3, :3].sum()),
            ),
            "negative": replace(good.sums, confusion=good.sums.confusion - 1),
            "the confusion matrix contains": replace(good.sums, samples=good.sums.samples + 1),
            "the number of scores differs": replace(good.sums, scores=good.sums.scores * 0),
        }

        def require(reply: Evaluated) -> None:
            request.check(reply)
            reply.require(10)

        for problem, sums in bad.items():
            with pytest.raises(ReplyRefusedError, match=problem):
                require(replace(good, sums=sums))


def test_who_has_no_such_part_is_not_measured():
    with started() as simulation:
        simulation.step()
        replies, _ = asked(simulation, part="validation")
        assert replies == {}
        events = [event for event in simulation.federation.events if event["kind"] == "not measured"]
        assert len(events) == 5
        assert "does not have validation samples" in events[0]["reason"]
