"""Settings with which the bound on a client's update would not hold are refused before the first round."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import fedstrata as fs
from fedstrata.base.errors import SpecError
from fedstrata.runs.client_checks import check_client_privacy

TABLE: dict[str, Any] = {
    "data": {"name": "digits", "limit": 400},
    "partition": {"name": "iid", "clients": 100},
    "model": {"name": "mlp", "hidden": [8]},
    "method": {"name": "fedavg", "aggregator": "mean"},
    "privacy": {"clients": {"clip": 1.0, "noise": 1.0}},
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": {"name": "fedavg"}}, r"method\.aggregator = 'size': does not give all clients the same weight"),
        ({"method": {"name": "fedavg", "aggregator": "median"}}, r"method\.aggregator = 'median'"),
        (
            {"method": {"name": "scaffold", "aggregator": "mean"}},
            r"method\.objective = 'scaffold': lets clients send",
        ),
        (
            {"method": {"name": "rebafl", "aggregator": "mean"}},
            r"method\.objective = 'rebafl': lets clients send",
        ),
        (
            {"method": {"name": "feddyn", "aggregator": "mean"}},
            r"method\.objective = 'feddyn': uses the updates of",
        ),
        ({"method": "stratify"}, r"method\.name = 'stratify': asks clients for more than one update"),
        ({"method": "sfl"}, r"method\.name = 'sfl': asks clients"),
        ({"method": {"name": "ccvr", "aggregator": "mean"}}, r"method\.name = 'ccvr': asks clients"),
        ({"method": {"name": "fedtan", "aggregator": "mean"}, "training": {"local_steps": 1}}, r"method\.name = 'fedt"),
        ({"method": {"name": "fedsampling", "aggregator": "mean"}}, r"method\.data_sampler = 'fedsampling'"),
        ({"method": {"name": "power-of-choice"}}, r"method\.client_sampler = 'power-of-choice': ε is valid only"),
        (
            {
                "method": {
                    "name": "fedavg",
                    "aggregator": "mean",
                    "client_sampler": {"name": "uniform", "replacement": True},
                }
            },
            r"method\.client_sampler = 'uniform': ε is valid only for draws without replacement",
        ),
        ({"model": {"name": "resnet20"}}, r"model = 'resnet20': has buffers"),
        ({"communication": {"up": "powersgd"}}, r"communication\.up = 'powersgd': decodes each update together with"),
        ({"availability": {"name": "bernoulli", "announced": True}}, r"availability\.announced = True"),
        ({"evaluation": {"weight_diversity": True}}, r"evaluation\.weight_diversity = True"),
        ({"attack": {"name": "ipm"}}, r"attack = 'ipm': attackers may use the updates of other clients"),
        ({"privacy": {**TABLE["privacy"], "dp": {"clip": 1.0, "noise": 1.0}}}, r"privacy\.dp: cannot be used with"),
        ({"privacy": {"clients": {"clip": 1.0, "noise": 0}}}, r"privacy\.clients\.noise = 0"),
        ({"privacy": {"clients": {"clip": 1.0, "noise": 1.0, "participations": 0}}}, "participations = 0"),
    ],
)
def test_what_the_bound_does_not_cover_is_refused(changes: dict[str, Any], message: str):
    with pytest.raises(SpecError, match=message):
        fs.prepare(fs.Experiment.from_table({**TABLE, **changes}))


def test_secure_sums_are_refused():
    secure = {**TABLE["privacy"], "sums": "secure"}
    with pytest.raises(SpecError, match=r"privacy\.sums = 'secure'"):
        fs.prepare(fs.Experiment.from_table({**TABLE, "method": "fedavg", "privacy": secure}))


def test_a_method_with_its_own_round_is_refused():
    class Own(fs.FedAvg):
        def run_round(self, federation: fs.Federation, state: Any) -> tuple[Any, dict[str, Any]]:
            return super().run_round(federation, state)

    with pytest.raises(SpecError, match="asks clients for more than one update"):
        fs.prepare(fs.Experiment.from_table(TABLE).model_copy(update={"method": Own(aggregator="mean")}))


def test_real_sites_refuse_noise_from_the_server():
    prepared = fs.prepare(fs.Experiment.from_table(TABLE))
    with pytest.raises(SpecError, match=r"privacy\.clients\.noise_from = 'server': is only for simulations"):
        check_client_privacy(prepared.spec, replace(prepared.config, sizes=None))


def test_a_run_with_few_clients_warns():
    few = {**TABLE, "partition": {"name": "iid", "clients": 99}}
    with pytest.warns(UserWarning, match=r"has 99 clients.*use privacy\.dp"):
        fs.prepare(fs.Experiment.from_table(few))


def test_a_spec_without_it_has_no_new_key():
    assert "clients" not in fs.Experiment.from_table({"privacy": {"min_samples": 5}}).to_spec()["privacy"]
