"""FedSSAR end to end: everybody trains once, clusters follow the data, the proximal term is there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedstrata as fs
from fedstrata.aggregation.base import HorvitzThompson
from fedstrata.base.errors import SpecError
from fedstrata.methods.fedssar import FedSSAR
from fedstrata.reporting.replayed_strata import strata_after


@pytest.fixture(scope="module")
def one_label() -> fs.History:
    """Digits, 30 clients of one label each, 10 a round."""
    return fs.run(
        fs.Experiment(
            method=FedSSAR(alpha=0.01),
            partition=fs.Shards(clients=30, per_client=1),
            training=fs.Training(rounds=6, lr=0.1, batch_size=10, local_epochs=2),
        )
    )


@pytest.mark.slow
def test_the_first_round_asks_everybody_and_the_others_only_participants(one_label):
    assert [record["clients_invited"] for record in one_label] == [30] + [10] * 5
    sketch = 4 * 2048
    full = sum(w.numel() for w in one_label.params.values()) * 4
    # Everybody sends a sketch, ten send a model.
    assert 30 * sketch + 10 * full < one_label[0]["bytes_up"] < 30 * (sketch + 400) + 10 * (full + 2000)
    assert one_label[1]["bytes_up"] < one_label[0]["bytes_up"]


@pytest.mark.slow
def test_clusters_and_places_are_recorded(one_label):
    for record in one_label:
        assert sum(record["strata_sizes"]) == 30
        assert sum(record["strata_allocation"]) == 10
        assert all(m <= n for m, n in zip(record["strata_allocation"], record["strata_sizes"], strict=True))
        assert 0 <= record["strata_noise"] <= 30
    assert len(one_label[0]["strata_sizes"]) > 3


@pytest.mark.slow
def test_clusters_are_labels_when_each_client_holds_one():
    """Three clients a label: those that share a cluster share most of their label."""
    spec = fs.Experiment(
        method=FedSSAR(),
        partition=fs.Shards(clients=30, per_client=1),
        training=fs.Training(rounds=1, lr=0.1, batch_size=10, local_epochs=2),
    )
    view = strata_after(fs.prepare(spec))
    label = view.labels.argmax(axis=1)
    agree = [np.bincount(label[view.strata == h]).max() for h in range(view.strata.max() + 1)]
    assert sum(agree) >= 24


def test_the_recipe_is_fedprox_with_another_sampler():
    method = FedSSAR(alpha=0.3, min_samples=4, xi=0.2, features="updates", coordinates=64, optics_max=50)
    sampler, data, objective, aggregator = method.choices()
    assert sampler.to_spec() == {
        "name": "fedssar",
        "min_samples": 4,
        "xi": 0.2,
        "features": "updates",
        "coordinates": 64,
        "optics_max": 50,
    }
    assert (data.name, objective.name, objective.mu, aggregator.name) == ("all", "fedprox", 0.3, "size")


@pytest.mark.slow
def test_a_stronger_proximal_term_keeps_clients_nearer():
    def moved(alpha: float) -> float:
        spec = fs.Experiment(
            method=FedSSAR(alpha=alpha), partition=fs.Shards(clients=10), training=fs.Training(rounds=1, local_epochs=5)
        )
        before = fs.prepare(spec).config.model.params()
        after = fs.run(spec).params
        return sum(float((after[name] - before[name]).square().sum()) for name in before)

    assert moved(5.0) < 0.5 * moved(0.0)


@pytest.mark.slow
@pytest.mark.parametrize("aggregator", ["size", "horvitz-thompson"])
def test_sampling_with_another_objective_and_dropout_resumes_to_the_same_bytes(aggregator, tmp_path):
    """FedSSAR's sampler under SCAFFOLD, half of the clients away: killed and resumed, the result is the same."""
    spec = fs.Experiment(
        method={
            "name": "scaffold",
            "client_sampler": {"name": "fedssar", "features": "updates"},
            "aggregator": aggregator,
        },
        partition=fs.Dirichlet(alpha=0.1, clients=12),
        availability=fs.Bernoulli(p=0.5),
        training=fs.Training(rounds=4, clients_per_round=4),
        evaluation=fs.Evaluation(checkpoint_every=2),
    )
    whole = fs.run(spec, out=tmp_path / "whole")

    class KilledError(Exception):
        pass

    def kill(record):
        if record["round"] == 3:
            raise KilledError

    with pytest.raises(KilledError):
        fs.run(spec, out=tmp_path / "killed", callbacks=[kill])
    resumed = fs.run(spec, out=tmp_path / "killed", resume=True)
    assert all(torch.equal(whole.params[name], resumed.params[name]) for name in whole.params)


@pytest.mark.parametrize(("key", "value"), [("alpha", -1.0), ("min_samples", 1), ("xi", 1.0), ("optics_max", 0)])
def test_bad_settings_name_their_key(key, value):
    with pytest.raises(SpecError) as caught:
        fs.Experiment.from_table({"method": {"name": "fedssar", key: value}})
    assert caught.value.key == f"method.{key}"


@pytest.mark.slow
def test_announced_dropout_leaves_horvitz_thompson_with_fedssar_its_size():
    """Weights of a round add up to 1 however many of a cluster are away."""
    spec = fs.Experiment(
        partition=fs.Classes(clients=12, per_client=2),
        availability=fs.Bernoulli(p=0.5, announced=True),
        method={"name": "fedssar", "aggregator": "horvitz-thompson"},
        training={"rounds": 4, "clients_per_round": 5, "local_epochs": 1},
    )
    totals = []

    class Watching(HorvitzThompson):
        def coefficients(self, *args, **kwargs):
            found = super().coefficients(*args, **kwargs)
            totals.append(found.sum())
            return found

    fs.run(spec.model_copy(update={"method": spec.method.model_copy(update={"aggregator": Watching()})}))
    assert totals == pytest.approx([1.0] * 4)
