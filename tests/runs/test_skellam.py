"""The ε of noise from the clients: the bound by hand, exact divergences, the Gaussian limit, and the statement."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, rdp
from scipy import special

import fedstrata as fs
from fedstrata.federation.exchanges import RoundLog
from fedstrata.federation.messages import Fit
from fedstrata.federation.secure.noisy import NoisyForm
from fedstrata.runs.accountant import ORDERS
from fedstrata.runs.client_accountant import MEMORY, SharesAccountant, client_accountant_of, skellam_divergence

pytest.importorskip("cryptography")
pytestmark = pytest.mark.filterwarnings(r"ignore:privacy\.clients")


def accountant(**dp: Any) -> SharesAccountant:
    """The accountant of a run with 20 clients in a round, of which 14 must answer."""
    privacy = {"sums": "secure", "clients": {"clip": 0.5, "noise": 1.0, "noise_from": "sites", **dp}}
    table = {
        "data": {"name": "digits", "limit": 400},
        "partition": {"name": "iid", "clients": 30},
        "method": {"name": "fedavg", "aggregator": "mean"},
        "training": {"clients_per_round": 20},
        "privacy": privacy,
    }
    prepared = fs.prepare(fs.Experiment.from_table(table))
    made = client_accountant_of(prepared.spec, prepared.config)
    assert isinstance(made, SharesAccountant)
    return made


def test_the_bound_by_hand():
    # With α = 2, μ = 4, Δ₁ = 3 and Δ₂ = 2: 2·4 / 8 + min((3·4 + 6·3) / 64, 9 / 8) = 1 + 0.46875.
    assert skellam_divergence(2, 4.0, 3.0, 2.0) == 1.46875
    # With α = 3, μ = 0.5 and Δ₁ = Δ₂ = 1: 3 / 1 + min((5 + 6) / 1, 3 / 1) = 6.
    assert skellam_divergence(3, 0.5, 1.0, 1.0) == 6.0


@pytest.mark.parametrize("variance", [2.0, 10.0, 50.0])
@pytest.mark.parametrize("change", [1, 2, 5])
@pytest.mark.parametrize("order", [2, 3, 8])
def test_the_exact_divergence_is_at_most_the_bound(variance: float, change: int, order: int):
    far = int(change * order + 14 * math.sqrt(variance) + 30)
    values = np.arange(-far, far + 1)
    with np.errstate(divide="ignore"):  # the probability of k is exp(−μ) I_|k|(μ), which underflows far from zero
        one, other = (np.log(special.ive(np.abs(values - shift), variance)) for shift in (0, change))
    used = np.isfinite(one) & np.isfinite(other)
    terms = order * other[used] - (order - 1) * one[used]
    exact = np.logaddexp.reduce(terms) / (order - 1)
    bound = skellam_divergence(order, variance, change, change)
    assert exact <= bound
    if variance == 50.0 and order * change < 10:
        assert bound < exact * 1.07


def test_a_large_variance_gives_the_divergence_of_gaussian_noise():
    for order in ORDERS:
        for change in (1.0, 300.0):
            variance = 1e9 * change**2
            gaussian = order * change**2 / (2 * variance)
            assert skellam_divergence(order, variance, change**2, change) == pytest.approx(gaussian, rel=1e-3)


def test_the_noise_of_a_run_is_nearly_gaussian():
    """With 34,110 parameters, rounding makes the largest norm longer by a factor of 1.0003."""
    made = accountant()
    form = made._form
    assert form.least == 14
    for order in ORDERS:
        found = skellam_divergence(order, form.variance, *form.sensitivity)
        assert found == pytest.approx(order / 2, rel=1e-3)
        assert found > order / 2
    gaussian = rdp.RdpAccountant(ORDERS).compose(GaussianDpEvent(1.0), 5).get_epsilon(1e-5)
    assert gaussian < made.epsilon(5) < gaussian * 1.001


def test_epsilon_grows_with_rounds_and_falls_with_noise():
    made = accountant()
    assert made.epsilon(0) == 0
    assert 0 < made.epsilon(1) < made.epsilon(2) < made.epsilon(20)
    assert accountant(noise=2.0).epsilon(5) < made.epsilon(5) < accountant(noise=0.5).epsilon(5)
    assert made.epsilon(5) < accountant(delta=1e-7).epsilon(5)


@pytest.mark.parametrize("colluding", [0, 5])
def test_colluding_clients_cost_noise_but_not_epsilon(colluding: int):
    form = accountant(colluding=colluding)._form
    assert isinstance(form, NoisyForm)
    assert form.ring.noise**2 * (14 - colluding) == pytest.approx(1.0)
    assert accountant(colluding=colluding).epsilon(5) == pytest.approx(accountant().epsilon(5), rel=1e-3)


def test_every_record_says_whom_epsilon_is_about():
    memory: dict[str, Any] = {}
    made = accountant(participations=3)
    record = made.spend(memory, RoundLog(invited={0, 2}))
    assert record == {
        "epsilon": made.epsilon(1),
        "privacy": {
            "unit": "client",
            "neighbours": "one client sends zeros with noise instead of its updates",
            "delta": 1e-5,
            "sampling": "not counted",
            "accountant": "Rényi divergences of the Skellam mechanism",
            "against": "the server as well, and users of the models",
            "noise": "no privacy: seeded, so anyone who knows the seed can remove the noise",
        },
    }
    assert made.spend(memory, RoundLog(invited={1, 2}))["epsilon"] == made.epsilon(2)
    against = accountant(colluding=2).spend({}, RoundLog(invited={0}))["privacy"]["against"]
    assert against == "the server as well, and up to 2 clients, even if they collude"


def test_a_run_ends_when_too_few_clients_are_below_the_limit():
    made = accountant(participations=2)
    rounds = np.array([2] * 16 + [1] * 14)
    assert made.ending({MEMORY: rounds}) == ""
    rounds[-1] = 2
    assert made.ending({MEMORY: rounds}) == (
        "privacy: 13 clients took part in fewer than 2 rounds, but a sum needs 14 clients"
    )
    assert "every client took part" in made.ending({MEMORY: np.full(30, 2)})


def test_the_request_of_local_training_has_the_form():
    prepared = fs.prepare(fs.Experiment(partition=fs.IID(clients=4)))
    assert not isinstance(prepared.spec.method.forms(prepared.config)[Fit], NoisyForm)
