"""Count samples under encryption: the server adds up encrypted counts, and a client decrypts the totals.

A *placeholder* is a number that stands for a label. On the server, the placeholders are 0 … P − 1. Clients use a random
number for each placeholder: the placeholder's *name*.
"""

from __future__ import annotations

import numpy as np
import torch

from fedstrata.base.arrays import Ints
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import ClientId
from fedstrata.stratify.masking.ckks import COUNTING, Cipher
from fedstrata.stratify.masking.messages import CountReport, OpenTotals, ShareReport
from fedstrata.stratify.masking.public_keys import Public, ask_until

Held = dict[ClientId, Ints]

TOGETHER = 64
"""The number of clients whose ciphertexts are in memory at the same time."""


def sum_packed(federation: Federation, public: Public, held: Held, names: Ints) -> tuple[Held, tuple[bytes, ...]]:
    """Tell clients the placeholders (numbers) that stand for their labels, and add up the encrypted sample counts.

    Args:
        federation: The federation, through which the server sends requests to clients.
        public: The clients' public keys.
        held: A mapping from each client to its placeholders, given as indices into ``names``.
        names: The random number that clients use for each placeholder, shape (P,).

    Returns:
        Two values: the part of ``held`` for the clients that replied, and the encrypted number of samples of each
        placeholder, summed over these clients. The encrypted numbers are sorted by name, and each ciphertext contains
        many numbers.
    """
    slots, size = COUNTING.slots, len(names)
    sums: list[Cipher] = []

    counted: Held = {}
    clients = list(held)
    for begin in range(0, len(clients), TOGETHER):
        chunk = clients[begin : begin + TOGETHER]
        requests = {client: CountReport(torch.from_numpy(names[held[client]]), size) for client in chunk}
        replies = federation.ask(requests, requests, check=public.check_counts)
        for client, reply in replies.items():
            pages = [public.counting.load(data, length=slots) for data in reply.pages]
            sums = [total.add_(page) for total, page in zip(sums, pages, strict=True)] if sums else pages
            counted[client] = held[client]
    return counted, tuple(total.serialize() for total in sums)


def open_totals(federation: Federation, pages: tuple[bytes, ...], held: Held, names: Ints) -> Ints:
    """Return the number of samples of each label over all clients. The first client that replies decrypts the numbers.

    Args:
        federation: The federation, through which the server sends requests to clients.
        pages: The ciphertexts, which contain the totals sorted by name.
        held: A mapping from each client whose samples were counted to its placeholders (numbers that stand for labels).
        names: The random number that clients use for each placeholder, shape (P,).

    Returns:
        The totals, shape (P,).

    Raises:
        QuorumError: No client could decrypt the totals. Clients report only totals that are close to integers.
    """
    size = len(names)
    if size == 0 or not held:
        return np.zeros(size, dtype=np.int64)
    holders = np.zeros(size, dtype=np.int64)
    holders[names] = np.bincount(np.concatenate(list(held.values())), minlength=size)
    request = OpenTotals(pages, size)
    _, reply = ask_until(federation, held, request, "decrypt the totals", check=lambda reply: reply.require(holders))
    totals: Ints = reply.totals.numpy()[names]
    return totals


def shares(federation: Federation, held: Held, totals: Ints) -> Held:
    """Ask clients for their fractions of the totals, and compute each client's sample counts per label.

    Args:
        federation: The federation, through which the server sends requests to clients.
        held: A mapping from each client to its placeholders (numbers that stand for its labels).
        totals: The number of samples of each placeholder over all clients, shape (P,).

    Returns:
        A mapping from each replying client to its counts, in the order of the client's placeholders. If the counts
        contradict a total, the mapping is empty.
    """
    requests = {client: ShareReport(torch.from_numpy(totals[placeholders])) for client, placeholders in held.items()}
    counts: Held = {}
    for client, reply in federation.ask(requests, requests).items():
        counts[client] = np.rint(reply.shares.numpy() * totals[held[client]]).astype(np.int64)
    rest = totals - _per_placeholder(counts, held, len(totals))
    silent = {client: np.ones_like(placeholders) for client, placeholders in held.items() if client not in counts}
    unknown = _per_placeholder(silent, held, len(totals))
    wrong = (rest < unknown) | ((unknown == 0) & (rest != 0))
    if wrong.any():
        # The sum does not show which client sent a wrong fraction, so no fraction is used.
        problem = f"the shares of {int(wrong.sum())} placeholders do not add up to the total"
        federation.note("refused", list(counts), problem)
        return {}
    return counts


def _per_placeholder(values: Held, held: Held, size: int) -> Ints:
    """Return the sum of the clients' values for each placeholder, shape (size,).

    ``held`` contains the placeholders of each client.
    """
    sums = np.zeros(size, dtype=np.int64)
    for client, counts in values.items():
        sums[held[client]] += counts
    return sums
