"""The four choices are free of each other: every combination of registered names works from a spec."""

from __future__ import annotations

import itertools
import tomllib

import numpy as np
import pytest
import torch
from pydantic import Field
from torch import nn

import fedstrata as fs
from fedstrata.aggregation.base import AGGREGATORS, HorvitzThompson, Mean, StratumMean
from fedstrata.base.errors import SpecError
from fedstrata.base.rng import torch_seeded
from fedstrata.federation.messages import FitReply, Weights
from fedstrata.methods.base import METHODS
from fedstrata.methods.head_tuning import HeadTuning
from fedstrata.methods.recipe import CHOICES, training_metrics, weight_diversity
from fedstrata.objectives.base import OBJECTIVES
from fedstrata.objectives.fedprox import Proximal
from fedstrata.objectives.rebafl import Rebalanced
from fedstrata.sampling.base import CLIENT_SAMPLERS, DATA_SAMPLERS
from fedstrata.sampling.fedsampling import FedSamplingData
from fedstrata.sampling.stratified import Stratified


@pytest.fixture(scope="module")
def small() -> fs.Dataset:
    generator = np.random.default_rng(0)
    y = np.arange(48) % 3
    x = generator.normal(size=(48, 4)) + 2 * np.eye(3, 4)[y]
    return fs.from_arrays(x, y, x[:9], y[:9])


def table(sampler: str, data: str, objective: str, aggregator: str | dict) -> dict:
    clients: dict = {"name": sampler}
    if sampler == "fedsts":
        clients |= {"strata": 2, "coordinates": 8, "centres": 4, "replacement": aggregator == "horvitz-thompson"}
    return {
        "method": {
            "name": "fedavg",
            "client_sampler": clients,
            "data_sampler": data,
            "objective": objective,
            # Three clients per round are enough for Krum if no update is false.
            "aggregator": {"name": aggregator, "attackers": 0} if aggregator in ("krum", "multi-krum") else aggregator,
        },
        "model": {"name": "mlp", "hidden": [6]},
        "partition": {"name": "dirichlet", "alpha": 1.0, "clients": 8},
        "training": {"rounds": 2, "clients_per_round": 3, "batch_size": 8, "local_epochs": 1},
    }


# Every objective with every client sampler, the other two choices taking turns; and the other two with every sampler.
TURNS = itertools.cycle(itertools.product(DATA_SAMPLERS, ["size", "mean", "stratum"]))
COMBINATIONS = [
    *((sampler, *next(TURNS), objective) for sampler, objective in itertools.product(CLIENT_SAMPLERS, OBJECTIVES)),
    *((*three, "cross-entropy") for three in itertools.product(CLIENT_SAMPLERS, DATA_SAMPLERS, AGGREGATORS)),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampler", "data", "aggregator", "objective"),
    [
        each if place % 7 == 0 else pytest.param(*each, marks=pytest.mark.long)
        for place, each in enumerate(COMBINATIONS)
    ],
)
def test_every_combination_runs_from_a_spec(sampler, data, aggregator, objective, small):
    spec = fs.Experiment.from_table(table(sampler, data, objective, aggregator))
    again = fs.Experiment.from_table(tomllib.loads(spec.to_toml()))
    assert again == spec
    assert [choice.name for choice in again.method.choices()] == [sampler, data, objective, aggregator]
    history = fs.run(again, data=small)
    assert len(history) == 2
    assert all(torch.isfinite(w).all() for w in history.params.values() if w.is_floating_point())
    assert all(record["clients_returned"] > 0 for record in history)
    if sampler in (asked := {"uniform": 3, "fedsts": 8}):
        # FedSTS asks everybody for a compressed gradient; otherwise only participants are asked.
        assert history[0]["clients_invited"] == asked[sampler]


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adagrad", "yogi"])
def test_the_servers_optimiser_is_part_of_the_spec(optimizer, small):
    server = {"optimizer": optimizer, "lr": 0.1} | ({"momentum": 0.5} if optimizer == "sgd" else {})
    spec = fs.Experiment.from_table(table("uniform", "all", "cross-entropy", "size"))
    own = table("uniform", "all", "cross-entropy", {"name": "size", "server": server})
    stepped = fs.Experiment.from_table(own)
    assert fs.Experiment.from_table(tomllib.loads(stepped.to_toml())) == stepped
    found, plain = fs.run(stepped, data=small).params, fs.run(spec, data=small).params
    assert not torch.equal(found["head.weight"], plain["head.weight"])
    short = fs.Experiment(method={"name": "fedavg", "aggregator": {"name": "size", "server": optimizer}})
    assert short.method.choices()[3].server.optimizer == optimizer


def test_a_named_method_is_its_four_choices(small):
    """SCAFFOLD spelled out on FedAvg gives SCAFFOLD's bytes."""
    spelled = fs.Experiment.from_table(table("uniform", "all", "scaffold", "mean"))
    named = fs.Experiment.from_table(table("uniform", "all", "scaffold", "mean") | {"method": {"name": "scaffold"}})
    one, two = fs.run(spelled, data=small).params, fs.run(named, data=small).params
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(
    ("method", "key", "words"),
    [
        ({"objective": "fedprx"}, "method.objective.name", "did you mean 'fedprox'"),
        ({"client_sampler": {"name": "fedsts", "srata": 3}}, "method.client_sampler.srata", "did you mean 'strata'"),
        ({"objective": {"name": "fedprox", "mu": -1}}, "method.objective.mu", "greater than or equal to 0"),
        (
            {"aggregator": {"name": "size", "server": {"optimizer": "lion"}}},
            "method.aggregator.server.optimizer",
            "adam",
        ),
        ({"data_sampler": 3}, "method.data_sampler", "must be a name, or a table"),
    ],
)
def test_a_wrong_choice_names_its_key(method, key, words):
    with pytest.raises(SpecError, match=words) as caught:
        fs.Experiment.from_table({"method": {"name": "fedavg", **method}})
    assert caught.value.key == key


def test_choices_that_do_not_go_together_are_refused(small):
    wanted = table("fedsts", "all", "cross-entropy", "horvitz-thompson")
    wanted["method"]["client_sampler"]["replacement"] = False
    with pytest.raises(
        SpecError, match=r"the aggregator 'horvitz-thompson' requires that clients are drawn with replacement\. Set r"
    ) as caught:
        fs.run(wanted, data=small)
    assert caught.value.key == "method.client_sampler.replacement"


def test_a_setting_acts_in_its_choice():
    assert fs.FedProx(mu=0.3).objective == Proximal(mu=0.3)
    assert fs.FedSSAR(alpha=0.3, xi=0.2).choices()[::2] == (fs.FedSSAR(xi=0.2).client_sampler, Proximal(mu=0.3))
    assert fs.FedSTS(strata=3).client_sampler == Stratified(strata=3)
    assert fs.FedSTS().aggregator == StratumMean()
    unbiased = fs.FedSTaS(strata=3, aggregation="horvitz-thompson")
    assert unbiased.client_sampler == Stratified(strata=3, replacement=True)
    assert unbiased.aggregator == HorvitzThompson()


def test_limits_are_those_of_the_choice():
    with pytest.raises(SpecError, match="greater than or equal to 0"):
        fs.FedProx(mu=-1)
    with pytest.raises(SpecError, match="greater than or equal to 0") as caught:
        fs.Experiment.from_table({"method": {"name": "fedssar", "alpha": -1}})
    assert caught.value.key == "method.alpha"


@pytest.mark.parametrize(
    ("method", "key", "choice"),
    [
        ({"name": "fedprox", "mu": 0.1, "objective": "cross-entropy"}, "mu", "objective"),
        ({"name": "fedssar", "alpha": 0.1, "objective": "moon"}, "alpha", "objective"),
        ({"name": "rebafl", "mu": 5.0, "objective": "rebafl"}, "mu", "objective"),
        ({"name": "fedsts", "strata": 3, "client_sampler": "uniform"}, "strata", "client_sampler"),
        (
            {"name": "fedsts", "aggregation": "horvitz-thompson", "client_sampler": "uniform", "aggregator": "mean"},
            "aggregation",
            "aggregator",
        ),
    ],
)
def test_a_setting_of_a_choice_that_was_replaced_is_refused(method, key, choice):
    with pytest.raises(SpecError, match=f"has no effect, because the spec also sets method.{choice}. Remove") as caught:
        fs.Experiment.from_table({"method": method})
    assert caught.value.key == f"method.{key}"


def test_a_setting_that_shapes_two_choices_may_keep_one_of_them():
    method = fs.FedSTS(aggregation="horvitz-thompson", aggregator=Mean())
    assert method.client_sampler == Stratified(replacement=True)
    assert method.aggregator == Mean()


@pytest.mark.parametrize(
    ("method", "table"),
    [
        (fs.FedProx(mu=0.3), {"name": "fedprox", "mu": 0.3}),
        (fs.FedSSAR(objective=Proximal(mu=0.3)).model_copy(), {"name": "fedssar", "objective": {"name": "fedprox"}}),
        (fs.FedProx(objective="cross-entropy"), {"name": "fedprox", "objective": {"name": "cross-entropy"}}),
    ],
)
def test_a_spec_says_what_acts(method, table):
    found = method.to_spec()
    assert table["name"] == found["name"]
    assert found.keys() >= table.keys()
    assert not {"mu", "alpha"} & (found.keys() - table.keys())
    assert METHODS.parse(found) == method
    assert METHODS.parse(found).to_spec() == found


class Strong(fs.FedProx):
    mu: float = Field(1.0, ge=0)


class Both(fs.FedSTS, fs.ReBaFL):
    """Two methods' choices, and the settings of both."""

    def parts(self):
        return {**fs.FedSTS.parts(self), **fs.ReBaFL.parts(self)}


def test_a_subclass_may_change_a_default_and_join_two_recipes():
    assert (Strong().mu, Strong().objective, Strong(mu=2).objective) == (1, Proximal(mu=1), Proximal(mu=2))
    assert fs.FedProx().mu == 0.01
    assert Both(strata=3, epsilon=0.5).choices()[::2] == (Stratified(strata=3), Rebalanced(epsilon=0.5))
    assert {"strata", "aggregation", "epsilon"} < Both().to_spec().keys() - set(CHOICES)
    assert METHODS.parse(Both(mu=0.2).to_spec()) == Both(mu=0.2)


def test_parts_that_cannot_be_choices_say_so():
    class Unmade(fs.Recipe):
        def parts(self):
            return {"objective": Proximal}

    class Mixed(fs.Recipe):
        def parts(self):
            return {"objective": Mean()}

    class Misspelt(fs.Recipe):
        def parts(self):
            return {"objectiv": Proximal()}

    with pytest.raises(TypeError, match=r"Unmade\.parts: objective = <class .*> is not an instance of Objective"):
        Unmade()
    with pytest.raises(TypeError, match=r"Mixed\.parts: objective = Mean\(.*\) is not an instance of Objective"):
        Mixed()
    with pytest.raises(TypeError, match=r"Misspelt\.parts: 'objectiv' is not one of client_sampler, "):
        Misspelt()


class Needed(fs.Recipe):
    """Args:
    mu: Strength.
    """

    mu: float = Field(ge=0)

    def parts(self):
        return {"objective": Proximal(mu=self.mu)}


def test_a_setting_of_a_recipe_may_be_needed():
    assert Needed(mu=0.5).objective == Proximal(mu=0.5)
    with pytest.raises(SpecError, match="is required, but not set"):
        Needed()
    again = METHODS.parse(Needed(mu=0.5, objective="cross-entropy").to_spec())
    assert again == Needed(mu=0.5, objective="cross-entropy")


class Ours(fs.Recipe):
    """A recipe with a setting of its own, ``samples``, that its data sampler has too."""

    samples: int = 5

    def parts(self):
        return {"data_sampler": FedSamplingData()}


def test_a_setting_that_only_shares_a_name_with_a_replaced_choice_stays_in_the_spec():
    assert Ours(samples=7, data_sampler="all").to_spec()["samples"] == 7


OTHERS = [0.3, 2.5, 1, 3, False, "one", "updates", "participants", "centroids", "random", "proportional", ("body",)]
OTHERS += ["pooled"]


def accepts(part: type, name: str, value: object) -> bool:
    try:
        part(**{name: value})
    except SpecError:
        return False
    return True


RECIPES = [method for name in METHODS if issubclass(method := METHODS.find(name), fs.Recipe)]
SHARED = [(method, key) for method in RECIPES for key in method().shared_settings()]


def test_every_setting_of_a_recipe_is_one_of_a_choice_or_the_recipes_own():
    shared = {(method.name, key) for method, key in SHARED}
    settings = {(method.name, key) for method in RECIPES for key in method.model_fields if key not in CHOICES}
    own = {(method, key) for method in ("fedavg-ft", "ccvr") for key in HeadTuning.model_fields}
    own |= {("fedbabu", "fine_tune"), ("ccvr", "every"), ("fedavgm", "beta"), ("fedavgm", "server_lr")}
    own |= {(name, key) for name in ("fedadagrad", "fedadam", "fedyogi") for key in ("server_lr", "tau")}
    own |= {(name, "betas") for name in ("fedadam", "fedyogi")}
    assert settings - shared == own | {(method, "aggregation") for method in ("fedsts", "fedstas", "fedssar")}


@pytest.mark.parametrize(("method", "key"), SHARED)
def test_a_setting_is_declared_as_in_its_choice_and_acts_there(method, key):
    choice, name = method().shared_settings()[key]
    part = type(getattr(method(), choice))
    here, there = method.model_fields[key], part.model_fields[name]
    assert (here.annotation, here.metadata, here.default) == (there.annotation, there.metadata, there.default)
    # Whichever values the limits accept, the choice gets them.
    values = [value for value in OTHERS if value != here.default and accepts(part, name, value)]
    assert values
    for value in values:
        made = method(**{key: value})
        assert getattr(getattr(made, choice), name) == getattr(made, key) == value
        assert getattr(made, choice).model_copy(update={name: there.default}) == getattr(method(), choice)


def test_weight_diversity_by_hand():
    """Three models of two parameters: distances from the mean are added up over both, and averaged over the models."""
    models = [
        {"w": torch.tensor([[0.0, 3.0]]), "b": torch.tensor([1.0])},
        {"w": torch.tensor([[0.0, 0.0]]), "b": torch.tensor([1.0])},
        {"w": torch.tensor([[6.0, 0.0]]), "b": torch.tensor([4.0])},
    ]
    # Means (2, 1) and 2: 4 + 4 + 1, 4 + 1 + 1 and 16 + 1 + 4.
    assert weight_diversity(models) == {"weight_diversity": pytest.approx((9 + 6 + 21) / 3)}
    assert weight_diversity([]) == {"weight_diversity": None}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "rebafl", "fedtan"])
def test_weight_diversity_is_that_of_the_models_that_came_back(method, start, trace):
    with torch_seeded(0, "model"):
        module = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))
    table = {
        "data": {"name": "digits", "limit": 200},
        "partition": {"name": "iid", "clients": 3},
        "availability": trace({0: [1, 3], 1: [1], 2: [1]}),
        "method": method,
        "training": {"rounds": 3, "clients_per_round": 3, "local_epochs": 1},
        "evaluation": {"weight_diversity": True},
    }
    started = start(fs.Experiment.from_table(table), model=module)
    models: list[dict[str, torch.Tensor]] = []
    ask = started.federation.ask

    def listening(*args, **kwargs):
        replies = ask(*args, **kwargs)
        models.extend(reply.weights.params for reply in replies.values())
        return replies

    started.federation.ask = listening
    found = started.step()["weight_diversity"]
    flat = torch.stack([torch.cat([w.flatten() for w in params.values()]) for params in models])
    assert len(flat) == 3
    assert found == pytest.approx((flat - flat.mean(dim=0)).square().sum(dim=1).mean().item(), rel=1e-4)
    assert started.step()["weight_diversity"] is None  # nobody is there
    assert started.step()["weight_diversity"] == 0  # one alone


def test_a_setting_that_still_means_something_is_kept():
    # It shapes the sampler and the aggregator, and one of them is left. Defaults, as a run writes them, are no loss.
    fs.Experiment(method={"name": "fedsts", "aggregation": "horvitz-thompson", "client_sampler": "uniform"})
    spec = fs.Experiment(method={"name": "fedsts", "client_sampler": "uniform"})
    assert fs.Experiment.from_table(spec.to_spec()) == spec


def test_a_mean_loss_counts_each_client_by_the_samples_that_it_saw():
    nothing = Weights({}, {})
    replies = [FitReply(nothing, 10, 1, 10, 1.0, {}), FitReply(nothing, 15, 2, 30, 4.0, {})]
    assert training_metrics(replies) == {"clients_trained": 2, "samples": 40, "train_loss": (10 * 1.0 + 30 * 4.0) / 40}
