from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from fedstrata.config import build
from fedstrata.data.catalog import available
from fedstrata.data.sources import Data
from fedstrata.errors import DataError, SpecError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSTRATA_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def write(path, **more):
    x = np.arange(80, dtype=np.uint8).reshape(20, 2, 2)
    arrays = {"x_train": x, "y_train": np.arange(20) % 4, "x_test": x[:4], "y_test": np.arange(4)}
    np.savez(path, **(arrays | more))


def test_digits_is_a_fixed_stratified_split_of_all_of_them():
    data, again = Data().load(), Data("digits").load(seed=5)
    assert (data.train_size, len(data.y_test), data.shape, data.classes) == (1437, 360, (1, 8, 8), 10)
    assert torch.equal(data.x_train, again.x_train)
    from sklearn.datasets import load_digits

    bunch = load_digits()
    both = torch.cat([data.x_train, data.x_test]).reshape(1797, -1).numpy()
    assert Counter(map(bytes, both)) == Counter(
        map(bytes, np.rint(bunch.images * 255 / 16).astype(np.uint8).reshape(1797, -1))
    )
    counts = np.bincount(bunch.target)
    assert np.abs(np.bincount(data.y_test) - counts * 360 / 1797).max() < 1


def test_a_file_is_found_by_name_and_by_path(folder):
    write(folder / "mine.npz", classes=np.array(["a", "b", "c", "d"]), domain_train=np.arange(20) % 2,
          domain_test=np.zeros(4, np.int64), domains=np.array(["old", "new"]))  # fmt: skip
    by_name, by_path = Data("mine").load(), Data(str(folder / "mine.npz")).load()
    assert torch.equal(by_name.x_train, by_path.x_train)
    assert (by_name.class_names, by_name.domain_names) == (("a", "b", "c", "d"), ("old", "new"))
    assert ("mine", "your own file", True) in available()
    assert {name: found for name, _, found in available()} == {
        **dict.fromkeys(("mnist", "fashion_mnist", "emnist_letters", "usps", "cifar10", "cifar100"), False),
        **dict.fromkeys(("covtype_sample", "pacs64", "digits3"), False), "digits": True, "mine": True,
    }  # fmt: skip


def test_the_cache_folder_is_the_second_place(folder, tmp_path):
    cache = tmp_path / "home" / ".cache" / "fedstrata"
    cache.mkdir(parents=True)
    write(cache / "mnist.npz")
    assert Data("mnist").load().train_size == 20
    write(folder / "mnist.npz", x_train=np.zeros((1, 2, 2)), y_train=np.zeros(1, np.int64))
    assert Data("mnist").load().train_size == 1


def test_limit_keeps_the_classes_in_proportion_and_their_names(folder):
    write(folder / "mine.npz", y_train=np.repeat([0, 1, 2, 5], [10, 5, 4, 1]), y_test=np.array([0, 1, 2, 5]),
          domain_train=np.arange(20) % 2, domain_test=np.zeros(4, np.int64))  # fmt: skip
    data = Data("mine", limit=10).load()
    assert torch.bincount(data.y_train, minlength=4).tolist()[:3] == [5, 3, 2]
    assert data.class_names == ("0", "1", "2", "5")
    assert data.domain_train is not None
    assert len(data.domain_train) == len(data.x_train) == 10
    assert data.inputs(slice(None)).mean().item() == pytest.approx(0, abs=1e-6)
    assert torch.equal(data.x_train, Data("mine", limit=10).load().x_train)
    others = [Data("mine", limit=10).load(seed).x_train for seed in range(1, 5)]
    assert not all(torch.equal(data.x_train, other) for other in others)
    assert Data("mine", limit=999).load().train_size == 20


def test_unknown_names_say_what_there_is(folder):
    write(folder / "mine.npz")
    with pytest.raises(
        SpecError, match=r"data.name = 'mnits'.*there are: digits, mine .*did you mean 'mnist'"
    ) as caught:
        Data("mnits").load()
    assert str(folder) in str(caught.value)
    with pytest.raises(SpecError, match="no such data set"):
        Data("../data/mine").load()
    with pytest.raises(DataError, match=r"no cifar10\.npz in") as missing:
        Data("cifar10").load()
    assert str(folder) in str(missing.value)
    with pytest.raises(DataError, match=r"there is no file .*gone\.npz"):
        Data(str(folder / "gone.npz")).load()


def test_files_that_are_no_data_set(folder):
    (folder / "text.npz").write_text("hello")
    np.savez(folder / "half.npz", x_train=np.zeros(3), other=np.zeros(1))
    write(folder / "objects.npz", y_train=np.array([{}] * 20, dtype=object))
    write(folder / "wrong.npz", y_train=np.zeros(3))
    write(folder / "torn.npz")
    torn = (folder / "torn.npz").read_bytes()
    (folder / "torn.npz").write_bytes(torn[: len(torn) // 2])
    with (folder / "single.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    for name, message in {
        "single": "holds a single array",
        "half": r"has no y_train, x_test, y_test; it holds: x_train, other",
        "objects": "without pickle",
        "wrong": "data 'wrong': y_train: 3 for 20 samples",
        "torn": "is damaged",
        "text": "pickle|damaged",
    }.items():
        with pytest.raises(DataError, match=message):
            Data(name).load()


def test_settings_round_trip_and_refuse():
    data = Data("mnist", normalize="unit", limit=5)
    assert data.to_spec() == {"name": "mnist", "normalize": "unit", "limit": 5}
    assert build(Data, data.to_spec()) == data
    assert Data() == Data(name="digits")
    with pytest.raises(SpecError, match="limit = 0"):
        build(Data, {"limit": 0})
    with pytest.raises(SpecError, match="accepted here: name, normalize, limit; did you mean 'limit'"):
        build(Data, {"limits": 1})
