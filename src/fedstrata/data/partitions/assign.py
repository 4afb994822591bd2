"""Compute partitions with pure functions on arrays.

The *owner* of a sample is the client that has this sample. A *holding* is a pair of a client and a class of which this
client has samples.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from fedstrata.base.arrays import Floats, Ints
from fedstrata.data.subsets import by_class


def log_dirichlet(alpha: Floats, rng: np.random.Generator) -> Floats:
    """Draw the logarithms of Dirichlet shares. The logarithms are finite even for very small α.

    A Dirichlet share is a gamma variate divided by the sum of all gamma variates. For small α, gamma variates underflow
    to 0. The function therefore draws log(Gamma(α)) as log(Gamma(α + 1)) + log(U)/α with a uniform U (Marsaglia and
    Tsang 2000, section 6).

    Args:
        alpha: The concentrations α, all positive, shape (…, C).
        rng: The random generator.

    Returns:
        The logarithms, in the shape of ``alpha``. The shares themselves add up to 1 along the last axis.
    """
    draws: Floats = np.log(rng.standard_gamma(alpha + 1)) + np.log(1 - rng.random(alpha.shape)) / alpha
    draws -= draws.max(axis=-1, keepdims=True)
    draws -= np.log(np.exp(draws).sum(axis=-1, keepdims=True))
    return draws


def cut_by_dirichlet(codes: Ints, clients: int, alpha: float, rng: np.random.Generator) -> Ints:
    """Divide the samples of each class among N clients, in proportions drawn from a Dirichlet distribution.

    The numbers of samples are rounded at random. A client's expected number of samples is therefore exactly
    proportional to its share.

    Args:
        codes: The class (or domain) of every sample, 0…C−1, shape (samples,).
        clients: The number of clients N.
        alpha: The concentration α, the same for each client.
        rng: The random generator.

    Returns:
        The owner of every sample, as an array of shape (samples,).
    """
    owner = np.empty(len(codes), dtype=np.int64)
    for code in range(int(codes.max()) + 1):
        members = rng.permutation(np.flatnonzero(codes == code))
        shares = np.exp(log_dirichlet(np.full(clients, alpha), rng))
        cuts = np.floor(np.cumsum(shares) * len(members) + rng.random())
        owner[members] = np.searchsorted(cuts[:-1], np.arange(len(members)), side="right")
    return owner


def deal_by_mix(codes: Ints, sizes: Ints, log_mix: Floats, rng: np.random.Generator) -> Ints:
    """Give each client a fixed number of samples, with classes drawn from the client's own class probabilities.

    All clients draw their classes simultaneously. If a class is drawn more often than it has samples, the excess draws
    (chosen at random) are replaced by new draws. Only classes that still have samples can then be drawn.

    Args:
        codes: The class of every sample, 0…C−1, shape (samples,).
        sizes: The number of samples of each client, shape (N,). These numbers must add up to the total number of
            samples.
        log_mix: The logarithms of each client's class probabilities, shape (N, C).
        rng: The random generator.

    Returns:
        The owner of every sample, as an array of shape (samples,).
    """
    pool, starts, remaining = by_class(codes, log_mix.shape[1], rng)
    owner = np.empty(len(codes), dtype=np.int64)
    pending = np.repeat(np.arange(len(sizes)), sizes)  # each client, once for every sample that it must still get
    while len(pending):
        pending = rng.permutation(pending)
        in_stock = np.flatnonzero(remaining)
        clients, row = np.unique(pending, return_inverse=True)
        mix = log_mix[np.ix_(clients, in_stock)]
        bounds = np.cumsum(np.exp(mix - mix.max(axis=1, keepdims=True)), axis=1)
        # Shift row r of the bounds to (r, r + 1], so that a single search over all rows can look up every draw.
        bounds = bounds / bounds[:, -1:] + np.arange(len(clients))[:, None]
        draws = np.searchsorted(bounds.ravel(), row + rng.random(len(row)), side="right") - row * len(in_stock)
        drawn = in_stock[np.clip(draws, 0, len(in_stock) - 1)]
        order = np.argsort(drawn, kind="stable")
        pending, drawn = pending[order], drawn[order]
        rank = ranks(drawn, len(remaining))
        served = rank < remaining[drawn]
        owner[pool[starts[drawn[served]] + rank[served]]] = pending[served]
        used = np.bincount(drawn[served], minlength=len(remaining))
        starts, remaining, pending = starts + used, remaining - used, pending[~served]
    return owner


def hold_classes(each: Ints, classes: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Choose the classes of each client at random.

    The classes of a client are distinct, and all classes have the same number of clients (±1). All combinations of
    classes are possible.

    Args:
        each: The number of classes of each client, at most ``classes``, shape (N,).
        classes: The number of classes C.
        rng: The random generator.

    Returns:
        The client and the class of each holding, as two arrays with one entry per holding, sorted by client.
    """
    owner = np.repeat(np.arange(len(each)), each)
    held = rng.permutation(classes)[np.arange(len(owner)) % classes]
    holds = np.zeros((len(each), classes), dtype=bool)
    holds[owner, held] = True
    first, half = np.cumsum(each) - each, len(each) // 2
    for _ in range(10 + 5 * int(each.max())):
        pairs = rng.permutation(len(each))[: 2 * half].reshape(2, half)
        slots = first[pairs] + (rng.random(pairs.shape) * each[pairs]).astype(np.int64)
        class_a, class_b = held[slots]
        allowed = ~holds[pairs[0], class_b] & ~holds[pairs[1], class_a]
        (a, b), class_a, class_b = pairs[:, allowed], class_a[allowed], class_b[allowed]
        holds[a, class_a] = holds[b, class_b] = False
        holds[a, class_b] = holds[b, class_a] = True
        held[slots[0, allowed]], held[slots[1, allowed]] = class_b, class_a
    return owner, held


def deal_to_holders(codes: Ints, owner: Ints, held: Ints, rng: np.random.Generator, quota: Ints | None = None) -> Ints:
    """Split the samples of every class among its holders (the clients that were chosen for the class).

    Args:
        codes: The class of every sample, 0…C−1, shape (samples,). Every class must have a holder.
        owner: The client of each holding, in the order of ``hold_classes``. A holding is a class that a client has.
        held: The class of each holding, in the order of ``hold_classes``.
        rng: The random generator that chooses each client's samples, and decides which clients get one extra sample.
        quota: The number of samples of each holding. By default, all samples are split equally (±1).

    Returns:
        The owner of every sample, as an array of shape (samples,). For samples that exceed the quotas, the owner is −1.
    """
    classes = int(codes.max()) + 1
    pool, starts, _ = by_class(codes, classes, rng)
    order = np.lexsort((rng.random(len(held)), held))
    owner, held = owner[order], held[order]
    label, rank = codes[pool], np.arange(len(pool)) - starts[codes[pool]]
    result = np.full(len(codes), -1, dtype=np.int64)
    if quota is None:
        holders = np.bincount(held, minlength=classes)
        result[pool] = owner[(np.cumsum(holders) - holders)[label] + rank % holders[label]]
    else:
        wanted = np.bincount(held, weights=quota[order], minlength=classes)
        result[pool[rank < wanted[label]]] = np.repeat(owner, quota[order])
    return result


def top_up(owner: Ints, clients: int, least: int, rng: np.random.Generator) -> Ints:
    """Move as few samples as possible, so that every client has at least ``least`` samples.

    Each sample is taken from the client that has the most samples left.

    Args:
        owner: The owner of every sample, as an array of shape (samples,). There must be at least ``clients`` ·
            ``least`` samples.
        clients: The number of clients N.
        least: The minimum number of samples per client.
        rng: The random generator that selects the samples and their new owners.

    Returns:
        The new owner of every sample, shape (samples,).
    """
    sizes = np.bincount(owner, minlength=clients)
    missing = np.maximum(least - sizes, 0)
    if not missing.any():
        return owner
    taken = taken_from_largest(sizes, int(missing.sum()))
    pool, starts, _ = by_class(owner, clients, rng)
    selected = pool[np.arange(len(pool)) - starts[owner[pool]] < taken[owner[pool]]]
    result = owner.copy()
    result[rng.permutation(selected)] = np.repeat(np.arange(clients), missing)
    return result


def taken_from_largest(sizes: Ints, amount: int) -> Ints:
    """Return how many samples each client loses if ``amount`` samples are taken from the largest clients.

    The samples are taken one after another, always from the client that has the most samples left.

    >>> taken_from_largest(np.array([2, 9, 6]), 5).tolist()
    [0, 4, 1]
    """
    # Find the largest ``level`` for which the clients together have at least ``amount`` samples above ``level``.
    levels = range(int(sizes.max()) + 1)
    level = bisect_right(levels, -amount, key=lambda level: -int(np.maximum(sizes - level, 0).sum())) - 1
    taken = np.maximum(sizes - level, 0)
    givers = np.flatnonzero(taken)
    taken[givers[len(givers) - int(taken.sum() - amount) :]] -= 1
    return taken


def ranks(ordered: Ints, classes: int) -> Ints:
    """For each entry of an ascending array, return how many equal entries come before it.

    >>> ranks(np.array([0, 0, 2, 2, 2]), 3).tolist()
    [0, 1, 0, 1, 2]
    """
    sizes = np.bincount(ordered, minlength=classes)
    rank: Ints = np.arange(len(ordered)) - (np.cumsum(sizes) - sizes)[ordered]
    return rank
