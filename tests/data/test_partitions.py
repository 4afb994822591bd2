from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstrata.base.config import build
from fedstrata.base.errors import SpecError
from fedstrata.data.partitions.base import PARTITIONS, UNUSED, Assignment, Partition
from fedstrata.data.partitions.label_skew import Classes, ClassGroup, Domains, Groups
from fedstrata.data.partitions.schemes import IID, Dirichlet, Given, PowerLaw, Shards


def table(partition, dataset, seed=0):
    return partition.split(dataset, seed).counts(dataset.y_train.numpy(), dataset.outputs)


def test_assignment_by_hand():
    assignment = Assignment.from_owners(np.array([2, 0, UNUSED, 2, 0]), clients=4)
    assert assignment.indices.tolist() == [1, 4, 0, 3]
    assert assignment.offsets.tolist() == [0, 2, 2, 4, 4]
    assert [part.tolist() for part in assignment] == [[1, 4], [], [0, 3], []]
    assert assignment.sizes.tolist() == [2, 0, 2, 0]
    assert assignment.counts(np.array([0, 1, 1, 0, 1]), 3).tolist() == [
        [0, 2, 0],
        [0, 0, 0],
        [2, 0, 0],
        [0, 0, 0],
    ]
    lists = Assignment.from_lists([np.array([1, 4]), np.array([], dtype=np.int64), np.array([0, 3]), np.array([])])
    assert np.array_equal(lists.indices, assignment.indices)
    assert np.array_equal(lists.offsets, assignment.offsets)
    with pytest.raises(IndexError, match="client 4 does not exist"):
        assignment[4]


@st.composite
def schemes(draw):
    """A scheme with settings that the drawn data allow: (partition, labels, domains)."""
    classes = draw(st.integers(1, 6))
    counts = draw(st.lists(st.integers(36, 60), min_size=classes, max_size=classes))
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(classes), counts))
    domains = np.arange(len(labels)) % 3
    clients = draw(st.integers(1, 12))
    least = draw(st.integers(0, len(labels) // clients))
    each = draw(st.integers(min(classes, -(-classes // clients)), classes))
    alpha = draw(st.sampled_from([1e-9, 1e-3, 0.1, 1.0, 1e6]))
    low = {"clients": clients, "min_size": min(least, 1)}
    partition = draw(
        st.sampled_from(
            [
                IID(clients=clients, min_size=least),
                Dirichlet(clients=clients, min_size=least, alpha=alpha),
                Dirichlet(clients=clients, min_size=least, alpha=alpha, balance="client"),
                PowerLaw(clients=clients, min_size=least, exponent=2.5),
                Domains(clients=clients, min_size=least, alpha=alpha),
                Classes(per_client=each, **low),
                Shards(per_client=draw(st.integers(1, 3)), **(low | {"clients": min(clients, 4 * classes)})),
                Groups(
                    groups=(ClassGroup(clients=clients, classes=each), ClassGroup(clients=1, classes=classes)),
                    min_size=0,
                ),
                Domains(per_client=draw(st.integers(min(3, -(-3 // clients)), 3)), **low),
            ]
        )
    )
    return partition, labels, domains


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(schemes(), st.integers(0, 2**32))
def test_nothing_is_lost_or_repeated_and_the_seed_decides(labelled, scheme, seed):
    partition, labels, domains = scheme
    dataset = labelled(labels, domains)
    assignment = partition.split(dataset, seed)
    assert np.array_equal(np.sort(assignment.indices), np.arange(len(labels)))
    assert len(assignment) == partition.clients
    assert assignment.sizes.min() >= partition.min_size
    assert np.array_equal(assignment.counts(labels, dataset.outputs).sum(axis=0), np.bincount(labels))
    again = partition.split(dataset, seed)
    assert np.array_equal(assignment.indices, again.indices)
    assert np.array_equal(assignment.offsets, again.offsets)
    assert PARTITIONS.parse(partition.to_spec()) == partition


@pytest.mark.parametrize("partition", [
    IID(clients=5), Dirichlet(clients=5), Dirichlet(clients=5, balance="client"), Classes(clients=5),
    Shards(clients=5), Groups(groups=[{"clients": 3, "classes": 2}, {"clients": 2, "classes": 1}]),
    PowerLaw(clients=5), Domains(clients=5),
], ids=lambda partition: partition.name)  # fmt: skip
def test_another_seed_is_another_partition(labelled, partition):
    dataset = labelled(np.arange(100) % 4, np.arange(100) % 3)
    owners = [partition.split(dataset, seed) for seed in (0, 1)]
    assert not np.array_equal(owners[0].indices, owners[1].indices)


def test_iid_sizes_and_mix(labelled):
    counts = table(IID(clients=7), labelled(np.arange(7000) % 10))
    assert counts.sum(axis=1).tolist() == [1000] * 7
    # Hypergeometric: 100 expected, deviation below sqrt(1000 · 0.1 · 0.9) = 9.5.
    assert np.abs(counts - 100).max() < 45
    assert sorted(IID(clients=3).split(labelled(np.zeros(11, dtype=int)), 0).sizes) == [3, 4, 4]


def test_classes_holds_exactly_k_and_splits_equally(labelled):
    labels = np.repeat(np.arange(10), 601)
    counts = table(Classes(clients=20, per_client=3), labelled(labels))
    assert ((counts > 0).sum(axis=1) == 3).all()
    assert ((counts > 0).sum(axis=0) == 6).all()  # 60 holdings of 10 classes
    held = [column[column > 0] for column in counts.T]
    assert all(sorted(part) == [100, 100, 100, 100, 100, 101] for part in held)


def test_classes_mixes_which_classes_meet(labelled):
    counts = table(Classes(clients=200, per_client=2), labelled(np.arange(4000) % 10))
    pairs = {tuple(np.flatnonzero(row)) for row in counts}
    assert len(pairs) > 38  # of 45; with 200 clients, all but one or two
    every_class = table(Classes(clients=4, per_client=10), labelled(np.arange(4000) % 10))
    assert (every_class == 100).all()


@pytest.mark.slow
def test_classes_of_a_fixed_size(labelled):
    """ReBaFL, section 5.1: every client 1,000 samples of two classes, equally many of each."""
    dataset = labelled(np.arange(60_000) % 10)
    for seed in range(3):
        partition = Classes(clients=20, per_client=2, size=1000)
        assignment = partition.split(dataset, seed)
        assert (assignment.sizes == 1000).all()
        assert len(np.unique(assignment.indices)) == 20_000
        assert set(assignment.counts(dataset.y_train.numpy(), 10).ravel()) == {0, 500}
    uneven = table(Classes(clients=5, per_client=3, size=10), dataset)
    assert all(sorted(row[row > 0]) == [3, 3, 4] for row in uneven)
    with pytest.raises(
        SpecError, match=r"partition.size = 40000: class \d has 6000 samples, but 80000 are needed. Use a smaller"
    ):
        Classes(clients=20, per_client=2, size=40_000).split(dataset, 0)
    with pytest.raises(
        SpecError,
        match=r"partition\.size = 2: a client with 3 class labels needs at least one sample of each label\. Use at",
    ):
        Classes(clients=20, per_client=3, size=2).split(dataset, 0)


def test_classes_that_cannot_be(labelled):
    dataset = labelled(np.arange(100) % 10)
    with pytest.raises(
        SpecError,
        match=r"partition\.per_client = 2: all clients together would have only 8 of the data's 10 class labels",
    ):
        Classes(clients=4, per_client=2).split(dataset, 0)
    with pytest.raises(
        SpecError, match=r"partition.per_client = 11: the data have only 10 different class labels\. Use at most 10\."
    ):
        Classes(clients=4, per_client=11).split(dataset, 0)
    with pytest.raises(SpecError, match=r"partition.clients = 60: class \d has 10 samples, but 12 clients need at"):
        Classes(clients=60, per_client=2).split(dataset, 0)


def test_groups_are_numbered_one_after_the_other(labelled):
    """The clustered setting of ReBaFL is the default."""
    counts = table(Groups(), labelled(np.arange(5000) % 10))
    assert (counts > 0).sum(axis=1).tolist() == [2] * 8 + [3] * 8 + [5] * 4
    assert ((counts > 0).sum(axis=0) == 6).all()
    fixed = Groups(size=60).split(labelled(np.arange(5000) % 10), 0)
    assert (fixed.sizes == 60).all()


def test_groups_count_their_clients():
    assert Groups(groups=[{"clients": 3, "classes": 1}]).clients == 3
    with pytest.raises(SpecError, match="clients = 30: the groups have 20 clients"):
        PARTITIONS.parse({"name": "groups", "clients": 30})
    with pytest.raises(SpecError, match=r"groups\.0\.clients = 0"):
        PARTITIONS.parse({"name": "groups", "groups": [{"clients": 0, "classes": 1}]})
    with pytest.raises(SpecError, match=r"groups\.0\.classes: is required"):
        PARTITIONS.parse({"name": "groups", "groups": [{"clients": 2}]})
    with pytest.raises(SpecError, match="groups = 'x'"):
        PARTITIONS.parse({"name": "groups", "groups": "x"})


def test_a_shard_is_a_random_part_of_its_label():
    """Neighbouring samples of the same label belong to the same client in about a fifth of the places."""
    owner = Shards(clients=5, per_client=1).assign(np.zeros(100, dtype=np.int64), None, np.random.default_rng(0))
    assert np.bincount(owner).tolist() == [20] * 5
    assert 5 < (np.diff(owner) == 0).sum() < 40


def test_shards_are_consecutive_labels(labelled):
    labels = np.repeat(np.arange(10), 200)
    counts = table(Shards(clients=50, per_client=2), labelled(labels))
    assert (counts.sum(axis=1) == 40).all()
    assert set(counts.ravel()) <= {0, 20, 40}  # shards of 20 never span two classes of 200
    assert ((counts > 0).sum(axis=1) <= 2).all()
    assert ((counts > 0).sum(axis=1) == 2).sum() > 30
    with pytest.raises(
        SpecError, match=r"partition.per_client = 50: gives 2500 shards, but there are 2000 samples. Use at most 40"
    ):
        Shards(clients=50, per_client=50).split(labelled(labels), 0)


def test_domains_per_client(labelled):
    domains = np.repeat(np.arange(4), 60)
    dataset = labelled(np.arange(240) % 3, domains)
    counts = Domains(clients=8).split(dataset, 0).counts(domains, 4)
    assert sorted(map(tuple, counts)) == sorted([(30, 0, 0, 0), (0, 30, 0, 0), (0, 0, 30, 0), (0, 0, 0, 30)] * 2)
    assert ((Domains(clients=8, per_client=2).split(dataset, 0).counts(domains, 4) > 0).sum(axis=1) == 2).all()
    skewed = Domains(clients=8, alpha=0.01).split(dataset, 0)
    assert skewed.sizes.max() > 45
    with pytest.raises(SpecError, match=r"partition\.name = 'domain': requires domains"):
        Domains(clients=2).split(labelled([0, 1]), 0)
    with pytest.raises(SpecError, match="has no effect together with per_client"):
        Domains(per_client=1, alpha=0.5)


def test_power_law_sizes(labelled):
    dataset = labelled(np.zeros(1100, dtype=int))
    assert PowerLaw(clients=3).split(dataset, 0).sizes.tolist() == [600, 300, 200]
    assert PowerLaw(clients=4, exponent=0).split(dataset, 0).sizes.tolist() == [275] * 4
    # 1/k² of 1,100: 773, 193, 86, 48; the last lacks 52, all of which the first gives.
    assert PowerLaw(clients=4, exponent=2, min_size=100).split(dataset, 0).sizes.tolist() == [
        707,
        193,
        100,
        100,
    ]


def test_dirichlet_at_both_ends(labelled):
    labels = np.repeat(np.arange(10), 1000)
    even = table(Dirichlet(clients=10, alpha=1e6), labelled(labels))
    assert np.abs(even - 100).max() <= 2
    even = table(Dirichlet(clients=10, alpha=1e6, balance="client"), labelled(labels))
    assert np.abs(even - 100).max() < 50  # multinomial: a deviation of 9.5
    skewed = table(Dirichlet(clients=100, alpha=1e-3, min_size=0), labelled(labels))
    assert np.median(skewed.max(axis=0)) == 1000  # nearly every class at one client
    one_class = table(Dirichlet(clients=100, alpha=1e-3, balance="client"), labelled(labels))
    assert (one_class.sum(axis=1) == 100).all()
    # Mixes of one class each, of which some are wanted by more than the ten clients that they suffice for.
    assert np.median(one_class.max(axis=1)) > 60
    assert np.median((one_class > 0).sum(axis=1)) <= 3


@pytest.mark.slow
def test_dirichlet_moments(labelled):
    """Shares of a class have the mean 1/N and the variance (N − 1)/(N² (N α + 1)) of Dir_N(α)."""
    dataset, alpha, clients = labelled(np.repeat(np.arange(20), 200)), 0.3, 8
    partition = Dirichlet(clients=clients, alpha=alpha, min_size=0)
    shares = np.concatenate([table(partition, dataset, seed).T / 200 for seed in range(40)])  # 800 draws
    error = np.sqrt((clients - 1) / (clients**2 * (clients * alpha + 1)) / len(shares))
    assert np.abs(shares.mean(axis=0) - 1 / clients).max() < 4 * error
    assert shares.var() == pytest.approx((clients - 1) / (clients**2 * (clients * alpha + 1)), rel=0.06)


@pytest.mark.slow
def test_dirichlet_favours_no_client_when_pieces_are_small(labelled):
    """With far more clients than samples a class, rounding decides; the first and last get their share all
    the same."""
    dataset = labelled(np.repeat(np.arange(50), 10))
    partition = Dirichlet(clients=40, alpha=100, min_size=0)
    sizes = np.mean([partition.split(dataset, seed).sizes for seed in range(40)], axis=0)  # 12.5 expected each
    assert np.abs(sizes - 12.5).max() < 4 * np.sqrt(12.5 / 40)


def test_top_up_moves_as_few_as_it_can(labelled):
    dataset = labelled(np.repeat(np.arange(10), 100))
    without = Dirichlet(clients=30, alpha=0.02, min_size=0)
    topped = Dirichlet(clients=30, alpha=0.02, min_size=5)
    before, after = without.split(dataset, 3), topped.split(dataset, 3)
    missing = np.maximum(5 - before.sizes, 0)
    assert missing.sum() > 20
    assert (after.sizes[missing > 0] == 5).all()
    owners = [np.empty(1000, dtype=int), np.empty(1000, dtype=int)]
    for owner, assignment in zip(owners, (before, after), strict=True):
        owner[assignment.indices] = assignment.owners
    assert (owners[0] != owners[1]).sum() == missing.sum()
    assert before.sizes.max() - after.sizes.max() > 0


def test_given(labelled):
    partition = Given(indices=[np.array([3, 1]), [0]])
    assert partition.clients == 2
    assert [part.tolist() for part in partition.split(labelled([0, 1, 0, 1]), 0)] == [[3, 1], [0]]
    assert PARTITIONS.parse(partition.to_spec()) == partition
    with pytest.raises(SpecError, match="gives sample 1 to 2 clients"):
        Given(indices=[[1], [1]]).split(labelled([0, 1]), 0)
    with pytest.raises(SpecError, match=r"returned indices 0…7. Return only indices 0…1"):
        Given(indices=[[0], [7]]).split(labelled([0, 1]), 0)
    with pytest.raises(SpecError, match="min_size = 1: client 1 gets 0 samples"):
        Given(indices=[[0], []]).split(labelled([0, 1]), 0)
    with pytest.raises(SpecError, match="clients = 3: there are indices for 2"):
        Given(indices=[[0], [1]], clients=3)


def test_too_many_clients(labelled):
    with pytest.raises(
        SpecError, match=r"partition\.clients = 4: arrays has only 9 training samples. Use at most 3 with min_size = 3"
    ):
        IID(clients=4, min_size=3).split(labelled([0] * 9), 0)


class Broken(Partition):
    wrong: str

    def assign(self, labels, domains, rng):
        return {
            "short": np.zeros(3, dtype=int),
            "beyond": np.full(len(labels), 2),
            "dropped": np.where(np.arange(len(labels)) == 0, UNUSED, 0),
            "lists": [np.arange(len(labels))],
        }[self.wrong]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("short", "Broken returned 3 owners for 4 samples"),
        ("beyond", "returned owners 2…2. Return only owners 0…1"),
        ("dropped", "leaves out 1 of 4 samples"),
        ("lists", "returned 1 lists for 2 clients"),
    ],
)
def test_a_scheme_of_ones_own_is_checked(labelled, wrong, message):
    with pytest.raises(SpecError, match=message):
        Broken(clients=2, wrong=wrong).split(labelled([0, 1, 0, 1]), 0)


def test_every_registered_name_is_a_scheme_with_that_name():
    assert {name: PARTITIONS.find(name).name for name in PARTITIONS} == {name: name for name in PARTITIONS}
    with pytest.raises(SpecError, match="alpha = 0: "):
        build(Dirichlet, {"alpha": 0})
    with pytest.raises(SpecError, match="did you mean 'dirichlet'"):
        PARTITIONS.parse("dirichlett")


@pytest.mark.slow
def test_many_clients_are_quick(labelled):
    """100,000 clients: seconds would mean a Python loop over clients."""
    dataset = labelled(np.arange(60_000) % 10, np.arange(60_000) % 3)
    for partition in (IID, Dirichlet, Classes, Shards, PowerLaw, Domains):
        assignment = partition(clients=100_000, min_size=0).split(dataset, 0)
        assert (len(assignment), len(assignment.indices)) == (100_000, 60_000)


def test_more_shards_than_memory_can_hold_are_refused_where_clients_may_be_empty(labelled):
    with pytest.raises(
        SpecError, match=r"partition.per_client = 2000000000: gives 8000000000 shards, .* at most 2500000"
    ):
        Shards(clients=4, per_client=2_000_000_000, min_size=0).split(labelled([0, 1]), 0)
    assert len(Shards(clients=4, per_client=1000, min_size=0).split(labelled([0, 1]), 0)) == 4


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        (5, "indices = 5: must be a list"),
        ("ab", "indices = 'ab': must be a list"),
        ([], "indices = .*: tuple should have at least 1 item"),
        (np.array(3), "indices = 3: must be a list"),
        ([3, 4], "indices.0 = 3: must be a list"),
    ],
    ids=str,
)
def test_indices_that_are_no_lists_of_numbers(indices, message):
    with pytest.raises(SpecError, match=message):
        Given(indices=indices)


def test_indices_may_be_a_table_of_numpy(labelled):
    partition = Given(indices=np.array([[0, 1], [3, 2]]))
    assert partition == Given(indices=[[0, 1], [3, 2]])
    assert partition.split(labelled([0, 1, 0, 1]), 0)[1].tolist() == [3, 2]


def test_indices_may_lie_in_a_file(tmp_path, labelled):
    lists = Given(indices=[[3, 1], [], [0]], min_size=0)
    (tmp_path / "p.npz").write_bytes(lists.packed())
    assert Given(file=tmp_path / "p.npz", min_size=0) == lists
    arrays = np.load(tmp_path / "p.npz")
    assert (arrays["indices"].tolist(), arrays["offsets"].tolist()) == ([3, 1, 0], [0, 2, 2, 3])
    # What is in the file is what counts, and not where it lies.
    assert "file" not in PARTITIONS.parse({"name": "given", "file": str(tmp_path / "p.npz"), "min_size": 0}).to_spec()
    with pytest.raises(SpecError, match="clients = 2: there are indices for 3"):
        Given(file=tmp_path / "p.npz", clients=2)
    with pytest.raises(SpecError, match=r"has no effect together with 'indices'\. Remove one of the two keys\."):
        Given(file=tmp_path / "p.npz", indices=[[1]])
    with pytest.raises(SpecError, match=r"indices: is required, but not set. Set either 'indices' or 'file'"):
        Given()


@pytest.mark.parametrize(
    ("indices", "offsets"),
    [
        ([0, 1, 2], [0, 2]),
        ([0, 1, 2], [1, 3]),
        ([0, 1, 2], [0, 2, 1, 3]),
        ([0, 1, 2], [0]),
        ([0, 1, 2], []),
        ([[0, 1, 2]], [0, 3]),
        ([0.0, 1.0], [0, 2]),
        ([0, 1, 2], np.array([0, 2**64 - 1, 3], dtype=np.uint64)),
    ],
    ids=str,
)
def test_a_file_of_something_else_is_refused(tmp_path, indices, offsets):
    np.savez(tmp_path / "p.npz", indices=np.array(indices), offsets=np.array(offsets))
    with pytest.raises(
        SpecError, match=r"must contain two arrays of integers, 'indices' and 'offsets'\. The offsets must ascend"
    ):
        Given(file=str(tmp_path / "p.npz"))


def test_no_file_of_indices(tmp_path):
    for content in (b"", b"PK damaged"):
        (tmp_path / "p.npz").write_bytes(content)
        with pytest.raises(SpecError, match=r"file = .*: .*is not a \.npz file, or is damaged"):
            Given(file=tmp_path / "p.npz")
    with pytest.raises(SpecError, match=r"file = .*: there is no file"):
        Given(file=tmp_path / "none.npz")
    with pytest.raises(SpecError, match=r"file = 5: is not the path of a \.npz file\. Give a path that ends in"):
        Given(file=5)


def test_alpha_in_every_class_is_ten_times_alpha_by_shares(labelled):
    """Ten classes of equal size: the same draws, to the sample."""
    labels = np.repeat(np.arange(10), 300)
    flat = Dirichlet(clients=20, alpha=0.01, balance="client", prior="flat")
    shares = Dirichlet(clients=20, alpha=0.1, balance="client")
    assert table(flat, labelled(labels)).tolist() == table(shares, labelled(labels)).tolist()


def test_a_prior_without_mixes_is_refused():
    with pytest.raises(SpecError, match="has no effect with balance = 'class'"):
        Dirichlet(prior="flat")
