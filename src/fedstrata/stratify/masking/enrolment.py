"""Enrol clients: the server learns their sample counts and which clients share labels, but not the labels.

The server enrols clients before the first round, and whenever further clients join. A *placeholder* is a number that
stands for a label. The server assigns placeholders in the order in which it discovers the labels. The order does not
depend on the mode of masking, so masking does not change the training. Clients know the placeholders only by random
numbers (*names*), because the server's own numbers would reveal which client added a label. Neither this module nor its
imports can access a secret key.

The page ``docs/privacy/masked-labels.md`` lists what each party learns in each mode of masking (Stratify §IV-A).
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
from fedstrata.sampling.label_counts import LabelReply, LabelReport
from fedstrata.stratify.masking.ckks import tenseal
from fedstrata.stratify.masking.counting import Held, open_totals, shares, sum_packed
from fedstrata.stratify.masking.messages import Assign, Assigned, OpenKeys, PublicKeys, TagReport
from fedstrata.stratify.masking.public_keys import Public, ask_until
from fedstrata.stratify.masking.slot_layout import MOST_CLASSES, shuffled
from fedstrata.stratify.masking.unique_list import UniqueList
from fedstrata.stratify.schedule import Holders

Masking = Literal["none", "prf", "ckks"]
Watch = Callable[[str], None]


@record("Roll")
class Roll:
    """The server's knowledge of each client's placeholders (numbers that stand for labels).

    Args:
        masking: The mode of masking; see ``enrol``.
        names: For each of the P placeholders, the number that clients use for it: a permutation of 0 … P − 1. All other
            fields use the server's own numbering of placeholders, 0 … P − 1.
        held: A mapping from each client to its placeholders, in the order of the client's labels.
        counts: A mapping from each client to its numbers of samples, in the order of its placeholders in ``held``.
            Clients report counts if labels are not masked or if selection is weighted. The mapping contains only
            clients that reported counts.
        totals: For each placeholder, the number of samples that all clients have together, shape (P,).
        register: The server's knowledge about the labels: an ``OpenRegister``, a ``TagRegister`` or a
            ``PackedRegister``. With the register, the server recognises the labels of clients that join later.
    """

    masking: str
    names: Ints
    held: dict[int, Ints]
    counts: dict[int, Ints]
    totals: Ints
    register: Tree

    def holders(self) -> Holders:
        """For each placeholder (a number that stands for a label), return the clients with this label and their counts.

        The unreported samples of a label (the total minus the reported counts) are divided equally among the clients
        that did not report their counts.
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
    """The labels, which the server knows because they are not masked.

    Args:
        labels: For each placeholder 0 … P − 1, its label, shape (P,).
    """

    labels: Ints


@record("TagRegister")
class TagRegister:
    """The keyed hashes of the labels, which the server knows if ``masking = "prf"``.

    Args:
        keys: The clients' public keys.
        tags: For each placeholder 0 … P − 1, the keyed hash (16 bytes) of its label.
    """

    keys: PublicKeys
    tags: tuple[bytes, ...]


def check(masking: Masking, classes: int) -> None:
    """Raise an error if a mode of masking cannot be used.

    Raises:
        ExtraMissingError: TenSEAL is not installed.
        SpecError: The number of classes is too large for the mode of masking.
    """
    if masking != "none":
        tenseal()
    if masking == "ckks" and classes > MOST_CLASSES:
        raise SpecError(
            "masking",
            f"supports at most {MOST_CLASSES} classes, but the data have {classes}. Use masking = 'prf'.",
            masking,
        )


def enrol(
    federation: Federation,
    masking: Masking = "none",
    *,
    weighted: bool = False,
    before: Roll | None = None,
    watch: Watch = lambda phase: None,
) -> Roll:
    """Ask clients for their labels, and give each label a placeholder (a number that stands for the label).

    Args:
        federation: The federation, through which the server sends requests to clients.
        masking: The form in which clients send labels: unchanged (``none``), as keyed hashes (``prf``), or encrypted
            (``ckks``). With ``ckks``, the server compares encrypted labels.
        weighted: Whether each client also reports, for each of its labels, which fraction of all samples with this
            label the client has.
        before: The result of an earlier enrolment; None for the first enrolment. After an earlier enrolment, the server
            asks only clients that are not enrolled yet. Each existing placeholder keeps its label.
        watch: A function that is called with a phase's name when the phase begins. The phases are "unique list" (find
            all labels), "mapping" (find each client's labels) and "counts".

    Returns:
        The enrolled clients, which replied to every request. For each client that is not enrolled, an event says why.

    Raises:
        QuorumError: No client replied, or no client could decrypt the totals.
        ClientsFailedError: All clients raised an exception.
    """
    if before is not None and before.masking != masking:
        raise ValueError(f"the earlier enrolment used masking = {before.masking!r}, not {masking!r}")
    joined = before.held if before is not None else {}
    clients = [client for client in range(federation.config.clients) if client not in joined]
    roll = _MODES[masking](federation, clients, before, watch, weighted)
    if before is not None:
        totals = roll.totals.copy()
        totals[: len(before.totals)] += before.totals
        held, counts = {**before.held, **roll.held}, {**before.counts, **roll.counts}
        roll = replace(roll, held=held, counts=counts, totals=totals)
    if not roll.held:
        raise QuorumError(
            f"none of the {len(clients)} clients could report its labels. See events.jsonl for the reasons."
        )
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
    # Without masking, the server sees the labels, so their placeholders (``names``) need not be random. With fixed
    # placeholders, repeated runs write the same files.
    names = np.arange(len(known))
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
    classes = federation.config.strata
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
    """Return the clients' public keys, from an earlier enrolment or from the first client that replies."""
    if before:
        return Public(before.register.keys)
    _, keys = ask_until(federation, clients, OpenKeys(comparing), "send keys")
    return Public(keys)


def _names(before: Roll | None, size: int) -> Ints:
    """Return ``size`` random numbers: one for each placeholder, for use in messages to clients.

    Placeholders of an earlier enrolment keep their random numbers.
    """
    old = before.names if before else np.empty(0, dtype=np.int64)
    return np.concatenate([old, len(old) + shuffled(size - len(old))])


def _match(unique: UniqueList, clients: Sequence[ClientId], watch: Watch) -> Held:
    """Ask clients one by one until the list is complete. Then compare the remaining clients' labels with the list."""
    watch("unique list")
    held, rest = unique.discover(clients)
    watch("mapping")
    return held | unique.locate(rest)


def _counted(
    federation: Federation, public: Public, held: Held, names: Ints, weighted: bool
) -> tuple[Held, Ints, Held]:
    """Add up encrypted sample counts, and let a client decrypt the sums. If ``weighted``, also ask for fractions.

    Returns:
        Three values: the placeholders (numbers for labels) of each client that replied, the total number of samples of
        each placeholder, shape (P,), and the sample counts of each client. The last value is empty if selection is not
        weighted.
    """
    held, pages = sum_packed(federation, public, held, names)
    totals = open_totals(federation, pages, held, names)
    return held, totals, shares(federation, held, totals) if weighted else {}


def _discover(known: list[Any], presented: dict[ClientId, list[Any]]) -> Held:
    """Give placeholders (the integers 0, 1, 2, …) to labels, in the order in which clients report the labels.

    Args:
        known: The labels that already have a placeholder, in the order of the placeholders. New labels are appended.
        presented: A mapping from each client to its labels (or to the hashes of its labels).

    Returns:
        A mapping from each client to the placeholders that stand for its labels.
    """
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
    """Tell clients which numbers stand for their labels. Return ``held`` without the clients that did not reply."""
    requests = {client: Assign(torch.from_numpy(names[placeholders])) for client, placeholders in held.items()}
    replies: dict[ClientId, Assigned] = federation.ask(requests, requests)
    return {client: held[client] for client in replies}
