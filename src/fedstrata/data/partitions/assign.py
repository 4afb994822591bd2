"""The arithmetic behind the partition schemes: pure functions on arrays, with the generator last."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedstrata.data.subsets import by_class

Ints = NDArray[np.int64]
Reals = NDArray[np.float64]


def log_dirichlet(alpha: Reals, rng: np.random.Generator) -> Reals:
    """Logarithms of Dirichlet draws along the last axis, finite for any α a float can hold sensibly.

    With α = 0.001 nearly all gamma variates underflow to 0 and 0/0 is NaN. Hence log Γ(α) = log Γ(α+1) +
    log(U)/α (Marsaglia and Tsang 2000, section 6), normalised in logarithms.

    Args:
        alpha: Concentrations, all positive, (…, C).
        rng: Where the draws come from.

    Returns:
        Of the same shape; the exponentials sum to 1 along the last axis.
    """
    draws: Reals = np.log(rng.standard_gamma(alpha + 1)) + np.log(1 - rng.random(alpha.shape)) / alpha
    draws -= draws.max(axis=-1, keepdims=True)
    draws -= np.log(np.exp(draws).sum(axis=-1, keepdims=True))
    return draws


def cut_by_dirichlet(codes: Ints, clients: int, alpha: float, rng: np.random.Generator) -> Ints:
    """Cut the samples of every class into pieces in proportion to a draw from Dir(α) over the clients.

    One uniform offset for each class makes the expected size of a piece exactly its share; plain rounding
    down would favour the last client by half a sample a class.

    Args:
        codes: Class (or domain) of every sample, 0…C−1, (samples,).
        clients: Number of clients N.
        alpha: Concentration of each client.
        rng: Where the draws come from.

    Returns:
        The owner of every sample.
    """
    owner = np.empty(len(codes), dtype=np.int64)
    for code in range(int(codes.max()) + 1):
        members = rng.permutation(np.flatnonzero(codes == code))
        shares = np.exp(log_dirichlet(np.full(clients, alpha), rng))
        cuts = np.floor(np.cumsum(shares) * len(members) + rng.random())
        owner[members] = np.searchsorted(cuts[:-1], np.arange(len(members)), side="right")
    return owner


def deal_by_mix(codes: Ints, sizes: Ints, log_mix: Reals, rng: np.random.Generator) -> Ints:
    """Give every client its number of samples, their classes drawn from its own mix.

    All clients draw at once. Where more samples of a class are wanted than there are, a random choice of the
    wishes is served; the rest draw again from their mix renormalised over the classes that are left. Every
    pass but the last uses up a class, so there are at most C.

    Args:
        codes: Class of every sample, 0…C−1, (samples,).
        sizes: Samples for each client, (N,), their sum being the number of samples.
        log_mix: Logarithm of each client's class probabilities, (N, C).
        rng: Where the draws come from.

    Returns:
        The owner of every sample.
    """
    pool, starts, left = by_class(codes, log_mix.shape[1], rng)
    owner = np.empty(len(codes), dtype=np.int64)
    wishes = np.repeat(np.arange(len(sizes)), sizes)  # the client of each sample still to come
    while len(wishes):
        wishes = rng.permutation(wishes)
        in_stock = np.flatnonzero(left)
        clients, row = np.unique(wishes, return_inverse=True)
        mix = log_mix[np.ix_(clients, in_stock)]
        bounds = np.cumsum(np.exp(mix - mix.max(axis=1, keepdims=True)), axis=1)
        bounds = bounds / bounds[:, -1:] + np.arange(len(clients))[:, None]  # one ascending line for all rows
        drawn = np.searchsorted(bounds.ravel(), row + rng.random(len(row)), side="right") - row * len(in_stock)
        wanted = in_stock[np.clip(drawn, 0, len(in_stock) - 1)]
        order = np.argsort(wanted, kind="stable")
        wishes, wanted = wishes[order], wanted[order]
        rank = ranks(wanted, len(left))
        served = rank < left[wanted]
        owner[pool[starts[wanted[served]] + rank[served]]] = wishes[served]
        gone = np.bincount(wanted[served], minlength=len(left))
        starts, left, wishes = starts + gone, left - gone, wishes[~served]
    return owner


def hold_classes(each: Ints, classes: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Choose which classes every client holds.

    A client's classes are distinct, and every class is held by as many clients as any other (±1).
    Starts from classes dealt in a circle, which has both properties, and keeps them while random pairs of
    clients swap random classes, so that in the end any two classes may meet.

    Args:
        each: Number of classes of each client, at most ``classes``, (N,).
        classes: Number of classes C.
        rng: Where the choices come from.

    Returns:
        The client and the class of each holding, client after client; Σ each of them.
    """
    owner = np.repeat(np.arange(len(each)), each)
    held = rng.permutation(classes)[np.arange(len(owner)) % classes]
    holds = np.zeros((len(each), classes), dtype=bool)
    holds[owner, held] = True
    first, half = np.cumsum(each) - each, len(each) // 2
    for _ in range(10 + 5 * int(each.max())):
        pairs = rng.permutation(len(each))[: 2 * half].reshape(2, half)
        slots = first[pairs] + (rng.random(pairs.shape) * each[pairs]).astype(np.int64)
        mine, theirs = held[slots]
        allowed = ~holds[pairs[0], theirs] & ~holds[pairs[1], mine]
        (a, b), mine, theirs = pairs[:, allowed], mine[allowed], theirs[allowed]
        holds[a, mine] = holds[b, theirs] = False
        holds[a, theirs] = holds[b, mine] = True
        held[slots[0, allowed]], held[slots[1, allowed]] = theirs, mine
    return owner, held


def deal_to_holders(codes: Ints, owner: Ints, held: Ints, rng: np.random.Generator, quota: Ints | None = None) -> Ints:
    """Split the samples of every class among those who hold it.

    Args:
        codes: Class of every sample, 0…C−1, each with a holder, (samples,).
        owner: The client of each holding.
        held: The class of each holding.
        rng: Decides who gets which sample, and who gets one more where it does not come out even.
        quota: How many samples each holding gets, at most as many as there are; by default all of them, split
            equally.

    Returns:
        The owner of every sample, −1 for those that no quota asks for.
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
        quota = quota[order]
        wanted = np.zeros(classes, dtype=np.int64)
        np.add.at(wanted, held, quota)
        result[pool[rank < wanted[label]]] = np.repeat(owner, quota)
    return result


def top_up(owner: Ints, clients: int, least: int, rng: np.random.Generator) -> Ints:
    """Move as few samples as possible so that every client has ``least``: always from whoever then has most.

    Args:
        owner: The owner of every sample; at least ``clients * least`` of them.
        clients: Number of clients N.
        least: The fewest samples a client may hold.
        rng: Decides which samples move, and to whom.

    Returns:
        The owner of every sample afterwards.
    """
    sizes = np.bincount(owner, minlength=clients)
    missing = np.maximum(least - sizes, 0)
    if not missing.any():
        return owner
    given = taken_from_largest(sizes, int(missing.sum()))
    pool, starts, _ = by_class(owner, clients, rng)
    moving = pool[np.arange(len(pool)) - starts[owner[pool]] < given[owner[pool]]]
    result = owner.copy()
    result[rng.permutation(moving)] = np.repeat(np.arange(clients), missing)
    return result


def taken_from_largest(sizes: Ints, amount: int) -> Ints:
    """How many each gives when ``amount`` are taken one by one from whoever has most.

    >>> taken_from_largest(np.array([2, 9, 6]), 5).tolist()
    [0, 4, 1]
    """
    low, high = 0, int(sizes.max())  # the highest level to which cutting everyone yields the amount
    while low < high:
        level = (low + high + 1) // 2
        if np.maximum(sizes - level, 0).sum() >= amount:
            low = level
        else:
            high = level - 1
    given = np.maximum(sizes - low, 0)
    givers = np.flatnonzero(given)
    given[givers[len(givers) - int(given.sum() - amount) :]] -= 1
    return given


def ranks(ordered: Ints, classes: int) -> Ints:
    """The position of each entry of an ascending array among its equals.

    >>> ranks(np.array([0, 0, 2, 2, 2]), 3).tolist()
    [0, 1, 0, 1, 2]
    """
    sizes = np.bincount(ordered, minlength=classes)
    rank: Ints = np.arange(len(ordered)) - (np.cumsum(sizes) - sizes)[ordered]
    return rank


def numbered(labels: Ints) -> tuple[Ints, Ints, Ints]:
    """Labels numbered without gaps, the label behind each number, and how many samples each has.

    >>> [part.tolist() for part in numbered(np.array([5, 2, 5]))]
    [[1, 0, 1], [2, 5], [1, 2]]
    """
    values, codes, amounts = np.unique(labels, return_inverse=True, return_counts=True)
    return codes, values, amounts
