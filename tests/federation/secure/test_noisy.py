"""Updates with a share of the noise: the distribution of the noise, the bound on one client, and room in the ring."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import fedstrata as fs
from fedstrata.base.errors import ReplyRefusedError, SpecError
from fedstrata.base.rng import rng
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.messages import Fit, FitReply, Weights
from fedstrata.federation.secure import ring as module
from fedstrata.federation.secure.noisy import UPDATE, NoisyForm, clipped
from fedstrata.federation.secure.ring import LARGEST, Part, Ring, add, skellam
from fedstrata.federation.settings import ClientDP, Privacy

pytest.importorskip("cryptography")

SIZE = 4000


@pytest.fixture(scope="module")
def config() -> FederationConfig:
    return fs.prepare(fs.Experiment(data={"name": "digits", "limit": 100}, partition=fs.IID(clients=4))).config


def form_of(config: FederationConfig, least: int = 14, size: int = SIZE, **dp: Any) -> NoisyForm:
    """A form for 20 clients, of which at least ``least`` must answer."""
    settings: dict[str, Any] = {"clip": 0.5, "noise": 1.0, "noise_from": "sites", **dp}
    privacy = Privacy(sums="secure", parties=least, clients=ClientDP(**settings))
    return NoisyForm(replace(config, privacy=privacy), 20, {"w": torch.zeros(size)})


def message(form: NoisyForm, update: torch.Tensor, client: int = 0, round: int = 1) -> np.ndarray:
    sent = Weights({"w": torch.zeros(len(update))}, {})
    reply = FitReply(Weights({"w": update}, {}), 1, 1, 1, 0.0, {}, True)
    words = form.encode(Fit(round, sent, {}, 1.0), reply, client)
    return form.ring.add_noise(words, rng(form.seed, "noise share", round, client))


def whole(words: np.ndarray) -> np.ndarray:
    """The elements of a message or of a sum as whole numbers, without the number of scaled parts."""
    return words[:-1].view(np.int32).astype(float)


def fits(drawn: np.ndarray, variance: float) -> float:
    """The p-value of a chi-squared test that numbers are Skellam variables with the mean 0 and this variance."""
    expected = stats.skellam(variance / 2, variance / 2)
    far = int(3 * math.sqrt(variance))
    edges = np.arange(-far, far + 1)
    counts = np.array([(drawn <= -far).sum(), *((drawn == k).sum() for k in edges[1:-1]), (drawn >= far).sum()])
    chances = np.array([expected.cdf(-far), *expected.pmf(edges[1:-1]), expected.sf(far - 1)])
    return float(stats.chisquare(counts, chances * len(drawn)).pvalue)


@pytest.mark.parametrize("variance", [1.0, 6.5, 40.0])
def test_the_noise_is_skellam_noise(variance: float) -> None:
    drawn = skellam(rng(0, "test"), 200_000, variance)
    assert fits(drawn, variance) > 1e-3
    assert fits(drawn, variance * 1.05) < 1e-6
    assert np.mean(drawn) == pytest.approx(0, abs=4 * math.sqrt(variance / len(drawn)))
    # The fourth moment of a Skellam variable is 3 μ² + μ.
    assert np.var(drawn) == pytest.approx(variance, rel=4 * math.sqrt((2 + 1 / variance) / len(drawn)))
    assert np.mean(drawn**4.0) == pytest.approx(3 * variance**2 + variance, rel=0.06)


def test_noise_with_the_largest_variance_is_nearly_gaussian() -> None:
    drawn = skellam(rng(0, "test"), 200_000, 2 * module.LARGEST_MEAN)
    assert stats.kstest(drawn / math.sqrt(2 * module.LARGEST_MEAN), "norm").pvalue > 1e-3
    assert np.var(drawn) == pytest.approx(2 * module.LARGEST_MEAN, rel=4 * math.sqrt(2 / len(drawn)))


@pytest.mark.slow
@pytest.mark.parametrize(("answers", "colluding"), [(14, 0), (20, 0), (14, 4), (14, 7)])
def test_the_noise_of_a_sum(
    config: FederationConfig, monkeypatch: pytest.MonkeyPatch, answers: int, colluding: int
) -> None:
    """Clients without changes send only noise, whose variance in a sum of 14 honest clients is σ² or more.

    The sum of the honest clients is tested: with 14 answers of which 4 collude, it contains 10 shares of the noise.
    """
    monkeypatch.setattr(module, "LARGEST_MEAN", 8.0)
    form = form_of(config, colluding=colluding, size=60_000)
    honest = answers - colluding
    total = add(message(form, torch.zeros(60_000), client) for client in range(honest))
    variance = form.variance * honest / (14 - colluding)
    assert (variance > form.variance) == (answers > 14)
    assert form.variance == pytest.approx(form.ring.scale**2)
    assert fits(whole(total), variance) > 1e-3
    decoded = form.ring.decode(add([total, *(message(form, torch.zeros(60_000), k) for k in range(honest, 20))]), 20)
    assert np.std(decoded.parts[UPDATE]) == pytest.approx(0.5 * math.sqrt(20 / (14 - colluding)), rel=0.02)


@pytest.mark.slow
@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=5, max_size=5),
    st.floats(1e-6, 1e6),
    st.floats(0.01, 1e3),
)
def test_no_update_exceeds_the_largest_norms(
    config: FederationConfig, update: list[float], clip: float, noise: float
) -> None:
    form = form_of(config, size=5, clip=clip, noise=noise)
    words = message(form, torch.tensor(update))
    changed = whole(words - message(form, torch.zeros(5)))
    most1, most2 = form.sensitivity
    assert np.linalg.norm(changed) <= most2
    assert np.abs(changed).sum() <= most1
    assert words[-1] == 0


def test_a_long_update_is_scaled_down_and_a_short_one_is_not(config: FederationConfig) -> None:
    form = form_of(config, size=2)
    for update, expected in (([3.0, -4.0], [0.3, -0.4]), ([0.1, 0.2], [0.1, 0.2])):
        changed = whole(message(form, torch.tensor(update)) - message(form, torch.zeros(2)))
        np.testing.assert_allclose(changed * (0.5 / form.ring.scale), expected, atol=0.5 / form.ring.scale + 1e-8)


def test_an_element_with_the_largest_norm_does_not_count_as_scaled() -> None:
    clip = 0.1 + 0.2
    rows = [np.array([x]) for x in np.linspace(1, 9, 5000)]
    assert any(row[0] * (clip / row[0]) > clip for row in rows)
    assert all(clipped(row, clip)[0] <= clip for row in rows)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_update_that_is_not_finite_becomes_noise_alone(config: FederationConfig, value: float) -> None:
    form = form_of(config, size=2)
    assert message(form, torch.tensor([value, 1.0])).tolist() == message(form, torch.zeros(2)).tolist()


def test_the_first_norm_is_that_of_whole_numbers(config: FederationConfig) -> None:
    most1, most2 = form_of(config, size=400).sensitivity
    scale = form_of(config, size=400).ring.scale
    assert (most1, most2) == (20 * (scale + 20), scale + 20)
    most1, most2 = form_of(config, noise=1e5, size=400).sensitivity
    assert most2 == form_of(config, noise=1e5, size=400).ring.scale + 20
    assert most1 == min(most2**2, 20 * most2)


@pytest.mark.slow
@given(st.integers(1, 64), st.floats(0, 1e4))
def test_a_sum_has_room_for_twelve_standard_deviations(sites: int, noise: float) -> None:
    ring = Ring(sites, {"x": Part(1, 2.0)}, noise=noise)
    assert ring.scale * (sites + 12 * noise * math.sqrt(sites)) <= LARGEST
    assert (ring.scale * noise) ** 2 / 2 <= module.LARGEST_MEAN * (1 + 1e-12)
    if not noise:
        assert ring.scale == LARGEST // sites


def test_a_sum_beyond_its_noise_is_refused() -> None:
    ring = Ring(4, {"x": Part(1, 1.0)}, noise=1.0)
    most = int(ring.scale * (4 + 24))
    assert ring.decode(np.array([most, 0], dtype=np.uint32), 4).parts["x"][0] == pytest.approx(28)
    with pytest.raises(ReplyRefusedError, match="the sum of x is out of range"):
        ring.decode(np.array([most + 2, 0], dtype=np.uint32), 4)
    with pytest.raises(ReplyRefusedError, match="the sum of x is out of range"):
        ring.decode(np.array([most, 0], dtype=np.uint32), 3)


def test_noise_that_leaves_nothing_of_an_update_is_refused(config: FederationConfig) -> None:
    with pytest.raises(SpecError, match=r"privacy\.clients\.noise = 1000000\.0: is so large that updates"):
        form_of(config, noise=1e6)


@pytest.mark.parametrize(("least", "most"), [(14, 7), (17, 13), (20, 18)])
def test_the_masks_must_protect_against_the_colluding_clients(config: FederationConfig, least: int, most: int) -> None:
    """Of n = 20 clients, at most 2t − n − 1 and at most t − 2 may collude."""
    assert form_of(config, least, colluding=most).dp.colluding == most
    problem = rf"privacy\.clients\.colluding = {most + 1}: with 20 .* as few as {least} .* Use at most {most}, or"
    with pytest.raises(SpecError, match=problem):
        form_of(config, least, colluding=most + 1)
