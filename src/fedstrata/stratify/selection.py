"""Select clients for Stratify: choose a client for each position (entry) of the schedule of labels.

The schedule is the sequence of labels of an epoch. A *position* is one entry of the schedule. At each position, a
client trains on one sample of the label. A *placeholder* is a number that stands for a label. In this module,
placeholders are the numbers 0 … P−1. ``assign_runs`` gives each client a *run* of consecutive positions (Stratify,
Algorithm 1). ``select_batch`` chooses the clients of a batch (Algorithm 2).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedstrata.base.arrays import Bools, Floats, Ints

_CELLS = 1 << 21
"""The maximum number of pairs (position, client) that are processed at once, to limit memory use."""


def assign_runs(
    wanted: Ints,
    available: Bools,
    weights: Floats | None = None,
    *,
    chunk_size: int,
    retain: float = 0.5,
    generator: np.random.Generator,
) -> Ints:
    """Choose a client for each position (entry) of a schedule of labels (Stratify, Algorithm 1).

    The schedule is cut into chunks of consecutive positions. Each position has a placeholder (a number that stands for
    a label). In each chunk, only a random subset of the clients with samples of a label may train on this label; see
    ``retained``. The positions of a chunk are assigned in order. At position i, the server chooses the client that may
    train on the most consecutive positions i, i + 1, … of the chunk (a *run*). If several clients may train on equally
    long runs, one of them is drawn at random. The client gets the whole run, and the next client is chosen for the
    position after the run.

    Args:
        wanted: For each position, the placeholder of its label, in 0 … P−1, shape (L,).
        available: For each placeholder and client, whether the client has unused samples of the label, shape (P, N).
        weights: The number of samples of each placeholder's label at each client, shape (P, N); None for uniform
            selection.
        chunk_size: The number of positions in a chunk.
        retain: The fraction, in (0, 1], of a label's available clients that may train on this label within a chunk.
        generator: The random generator.

    Returns:
        For each position, the id of the chosen client, shape (L,). The value is −1 if no client is available.

    >>> both = np.array([[True, True], [True, False]])  # placeholder 0: clients 0 and 1; placeholder 1: client 0
    >>> assign_runs(np.array([0, 1, 0]), both, chunk_size=3, retain=1.0, generator=np.random.default_rng(0)).tolist()
    [0, 0, 0]
    """
    clients = np.flatnonzero(available.any(axis=0))
    owner = np.full(len(wanted), -1, dtype=np.int64)
    if len(clients) == 0:
        return owner
    able = available[:, clients]
    shares = None if weights is None else weights[:, clients]
    block = max(1, _CELLS // (chunk_size * len(clients))) * chunk_size
    for begin in range(0, len(wanted), block):
        part = wanted[begin : begin + block]
        covers = _covers(part, able, shares, chunk_size, retain, generator)
        places = _walk(covers, generator).reshape(-1)[: len(part)]
        for _ in range(chunk_size - covers.shape[1]):
            generator.random(len(clients))  # Later draws must not depend on the length of this chunk.
        owner[begin : begin + block] = np.where(places >= 0, clients[places], -1)
    return owner


def retained(able: Bools, weights: Floats | None, retain: float, generator: np.random.Generator) -> Bools:
    """Draw a subset of the available clients, without replacement, for each of several labels.

    Of n available clients, r = max(1, ceil(retain · n)) clients are drawn. If selection is uniform, all
    clients are equally likely. If selection is weighted, clients are drawn one after another, with probabilities in
    proportion to the weights of the remaining clients (Efraimidis and Spirakis 2006).

    Args:
        able: Whether each client is available for each label, shape (…, N).
        weights: Each client's number of samples of each label, in the shape of ``able``; None for uniform selection.
        retain: The fraction of the available clients to draw, in (0, 1].
        generator: The random generator.

    Returns:
        Whether each client was drawn for each label, in the shape of ``able``.
    """
    if retain >= 1:
        return able
    # Subtract a small number, because a floating-point product may exceed the exact integer: 0.07 · 100 > 7.
    size = np.maximum(1, np.ceil(retain * able.sum(axis=-1, keepdims=True) - 1e-9)).astype(np.int64)
    keys = generator.standard_exponential(able.shape)
    with np.errstate(divide="ignore"):
        keys = np.where(able, keys if weights is None else keys / weights, np.inf)
    limit = np.take_along_axis(np.sort(keys, axis=-1), size - 1, axis=-1)
    pools: Bools = able & (keys <= limit)
    return pools


def tasks_of(owner: Ints, chunk_size: int) -> tuple[Ints, Ints]:
    """Divide a schedule into tasks of consecutive positions with the same chunk and client (Algorithm 3, line 8).

    Args:
        owner: For each position of the schedule, the id of its client, shape (L,); −1 for positions without a client.
        chunk_size: The number of positions in a chunk.

    Returns:
        Two arrays of shape (T,) for T tasks: the first position of each task, and the position after its last position.
        Positions without a client do not belong to a task.

    >>> [part.tolist() for part in tasks_of(np.array([2, 2, -1, 1, 1]), chunk_size=4)]
    [[0, 3, 4], [2, 4, 5]]
    """
    if len(owner) == 0:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    place = np.arange(1, len(owner))
    begins = np.concatenate([[0], place[(np.diff(owner) != 0) | (place % chunk_size == 0)]])
    ends = np.concatenate([begins[1:], [len(owner)]])
    served = owner[begins] >= 0
    return begins[served], ends[served]


def _covers(
    wanted: Ints, able: Bools, weights: Floats | None, chunk_size: int, retain: float, generator: np.random.Generator
) -> Bools:
    """Draw at random which clients may train on each position of the schedule; see ``retained``.

    Returns:
        Whether each client may train on each position of each chunk, shape (chunks, size, N). ``size`` is the smaller
        of ``chunk_size`` and ``len(wanted)``. A short last chunk is padded with False.
    """
    length = len(wanted)
    chunk = np.arange(length) // chunk_size
    # Clients are drawn once for each pair of a chunk and a label, and not for each position.
    pools, pool_of = np.unique(chunk * len(able) + wanted, return_inverse=True)
    of_placeholder = pools % len(able)
    kept = retained(able[of_placeholder], None if weights is None else weights[of_placeholder], retain, generator)
    chunks = -(-length // chunk_size)
    size = min(chunk_size, length)
    covers = np.zeros((chunks * size, able.shape[1]), dtype=bool)
    covers[:length] = kept[pool_of]
    return covers.reshape(chunks, size, -1)


def _walk(covers: Bools, generator: np.random.Generator) -> Ints:
    """Choose the client of each position in all chunks at the same time; see ``assign_runs``.

    Args:
        covers: Whether each of N clients may train on each position of each chunk, shape (chunks, size, N).
        generator: The random generator, to break ties.

    Returns:
        For each position, the client as an index into the last axis of ``covers``, shape (chunks, size). The value is
        −1 if no client may train on the position.
    """
    chunks, size, clients = covers.shape
    runs = np.zeros((size + 1, chunks, clients), dtype=np.int32)
    for i in reversed(range(size)):
        np.multiply(runs[i + 1] + 1, covers[:, i], out=runs[i])
    owner = np.full((chunks, size), -1, dtype=np.int64)
    next_start = np.zeros(chunks, dtype=np.int64)
    current = np.full(chunks, -1, dtype=np.int64)
    for i in range(size):
        starting = np.flatnonzero(next_start == i)
        lengths = runs[i, starting]
        longest = lengths.max(axis=1)
        ties = (lengths == longest[:, None]) * (1.0 - generator.random(lengths.shape))
        current[starting] = np.where(longest > 0, ties.argmax(axis=1), -1)
        next_start[starting] = i + np.maximum(longest, 1)
        owner[:, i] = current
    return owner


def select_batch(
    wanted: Ints, available: Mapping[int, Ints], weights: Mapping[int, Floats] | None, generator: np.random.Generator
) -> Ints:
    """Choose a client for each position (entry of the schedule) of one batch (Stratify, Algorithm 2).

    Each position has a placeholder p (a number that stands for a label). For each position with the placeholder p, one
    client is drawn from ``available[p]``. Clients are drawn with replacement only if there are fewer clients than
    positions with the placeholder p.

    Args:
        wanted: For each position, the placeholder of its label, shape (B,).
        available: A mapping from each placeholder to the clients with samples of its label.
        weights: A mapping from each placeholder to the weights of the clients in ``available``, in the same order; None
            for uniform selection.
        generator: The random generator.

    Returns:
        For each position, the id of the chosen client, shape (B,). The value is −1 if no client is available.
    """
    return select_batches(wanted, np.zeros(len(wanted), dtype=np.int64), available, weights, generator)


def select_batches(
    wanted: Ints,
    batch_of: Ints,
    available: Mapping[int, Ints],
    weights: Mapping[int, Floats] | None,
    generator: np.random.Generator,
) -> Ints:
    """Choose clients for many batches at once; see ``select_batch``.

    Args:
        wanted: For each position of the schedule, the placeholder (the number that stands for its label), shape (L,).
        batch_of: The index of the batch to which each position belongs, ascending, shape (L,).
        available: A mapping from each placeholder to the clients with samples of its label.
        weights: A mapping from each placeholder to the weights of the clients in ``available``; None for uniform
            selection.
        generator: The random generator.

    Returns:
        For each position, the id of the chosen client, shape (L,). The value is −1 if no client is available.
    """
    chosen = np.full(len(wanted), -1, dtype=np.int64)
    for p in np.unique(wanted).tolist():
        clients = available[p]
        if len(clients) == 0:
            continue
        positions = np.flatnonzero(wanted == p)
        _, begins, group, sizes = np.unique(
            batch_of[positions], return_index=True, return_inverse=True, return_counts=True
        )
        shares = None if weights is None else weights[p] / weights[p].sum()
        possible = len(clients) if shares is None else int((shares > 0).sum())
        place = np.arange(len(positions)) - begins[group]
        crowded = sizes[group] > possible
        chosen[positions[crowded]] = generator.choice(clients, size=int(crowded.sum()), p=shares)
        drawn = _orders(sizes <= possible, len(clients), shares, int(sizes.max()), generator)
        chosen[positions[~crowded]] = clients[drawn[group[~crowded], place[~crowded]]]
    return chosen


def _orders(groups: Bools, clients: int, shares: Floats | None, most: int, generator: np.random.Generator) -> Ints:
    """For each group (the positions of one label in one batch), draw up to ``most`` clients without replacement.

    Args:
        groups: True for the groups for which clients are drawn, shape (G,).
        clients: The number of clients.
        shares: The weight of each client, shape (``clients``,); None for uniform draws. For a weighted draw, each
            client gets a random key Exp(1) / share, and the clients with the smallest keys are drawn (Efraimidis and
            Spirakis 2006).
        most: The number of clients to draw for a group. If there are fewer clients, all clients are drawn.
        generator: The random generator.

    Returns:
        The indices of the clients in the order in which they were drawn, shape (G, min(``most``, ``clients``)); zeros
        for a group without drawn clients.
    """
    most = min(most, clients)
    orders = np.zeros((len(groups), most), dtype=np.int64)
    rows = np.flatnonzero(groups)
    if clients == 1:
        return orders
    if shares is None and clients > 32 * most:
        # If only a few of many clients are drawn, one call per group costs less than a random key for every client.
        for row in rows.tolist():
            orders[row] = generator.choice(clients, size=most, replace=False)
        return orders
    block = max(1, (1 << 21) // clients)
    for begin in range(0, len(rows), block):
        part = rows[begin : begin + block]
        keys = generator.standard_exponential((len(part), clients))
        if shares is not None:
            with np.errstate(divide="ignore"):
                keys /= shares
        orders[part] = np.argsort(keys, axis=1)[:, :most]
    return orders
