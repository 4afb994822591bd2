from __future__ import annotations

from collections import Counter
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.federation.secure.shamir import PRIME, SHARE_BYTES, coefficients, combine, split


def dealt(secret: int, tail: tuple[int, ...], holders: int, prime: int) -> list[int]:
    """Return the shares of a secret whose polynomial has the other coefficients ``tail``."""
    rest = iter(tail)
    return split(secret, len(tail) + 1, holders, prime=prime, draw=lambda below: next(rest))


def test_the_known_shares_of_a_published_example() -> None:
    """1234 + 166 x + 94 x² modulo 1613: the example of Wikipedia's article on Shamir's secret sharing."""
    shares = dealt(1234, (166, 94), 6, 1613)
    assert shares == [1494, 329, 965, 176, 1188, 775]
    assert combine([2, 4, 5], [329, 176, 1188], prime=1613) == 1234
    assert combine([2, 4, 5], [329, 176, 1188], at=6, prime=1613) == 775


def test_known_factors() -> None:
    """For the holders 1, 2 and 3, Lagrange's factors at 0 are 3, −3 and 1 modulo every prime above 3."""
    for prime in (5, 1613, PRIME):
        assert coefficients((1, 2, 3), 0, prime) == (3, prime - 3, 1)


def test_the_prime_is_prime_and_exceeds_secrets_of_16_bytes() -> None:
    assert 2**128 < PRIME < 2 ** (8 * SHARE_BYTES)
    # The test of Miller and Rabin: PRIME - 1 is twice an odd number.
    assert PRIME % 4 == 3
    assert all(pow(base, PRIME // 2, PRIME) in (1, PRIME - 1) for base in range(2, 42))


@pytest.mark.parametrize(("prime", "threshold", "holders"), [(5, 1, 3), (5, 2, 4), (5, 3, 4), (7, 2, 6), (7, 3, 5)])
def test_any_t_shares_give_the_secret_and_any_fewer_fit_every_secret(prime: int, threshold: int, holders: int) -> None:
    """For all polynomials: fewer than t shares have the same distribution, the uniform one, for every secret."""
    tables = {secret: [dealt(secret, t, holders, prime) for t in product(range(prime), repeat=threshold - 1)]
              for secret in range(prime)}  # fmt: skip
    everybody = range(1, holders + 1)
    for secret, table in tables.items():
        for shares in table:
            for chosen in combinations(everybody, threshold):
                assert combine(chosen, [shares[x - 1] for x in chosen], prime=prime) == secret
        for fewer in combinations(everybody, threshold - 1):
            views = Counter(tuple(shares[x - 1] for x in fewer) for shares in table)
            assert views == Counter(product(range(prime), repeat=threshold - 1))


@pytest.mark.slow
@given(st.data())
def test_any_t_shares_of_a_secret_of_16_bytes_give_it(data: st.DataObject) -> None:
    holders = data.draw(st.integers(3, 64))
    threshold = data.draw(st.integers(2, holders))
    secret = data.draw(st.integers(0, 2**128 - 1))
    shares = split(secret, threshold, holders)
    assert all(0 <= share < PRIME for share in shares)
    chosen = data.draw(st.permutations(range(1, holders + 1)))[:threshold]
    assert combine(chosen, [shares[x - 1] for x in chosen]) == secret
    assert combine(chosen[1:], [shares[x - 1] for x in chosen[1:]]) != secret
    others = [x for x in range(1, holders + 1) if x not in chosen]
    assert all(combine(chosen, [shares[y - 1] for y in chosen], at=x) == shares[x - 1] for x in others)


def test_two_sharings_of_a_secret_differ() -> None:
    assert split(7, 2, 3) != split(7, 2, 3)


@pytest.mark.parametrize(("secret", "threshold", "holders"), [(-1, 2, 3), (5, 2, 3), (0, 0, 3), (0, 4, 3), (0, 2, 5)])
def test_sharings_that_cannot_be_are_refused(secret: int, threshold: int, holders: int) -> None:
    with pytest.raises(ValueError, match="cannot be divided"):
        split(secret, threshold, holders, prime=5)


@pytest.mark.parametrize("holders", [(1, 1), (0, 1), (1, PRIME)])
def test_shares_of_impossible_holders_are_refused(holders: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="the holders' numbers must be distinct"):
        combine(holders, [1, 2])
