"""Hold samples out of training: validation samples, each client's test samples, and all samples of test clients.

Each client holds out the same fraction of its samples of each label. The choice depends only on the seed, the client
and the client's samples, and not on the number of clients.
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
"""A number larger than any client's number of samples, so that k · ``PLACES`` + i is unique for sample i of client k.
"""

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

NATURAL = ("given", "natural")
"""Partitions that use the data set's client ids.

With these partitions, each client holds out its own validation samples.
"""


@dataclass(frozen=True, eq=False)
class HeldOut:
    """The samples that are held out of training.

    Args:
        validation: The indices of the training samples that are used for validation; None without validation.
        own_validation: The validation samples of each client; None without validation, or if validation samples were
            held out before the partition.
        own_test: The test samples of each client; None if clients do not have their own test samples.
        own_test_split: The split of the data set to which the indices in ``own_test`` refer. ``"train"`` means that
            training samples were held out as test samples. ``"test"`` means that a real site or the data set provides
            the test samples.
        test_clients: The samples of the clients that never train; None if all clients train.
        numbers: The clients' ids in the partition. The clients that train come first, and get new ids from 0. The
            clients that never train come last. None if all clients train.
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
        """The indices of all samples that are held out of the training set."""
        parts = [self.validation] if self.validation is not None else []
        parts += [self.own_test.indices] if self.own_test is not None and self.own_test_split == "train" else []
        parts += [self.test_clients.indices] if self.test_clients is not None else []
        return np.concatenate([np.empty(0, dtype=np.int64), *parts])


def cut_validation(data: Dataset, share: float, seed: int) -> Ints:
    """Choose validation samples, a fraction of each class, before the samples are assigned to clients.

    Return sorted indices.

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
                f"none of the {there[c]} training samples of class {data.class_names[c]!r} would remain for {what}. "
            )
            problem += f"Use a {'smaller' if held[c] else 'larger'} fraction."
            raise SpecError("evaluation.validation", problem, share)
    return np.flatnonzero(mask)


def without(data: Dataset, held: Ints) -> tuple[Dataset, Ints]:
    """Return the data set without the training samples ``held``, and the indices of the remaining samples.

    If the inputs are memory-mapped, the result does not contain inputs, because a copy may not fit into memory.
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
    """Choose which samples are held out of training.

    Args:
        settings: The evaluation settings, which define the fractions.
        data: The data set.
        assignment: The training samples of each client.
        seed: The experiment's seed.
        validation: The validation samples that were held out before the partition; None if each client holds out its
            own validation samples.
        brought: The test samples of each client, if a real site or the data set provides them. If given, no other test
            samples are held out.
        everybody: Whether ``assignment`` contains the samples of all clients. At a real site, ``assignment`` contains
            only samples of the site's clients.

    Returns:
        The training samples of each client, and the samples that are held out.

    Raises:
        SpecError: No samples would be left for training or for tests, or ``test_clients`` is set in a deployment.
    """
    test_clients, numbers, own_test, own_validation = None, None, brought, None
    if settings.test_clients is not None:
        if not everybody:
            problem = (
                "has no effect in a deployment. Remove the key. To exclude sites from training, do not invite them."
            )
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
            problem = "no client has enough samples to hold out one sample at this fraction. Use a larger fraction."
            raise SpecError("evaluation.validation", problem, settings.validation)
    split: Split = "train" if brought is None else "test"
    return assignment, HeldOut(validation, own_validation, own_test, split, test_clients, numbers)


def natural_tests(data: Dataset, assignment: Assignment) -> Assignment | None:
    """Return the test samples that the data set provides for each client.

    The result is None if the partition does not use the data set's clients, or if the data set does not
    assign its test samples to clients.
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
    """Split off a fraction of each client's samples, stratified by label.

    Args:
        assignment: The samples of each client.
        data: The data set.
        share: The fraction to take.
        seed: The experiment's seed.
        purpose: A name for this use of random numbers. Different names give independent random numbers.
        least: The minimum number of samples to take from a client with at least two samples. The client always keeps
            at least one sample.

    Returns:
        The samples that each client keeps, and the samples that are taken from each client.
    """
    sizes, owners = assignment.sizes, assignment.owners
    wanted = np.minimum(np.maximum(np.round(share * sizes).astype(np.int64), least), np.maximum(sizes - 1, 0))
    labels = data.task.order(data.y_train)[assignment.indices]
    mask = held_by_label(owners, labels, wanted, seed, purpose)
    return _entries(assignment, ~mask), _entries(assignment, mask)


def held_by_label(owners: Ints, labels: Ints, wanted: Ints, seed: int, purpose: str) -> Mask:
    """Choose random samples of each client, stratified by label.

    The function uses systematic sampling. A client's n samples are sorted by label and shuffled within each label.
    Then, every (n / m)-th sample is chosen. The result contains a fraction m / n of each label's samples, rounded up or
    down. A real site chooses the same samples as a simulation.

    Args:
        owners: The client of each sample, in ascending order.
        labels: The label of each sample, in the order of ``owners``.
        wanted: The number m of samples to choose from each client, shape (N,).
        seed: The experiment's seed.
        purpose: A name for this use of random numbers. Different names give independent random numbers.

    Returns:
        A mask with one entry per sample: True for the chosen samples.

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
    """Hold out at least one test sample of each client. Return the remaining and the held-out samples.

    Raises:
        SpecError: A client has fewer than two samples.
    """
    sizes = assignment.sizes
    short = np.flatnonzero(sizes < 2 if everybody else sizes == 1)
    if len(short):
        has = "one sample" if sizes[short[0]] else "no sample"
        problem = (
            f"client {short[0]} has {has}, but needs at least two, because one sample is held out for tests. Set "
            "partition.min_size = 2."
        )
        raise SpecError("evaluation.client_test", problem, share)
    return split_each(assignment, data, share, seed, "client-test", least=1)


def _deal_clients(clients: int, share: float, seed: int) -> tuple[Ints, Ints]:
    """Choose random clients that never train. Return the sorted ids of training clients and of test clients.

    Raises:
        SpecError: All clients would be test clients.
    """
    count = max(1, round(share * clients))
    if count >= clients:
        problem = f"none of the {clients} clients would be left for training. Use a smaller fraction."
        raise SpecError("evaluation.test_clients", problem, share)
    shuffled = rng(seed, "test-clients").permutation(clients)
    return np.sort(shuffled[count:]), np.sort(shuffled[:count])


def only_clients(assignment: Assignment, chosen: Ints) -> Assignment:
    """Return only the samples of the ``chosen`` clients, which get new ids 0, 1, … in the order of ``chosen``."""
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
