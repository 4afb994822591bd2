"""Our schemes beside those of flwr-datasets, written by others."""

from __future__ import annotations

import numpy as np
import pytest
from lazy import Lazy

from fedstrata.data.partitions.label_skew import Classes
from fedstrata.data.partitions.schemes import IID, Dirichlet, Shards

pytestmark = pytest.mark.slow
partitioner, datasets = Lazy("flwr_datasets.partitioner"), Lazy("datasets")

LABELS = np.arange(2000) % 10
CLIENTS = 20


def theirs(scheme):
    scheme.dataset = datasets.Dataset.from_dict({"label": LABELS})
    parts = [scheme.load_partition(client)["label"][:] for client in range(CLIENTS)]
    return np.stack([np.bincount(np.asarray(part, dtype=np.int64), minlength=10) for part in parts])


def ours(partition, labelled, seed=0):
    return partition.split(labelled(LABELS), seed).counts(LABELS, 10)


def test_iid_sizes(labelled):
    their = theirs(partitioner.IidPartitioner(num_partitions=CLIENTS))
    assert sorted(their.sum(axis=1)) == sorted(ours(IID(clients=CLIENTS), labelled).sum(axis=1))


def test_classes_held(labelled):
    scheme = partitioner.PathologicalPartitioner(CLIENTS, "label", 3, class_assignment_mode="deterministic")
    their, our = theirs(scheme), ours(Classes(clients=CLIENTS, per_client=3), labelled)
    assert ((their > 0).sum(axis=1) == 3).all()
    assert np.array_equal((their > 0).sum(axis=1), (our > 0).sum(axis=1))
    assert np.array_equal((their > 0).sum(axis=0), (our > 0).sum(axis=0))
    assert sorted(their.sum(axis=1))[0] > 90 < sorted(our.sum(axis=1))[0]


@pytest.mark.filterwarnings("ignore:Specifying null_placement:FutureWarning")  # pyarrow, of datasets.sort
def test_shards_held(labelled):
    their = theirs(partitioner.ShardPartitioner(CLIENTS, "label", num_shards_per_partition=2))
    our = ours(Shards(clients=CLIENTS, per_client=2), labelled)
    assert np.array_equal(their.sum(axis=1), our.sum(axis=1))
    assert set(their.ravel()) == set(our.ravel()) == {0, 50, 100}


def skew(counts):
    """Mean over the clients of the largest class share, and deviation of sizes over their mean."""
    sizes = counts.sum(axis=1)
    held = sizes > 0
    return (counts[held].max(axis=1) / sizes[held]).mean(), sizes.std() / sizes.mean()


@pytest.mark.parametrize("alpha", [0.1, pytest.param(1.0, marks=pytest.mark.long)])
def test_dirichlet_over_the_clients_of_a_class(labelled, alpha):
    their = [
        theirs(partitioner.DirichletPartitioner(CLIENTS, "label", alpha, 0, False, seed=seed)) for seed in range(8)
    ]
    our = [ours(Dirichlet(clients=CLIENTS, alpha=alpha, min_size=0), labelled, seed) for seed in range(40)]
    assert_same([skew(counts) for counts in their], [skew(counts) for counts in our])


# Theirs divides by zero for small α, where a whole row underflows once a class has run out.
@pytest.mark.long
@pytest.mark.parametrize("alpha", [1.0, 10.0])
def test_dirichlet_over_the_classes_of_a_client(labelled, alpha):
    sizes = [len(LABELS) // CLIENTS] * CLIENTS
    schemes = [partitioner.InnerDirichletPartitioner(sizes, "label", alpha / 10, seed=seed) for seed in range(8)]
    partition = Dirichlet(clients=CLIENTS, alpha=alpha, balance="client")
    our = [ours(partition, labelled, seed) for seed in range(40)]
    assert_same([skew(theirs(scheme))[:1] for scheme in schemes], [skew(counts)[:1] for counts in our])


def assert_same(their, our):
    """The means agree within four standard errors."""
    their, our = np.array(their), np.array(our)
    error = np.sqrt(their.var(axis=0, ddof=1) / len(their) + our.var(axis=0, ddof=1) / len(our))
    assert (np.abs(their.mean(axis=0) - our.mean(axis=0)) < 4 * error).all(), (
        their.mean(0),
        our.mean(0),
        error,
    )
