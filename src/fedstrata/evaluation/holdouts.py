"""Hold samples out of training for validation, for clients' own tests, and for clients that never train.

The same fraction of each client's samples of each label is held out. The choice depends only on the seed, the client
and the sample, and not on the number of clients.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstrata.base.errors import SpecError
from fedstrata.base.inputs import each
from fedstrata.base.rng import rng, uniforms
from fedstrata.data.dataset import Dataset, Split
from fedstrata.data.partitions.base import UNUSED, Assignment
from fedstrata.evaluation.settings import Evaluation

PLACES = 2**32
"""A number above every client's number of samples, so that the key k · ``PLACES`` + i is unique for sample i of client
k.
"""

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

NATURAL = ("given", "natural")
"""Partitions that use the clients in the data, so that validation samples are held out from each client."""


@dataclass(frozen=True, eq=False)
class HeldOut:
    """The samples that are held out of training.

    Args:
        validation: The indices of the training samples for validation; None if there are no such samples.
        own_validation: The validation samples of each client; None if validation samples are held out before the
            partition, or not at all.
        own_test: The test samples of each client; None if clients do not have their own test samples.
        own_test_split: The split of the data set to which the indices in ``own_test`` refer. ``"train"`` means that
            test samples were held out of the training samples. ``"test"`` means that a real site or the data set
            provides the test samples.
        test_clients: All samples of each client that never trains; None if all clients train.
        numbers: The clients' ids in the partition. Clients that train come first, and get new ids from 0. Clients that
            never train follow. The value is None if all clients train.
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
        """The indices of all training samples that are held out."""
        parts = [self.validation] if self.validation is not None else []
        parts += [self.own_test.indices] if self.own_test is not None and self.own_test_split == "train" else []
        parts += [self.test_clients.indices] if self.test_clients is not None else []
        return np.concatenate([np.empty(0, dtype=np.int64), *parts])


def cut_validation(data: Dataset, share: float, seed: int) -> Ints:
    """Choose a fraction of each class for validation, before the partition, and return the sorted indices.

    Raises:
        SpecError: A class has too few samples for both validation and training.
    """
    labels = data.task.order(data.y_train)
    wanted = np.array([round(share * len(labels))])
    mask = held_by_label(np.zeros(len(labels), dtype=np.int64), labels, wanted, seed, "validation")
    if not data.task.has_classes:
        return np.flatnonzero(mask)
    held, there = (np.bincount(part, minlength=data.outputs) for part in (labels[mask], labels))
    for c in np.flatnonzero(there):
        if not 0 < held[c] < there[c]:
            what = "training" if held[c] else "validation"
            problem = (
                f"of the {there[c]} training samples of class {data.class_names[c]!r}, none would be left for {what}. "
            )
            problem += f"Use a {'smaller' if held[c] else 'larger'} fraction."
            raise SpecError("evaluation.validation", problem, share)
    return np.flatnonzero(mask)


def without(data: Dataset, held: Ints) -> tuple[Dataset, Ints]:
    """Return the data set without the training samples ``held``, and the indices of the remaining samples.

    If the inputs are memory-mapped, the result has no inputs, because a copy of the inputs may not fit into memory.
    """
    left = np.setdiff1d(np.arange(data.train_size), held)
    kept: dict[str, Any] = {}
    for name, x in data.tensors().items():
        if name.endswith("_train"):
            rows = slice(0) if name == "x_train" and data.mapped else left
            kept[name] = each(x, itemgetter(rows))
    return dataclasses.replace(data, **kept, mapped={}), left


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
    """Choose the samples to hold out of training, according to the settings.

    Args:
        settings: The settings of the evaluation.
        data: The data set.
        assignment: The training samples of each client.
        seed: The experiment's seed.
        validation: The validation samples that were held out before the partition; None to hold validation samples out
            from each client.
        brought: Test samples of each client that a real site or the data set provides. If this value is given, no other
            test samples are held out.
        everybody: Whether ``assignment`` contains the samples of all clients. At a real site, ``assignment`` contains
            only samples of the site's clients.

    Returns:
        The training samples of each client, and the samples that are held out.

    Raises:
        SpecError: No samples would be left for training or for tests, or ``test_clients`` is set at a real site.
    """
    test_clients, numbers, own_test, own_validation = None, None, brought, None
    if settings.test_clients is not None:
        if not everybody:
            problem = "has no effect at real sites. Remove it, and do not invite the sites that must not train."
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
            problem = "no client has enough samples to hold out this fraction. Use a larger fraction."
            raise SpecError("evaluation.validation", problem, settings.validation)
    split: Split = "train" if brought is None else "test"
    return assignment, HeldOut(validation, own_validation, own_test, split, test_clients, numbers)


def natural_tests(data: Dataset, assignment: Assignment) -> Assignment | None:
    """Return the test samples that the data set provides for each client.

    The result is None if the partition does not use the data set's clients, or if the clients of test samples are
    unknown.
    """
    if data.client_test is None or assignment.codes is None:
        return None
    number = np.full(len(data.client_names), UNUSED, dtype=np.int64)
    number[assignment.codes] = np.arange(len(assignment))
    tests = Assignment.from_owners(number[data.client_test.cpu().numpy()], len(assignment))
    return dataclasses.replace(tests, codes=assignment.codes)


def split_each(
    assignment: Assignment, data: Dataset, share: float, seed: int, purpose: str, *, least: int
) -> tuple[Assignment, Assignment]:
    """Take a fraction of each client's samples, with the same fraction of each label.

    Args:
        assignment: The samples of each client.
        data: The data set.
        share: The fraction to take.
        seed: The experiment's seed.
        purpose: A name for this use of random numbers. Different names give independent random numbers.
        least: The smallest number of samples to take from a client with at least two samples. The client always keeps
            at least one sample.

    Returns:
        The samples that each client keeps, and the samples that are taken from the client.
    """
    sizes, owners = assignment.sizes, assignment.owners
    wanted = np.minimum(np.maximum(np.round(share * sizes).astype(np.int64), least), np.maximum(sizes - 1, 0))
    labels = data.task.order(data.y_train)[assignment.indices]
    mask = held_by_label(owners, labels, wanted, seed, purpose)
    return _entries(assignment, ~mask), _entries(assignment, mask)


def held_by_label(owners: Ints, labels: Ints, wanted: Ints, seed: int, purpose: str) -> Mask:
    """Choose samples of each client at random, with the same fraction of each label.

    The choice is a systematic sample. Samples are sorted by label and shuffled within each label, and every (n / m)-th
    of a client's n samples is chosen. The result contains a fraction m / n of each label's samples, rounded up or down.
    A real site makes the same choice as a simulation.

    Args:
        owners: The client of each sample, ascending, one entry per sample.
        labels: The label of each sample, one entry per sample.
        wanted: The number m of samples to choose from each client, shape (N,).
        seed: The experiment's seed.
        purpose: A name for this use of random numbers. Different names give independent random numbers.

    Returns:
        A mask with one entry per sample. An entry is True if the sample was chosen.

    >>> held_by_label(np.zeros(6, int), np.array([0, 0, 0, 0, 1, 1]), np.array([3]), 0, "doc").sum()
    np.int64(3)
    """
    sizes = np.bincount(owners, minlength=len(wanted))
    places = np.arange(len(owners)) - (np.cumsum(sizes) - sizes)[owners]
    order = np.lexsort((uniforms(seed, purpose, 0, owners * PLACES + places), labels, owners))
    start = (uniforms(seed, f"{purpose}-start", 0, np.arange(len(wanted))) * sizes).astype(np.int64)
    m, n, s = (values[owners[order]] for values in (wanted, sizes, start))
    mask = np.zeros(len(order), dtype=bool)
    mask[order] = ((places + 1) * m + s) // n > (places * m + s) // n
    return mask


def _cut_own(
    share: float, data: Dataset, assignment: Assignment, seed: int, everybody: bool
) -> tuple[Assignment, Assignment]:
    """Hold out samples of each client, at least one, for its own test; return the remaining and the held-out samples.

    Raises:
        SpecError: A client has fewer than two samples.
    """
    sizes = assignment.sizes
    short = np.flatnonzero(sizes < 2 if everybody else sizes == 1)
    if len(short):
        has = "one sample" if sizes[short[0]] else "no sample"
        problem = (
            f"client {short[0]} has {has}, but needs at least two, because one is held out for tests. Set "
            "partition.min_size = 2."
        )
        raise SpecError("evaluation.client_test", problem, share)
    return split_each(assignment, data, share, seed, "client-test", least=1)


def _deal_clients(clients: int, share: float, seed: int) -> tuple[Ints, Ints]:
    """Choose at random which clients never train; return the sorted ids of training clients and of test clients.

    Raises:
        SpecError: All clients would be test clients.
    """
    count = max(1, round(share * clients))
    if count >= clients:
        problem = (
            f"{count} of {clients} clients would never train. Use a smaller fraction, so that at least one trains."
        )
        raise SpecError("evaluation.test_clients", problem, share)
    shuffled = rng(seed, "test-clients").permutation(clients)
    return np.sort(shuffled[count:]), np.sort(shuffled[:count])


def only_clients(assignment: Assignment, chosen: Ints) -> Assignment:
    """Return only the samples of the ``chosen`` clients, which get new ids from 0 in the same order."""
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
