"""Compress a gradient to a few values and one small code per coordinate (FedSTaS, "information squeeze")."""

from __future__ import annotations

from functools import lru_cache

import ckmeans
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstrata.base.arrays import Floats32
from fedstrata.base.rng import rng


def project(gradients: Tensor, coordinates: int, seed: int) -> Tensor:
    """Project gradients to fewer coordinates, with the same random projection for every client.

    The projection is a count sketch (Charikar et al. 2002). Each coordinate gets a random sign, and is added to a
    bucket. Inner products stay the same in expectation, and the cost for d coordinates is O(d). Coordinate i is added
    to bucket i mod p, where p is the largest prime up to K. Because p does not divide the width of a layer, the weights
    of each input or output are spread evenly over the buckets. Buckets p … K − 1 stay 0.

    Args:
        gradients: One gradient, shape (d,), or n gradients, shape (n, d).
        coordinates: The number K of coordinates after projection. Gradients with at most K coordinates are not
            projected. With 0, gradients are not projected.
        seed: The experiment's seed.

    Returns:
        The projected gradients, shape (min(d, K),) or (n, min(d, K)).
    """
    d = gradients.shape[-1]
    if coordinates == 0 or d <= coordinates:
        return gradients
    signed = (gradients * _signs(d, seed).to(gradients.dtype)).numpy()
    before, p = signed.shape[:-1], _prime(coordinates)
    full = d // p * p
    buckets = np.zeros((*before, coordinates), dtype=signed.dtype)
    signed[..., :full].reshape(*before, d // p, p).sum(axis=-2, out=buckets[..., :p])
    buckets[..., : d - full] += signed[..., full:]
    return torch.from_numpy(buckets)


@lru_cache(maxsize=4)
def _signs(d: int, seed: int) -> Tensor:
    """Return a random sign (±1) for every coordinate, float32, shape (d,)."""
    return torch.from_numpy(rng(seed, "projection").integers(2, size=d, dtype=np.int8)).float().mul_(2).sub_(1)


@lru_cache
def _prime(most: int) -> int:
    """Return the largest prime up to ``most``; 1 if ``most`` is 1."""
    return next((n for n in range(most, 1, -1) if all(n % k for k in range(2, int(n**0.5) + 1))), 1)


def quantize(values: Floats32, centres: int) -> tuple[Floats32, NDArray[np.uint8]]:
    """Quantize a vector by exact one-dimensional k-means, which replaces each value by the mean of its cluster.

    Args:
        values: The vector, shape (d,).
        centres: The maximum number d' of clusters, at most 255.

    Returns:
        Two arrays. The first array contains the means, ascending, shape (d',). If the vector has fewer different
        values, the array is shorter. The second array contains the index of the mean for every coordinate, shape (d,).

    >>> X, codes = quantize(np.array([0.0, 9.0, 0.2, 8.8], dtype=np.float32), 2)
    >>> X.round(2).tolist(), codes.tolist()
    ([0.10000000149011612, 8.899999618530273], [0, 1, 0, 1])
    """
    ordered = np.sort(values)
    groups = ckmeans.ckmeans(ordered, min(centres, len(np.unique(ordered))))
    # Take the smallest value of all groups except the first. ``np.unique`` merges groups that begin with equal values.
    lowest = np.unique(ordered[np.cumsum([len(group) for group in groups[:-1]], dtype=np.int64)])
    edges = np.concatenate([[0], np.searchsorted(ordered, lowest), [len(ordered)]])
    sums = np.add.reduceat(ordered, edges[:-1], dtype=np.float64)
    means = (sums / np.diff(edges)).astype(np.float32)
    return means, np.searchsorted(lowest, values, side="right").astype(np.uint8)


def pack(codes: NDArray[np.uint8], centres: int) -> NDArray[np.uint8]:
    """Pack two codes into each byte if there are at most 16 centres. Otherwise, return the codes unchanged.

    >>> pack(np.array([1, 2, 3], dtype=np.uint8), 9).tolist()
    [18, 48]
    """
    if centres > 16:
        return codes
    even = np.append(codes, np.uint8(0)) if len(codes) % 2 else codes
    packed: NDArray[np.uint8] = (even[0::2] * np.uint8(16)) | even[1::2]
    return packed


def restore(centres: Floats32, packed: NDArray[np.uint8], length: int) -> Floats32:
    """Return the quantized gradient, in which each code is replaced by its centre, shape (length,).

    The argument ``packed`` contains the codes (indices of centres) in the form that ``pack`` returns.

    Raises:
        ValueError: The codes do not match the length or the centres.
    """
    codes = np.stack([packed >> 4, packed & 15], axis=1).ravel()[:length] if len(centres) <= 16 else packed
    if len(codes) != length or (length and codes.max() >= len(centres)):
        raise ValueError(f"{len(packed)} bytes of codes do not match {length} coordinates and {len(centres)} centres")
    restored: Floats32 = centres[codes]
    return restored
