from __future__ import annotations

import sys

import numpy as np
import pytest
from lazy import Lazy

from fedstrata.base.errors import DataError, ExtraMissingError, SpecError
from fedstrata.data.hub import from_hub, input_columns, label_column
from fedstrata.data.sources import Data

pytestmark = pytest.mark.slow
datasets, Image = Lazy("datasets"), Lazy("PIL.Image")


def pictures(count, size=(4, 3), mode="RGB"):
    shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
    return [Image.fromarray(np.full(shape, number, np.uint8)) for number in range(count)]


def split(columns, **features):
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features) if features else None)


def photos():
    """Features of photos and their kinds."""
    return {"photo": datasets.Image(), "kind": datasets.ClassLabel(names=["cat", "dog"])}


def test_images_and_class_labels():
    train = split({"photo": pictures(4), "kind": [0, 1, 1, 0]}, **photos())
    test = split({"photo": pictures(2), "kind": [1, 0]}, **photos())
    arrays = from_hub(datasets.DatasetDict(train=train, test=test))
    assert arrays["x_train"].shape == (4, 3, 4, 3)
    assert arrays["x_train"].dtype == np.uint8
    assert arrays["x_train"][:, 0, 0, 0].tolist() == [0, 1, 2, 3]
    assert arrays["y_test"].tolist() == [1, 0]
    assert arrays["classes"].tolist() == ["cat", "dog"]


def test_grey_images_and_validation_in_place_of_test():
    grey = split({"photo": pictures(3, mode="L"), "kind": [0, 1, 0]}, **photos())
    arrays = from_hub(datasets.DatasetDict(train=grey, validation=grey))
    assert arrays["x_test"].shape == (3, 3, 4)


def test_one_split_is_divided_by_the_seed():
    one = datasets.DatasetDict(
        train=split({"x": [[float(n), 0.0] for n in range(50)], "label": [n % 2 for n in range(50)]})
    )
    first, again, other = from_hub(one, 0), from_hub(one, 0), from_hub(one, 1)
    assert np.bincount(first["y_test"]).tolist() == [5, 5]
    assert sorted([*first["x_train"][:, 0], *first["x_test"][:, 0]]) == list(range(50))
    assert np.array_equal(first["x_test"], again["x_test"])
    assert not np.array_equal(first["x_test"], other["x_test"])


def test_arrays_and_tables():
    grid = split({"grid": [np.full((2, 3), n).tolist() for n in range(4)], "y": ["a", "b", "a", "b"]},
                 grid=datasets.Array2D((2, 3), "float32"), y=datasets.Value("string"))  # fmt: skip
    arrays = from_hub(datasets.DatasetDict(train=grid, test=grid))
    assert arrays["x_train"].shape == (4, 2, 3)
    assert arrays["y_train"].tolist() == ["a", "b", "a", "b"]
    table = split({"height": [1.5, 2.5], "name": ["p", "q"], "weight": [3, 4], "label": [0, 1]})
    arrays = from_hub(datasets.DatasetDict(train=table, test=table))
    assert arrays["x_train"].tolist() == [[1.5, 3.0], [2.5, 4.0]]


def test_unclear_columns_are_named():
    image, label = datasets.Image(), datasets.ClassLabel(num_classes=2)
    assert input_columns(datasets.Features(left=image, image=image, label=label)) == ["image"]
    assert label_column(datasets.Features(image=image, coarse_label=label, fine_label=label)) == "fine_label"
    with pytest.raises(DataError, match="could be the input: left, right"):
        input_columns(datasets.Features(left=image, right=image, label=label))
    with pytest.raises(DataError, match="could be the label: a, b"):
        label_column(datasets.Features(a=label, b=label))
    with pytest.raises(DataError, match=r"no column with labels. Rename one of these columns to 'label': image"):
        label_column(datasets.Features(image=image))
    with pytest.raises(DataError, match=r"no column of images.*text \(Value\)"):
        input_columns(datasets.Features(text=datasets.Value("string"), label=label))
    with pytest.raises(DataError, match=r"the data set has the splits all, but not 'train'"):
        from_hub(datasets.DatasetDict(all=split({"x": [0.0], "y": [0]})))


def test_inputs_of_different_sizes_are_refused():
    mixed = split({"photo": [*pictures(1), *pictures(1, size=(5, 3))], "kind": [0, 1]}, **photos())
    with pytest.raises(DataError, match="the images in the column 'photo' have different sizes, 4x3 and 5x3"):
        from_hub(datasets.DatasetDict(train=mixed, test=mixed))
    ragged = split({"x": [[1.0], [1.0, 2.0]], "y": [0, 1]})
    with pytest.raises(DataError, match="the rows of the column 'x' have different lengths"):
        from_hub(datasets.DatasetDict(train=ragged, test=ragged))


def test_without_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ExtraMissingError, match=r"fedstrata\[hub\]"):
        Data("hub:owner/name").load()


def test_a_hub_that_cannot_be_reached():
    with pytest.raises(
        DataError, match=r"data\.name = 'hub:owner/there-is-none': 'owner/there-is-none' could not be loaded from"
    ):
        Data("hub:owner/there-is-none").load()


def test_images_of_more_than_eight_bits_keep_their_numbers():
    """They were clipped at 255; floats in [0, 1] became 0."""
    deep = [Image.fromarray(np.full((3, 4), 300 * n, np.uint16)) for n in range(4)]
    columns = {"photo": deep, "kind": [0, 1, 0, 1]}
    arrays = from_hub(datasets.DatasetDict(train=split(columns, **photos()), test=split(columns, **photos())))
    assert arrays["x_train"][:, 0, 0].tolist() == [0, 300, 600, 900]


def test_grey_images_among_colours_whichever_comes_first():
    mixed = [*pictures(2, mode="L"), *pictures(3)[2:]]
    for order in (mixed, mixed[::-1]):
        columns = {"photo": order, "kind": [0, 1, 0]}
        arrays = from_hub(datasets.DatasetDict(train=split(columns, **photos()), test=split(columns, **photos())))
        assert arrays["x_train"].shape == (3, 3, 4, 3)
        assert sorted(arrays["x_train"][:, 0, 0, 1].tolist()) == [0, 1, 2]


def test_a_column_says_whose_a_sample_is_and_is_no_input():
    columns = {"pixels": [[float(n), 1.0] for n in range(20)], "writer": [f"w{n % 3}" for n in range(20)],
               "label": [n % 2 for n in range(20)]}  # fmt: skip
    one = from_hub(datasets.DatasetDict(train=split(columns)), client="writer")
    for part in ("train", "test"):  # each sample's first number tells its writer
        assert one[f"client_{part}"].tolist() == [f"w{int(n) % 3}" for n in one[f"x_{part}"][:, 0]]
    two = from_hub(datasets.DatasetDict(train=split(columns), test=split(columns)), client="writer")
    assert two["client_test"].tolist() == columns["writer"]
    numbers = {"a": [1.0, 2.0], "who": [7, 9], "label": [0, 1]}
    table = from_hub(datasets.DatasetDict(train=split(numbers), test=split(numbers)), client="who")
    assert table["x_train"].tolist() == [[1.0], [2.0]]
    assert table["client_train"].tolist() == [7, 9]
    with pytest.raises(
        SpecError,
        match=r"data.client = 'writr': is not a column of the data set; did you mean 'writer'\? Use",
    ):
        from_hub(datasets.DatasetDict(train=split(columns)), client="writr")
