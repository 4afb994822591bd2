"""Encode and decode numbers for secure sums, as fixed-point numbers modulo 2³².

Masks hide a vector only if all numbers are elements of a finite ring. Therefore, each real number is sent as an
integer, in units of ``range / Q``. Counts are sent unchanged. Q is small enough that the sum over all sites cannot
overflow. The sum modulo 2³² therefore determines the sum of the numbers. The sum does not depend on the order of the
sites.

For differential privacy, each site can add noise to its vector. With noise, Q is smaller, to leave room for the noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedstrata.base.arrays import Floats
from fedstrata.base.errors import ReplyRefusedError, SpecError, WithheldError
from fedstrata.base.rng import rng
from fedstrata.federation.reply_checks import DIVERGED

Words = NDArray[np.uint32]
"""A vector of integers modulo 2³²."""

LARGEST = 2**31 - 1
"""The largest absolute value of a sum that does not overflow."""
HEADROOM = 12
"""A sum has room for noise up to this number of standard deviations. Noise above this limit reduces accuracy, but not
privacy."""
LARGEST_MEAN = 2.0**34
"""The largest mean of a Poisson variable in the noise. With a larger mean, NumPy's rounding errors would be too large.
"""
_CHUNK = 1 << 14
"""The number of elements that are encoded together (an even number). These elements fit into a processor's cache."""


@dataclass(frozen=True)
class Part:
    """A vector of real numbers, such as an update, within a site's message.

    Args:
        size: Number of elements.
        range: Largest absolute value of an element. If an element is larger, the whole vector is scaled down.
    """

    size: int
    range: float

    def __post_init__(self) -> None:
        if not 0 < self.range < math.inf:
            raise SpecError(
                "range",
                "must be positive and finite. Set range to the maximum absolute value in an update.",
                self.range,
            )


@dataclass(frozen=True)
class Total:
    """The sum of several sites' messages.

    Args:
        parts: The sum of each part, in float64.
        counts: The sum of each count.
        scaled: Number of parts, in the messages of all sites, that were scaled down. If this number is not 0, ``parts``
            contains the sums of the scaled vectors.
    """

    parts: dict[str, Floats]
    counts: dict[str, int]
    scaled: int


@dataclass(frozen=True)
class Ring:
    """The layout of the messages that are summed, and the units of their numbers.

    Args:
        sites: Maximum number of sites in a sum.
        parts: A mapping from the name of each vector of real numbers to its ``Part``.
        counts: A mapping from the name of each count to its maximum value at one site. A count is a non-negative
            integer.
        noise: Standard deviation of the noise that each site adds to each element of its parts, as a multiple of the
            part's range; 0 without noise.

    Raises:
        SpecError: A sum could overflow.

    >>> ring = Ring(2, {"update": Part(1, range=1.0)}, {"samples": 10})
    >>> one, two = (ring.encode({"update": [x]}, {"samples": 5}, rounding(0, 1, 0, 0)) for x in (0.25, -1.0))
    >>> total = ring.decode(add([one, two]), 2)
    >>> round(total.parts["update"].item(), 6), total.counts
    (-0.75, {'samples': 10})
    """

    sites: int
    parts: Mapping[str, Part]
    counts: Mapping[str, int] = field(default_factory=dict)
    noise: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.sites <= LARGEST:
            raise SpecError("sites", f"must be between 1 and {LARGEST}. Use a number in this range.", self.sites)
        for name, most in self.counts.items():
            if most < 0 or self.sites * most > LARGEST:
                problem = f"the sum over {self.sites} sites may exceed {LARGEST}. Use a smaller bound or fewer sites."
                raise SpecError(f"counts.{name}", problem, most)
        if not self.scale:
            problem = "is so large that updates would be rounded to zero. Use less noise."
            raise SpecError("noise", problem, self.noise)

    @property
    def scale(self) -> int:
        """The integer Q that encodes a number equal to ``range``."""
        scale = LARGEST / (self.sites + HEADROOM * self.noise * math.sqrt(self.sites))
        return int(min(scale, math.sqrt(2 * LARGEST_MEAN) / self.noise) if self.noise else scale)

    @property
    def length(self) -> int:
        """Number of elements of a message: all parts, the counts, and one element for the number of scaled parts."""
        return sum(part.size for part in self.parts.values()) + len(self.counts) + 1

    def encode(
        self,
        parts: Mapping[str, ArrayLike],
        counts: Mapping[str, int],
        generator: np.random.Generator,
        *,
        weights: Mapping[str, float] | None = None,
    ) -> Words:
        """Encode a site's numbers, and return the message, shape (``length``,).

        Real numbers are truncated to multiples of 2⁻³² units. Then they are randomly rounded to integers, without bias.

        Args:
            parts: The vectors, before multiplication by ``weights``.
            counts: The counts.
            generator: The random generator for the rounding; see ``rounding``.
            weights: The factors of the parts, between 0 and 1. Default: 1.

        Raises:
            WithheldError: A number is not finite, or a weight or a count is out of range.
        """
        if parts.keys() != self.parts.keys() or counts.keys() != self.counts.keys():
            raise ValueError(f"got the parts and counts {[*parts, *counts]} instead of {[*self.parts, *self.counts]}")
        factors = dict.fromkeys(self.parts, 1.0) | dict(weights or {})
        if not all(0 <= factor <= 1 for factor in factors.values()):
            # The error must not contain the weight, which depends on the size of the site.
            raise WithheldError(
                "the client did not send its reply, because its number of samples is above "
                "privacy.largest. Increase privacy.largest."
            )
        words, draw = np.zeros(self.length, dtype=np.uint32), generator.bit_generator.random_raw
        begin, scaled = 0, 0
        for name, part in self.parts.items():
            vector = np.asarray(parts[name])
            if vector.shape != (part.size,):
                raise ValueError(f"{name} has shape {vector.shape}, but must have shape {(part.size,)}")
            largest = float(max(vector.max(), -vector.min())) if part.size else 0.0
            if not math.isfinite(largest):
                problem = "the client did not send its reply, because the reply contains NaN or infinity"
                raise WithheldError(f"{problem}. {DIVERGED}")
            scaled += largest > part.range
            unit = max(part.range, largest)
            factor = factors[name] * (self.scale * 2.0**32)
            whole = words[begin : begin + part.size].view(np.int32)
            for first in range(0, part.size, _CHUNK):
                # After the division, all absolute values are at most 1, also with rounding. After the multiplication by
                # ``factor`` ≤ 2³² ``self.scale`` < 2⁶³, they fit into int64.
                exact = vector[first : first + _CHUNK].astype(np.float64)
                if unit != 1:
                    exact /= unit
                exact *= factor
                fixed = exact.astype(np.int64)
                fixed += draw(-(-len(fixed) // 2)).view(np.uint32)[: len(fixed)]
                fixed >>= 32
                whole[first : first + _CHUNK] = fixed
            begin += part.size
        for place, (name, most) in enumerate(self.counts.items(), start=begin):
            if not 0 <= counts[name] <= most:
                # The error must not contain the count, which may be a secret of the site.
                raise WithheldError(f"the client did not send its reply, because {name} is not between 0 and {most}.")
            words[place] = counts[name]
        words[-1] = scaled
        return words

    def add_noise(self, words: Words, generator: np.random.Generator) -> Words:
        """Return a site's message with Skellam noise on all parts, but not on counts.

        Args:
            words: The message.
            generator: The random generator of the noise. In a deployment, this generator must be secret.
        """
        size = sum(part.size for part in self.parts.values())
        noisy = words.copy()
        noisy[:size] += skellam(generator, size, (self.noise * self.scale) ** 2).astype(np.uint32)
        return noisy

    def decode(self, total: Words, sites: int) -> Total:
        """Decode the sum of several sites' messages.

        Args:
            total: The sum of the messages modulo 2³².
            sites: Number of sites that contributed.

        Raises:
            ReplyRefusedError: A sum is larger than any sum of valid messages, so at least one site has sent an invalid
                vector.
        """
        if total.shape != (self.length,) or total.dtype != np.uint32:
            raise ReplyRefusedError(
                f"the sum has shape {total.shape} and type {total.dtype}, but must have shape {(self.length,)} and "
                "type uint32"
            )
        if not 0 < sites <= self.sites:
            raise ValueError(f"{sites} sites contributed, but at most {self.sites} may contribute")
        parts: dict[str, Floats] = {}
        begin, most = 0, sites + HEADROOM * self.noise * math.sqrt(sites)
        for name, part in self.parts.items():
            whole = total[begin : begin + part.size].view(np.int32)
            if part.size and max(int(whole.max()), -int(whole.min())) > self.scale * most:
                raise ReplyRefusedError(f"the sum of {name} is out of range, so a site sent an invalid vector")
            parts[name] = whole.astype(np.float64) * (part.range / self.scale)
            begin += part.size
        counts = {name: int(total[place]) for place, name in enumerate(self.counts, start=begin)}
        for name, count in counts.items():
            if count > sites * self.counts[name]:
                raise ReplyRefusedError(f"the sum of {name} is out of range, so a site sent an invalid vector")
        if (scaled := int(total[-1])) > sites * len(self.parts):
            problem = "its count of scaled parts is larger than its number of parts"
            raise ReplyRefusedError(f"a site sent an invalid vector: {problem}")
        return Total(parts, counts, scaled)


def add(vectors: Iterable[Words]) -> Words:
    """Return the sum of one or more vectors modulo 2³²."""
    first, *others = vectors
    total = first.copy()
    for vector in others:
        total += vector
    return total


def skellam(generator: np.random.Generator, size: int, variance: float) -> NDArray[np.int64]:
    """Return Skellam noise, shape (``size``,): the difference of two Poisson variables with the mean ``variance`` / 2.

    The sum of independent Skellam variables is again a Skellam variable, and the variances add up.
    """
    first, second = (generator.poisson(variance / 2, size) for _ in range(2))
    return first - second


def rounding(seed: int, round: int, client: int, exchange: int) -> np.random.Generator:
    """Return the random generator for rounding the numbers in one client's message.

    The random numbers need not be secret, because the sum contains only rounded numbers.

    Args:
        seed: The experiment's seed.
        round: The round.
        client: The client's id.
        exchange: The index of the exchange within the round.
    """
    return rng(seed, f"rounding of secure sum {exchange}", round, client)
