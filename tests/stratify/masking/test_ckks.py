"""Real ciphertexts: exact sums, what cannot be decrypted, what is refused, and what a comparison shows."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

pytest.importorskip("tenseal")

from fedstrata.base.errors import FedstrataError, ReplyRefusedError
from fedstrata.stratify.masking.ckks import COMPARING, COUNTING, Opener, Parameters, Sealer, generate
from fedstrata.stratify.masking.slot_layout import TOLERANCE, SlotLayout

Pair = tuple[Opener, Sealer]


def pair(parameters: Parameters) -> Pair:
    secret, public = generate(parameters)
    return Opener(secret, parameters), Sealer(public, parameters)


def opened(opener: Opener, cipher: Any, *, tolerance: float) -> NDArray[np.int64]:
    """What a client decrypts of a ciphertext that the server sends."""
    return opener.open_whole(opener.load(cipher.serialize(), length=cipher.size()), tolerance=tolerance)


@pytest.fixture(scope="module")
def counting() -> Pair:
    return pair(COUNTING)


@pytest.fixture(scope="module")
def comparing() -> Pair:
    return pair(COMPARING)


@pytest.mark.slow
def test_sums_of_counts_to_ten_million_are_exact_with_a_wide_margin(counting: Pair) -> None:
    opener, sealer = counting
    generator = np.random.default_rng(0)
    counts = generator.integers(0, 10**7, size=(30, COUNTING.slots), endpoint=True)
    total = sealer.seal(counts[0])
    for row in counts[1:]:
        total += sealer.load(sealer.seal(row).serialize(), length=COUNTING.slots)
    assert (opened(opener, total, tolerance=0.001) == counts.sum(axis=0)).all()


def test_a_thousand_clients_of_ten_million_samples_each_are_exact(counting: Pair) -> None:
    opener, sealer = counting
    total = sealer.seal(np.full(COUNTING.slots, 10**7))
    for _ in range(10):
        total = total + total  # errors add up alike here: worse than 1,024 different ciphertexts
    assert (opened(opener, total, tolerance=0.1) == 1024 * 10**7).all()


def test_the_server_cannot_decrypt(counting: Pair) -> None:
    _, sealer = counting
    assert not sealer.context.has_secret_key()
    with pytest.raises(ValueError, match="doesn't hold a secret_key"):
        sealer.seal([1.0]).decrypt()


def test_a_context_with_a_secret_key_or_other_parameters_is_refused_on_arrival() -> None:
    secret, public = generate(COUNTING)
    with pytest.raises(ReplyRefusedError, match="contains a secret key"):
        Sealer(secret, COUNTING)
    with pytest.raises(ReplyRefusedError, match="degree"):
        Sealer(public, COMPARING)
    for junk in (b"", b"junk", os.urandom(1000), public[:1000]):
        with pytest.raises(ReplyRefusedError, match="the CKKS context cannot be read"):
            Sealer(junk, COUNTING)
    with pytest.raises(FedstrataError, match="does not contain a secret key"):
        Opener(public, COUNTING)


@pytest.mark.slow
def test_ciphertexts_that_are_none_are_refused(counting: Pair, comparing: Pair) -> None:
    _, sealer = counting
    good = sealer.seal([1.0, 2.0])
    data = good.serialize()
    sealer.load(data, length=2)
    product = sealer.seal([1.0, 2.0], product=True).serialize()
    other = comparing[1].seal([1.0, 2.0]).serialize()
    for junk in (b"", b"junk", os.urandom(len(data)), data[:-100], data * 20, product, other):
        with pytest.raises(ReplyRefusedError, match="ciphertext"):
            sealer.load(junk, length=2)
    with pytest.raises(ReplyRefusedError, match="2 numbers, but must have 3"):
        sealer.load(data, length=3)


def test_what_was_encrypted_with_another_key_is_never_rounded(counting: Pair) -> None:
    stranger = pair(COUNTING)[1].seal(np.ones(COUNTING.slots)).serialize()
    opener, sealer = counting
    mixed = sealer.seal(np.ones(COUNTING.slots)) + sealer.load(stranger, length=COUNTING.slots)
    with pytest.raises(FedstrataError, match="encrypted with another key"):
        opened(opener, mixed, tolerance=0.1)


def decrypted(comparing: Pair, grid: SlotLayout, difference: int, ciphertexts: int) -> NDArray[np.int64]:
    """What a client opens when its label is so much greater than the list's."""
    opener, sealer = comparing
    found = []
    for _ in range(ciphertexts):
        mine, theirs = opener.seal(np.full(grid.slots, difference + 60.0)), opener.seal(np.full(grid.slots, 60.0))
        factors, mask = grid.blind()
        product = (mine - theirs) * factors.tolist() + sealer.seal(mask, product=True)
        sent = opener.load(product.serialize(), length=grid.slots, product=True)
        found.append(opener.open_whole(sent, tolerance=0.1))
    return np.concatenate(found)


@pytest.mark.slow
def test_a_comparison_shows_zero_or_uniform_noise(comparing: Pair) -> None:
    grid = SlotLayout(100)
    assert TOLERANCE < 0.5
    samples = {d: decrypted(comparing, grid, d, 4) for d in (1, -50)}
    for values in samples.values():
        residues = values % grid.prime
        assert (residues > 0).all()
        assert stats.chisquare(np.bincount(residues, minlength=grid.prime)[1:]).pvalue > 1e-6
    assert stats.ks_2samp(samples[1], samples[-50]).pvalue > 1e-6
    assert (decrypted(comparing, grid, 0, 1) % grid.prime == 0).all()


@pytest.mark.slow
def test_the_printed_comparison_shows_the_difference(comparing: Pair) -> None:
    opener, _ = comparing
    shown = opener.open_whole(opener.seal([97.0]) - opener.seal([12.0]), tolerance=0.1)
    assert shown.tolist() == [85]


def test_the_error_of_a_product_is_drowned(comparing: Pair) -> None:
    """The part of a decrypted number that is not whole is the flood, which knows nothing of the factor."""
    opener, _ = comparing
    grid = SlotLayout(5000)
    sealed = opener.seal(np.full(grid.slots, 4999.0)) - opener.seal(np.zeros(grid.slots))
    factors, _ = grid.blind()
    own_error = np.array((sealed * factors.tolist()).decrypt()) - 4999.0 * factors
    flood = 1 / 16
    assert np.abs(own_error).max() < flood / 2**16
