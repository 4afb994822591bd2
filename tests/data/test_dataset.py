from __future__ import annotations

import numpy as np
import pytest
import torch

from fedstrata.base.errors import DataError
from fedstrata.data.dataset import from_arrays

BYTES = np.arange(4 * 3 * 2 * 3, dtype=np.uint8).reshape(4, 3, 2, 3)
Y = np.array([0, 1, 0, 1])


def images(**settings):
    return from_arrays(BYTES, Y, BYTES[:2], Y[:2], **settings)


def test_images_are_stored_as_they_came_and_read_as_channels_first():
    data = images(normalize="none")
    assert data.x_train.dtype == torch.uint8
    assert data.shape == (3, 3, 2)
    assert (data.outputs, data.train_size) == (2, 4)
    batch = data.inputs(np.array([2, 0]))
    assert torch.equal(batch, torch.from_numpy(BYTES[[2, 0]].transpose(0, 3, 1, 2).astype(np.float32)))
    assert batch.is_contiguous(memory_format=torch.channels_last)
    assert data.targets(torch.tensor([3, 0])).tolist() == [1, 0]
    assert data.targets(slice(None), "test").tolist() == [0, 1]


def test_standard_is_mean_0_and_deviation_1_for_each_channel():
    batch = images().inputs(slice(None)).double()
    expected = BYTES.transpose(3, 0, 1, 2).reshape(3, -1)
    expected = (expected - expected.mean(1, keepdims=True)) / expected.std(1, keepdims=True)
    np.testing.assert_allclose(batch.permute(1, 0, 2, 3).reshape(3, -1), expected, atol=1e-6)


def test_test_inputs_are_normalised_by_the_training_set():
    data = from_arrays([[0.0], [2.0]], [0, 1], [[5.0]], [1])
    assert data.inputs(slice(None), "test").tolist() == [[4.0]]


def test_features_that_never_change_are_safe():
    x = np.array([[7.0, 1e9, 0.0], [7.0, 1e9, 4.0]])
    assert from_arrays(x, [0, 1], x, [0, 1]).inputs([0, 1]).tolist() == [[0, 0, -1], [0, 0, 1]]
    assert from_arrays(x, [0, 1], x, [0, 1], normalize="unit").inputs([0, 1]).tolist() == [
        [0, 0, 0],
        [0, 0, 1],
    ]


def test_a_small_deviation_beside_a_large_mean_is_found():
    x = np.array([[10_000], [10_001], [10_002], [10_003]], dtype=np.int32)
    data = from_arrays(x, Y, x, Y)
    assert data.scale is not None
    assert data.scale.item() == pytest.approx(1 / np.std([0, 1, 2, 3]), rel=1e-6)


def test_unit_divides_bytes_by_255():
    full = np.array([[[0, 255]]], dtype=np.uint8).repeat(2, axis=0)
    assert from_arrays(full, [0, 1], full, [0, 1], normalize="unit").inputs([0]).tolist() == [[[[0.0, 1.0]]]]


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("indices", [slice(0, 2), slice(None), np.array([0, 1]), torch.tensor([1, 0])])
def test_reading_never_changes_what_is_stored(dtype, indices):
    data = from_arrays(BYTES.astype(dtype), Y, BYTES.astype(dtype), Y)
    before = data.x_train.clone()
    first = data.inputs(indices)
    first.zero_()
    assert torch.equal(data.x_train, before)
    assert not torch.equal(data.inputs(indices), first)
    plain = from_arrays(BYTES.astype(dtype), Y, BYTES.astype(dtype), Y, normalize="none")
    plain.inputs(indices).zero_()
    assert torch.equal(plain.x_train, before)


@pytest.mark.parametrize(
    ("shape", "seen"),
    [
        ((5, 6, 7), (1, 6, 7)),
        ((5, 6, 7, 3), (3, 6, 7)),
        ((5, 3, 6, 7), (3, 6, 7)),
        ((5, 3, 6, 4), (4, 3, 6)),
        ((5, 9), (9,)),
    ],
)
def test_shapes(shape, seen):
    x = np.random.default_rng(0).random(shape)
    data = from_arrays(x, np.arange(5), x, np.arange(5), normalize="none")
    assert data.shape == seen
    batch = data.inputs([1])
    assert batch.shape == (1, *seen)
    if shape == (5, 3, 6, 7):
        np.testing.assert_array_equal(batch[0], x[1].astype(np.float32))


def test_labels_of_any_kind_are_numbered_and_keep_their_names():
    x = np.zeros((3, 2))
    words = from_arrays(x, ["dog", "ant", "cat"], x, ["cat"] * 3)
    assert words.class_names == ("ant", "cat", "dog")
    assert words.y_train.tolist() == [2, 0, 1]
    assert words.y_test.tolist() == [1, 1, 1]
    numbers = from_arrays(x, [-1, 7, -1], x, [[7], [7], [-1]])
    assert (numbers.class_names, numbers.y_train.tolist()) == (("-1", "7"), [0, 1, 0])
    assert numbers.y_test.tolist() == [1, 1, 0]
    assert from_arrays(x, np.array(["b", "a", "b"], dtype=object), x, ["a"] * 3).y_train.tolist() == [1, 0, 1]
    named = from_arrays(x, [0, 2, 0], x, [0] * 3, class_names=["a", "b", "c"])
    assert (named.outputs, named.y_train.tolist()) == (3, [0, 2, 0])
    sorted_otherwise = from_arrays(x, ["b", "a", "b"], x, ["a"] * 3, class_names=["b", "a"])
    assert sorted_otherwise.y_train.tolist() == [0, 1, 0]


def test_domains_are_numbered_too():
    x = np.zeros((3, 2))
    data = from_arrays(x, [0, 1, 0], x, [0, 1, 0], domain_train=["q", "p", "q"], domain_test=["p"] * 3)
    assert data.domain_names == ("p", "q")
    assert data.domain_train is not None
    assert data.domain_train.tolist() == [1, 0, 1]
    assert "domains=2" in repr(data)


def test_tensors_wide_unsigned_and_read_only_arrays_are_taken():
    wide = np.array([[60_000], [0]], dtype=np.uint16)
    wide.flags.writeable = False
    data = from_arrays(wide, [0, 1], torch.tensor([[1], [2]]), torch.tensor([0, 1]), normalize="none")
    assert data.inputs([0]).item() == 60_000
    order = np.array([1, 0])
    order.flags.writeable = False
    assert data.inputs(order).flatten().tolist() == [0, 60_000]


def test_to_moves_every_tensor():
    moved = images().to("meta")
    assert {tensor.device.type for tensor in (moved.x_train, moved.y_test, moved.shift)} == {"meta"}
    assert moved.class_names == ("0", "1")


@pytest.mark.parametrize("indices", [np.array([True, False, True, False]), [0.0], [4], [-1]])
def test_indices_that_are_none(indices):
    with pytest.raises(IndexError):
        images().inputs(indices)


X = np.zeros((3, 2))
N = [0, 1, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X, N[:2], X, N), "y_train has 2 values for 3 samples"),
        ((X, N, np.zeros((3, 5)), N), "x_train has size 2, but a sample of x_test has size 5"),
        (
            (np.array([[0, np.nan], [np.inf, 0]]), N[:2], X, N),
            r"x_train: 2 values are NaN or infinite, the first at index \(0, 1\)\. Replace or remove",
        ),
        (
            (np.array([[1e300, 0]]), [0], X, N),
            r"x_train: 1 values are NaN or infinite, the first at index \(0, 0\)\. Replace or remove",
        ),
        ((np.zeros(3), N, X, N), r"x_train has shape \(3,\). Use \(N, F\)"),
        ((np.zeros((0, 2)), [], X, N), r"x_train has shape \(0, 2\)"),
        (([["a"]], [0], X, N), "x_train is of type <U1. Inputs must be numbers"),
        (
            ([[1], [1, 2]], N[:2], X, N),
            r"x_train cannot be converted to an array: setting an array element with a sequence\.",
        ),
        ((X, [0, np.nan, 1], X, N), "y_train contains fractions, NaN or infinity"),
        ((X, [0, np.inf, 1], X, N), "y_train contains fractions, NaN or infinity"),
        ((X, np.eye(3), X, N), r"y_train has shape \(3, 3\).*one-hot"),
        (
            (X, ["a", "b", "a"], X, N),
            r"y_train has the type <U1, but y_test has the type int64\. Use the same type for",
        ),
    ],
)
def test_bad_arrays_are_named(arguments, message):
    with pytest.raises(DataError, match=message):
        from_arrays(*arguments)


def test_bad_names_and_domains_are_named():
    with pytest.raises(DataError, match=r"y contains the numbers 0…1, but there are 1 names\. Use 0…0\."):
        from_arrays(X, N, X, N, class_names=["a"])
    with pytest.raises(DataError, match=r"'b' is not one of the given names\. Use one of: a"):
        from_arrays(X, ["a", "b", "a"], X, ["a"] * 3, class_names=["a"])
    with pytest.raises(DataError, match=r"domain_test is given. Give both"):
        from_arrays(X, N, X, N, domain_train=N)


@pytest.mark.parametrize("kind", [np.int64, np.float64])
def test_a_large_offset_does_not_swallow_what_tells_samples_apart(kind):
    """Times in seconds since 1970: cast to float32 before they were shifted, 22 of 952 values were left."""
    x = (1_700_000_000 + np.arange(-400, 400)).astype(kind)[:, None]
    y = np.arange(800) % 2
    for normalize in ("standard", "unit"):
        data = from_arrays(x, y, x[:5], y[:5], normalize=normalize)
        inputs = data.inputs(slice(None))
        assert inputs.dtype == torch.float32
        assert len(torch.unique(inputs)) == 800
    assert abs(float(from_arrays(x, y, x, y).inputs(slice(None)).std(correction=0)) - 1) < 1e-3


@pytest.mark.parametrize("kind", [np.int64, np.float64])
def test_reading_twice_gives_the_same_and_leaves_the_users_array_alone(kind):
    x = (1_700_000_000 + np.arange(-400, 400)).astype(kind)[:, None]
    before, data = x.copy(), from_arrays(x, np.arange(800) % 2, x, np.arange(800) % 2)
    first = data.inputs(slice(None), "test")
    assert torch.equal(first, data.inputs(slice(None), "test"))
    assert (x == before).all()


def test_a_small_test_set_is_stored_as_exactly_as_its_training_set():
    """On its own nothing in one row shows that float32 would lose what tells it from the others."""
    x = (1_700_000_000 + np.arange(-400, 400)).astype(np.float64)[:, None]
    data = from_arrays(x, np.arange(800) % 2, x[7:8], [1])
    assert torch.equal(data.inputs(slice(None), "test"), data.inputs(slice(7, 8)))
