"""Enrolment: the server learns which clients share a label and how many samples there are, but not the labels.

The server asks clients before the first round, and again when clients join. Labels are numbered in the order in which
they are discovered: client after client, each in an order of its own. Every mode of masking therefore leads to the same
training. Clients are told random names instead of these numbers, which would tell which client added a label. Neither
this module nor its imports can access a secret key.

Reference:
    Stratify §IV-A. ``docs/privacy.md`` lists what each party learns in each mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch

from fedstrata.base.arrays import Ints
from fedstrata.base.errors import QuorumError, SpecError
from fedstrata.base.records import Tree, record
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import ClientId
from fedstrata.stratify.masking.ckks import tenseal
from fedstrata.stratify.masking.counting import Held, open_totals, shares, sum_packed
from fedstrata.stratify.masking.messages import Assign, Assigned, OpenKeys, PublicKeys, TagReport
from fedstrata.stratify.masking.public_keys import Public, ask_until
from fedstrata.stratify.masking.slot_layout import MOST_CLASSES, shuffled
from fedstrata.stratify.masking.unique_list import UniqueList
from fedstrata.stratify.messages import LabelReply, LabelReport
from fedstrata.stratify.schedule import Holders

Masking = Literal["none", "prf", "ckks"]
Watch = Callable[[str], None]


@record("Roll")
class Roll:
    """The placeholders that each client holds, as the server knows them.

    Args:
        masking: The mode.
        names: The clients' names of the P placeholders: a permutation of 0 … P − 1. All other fields number the
            placeholders in the order of discovery.
        held: The placeholders of each client, in its own order.
        counts: The number of samples of each, for clients that reported it (no masking, or weighted selection).
        totals: N(p), shape (P,).
        register: The state of the mode that is needed when clients join.
    """

    masking: str
    names: Ints
    held: dict[int, Ints]
    counts: dict[int, Ints]
    totals: Ints
    register: Tree

    def holders(self) -> Holders:
        """Return the clients by placeholder.

        Samples of unknown clients are spread evenly over the holders, so that the sums are N(p).
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
        holders = Holders.of(replies)
        return replace(holders, placeholders=self.names[holders.placeholders])


@record("OpenRegister")
class OpenRegister:
    """Labels in the clear, by placeholder.

    Args:
        labels: The labels, shape (P,).
    """

    labels: Ints


@record("TagRegister")
class TagRegister:
    """Labels under a keyed hash, by placeholder.

    Args:
        keys: The public keys.
        tags: The hashes of 16 bytes.
    """

    keys: PublicKeys
    tags: tuple[bytes, ...]


def check(masking: Masking, classes: int) -> None:
    """Check that a mode of masking can be used.

    Raises:
        ExtraMissingError: TenSEAL is not installed.
        SpecError: There are too many classes for the mode.
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
    """Learn which clients hold which label, under placeholders.

    Args:
        federation: The federation, to ask its clients.
        masking: ``none``: labels in the clear. ``prf``: a keyed hash of them. ``ckks``: compared under encryption.
        weighted: Whether clients also report their share of each placeholder's samples.
        before: An earlier roll. Only clients that are not on it are asked, and its placeholders stay.
        watch: Called at the beginning of each phase: "unique list", "mapping", "counts".

    Returns:
        The roll of all clients that answered every request. Events give the reasons for the absence of others.

    Raises:
        QuorumError: No client answered, or no client could decrypt the totals.
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
    names = np.arange(len(known))  # not random: nothing is hidden, and repeated runs have the same files
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
    unique = UniqueList(federation, public, before.register if before else None)
    held = _match(unique, clients, watch)
    watch("counts")
    names = _names(before, len(unique))
    held, totals, counts = _counted(federation, public, held, names, weighted)
    return Roll("ckks", names, held, counts, totals, unique.register())


_Mode = Callable[[Federation, Sequence[ClientId], Roll | None, Watch, bool], Roll]
_MODES: dict[str, _Mode] = {"none": _in_the_clear, "prf": _by_tag, "ckks": _packed}


def _public(federation: Federation, clients: Sequence[ClientId], before: Roll | None, *, comparing: bool) -> Public:
    """Return the clients' public keys: those of an earlier roll, or of the first client that answers."""
    if before:
        return Public(before.register.keys)
    _, keys = ask_until(federation, clients, OpenKeys(comparing), "send keys")
    return Public(keys)


def _names(before: Roll | None, size: int) -> Ints:
    """Return random names for placeholders; those of an earlier roll keep their names."""
    old = before.names if before else np.empty(0, dtype=np.int64)
    return np.concatenate([old, len(old) + shuffled(size - len(old))])


def _match(unique: UniqueList, clients: Sequence[ClientId], watch: Watch) -> Held:
    """Build the unique list until it is complete, then map the labels of all other clients."""
    watch("unique list")
    held, rest = unique.discover(clients)
    watch("mapping")
    return held | unique.locate(rest)


def _counted(
    federation: Federation, public: Public, held: Held, names: Ints, weighted: bool
) -> tuple[Held, Ints, Held]:
    """Sum encrypted counts, let clients decrypt the totals, and ask for shares if selection is weighted."""
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
    """Tell clients their placeholders; return the entries of those that confirmed."""
    requests = {client: Assign(torch.from_numpy(names[placeholders])) for client, placeholders in held.items()}
    replies: dict[ClientId, Assigned] = federation.ask(requests, requests)
    return {client: held[client] for client in replies}
