"""Clients enrol: the server learns who shares a label and how many samples there are, without learning the labels.

It asks clients like any method does, before the first round, and again when clients join. Labels are numbered in the
order in which they are discovered, client after client, each in an order of its own, so that every mode of masking
leads to the same training. Clients are told random names instead of these numbers, which would say who brought a
label. Nothing in this module or in what it imports can reach a secret key.

Reference:
    Stratify §IV-A. What each party learns in each mode is in ``docs/privacy.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fedstrata.base.errors import QuorumError, SpecError
from fedstrata.base.records import Tree, record
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import ClientId
from fedstrata.stratify.masking.ckks import tenseal
from fedstrata.stratify.masking.ckks_packed import PackedList
from fedstrata.stratify.masking.counting import open_totals, shares, sum_packed
from fedstrata.stratify.masking.messages import Assign, Assigned, PublicKeys, TagReport
from fedstrata.stratify.masking.public_keys import Public
from fedstrata.stratify.masking.slot_layout import MOST_CLASSES, shuffled
from fedstrata.stratify.masking.unique_list import UniqueList
from fedstrata.stratify.messages import LabelReply, LabelReport
from fedstrata.stratify.schedule import Holders

Ints = NDArray[np.int64]
Masking = Literal["none", "prf", "ckks"]
Watch = Callable[[str], None]
Held = dict[ClientId, Ints]


@record("Roll")
class Roll:
    """Who holds which placeholder, as the server knows it.

    Args:
        masking: The mode.
        names: What clients call each of the P placeholders: a permutation of 0 … P − 1. Everything else here is by
            the order of discovery.
        held: The placeholders of each client, in its own order.
        counts: How many samples of each; only of clients that gave them (no masking, or weighted selection).
        totals: N(p), shape (P,).
        register: What the mode needs when clients join.
    """

    masking: str
    names: Ints
    held: dict[int, Ints]
    counts: dict[int, Ints]
    totals: Ints
    register: Tree

    def holders(self) -> Holders:
        """Clients by placeholder.

        What is not known to be one client's is spread evenly over the holders, so that the sums are N(p).
        """
        rest, unknown = self.totals.copy(), np.zeros_like(self.totals)
        for client, placeholders in self.held.items():
            if client in self.counts:
                rest[placeholders] -= self.counts[client]
            else:
                unknown[placeholders] += 1
        replies = {}
        for client in sorted(self.held):
            placeholders = self.held[client]
            counts = self.counts.get(client)
            if counts is None:
                counts = -(-rest[placeholders] // unknown[placeholders])
                rest[placeholders] -= counts
                unknown[placeholders] -= 1
            replies[client] = LabelReply(torch.from_numpy(placeholders), torch.from_numpy(counts))
        found = Holders.of(replies)
        return replace(found, placeholders=self.names[found.placeholders])


@record("OpenRegister")
class OpenRegister:
    """Labels in the clear; the place is the placeholder.

    Args:
        labels: Shape (P,).
    """

    labels: Ints


@record("TagRegister")
class TagRegister:
    """Labels under a keyed hash; the place is the placeholder.

    Args:
        keys: Public keys.
        tags: 16 bytes each.
    """

    keys: PublicKeys
    tags: tuple[bytes, ...]


def check(masking: Masking, classes: int) -> None:
    """Whether a mode can be used.

    Raises:
        ExtraMissingError: TenSEAL is not installed.
        SpecError: There are too many classes for it.
    """
    if masking != "none":
        tenseal()
    if masking == "ckks" and classes > MOST_CLASSES:
        raise SpecError("masking", f"at most {MOST_CLASSES} classes, the data have {classes}; 'prf' takes any", masking)


def enrol(
    federation: Federation,
    masking: Masking = "none",
    *,
    weighted: bool = False,
    before: Roll | None = None,
    watch: Watch = lambda phase: None,
) -> Roll:
    """Learn who holds which label, under placeholders.

    Args:
        federation: Whose clients are asked.
        masking: ``none``: labels in the clear. ``prf``: a keyed hash of them. ``ckks``: compared under encryption.
        weighted: Whether clients also say what share of a placeholder's samples is theirs.
        before: An earlier roll; only clients that are not on it are asked, and its placeholders stay.
        watch: Called at the beginning of each phase: "unique list", "mapping", "counts".

    Returns:
        The roll of all clients that answered everything; why others are not on it is an event.

    Raises:
        QuorumError: Nobody answered, or nobody could decrypt the totals: never a wrong count.
        ClientsFailedError: All clients raised an exception.
    """
    if before is not None and before.masking != masking:
        raise ValueError(f"the roll was made with masking {before.masking!r}, not {masking!r}")
    joined = before.held if before is not None else {}
    clients = [client for client in range(federation.config.clients) if client not in joined]
    roll = _MODES[masking](federation, clients, before, watch, weighted)
    if before is not None:
        totals = roll.totals.copy()
        totals[: len(before.totals)] += before.totals
        held, counts = {**before.held, **roll.held}, {**before.counts, **roll.counts}
        roll = replace(roll, held=held, counts=counts, totals=totals)
    if not roll.held:
        raise QuorumError(f"no client of {len(clients)} enrolled")
    reason = f"{len(roll.totals)} placeholders, masking {masking}"
    federation.note("enrolled", reason=f"{len(roll.held)} of {federation.config.clients} clients, {reason}")
    return roll


def _in_the_clear(
    federation: Federation, clients: Sequence[ClientId], before: Roll | None, watch: Watch, weighted: bool
) -> Roll:
    watch("unique list")
    replies = federation.ask(clients, LabelReport())
    known: list[int] = before.register.labels.tolist() if before else []
    held = _discover(known, {client: reply.labels.tolist() for client, reply in replies.items()})
    watch("mapping")
    names = np.arange(len(known))  # nothing is hidden, and a run's files are the same every time
    held = _assign(federation, held, names)
    counts = {client: replies[client].counts.numpy() for client in held}
    watch("counts")
    totals = np.zeros(len(known), dtype=np.int64)
    for client, placeholders in held.items():
        totals[placeholders] += counts[client]
    return Roll("none", names, held, counts, totals, OpenRegister(np.array(known, dtype=np.int64)))


def _by_tag(
    federation: Federation, clients: Sequence[ClientId], before: Roll | None, watch: Watch, weighted: bool
) -> Roll:
    public = _public(federation, clients, before, comparing=False)

    watch("unique list")
    classes = federation.config.classes
    replies = federation.ask(clients, TagReport(), check=lambda reply: reply.require(public, classes))
    known: list[bytes] = list(before.register.tags) if before else []
    presented = {client: [bytes(tag) for tag in reply.tags.numpy()] for client, reply in replies.items()}
    watch("mapping")
    held = _discover(known, presented)
    watch("counts")
    names = _names(before, len(known))
    held, totals, counts = _counted(federation, public, held, names, weighted)
    return Roll("prf", names, held, counts, totals, TagRegister(public.keys, tuple(known)))


def _packed(
    federation: Federation, clients: Sequence[ClientId], before: Roll | None, watch: Watch, weighted: bool
) -> Roll:
    public = _public(federation, clients, before, comparing=True)
    unique = PackedList(federation, public, before.register if before else None)
    held = _match(unique, clients, watch)
    watch("counts")
    names = _names(before, len(unique))
    held, totals, counts = _counted(federation, public, held, names, weighted)
    return Roll("ckks", names, held, counts, totals, unique.register())


_Mode = Callable[[Federation, Sequence[ClientId], Roll | None, Watch, bool], Roll]
_MODES: dict[str, _Mode] = {"none": _in_the_clear, "prf": _by_tag, "ckks": _packed}


def _public(federation: Federation, clients: Sequence[ClientId], before: Roll | None, *, comparing: bool) -> Public:
    """The clients' public keys: known from before, or from the first client that answers."""
    return Public(before.register.keys) if before else Public.ask(federation, clients, comparing=comparing)


def _names(before: Roll | None, size: int) -> Ints:
    """Random names for placeholders; those that have one keep it."""
    old = before.names if before else np.empty(0, dtype=np.int64)
    return np.concatenate([old, len(old) + shuffled(size - len(old))])


def _match(unique: UniqueList, clients: Sequence[ClientId], watch: Watch) -> Held:
    """Build the unique list, until it is complete, and map the labels of all other clients."""
    watch("unique list")
    held, rest = unique.discover(clients)
    watch("mapping")
    return held | unique.locate(rest)


def _counted(
    federation: Federation, public: Public, held: Held, names: Ints, weighted: bool
) -> tuple[Held, Ints, dict[int, Ints]]:
    """Encrypted counts summed, totals decrypted by clients, and shares where selection is weighted."""
    held, pages = sum_packed(federation, public, held, names)
    totals = open_totals(federation, pages, held, names)
    return held, totals, shares(federation, held, totals) if weighted else {}


def _discover(known: list[Any], presented: dict[ClientId, list[Any]]) -> Held:
    """Number labels in the order in which they are presented; ``known`` grows."""
    number = {label: placeholder for placeholder, label in enumerate(known)}
    held = {}
    for client in sorted(presented):
        for label in presented[client]:
            if label not in number:
                number[label] = len(known)
                known.append(label)
        held[client] = np.array([number[label] for label in presented[client]], dtype=np.int64)
    return held


def _assign(federation: Federation, held: Held, names: Ints) -> Held:
    """Tell clients their placeholders; those that know them now."""
    requests = {client: Assign(torch.from_numpy(names[placeholders])) for client, placeholders in held.items()}
    replies: dict[ClientId, Assigned] = federation.ask(requests, requests)
    return {client: held[client] for client in replies}
