"""Information squeeze: a gradient as few centres and one small code a coordinate (FedSTaS, IS)."""

from __future__ import annotations

from functools import lru_cache

import kmeans1d
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstrata.rng import rng
from fedstrata.sampling.segments import segment

SMALL = 5_000
"""Different values up to which the plain dynamic programme is the faster of the two."""


def project(gradient: Tensor, coordinates: int, seed: int) -> Tensor:
    """A seeded random projection to fewer coordinates, the same for every client.

    A count sketch (Charikar et al. 2002): every coordinate is added, with a random sign, to one of ``coordinates``
    buckets. Inner products are kept in expectation, and it costs O(d) where a dense projection costs O(d K).

    Args:
        gradient: Shape (d,).
        coordinates: K_desired; a gradient that is no longer stays as it is.
        seed: The experiment's seed.

    Returns:
        Shape (min(d, K_desired),).
    """
    d = gradient.numel()
    if coordinates == 0 or d <= coordinates:
        return gradient
    bucket, sign = _hashes(d, coordinates, seed)
    return torch.zeros(coordinates, dtype=gradient.dtype).scatter_add_(0, bucket, gradient * sign.to(gradient.dtype))


@lru_cache(maxsize=4)
def _hashes(d: int, coordinates: int, seed: int) -> tuple[Tensor, Tensor]:
    """The bucket and the sign of every coordinate: drawn once, and not by each client anew."""
    draw = rng(seed, "projection")
    bucket = torch.from_numpy(draw.integers(coordinates, size=d))
    return bucket, torch.from_numpy(draw.integers(2, size=d, dtype=np.int8)).float().mul_(2).sub_(1)


def squeeze(values: NDArray[np.float32], centres: int) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """The exact 1-D k-means of a vector's values.

    Args:
        values: Shape (d,).
        centres: d', at most 256.

    Returns:
        The centres, ascending, shape (min(d', different values),), and every coordinate's centre, shape (d,).

    >>> X, codes = squeeze(np.array([0.0, 9.0, 0.2, 8.8], dtype=np.float32), 2)
    >>> X.round(2).tolist(), codes.tolist()
    ([0.10000000149011612, 8.899999618530273], [0, 1, 0, 1])
    """
    distinct, counts = np.unique(values, return_counts=True)
    k = min(centres, len(distinct))
    cuts = segment(distinct.astype(np.float64), counts, k) if len(distinct) > SMALL and k > 1 else None
    if cuts is None:
        codes, found = kmeans1d.cluster(values.astype(np.float64), k)
        return np.asarray(found, dtype=np.float32), np.asarray(codes, dtype=np.uint8)
    begins = np.concatenate([[0], cuts])
    sums = np.add.reduceat(distinct.astype(np.float64) * counts, begins)
    means = (sums / np.add.reduceat(counts, begins)).astype(np.float32)
    return means, np.searchsorted(distinct[cuts], values, side="right").astype(np.uint8)


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
