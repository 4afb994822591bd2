from __future__ import annotations

import numpy as np
import pytest
import torch

from fedstrata.base.errors import DataError
from fedstrata.data.arrays import check_seen
from fedstrata.data.dataset import from_arrays

X = np.arange(8.0).reshape(4, 2)
Y = [0, 1, 0, 1]


def labelled(train, test, **settings):
    return from_arrays(X, train, X[: len(test)], test, **settings)


U63 = 2**63


@pytest.mark.parametrize(
    ("train", "test", "names"),
    [
        (np.array(Y, np.uint64), np.array([0, 1], np.int64), ("0", "1")),
        (np.array(Y, np.int64), np.array([0, 1], np.uint64), ("0", "1")),
        (np.array([U63, U63 + 1, -0, 1], np.uint64), np.array([0, 1]), ("0", "1", str(U63), str(U63 + 1))),
        (np.array([U63 + 1, U63, 0, 1], np.uint64), np.array([1, 0], np.uint64), ("0", "1", str(U63), str(U63 + 1))),
        (np.array([2.0**53, 2.0**53 - 1, 0, 0]), np.array([0]), ("0", str(2**53 - 1), str(2**53))),
        (np.array([2**53 + 1, 2**53, 0, 0]), np.array([0]), ("0", str(2**53), str(2**53 + 1))),
        (np.array([True, False, True, True]), np.array([False]), ("False", "True")),
        (np.array(["ä".encode(), b"b", b"b", b"b"]), np.array(["b"]), ("b", "ä")),
    ],
    ids=repr,
)
def test_labels_keep_their_exact_values(train, test, names):
    data = labelled(train, test)
    assert data.class_names == names
    assert [data.class_names[code] for code in data.y_train] == [
        each.decode() if isinstance(each, bytes) else str(int(each) if isinstance(each, float) else each)
        for each in np.asarray(train).tolist()
    ]


def test_whole_numbers_of_two_types_are_places_in_the_names_too():
    data = labelled(np.array(Y, np.uint64), np.array([0, 1]), class_names=["a", "b"])
    assert data.y_train.tolist() == Y
    with pytest.raises(DataError, match=f"y contains the numbers 0…{U63}, but there are 2 names"):
        labelled(np.array([0, U63, 0, 0], np.uint64), np.array([0, 1]), class_names=["a", "b"])


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ([1e300, 2e300, 0, 1], r"y_train: 2e\+300 is too large, because floats are exact only up to 2\*\*53\. Use int"),
        ([-(2.0**60), 0, 0, 1], r"y_train: 1.15292e\+18 is too large"),
        (np.array([2.0**15, 0, 0, np.inf], np.float16), "contains fractions, NaN or infinity"),
        (
            np.array([b"\xff", b"a", b"a", b"a"]),
            r"y_train contains the bytes b'\\xff', which are not UTF-8\. Store text as strings\.",
        ),
        ([None, 1, 1, 1], r"y_train: the rows have different lengths or types\. Give one array of numbers or"),
        (
            torch.tensor(Y).to_sparse(),
            "y_train cannot be converted to an array: can't convert Sparse layout tensor to",
        ),
    ],
    ids=repr,
)
def test_labels_whose_values_would_be_lost_are_refused(train, message):
    with pytest.raises(DataError, match=message):
        labelled(train, [0, 1])


def test_labels_that_only_the_test_set_has_are_named():
    with pytest.warns(UserWarning, match=r"y_train lacks the labels 'c', which 2 of 3 test samples have"):
        data = labelled(["a", "b", "a", "b"], ["c", "a", "c"])
    assert data.class_names == ("a", "b", "c")
    with pytest.warns(UserWarning, match="y_train lacks the labels 'three', which 1 of 2"):
        labelled([0, 1, 0, 1], [1, 2], class_names=["one", "two", "three"])


def test_a_test_set_of_which_nothing_can_be_learnt_is_refused():
    message = r"y_test has the labels 'A', 'B', but y_train has only the labels 'a', 'b'\. Use only labels that occur "
    with pytest.raises(DataError, match=message):
        labelled(["a", "b", "a", "b"], ["A", "B"])
    with pytest.raises(DataError, match=r"has the labels '0', '1', '2', '3', '4', '5', '6', '7', '8', '9', …, but"):
        check_seen(torch.tensor([20]), torch.arange(12), [str(number) for number in range(21)])


def test_domains_that_only_the_test_set_has_are_what_domains_are_for():
    assert labelled(Y, [0, 1], domain_train=["a"] * 4, domain_test=["b", "b"]).domain_names == ("a", "b")


def test_names_that_repeat_cannot_tell_labels_apart():
    with pytest.raises(DataError, match=r"y: some names occur twice in a, b, a\. Make all names different"):
        labelled(["a", "b", "a", "b"], ["a"], class_names=["a", "b", "a"])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            np.array([[U63], [1], [2], [3]], np.uint64),
            rf"x_train: {U63} is too large\. Use integers below 2\*\*63",
        ),
        (
            torch.ones(4, 2).to_sparse(),
            "x_train cannot be converted to an array: can't convert Sparse layout tensor to",
        ),
        (
            (number for number in range(4)),
            r"x_train: the rows have different lengths or types\. Give one array of numbers or",
        ),
    ],
)
def test_inputs_that_would_wrap_or_are_none_are_refused(inputs, message):
    with pytest.raises(DataError, match=message):
        from_arrays(inputs, Y, X, Y)


def test_inputs_of_types_that_numpy_or_torch_does_not_know():
    half = torch.tensor([[1.0, 2.5], [0.0, 1.0]], dtype=torch.bfloat16)
    data = from_arrays(half, [0, 1], half, [0, 1], normalize="none")
    assert data.inputs(slice(None)).tolist() == half.tolist()
    large = 1e9 + np.arange(4, dtype=np.longdouble)[:, None]
    assert len(torch.unique(from_arrays(large, Y, large, Y).inputs(slice(None)))) == 4
    wide = np.array([[U63 - 1], [U63 - 2]], np.uint64)
    assert from_arrays(wide, [0, 1], wide, [0, 1]).x_train.flatten().tolist() == [U63 - 1, U63 - 2]
