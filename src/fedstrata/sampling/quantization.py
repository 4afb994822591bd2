"""Information squeeze: a gradient as few centres and one small code a coordinate (FedSTaS, IS)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import ckmeans
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstrata.base.rng import rng
from fedstrata.sampling.kmeans_1d import segment

SMALL = 50_000
"""Different values up to which the plain dynamic programme is the faster of the two."""


def project(gradients: Tensor, coordinates: int, seed: int) -> Tensor:
    """A seeded random projection to fewer coordinates, the same for every client.

    A count sketch (Charikar et al. 2002): every coordinate is added, with a random sign, to a bucket. The random signs
    keep inner products in expectation, and it costs O(d) where a dense projection costs O(d K). Coordinate i goes to
    bucket i mod p with p the largest prime up to K: memory is read in order, and no layer's width is in step with p, so
    that the weights of one input or output meet equally in all buckets. Buckets beyond p stay 0.

    Args:
        gradients: Shape (d,), or (n, d) for several.
        coordinates: K_desired; a shorter gradient stays unchanged.
        seed: The experiment's seed.

    Returns:
        Shape (min(d, K_desired),), or (n, min(d, K_desired)).
    """
    d = gradients.shape[-1]
    if coordinates == 0 or d <= coordinates:
        return gradients
    signed = gradients * signs(d, seed).to(gradients.dtype)
    return torch.from_numpy(bucketed(signed.numpy(), coordinates))


@lru_cache(maxsize=4)
def signs(d: int, seed: int) -> Tensor:
    """The random sign of every coordinate, ±1, float32, shape (d,): drawn once, the same for all clients."""
    return torch.from_numpy(rng(seed, "projection").integers(2, size=d, dtype=np.int8)).float().mul_(2).sub_(1)


def bucketed(signed: NDArray[Any], coordinates: int) -> NDArray[Any]:
    """Coordinates that have their signs, (…, d), added up in their buckets, (…, K)."""
    before, d, p = signed.shape[:-1], signed.shape[-1], _prime(coordinates)
    whole = d // p * p
    buckets = np.zeros((*before, coordinates), dtype=signed.dtype)
    signed[..., :whole].reshape(*before, d // p, p).sum(axis=-2, out=buckets[..., :p])
    buckets[..., : d - whole] += signed[..., whole:]
    return buckets


@lru_cache
def _prime(most: int) -> int:
    """The largest prime up to a number; 1 where there is none."""
    return next((n for n in range(most, 1, -1) if all(n % k for k in range(2, int(n**0.5) + 1))), 1)


def quantize(values: NDArray[np.float32], centres: int) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """The exact 1-D k-means of a vector's values.

    Args:
        values: Shape (d,).
        centres: d', at most 255.

    Returns:
        The centres, ascending, shape (min(d', different values),), and every coordinate's centre, shape (d,).

    >>> X, codes = quantize(np.array([0.0, 9.0, 0.2, 8.8], dtype=np.float32), 2)
    >>> X.round(2).tolist(), codes.tolist()
    ([0.10000000149011612, 8.899999618530273], [0, 1, 0, 1])
    """
    ordered = np.sort(values)
    begins = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    distinct, counts = ordered[begins], np.diff(begins, append=len(ordered))
    k = min(centres, len(distinct))
    cuts = segment(distinct.astype(np.float64), counts, k) if len(distinct) > SMALL and k > 1 else None
    lowest = distinct[cuts] if cuts is not None else _lowest(ordered, k)
    edges = np.concatenate([[0], np.searchsorted(ordered, lowest), [len(ordered)]])
    sums = np.add.reduceat(ordered, edges[:-1], dtype=np.float64)
    means = (sums / np.diff(edges)).astype(np.float32)
    return means, np.searchsorted(lowest, values, side="right").astype(np.uint8)


def _lowest(ordered: NDArray[np.float32], k: int) -> NDArray[np.float32]:
    """The smallest value of each of the k best groups but the first, by the plain dynamic programme."""
    groups = ckmeans.ckmeans(ordered, k)
    begins = np.cumsum([len(group) for group in groups[:-1]], dtype=np.int64)
    return np.unique(ordered[begins])


def pack(codes: NDArray[np.uint8], centres: int) -> NDArray[np.uint8]:
    """Two codes a byte where 16 centres or fewer make that possible.

    >>> pack(np.array([1, 2, 3], dtype=np.uint8), 9).tolist()
    [18, 48]
    """
    if centres > 16:
        return codes
    even = np.append(codes, np.uint8(0)) if len(codes) % 2 else codes
    packed: NDArray[np.uint8] = (even[0::2] * np.uint8(16)) | even[1::2]
    return packed


def restore(centres: NDArray[np.float32], packed: NDArray[np.uint8], length: int) -> NDArray[np.float32]:
    """Z = X[λ], shape (length,).

    Raises:
        ValueError: The codes do not fit the length or the centres.
    """
    codes = packed
    if len(centres) <= 16:
        codes = np.stack([packed >> 4, packed & 15], axis=1).ravel()[:length]
    if len(codes) != length or (length and codes.max() >= len(centres)):
        raise ValueError(f"{len(packed)} bytes of codes do not name {length} of {len(centres)} centres")
    restored: NDArray[np.float32] = centres[codes]
    return restored
