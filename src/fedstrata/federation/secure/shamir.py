"""Share a secret (Shamir 1979): any t of n shares determine the secret, and fewer than t shares reveal nothing.

The dealer draws a random polynomial of degree t − 1 whose value at 0 is the secret. Holder x, from 1 to n, gets the
polynomial's value at x as a share. All calculations are modulo a prime, by default a prime that is larger than any
secret of 16 bytes.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from functools import lru_cache

PRIME = 2**130 - 5
SHARE_BYTES = 17


def split(
    secret: int, threshold: int, holders: int, *, prime: int = PRIME, draw: Callable[[int], int] = secrets.randbelow
) -> list[int]:
    """Divide a secret into shares, and return the shares of the holders 1, …, n.

    Args:
        secret: A number from 0 to ``prime`` − 1.
        threshold: Number t of shares that suffice to reconstruct the secret.
        holders: Number n of shares.
        prime: The prime.
        draw: A function that returns a random number below its argument. Default: random numbers from the operating
            system.
    """
    if not (0 <= secret < prime and 1 <= threshold <= holders < prime):
        raise ValueError(
            f"a secret cannot be divided among {holders} holders (threshold {threshold}, prime modulus {prime})"
        )
    polynomial = [secret, *(draw(prime) for _ in range(threshold - 1))]
    shares = []
    for holder in range(1, holders + 1):
        share = 0
        for coefficient in reversed(polynomial):
            share = (share * holder + coefficient) % prime
        shares.append(share)
    return shares


@lru_cache(maxsize=4096)
def coefficients(holders: tuple[int, ...], at: int = 0, prime: int = PRIME) -> tuple[int, ...]:
    """Return a factor per share. The sum of all products of share and factor is the polynomial's value at ``at``.

    The factors depend only on the holders, so they are the same for all secrets that these holders reconstruct.

    Args:
        holders: The numbers x of the holders, which are distinct, at least 1 and below ``prime``.
        at: The argument of the polynomial: 0 for the secret, x for the share of holder x.
        prime: The prime.
    """
    if len(set(holders)) < len(holders) or not all(1 <= holder < prime for holder in holders):
        raise ValueError(f"the holders' numbers must be distinct and between 1 and {prime - 1}, but are {holders}")
    factors = []
    for holder in holders:
        above = below = 1
        for other in holders:
            if other != holder:
                above = above * (at - other) % prime
                below = below * (holder - other) % prime
        factors.append(above * pow(below, -1, prime) % prime)
    return tuple(factors)


def combine(holders: Sequence[int], shares: Sequence[int], *, at: int = 0, prime: int = PRIME) -> int:
    """Return the value of the dealer's polynomial at ``at``. The value at 0 is the secret.

    The result is wrong if a share is wrong, or if there are fewer shares than the dealer's threshold.

    Args:
        holders: The holders of the shares.
        shares: The shares of these holders.
        at: The argument of the polynomial.
        prime: The prime.
    """
    factors = coefficients(tuple(holders), at, prime)
    return sum(factor * share for factor, share in zip(factors, shares, strict=True)) % prime
