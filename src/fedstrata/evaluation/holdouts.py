"""Samples that nobody trains on: for validation, each client's own test part, and clients that never train.

All cuts are by label, and functions of the seed, the client and the sample: one client more moves nobody else's part.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedstrata.base.errors import SpecError
from fedstrata.base.rng import rng, uniforms
from fedstrata.data.dataset import Dataset, Split
from fedstrata.data.partitions import UNUSED, Assignment
from fedstrata.evaluation.settings import Evaluation

PLACES = 2**32
"""More samples than a client has."""

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

NATURAL = ("given", "natural")
"""Partitions whose clients come with the data: validation is then a part of each client's samples."""


@dataclass(frozen=True, eq=False)
class HeldOut:
    """What was held out of the training samples.

    Args:
        validation: Samples of the training set, whosever they were; None for none.
        own_validation: The same by client, where it is a part of each client's.
        own_test: Each client's own test part; None for none.
        own_test_split: Where it lies: a real site may bring test samples of its own.
        test_clients: All samples of the clients that never train; None for none.
        numbers: What the clients were called before those that never train were taken out, where any were: first
            those that train, then the others.
    """

    validation: Ints | None = None
    own_validation: Assignment | None = None
    own_test: Assignment | None = None
    own_test_split: Split = "train"
    test_clients: Assignment | None = None
    numbers: Ints | None = None

    def __bool__(self) -> bool:
        return any(part is not None for part in (self.validation, self.own_test, self.test_clients))

    @property
    def samples(self) -> Ints:
        """Numbers of all training samples that were held out."""
        parts = [self.validation] if self.validation is not None else []
        parts += [self.own_test.indices] if self.own_test is not None and self.own_test_split == "train" else []
        parts += [self.test_clients.indices] if self.test_clients is not None else []
        return np.concatenate([np.empty(0, dtype=np.int64), *parts])


def cut_validation(data: Dataset, share: float, seed: int) -> Ints:
    """The training samples that are held out before a partition, ascending: a share of each class.

    Raises:
        SpecError: A class would have no sample in one of the two parts.
    """
    labels = data.y_train.cpu().numpy()
    wanted = np.array([round(share * len(labels))])
    mask = held_by_label(np.zeros(len(labels), dtype=np.int64), labels, wanted, seed, "validation")
    held, there = (np.bincount(part, minlength=data.classes) for part in (labels[mask], labels))
    for c in np.flatnonzero(there):
        if not 0 < held[c] < there[c]:
            what = "no sample of it to train on" if held[c] else "none of them for validation"
            problem = f"class {data.class_names[c]!r} has {there[c]} training samples, and this leaves {what}"
            raise SpecError("evaluation.validation", f"{problem}; accepted: a share that splits every class", share)
    return np.flatnonzero(mask)


def without(data: Dataset, held: Ints) -> tuple[Dataset, Ints]:
    """A data set whose training samples lack some, and the numbers that those left have in the whole one."""
    left = np.setdiff1d(np.arange(data.train_size), held)
    arrays: dict[str, Any] = {
        field.name: value[left]
        for field in dataclasses.fields(data)
        if field.name.endswith("_train") and isinstance(value := getattr(data, field.name), (Tensor, np.ndarray))
    }
    return dataclasses.replace(data, **arrays), left


def hold_out(
    settings: Evaluation,
    data: Dataset,
    assignment: Assignment,
    seed: int,
    *,
    validation: Ints | None = None,
    brought: Assignment | None = None,
    everybody: bool = True,
) -> tuple[Assignment, HeldOut]:
    """Take out what nobody trains on.

    Args:
        settings: What to hold out.
        data: The data set.
        assignment: Which samples belong to whom.
        seed: The experiment's seed.
        validation: What was held out before the partition. Where that is nothing and ``settings`` want something, it
            is a part of each client's samples.
        brought: Test samples that a real site brings, or whose clients the data name; by client, they take the place
            of a part of its samples.
        everybody: Whether all clients' samples are here; not at a real site.

    Returns:
        What is left to train on, and what was held out.

    Raises:
        SpecError: A client, or nobody, would have nothing.
    """
    test_clients, numbers, own_test, own_validation = None, None, brought, None
    if settings.test_clients is not None:
        if not everybody:
            problem = "every client is a real site with data of its own; leave it out, and let a site not take part"
            raise SpecError("evaluation.test_clients", problem, settings.test_clients)
        training, testing = _deal_clients(len(assignment), settings.test_clients, seed)
        numbers = np.concatenate([training, testing])
        test_clients, assignment = only_clients(assignment, testing), only_clients(assignment, training)
        own_test = brought = None if brought is None else only_clients(brought, training)
    if settings.client_test is not None and brought is None:
        assignment, own_test = _cut_own(settings.client_test, data, assignment, seed, everybody)
    if settings.validation is not None and validation is None:
        assignment, own_validation = split_each(assignment, data, settings.validation, seed, "validation", least=0)
        validation = np.sort(own_validation.indices)
        if everybody and not len(validation):
            problem = "no client has enough samples for a part of them; accepted: a larger share"
            raise SpecError("evaluation.validation", problem, settings.validation)
    split: Split = "train" if brought is None else "test"
    return assignment, HeldOut(validation, own_validation, own_test, split, test_clients, numbers)


def natural_tests(data: Dataset, assignment: Assignment) -> Assignment | None:
    """The test samples of natural clients, by client; None where clients are no natural ones, or it is not known."""
    if data.client_test is None or assignment.codes is None:
        return None
    number = np.full(len(data.client_names), UNUSED, dtype=np.int64)
    number[assignment.codes] = np.arange(len(assignment))
    found = Assignment.from_owners(number[data.client_test.cpu().numpy()], len(assignment))
    return dataclasses.replace(found, codes=assignment.codes)


def split_each(
    assignment: Assignment, data: Dataset, share: float, seed: int, purpose: str, *, least: int
) -> tuple[Assignment, Assignment]:
    """Each client's samples in two parts by label: what it keeps, and ``share`` of them.

    Args:
        assignment: Which samples belong to whom.
        data: The data set.
        share: Of each client's samples.
        seed: The experiment's seed.
        purpose: What the cut is for.
        least: Fewest samples that are taken of a client that has two.
    """
    sizes, owners = assignment.sizes, assignment.owners
    wanted = np.minimum(np.maximum(np.round(share * sizes).astype(np.int64), least), np.maximum(sizes - 1, 0))
    labels = data.y_train.cpu().numpy()[assignment.indices]
    mask = held_by_label(owners, labels, wanted, seed, purpose)
    return _entries(assignment, ~mask), _entries(assignment, mask)


def held_by_label(owners: Ints, labels: Ints, wanted: Ints, seed: int, purpose: str) -> Mask:
    """Which samples are taken of each client, spread over its labels.

    Systematic sampling: each client's samples stand in a row, label after label and shuffled within each, and every
    (n / m)-th is taken from a random start. Of each label's samples the share m / n is taken, rounded up or down. The
    numbers are functions of the client and the place of a sample among its own, so that a real site cuts as a
    simulation does.

    Args:
        owners: The client of each sample, (n,), ascending.
        labels: Its label.
        wanted: m, how many to take of each client, (N,).
        seed: The experiment's seed.
        purpose: What the cut is for.

    Returns:
        (n,); True for ``wanted`` of each client.

    >>> held_by_label(np.zeros(6, int), np.array([0, 0, 0, 0, 1, 1]), np.array([3]), 0, "doc").sum()
    np.int64(3)
    """
    sizes = np.bincount(owners, minlength=len(wanted))
    places = np.arange(len(owners)) - (np.cumsum(sizes) - sizes)[owners]
    order = np.lexsort((uniforms(seed, purpose, 0, owners * PLACES + places), labels, owners))
    who, rank = owners[order], places
    start = (uniforms(seed, f"{purpose}-start", 0, np.arange(len(wanted))) * sizes).astype(np.int64)
    m, n, s = wanted[who], sizes[who], start[who]
    mask = np.zeros(len(order), dtype=bool)
    mask[order] = ((rank + 1) * m + s) // n > (rank * m + s) // n
    return mask


def _cut_own(
    share: float, data: Dataset, assignment: Assignment, seed: int, everybody: bool
) -> tuple[Assignment, Assignment]:
    """Each client's own test part, at least a sample.

    Raises:
        SpecError: A client has a single sample, or none.
    """
    sizes = assignment.sizes
    short = np.flatnonzero(sizes < 2 if everybody else sizes == 1)
    if len(short):
        has = "one sample" if sizes[short[0]] else "no sample"
        problem = f"client {short[0]} has {has}, and a test part takes one of at least two: partition.min_size = 2"
        raise SpecError("evaluation.client_test", problem, share)
    return split_each(assignment, data, share, seed, "client-test", least=1)


def _deal_clients(clients: int, share: float, seed: int) -> tuple[Ints, Ints]:
    """Those that train and those that never do, both ascending.

    Raises:
        SpecError: Nobody would be left to train.
    """
    count = max(1, round(share * clients))
    if count >= clients:
        problem = f"of {clients} clients {count} would never train; accepted: a share that leaves at least one"
        raise SpecError("evaluation.test_clients", problem, share)
    shuffled = rng(seed, "test-clients").permutation(clients)
    return np.sort(shuffled[count:]), np.sort(shuffled[:count])


def only_clients(assignment: Assignment, chosen: Ints) -> Assignment:
    """The samples of some clients, who are then called 0, 1 and so on."""
    wanted = np.zeros(len(assignment), dtype=bool)
    wanted[chosen] = True
    ends = np.cumsum(assignment.sizes[chosen])
    codes = None if assignment.codes is None else assignment.codes[chosen]
    return Assignment(
        assignment.indices[wanted[assignment.owners]], np.concatenate(([0], ends)).astype(np.int64), codes
    )


def _entries(assignment: Assignment, mask: Mask) -> Assignment:
    sizes = np.bincount(assignment.owners[mask], minlength=len(assignment))
    offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
    return Assignment(assignment.indices[mask], offsets, assignment.codes)
