"""The ε of clients: closed forms, other accountants, the limit of rounds and the budget."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent, pld, rdp
from quick import others_long

from fedstrata.federation.exchanges import RoundLog
from fedstrata.federation.settings import DPSGD, ClientDP, Training
from fedstrata.runs.accountant import ORDERS, Accountant
from fedstrata.runs.client_accountant import LEAST_NOISE, MEMORY, ClientAccountant

DELTA = 1e-5

OPACUS = [
    (0.1, 1.0, 50, 6.021491976835694, 5.137891012822693, 5.158636353600319),
    (0.1, 0.5, 50, 31.585110633745334, 22.611421917668796, 22.634320303890537),
    (0.01, 4.0, 1000, 0.30116115855491327, 0.2621315575189464, 0.2821750540261797),
    (0.25, 2.0, 20, 3.1236069903862416, 2.785587202539525, 2.8059681477713756),
    (0.02, 1.0, 200, 2.2517873227139327, 1.8425780486716432, 1.8628948448308973),
]
"""Values of Opacus 1.6.0: rate, noise, rounds, ε of Rényi divergences, and bounds of ε of the PRV accountant.

The following program printed them:

    from opacus.accountants import PRVAccountant
    from opacus.accountants.analysis.rdp import compute_rdp, get_privacy_spent
    orders = [*range(2, 65), 80, 96, 128, 192, 256, 512]
    for q, z, rounds in [(0.1, 1.0, 50), (0.1, 0.5, 50), (0.01, 4.0, 1000), (0.25, 2.0, 20), (0.02, 1.0, 200)]:
        rdp = compute_rdp(q=q, noise_multiplier=z, steps=rounds, orders=orders)
        epsilon, _ = get_privacy_spent(orders=orders, rdp=rdp, delta=1e-5)
        prv = PRVAccountant()
        prv.history = [(z, q, rounds)]
        bounds = {"delta_error": 1e-8, "eps_error": 0.01}
        low, _, high = prv._get_dprv(**bounds).compute_epsilon(1e-5, **bounds)
        print((q, z, rounds, float(epsilon), float(low), float(high)))
"""


def accountant(
    rate: float | None = None,
    noise: float = 1.0,
    clients: int = 4,
    *,
    budget: float | None = None,
    participations: int | None = None,
) -> ClientAccountant:
    dp = ClientDP(clip=1.0, noise=noise, delta=DELTA, budget=budget, participations=participations)
    return ClientAccountant(dp, clients, rate)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("noise", "rounds"), others_long([(1.0, 1), (2.0, 10), (0.5, 3), (5.0, 40)], [(1.0, 1), (2.0, 10)])
)
def test_the_epsilon_of_full_participation_is_that_of_one_gaussian_mechanism(noise: float, rounds: int):
    epsilon = accountant(None, noise).epsilon(rounds)
    # Balle and Wang 2018, Theorem 8: δ(ε) = Φ(μ/2 − ε/μ) − exp(ε) Φ(−μ/2 − ε/μ) with μ = √k / z.
    mu, cdf = math.sqrt(rounds) / noise, NormalDist().cdf
    delta = cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * cdf(-mu / 2 - epsilon / mu)
    assert delta == pytest.approx(DELTA, rel=1e-4)
    other = pld.PLDAccountant().compose(SelfComposedDpEvent(GaussianDpEvent(noise), rounds))
    assert epsilon == pytest.approx(other.get_epsilon(DELTA), rel=1e-3)
    assert epsilon < rdp.RdpAccountant(ORDERS).compose(GaussianDpEvent(noise), rounds).get_epsilon(DELTA)


@pytest.mark.parametrize(("rate", "noise", "rounds", "renyi", "low", "high"), OPACUS)
def test_the_epsilon_of_poisson_sampling_is_within_the_bounds_of_opacus(rate, noise, rounds, renyi, low, high):
    assert low <= accountant(rate, noise).epsilon(rounds) <= min(high, renyi)


@pytest.mark.parametrize(("rate", "noise", "rounds", "renyi", "low", "high"), OPACUS)
def test_the_renyi_divergences_of_single_samples_are_those_of_opacus(rate, noise, rounds, renyi, low, high):
    size = 1000
    training = Training(local_steps=1, batch_size=round(rate * size))
    of_samples = Accountant(DPSGD(clip=1.0, noise=noise, delta=DELTA), training, np.array([size]))
    assert of_samples.largest(np.array([rounds])) == pytest.approx(renyi, rel=1e-6)
    own = rdp.RdpAccountant(ORDERS).compose(PoissonSampledDpEvent(rate, GaussianDpEvent(noise)), rounds)
    assert own.get_epsilon(DELTA) == pytest.approx(renyi, rel=1e-6)


@pytest.mark.slow
def test_epsilon_grows_with_rounds_and_rate_and_falls_with_noise():
    assert accountant(0.1).epsilon(0) == 0
    assert accountant(0.1, 2.0).epsilon(5) < accountant(0.1).epsilon(5) < accountant(0.1).epsilon(6)
    assert accountant(0.1).epsilon(5) < accountant(0.3).epsilon(5) < accountant(None).epsilon(5)


def test_without_sampling_the_client_with_the_most_invitations_counts():
    single, memory = accountant(None), {}
    assert single.spend(memory, RoundLog(invited={0, 2}))["epsilon"] == single.epsilon(1)
    assert single.spend(memory, RoundLog(invited={1, 2}))["epsilon"] == single.epsilon(2)
    assert single.spend(memory, RoundLog(invited={0, 1}))["epsilon"] == single.epsilon(2)
    assert memory[MEMORY].tolist() == [2, 2, 2, 0]


def test_with_poisson_sampling_every_round_counts_for_every_client():
    sampled, memory = accountant(0.5), {}
    sampled.spend(memory, RoundLog(invited=set()))
    record = sampled.spend(memory, RoundLog(invited={3}))
    assert memory[MEMORY].tolist() == [2, 2, 2, 2]
    assert record["epsilon"] == sampled.epsilon(2)
    assert record["privacy"] == {
        "unit": "client",
        "neighbours": "one client never answers",
        "delta": DELTA,
        "sampling": "Poisson with rate 0.5",
        "accountant": "privacy loss distributions",
        "against": "parties that see the models, but not the server",
        "noise": "no privacy: seeded, so anyone who knows the seed can remove the noise",
    }


def test_a_client_at_the_limit_is_excluded_and_does_not_end_the_run():
    budget = accountant(None).epsilon(2)
    limited = accountant(None, budget=budget, participations=2)
    memory = {MEMORY: np.array([2, 2, 1, 0])}
    assert limited.excluded(memory).tolist() == [0, 1]
    assert limited.ending(memory) == ""
    assert "participations = 2" in limited.ending({MEMORY: np.array([2, 2, 2, 2])})
    assert "budget" in accountant(None, budget=budget).ending(memory)
    assert "budget" in accountant(None, budget=budget, participations=3).ending(memory)


def test_a_limit_lets_no_client_exceed_the_budget():
    first = accountant(None).epsilon(1)
    assert accountant(None, budget=first).ending({}) == ""
    assert "budget" in accountant(None, budget=first * 0.999).ending({})


def test_epsilon_is_large_but_finite_with_little_noise():
    assert 4e27 < accountant(None, 1e-14).epsilon(1) < 6e27
    assert accountant(0.1, LEAST_NOISE).epsilon(50) < accountant(None, LEAST_NOISE).epsilon(50) < 1e6
