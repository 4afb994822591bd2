"""Measure properties of a partition and an availability model, without training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from fedstrata.base.arrays import Bools, Floats, Ints
from fedstrata.papers.recommend.rounds import Simulated, simulate
from fedstrata.runs.preparation import Prepared

SEEDS = 5
"""Number of simulations. Their seeds are consecutive integers, beginning with the spec's seed."""


@dataclass(frozen=True)
class Properties:
    """The measured properties of a spec, as numbers. Properties of classes are None if the task does not have classes.

    Properties of the partition are exact. Other properties are means over ``SEEDS`` simulations of all rounds. The
    simulations ignore training, deadlines and failures.

    Args:
        clients: Number of clients N.
        invited: Mean number of clients that are invited in a round, divided by N.
        size_imbalance: Gini coefficient of the clients' numbers of samples, which is 0 if all clients have equally many
            samples.
        step_imbalance: Gini coefficient of the clients' numbers of local steps per round.
        online: Mean number of online clients per round, divided by N.
        offline_rounds: Mean number of consecutive rounds in which a client is offline, or 0 if all clients are always
            online. Only the simulated rounds are counted.
        size_correlation: Pearson's correlation between a client's number of samples and the share of rounds in which
            the client is online. The value is 0 if all clients have equally many samples, or if all clients are online
            equally often.
        classes: Number C of classes of which at least one client has samples.
        classes_per_client: Mean number of classes of a client, divided by C.
        label_skew: Total variation distance between a client's class shares and the class shares of all samples,
            averaged over clients.
        class_imbalance: Total variation distance between the class shares of all samples and equal shares.
        online_skew: Total variation distance between the class shares of all samples and the class shares of online
            clients' samples. Samples of online clients are added up over all rounds.
        absent_online: Mean over classes: the share of rounds in which no client with samples of the class is online.
        absent_uninvited: Mean over classes: the share of rounds in which clients with samples of the class are online,
            but none of these clients is invited.
        absent_replies: The sum of ``absent_online`` and ``absent_uninvited``.
        longest_absence: Largest number of consecutive rounds in which the same class is absent. A class is absent from
            a round if no invited and online client has samples of the class.
    """

    clients: float
    invited: float
    size_imbalance: float
    step_imbalance: float
    online: float
    offline_rounds: float
    size_correlation: float
    classes: float | None = None
    classes_per_client: float | None = None
    label_skew: float | None = None
    class_imbalance: float | None = None
    online_skew: float | None = None
    absent_online: float | None = None
    absent_uninvited: float | None = None
    absent_replies: float | None = None
    longest_absence: float | None = None


def measure(prepared: Prepared) -> Properties:
    """Measure the properties of a spec without training.

    Args:
        prepared: The prepared experiment.

    Raises:
        SpecError: In one of the simulations, the availability model cannot be used for the federation.
    """
    seed, assignment, data = prepared.spec.seed, prepared.assignment, prepared.data
    sizes, training = assignment.sizes, prepared.spec.training
    steps = np.ceil(sizes / training.samples_per_step) * training.epochs
    if training.local_steps is not None:
        steps = np.full(len(sizes), training.local_steps)
    counts = assignment.counts(*data.strata_or_one) if data.task.has_classes else None
    return mean([properties(sizes, steps, counts, simulate(prepared, seed + more)) for more in range(SEEDS)])


def mean(several: Sequence[Properties]) -> Properties:
    """Return the mean of each property over several measurements; None if a measurement lacks the property."""
    values = zip(*map(astuple, several), strict=True)
    means: list[Any] = [None if None in each else fmean(each) for each in values]
    return Properties(*means)


def properties(sizes: Ints, steps: Floats, counts: Ints | None, run: Simulated) -> Properties:
    """Compute the properties of a partition and of simulated rounds.

    Args:
        sizes: Number of samples of each client, shape (N,).
        steps: Number of local steps of each client per round, shape (N,).
        counts: Number of samples of each class at each client, shape (N, C); None if the task does not have classes.
        run: Simulated rounds with one seed.
    """
    rates = run.online.mean(axis=0)
    general = Properties(
        clients=len(sizes),
        invited=float(run.invited.mean()),
        size_imbalance=gini(sizes),
        step_imbalance=gini(steps),
        online=float(rates.mean()),
        offline_rounds=spell(run.online),
        size_correlation=correlation(sizes, rates),
    )
    if counts is None:
        return general
    counts = counts[:, counts.sum(axis=0) > 0]
    holds, total, filled = counts > 0, counts.sum(axis=0), counts[sizes > 0]
    online, replies = without_holder(holds, run.online), without_holder(holds, run.online & run.invited)
    differences = filled / filled.sum(axis=1, keepdims=True) - total / total.sum()
    return replace(
        general,
        classes=counts.shape[1],
        classes_per_client=float(holds.mean()),
        label_skew=float(np.abs(differences).sum(axis=1).mean() / 2),
        class_imbalance=distance(total, np.ones_like(total)),
        online_skew=distance(rates @ counts, total),
        absent_online=float(online.mean()),
        absent_uninvited=float(replies.mean() - online.mean()),
        absent_replies=float(replies.mean()),
        longest_absence=longest(replies),
    )


def gini(values: Ints | Floats) -> float:
    """Return the Gini coefficient of non-negative numbers: 0 for equal numbers, near 1 if one number dominates the sum.

    >>> gini(np.array([1, 1, 1])), round(gini(np.array([0, 0, 3])), 3)
    (0.0, 0.667)
    """
    n, total = len(values), values.sum()
    ranks = 2 * np.arange(1, n + 1) - n - 1
    return float(ranks @ np.sort(values) / (n * total)) if total else 0.0


def distance(counts: Ints | Floats, others: Ints | Floats) -> float:
    """Return the total variation distance between two distributions, which are given as counts.

    >>> distance(np.array([1, 0]), np.array([2, 2])), distance(np.array([0, 0]), np.array([2, 2]))
    (0.5, 0.0)
    """
    if not counts.sum() or not others.sum():
        return 0.0
    return float(np.abs(counts / counts.sum() - others / others.sum()).sum() / 2)


def correlation(values: Ints, rates: Floats) -> float:
    """Return Pearson's correlation of ``values`` and ``rates``, or 0 if all values or all rates are equal.

    >>> correlation(np.array([1, 2]), np.array([0.5, 0.5])), round(correlation(np.array([1, 2]), np.array([0, 1.0])), 6)
    (0.0, 1.0)
    """
    if np.ptp(values) == 0 or np.ptp(rates) == 0:
        return 0.0
    return float(np.corrcoef(values, rates)[0, 1])


def spell(online: Bools) -> float:
    """Return the mean number of consecutive rounds in which a client is offline; 0 if all clients are always online.

    Args:
        online: Whether each client is online in each round, shape (rounds, N).

    >>> spell(np.array([[True, False], [False, False], [True, False]]))
    2.0
    """
    before = np.vstack([np.ones_like(online[:1]), online[:-1]])
    begins = int((before & ~online).sum())
    return float((~online).sum() / begins) if begins else 0.0


def without_holder(holds: Bools, takes_part: Bools) -> Bools:
    """Return, for each round and class, whether the class is absent: no participating client has samples of it.

    Args:
        holds: Whether each client has samples of each class, shape (N, C).
        takes_part: Whether each client takes part in each round, shape (rounds, N).

    Returns:
        Boolean values, shape (rounds, C).
    """
    return np.array([~holds[row].any(axis=0) for row in takes_part])


def longest(absent: Bools) -> int:
    """Return, over all classes, the maximum number of consecutive rounds in which a class is absent.

    Args:
        absent: Whether each class is absent in each round, shape (rounds, C).

    >>> longest(np.array([[True, False], [False, False], [True, True], [True, True]]))
    2
    """
    current, most = np.zeros(absent.shape[1], dtype=np.int64), 0
    for row in absent:
        current = (current + 1) * row
        most = max(most, int(current.max()))
    return most


class Shown(NamedTuple):
    """How a property is shown to users.

    Args:
        label: Short name of the property.
        about: Noun phrase that defines the property.
        unit: Unit of the property: ``share`` (shown in percent), ``number``, or ``index`` (0 to 1, or -1 to 1).
    """

    label: str
    about: str
    unit: str


SHOWN = {
    "clients": Shown("clients", "number of clients", "number"),
    "invited": Shown("invited", "share of the clients that are invited in a round", "share"),
    "classes": Shown("classes", "number of classes", "number"),
    "classes_per_client": Shown("classes per client", "mean share of the classes that a client has", "share"),
    "label_skew": Shown("label skew", "distance of a client's class shares from the shares of all samples", "index"),
    "class_imbalance": Shown(
        "class imbalance", "distance of the class shares of all samples from equal shares", "index"
    ),
    "size_imbalance": Shown("size imbalance", "Gini coefficient of the clients' numbers of samples", "index"),
    "step_imbalance": Shown("step imbalance", "Gini coefficient of the clients' numbers of local steps", "index"),
    "online": Shown("online", "share of the clients that are online in a round", "share"),
    "offline_rounds": Shown("rounds offline", "number of consecutive rounds that a client is offline", "number"),
    "online_skew": Shown(
        "online and labels", "distance of the class shares of online clients from the shares of all samples", "index"
    ),
    "size_correlation": Shown(
        "online and sizes", "correlation of a client's rounds online with its number of samples", "index"
    ),
    "absent_online": Shown("absent online", "share of rounds in which no client with a class is online", "share"),
    "absent_uninvited": Shown(
        "absent uninvited", "share of rounds in which clients with a class are online, but none is invited", "share"
    ),
    "absent_replies": Shown(
        "absent in replies", "share of rounds in which no invited client with a class is online", "share"
    ),
    "longest_absence": Shown(
        "longest absence", "most consecutive rounds in which no invited client with a class is online", "number"
    ),
}
"""A mapping from each property to its presentation, in the order in which properties are shown."""

FACTOR = 1000.0
"""If the ratio of two numbers is at least this factor, their distance is 1, the maximum."""


def apart(key: str, mine: Properties, other: Properties) -> float | None:
    """Return the distance between two specs in a property, from 0 (equal) to 1; None if neither spec has the property.

    For shares and indices, the distance is the absolute difference. For correlations, the distance is half the absolute
    difference. For numbers, the distance is the logarithm of the ratio, divided by the logarithm of ``FACTOR``. If only
    one spec has the property, the distance is 1.

    Args:
        key: Name of the property.
        mine: Properties of one spec.
        other: Properties of the other spec.
    """
    a, b = getattr(mine, key), getattr(other, key)
    if a is None or b is None:
        return None if a is b else 1.0
    if SHOWN[key].unit == "number":
        return min(1.0, abs(math.log((1 + a) / (1 + b))) / math.log(FACTOR))
    return float(abs(a - b)) / (2 if key == "size_correlation" else 1)
