from __future__ import annotations

import contextlib
import gc
import io
import os
import threading
import time
import warnings
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from fedstrata.base.config import build
from fedstrata.base.errors import DataError, SpecError
from fedstrata.data.catalog import available
from fedstrata.data.sources import Data, read_arrays


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
    assert (data.train_size, len(data.y_test), data.shape, data.outputs) == (1437, 360, (1, 8, 8), 10)
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
    write(folder / "mnist.npz", x_train=np.zeros((4, 2, 2)), y_train=np.arange(4))
    assert Data("mnist").load().train_size == 4


def test_limit_keeps_the_classes_in_proportion_and_their_names(folder):
    write(folder / "mine.npz", y_train=np.repeat([0, 1, 2, 5], [10, 5, 4, 1]), y_test=np.array([0, 1, 2, 0]),
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


def test_a_class_that_the_limit_leaves_nothing_of_is_named(folder):
    write(folder / "mine.npz", y_train=np.repeat([0, 1, 2, 3], [10, 5, 4, 1]))
    with pytest.warns(UserWarning, match="y_train lacks the labels '3', which 1 of 4 test samples have"):
        Data("mine", limit=10).load()


def test_unknown_names_say_what_there_is(folder):
    write(folder / "mine.npz")
    with pytest.raises(
        SpecError, match=r"data.name = 'mnits': .*did you mean 'mnist'\? Use one of: digits, mine "
    ) as caught:
        Data("mnits").load()
    assert str(folder) in str(caught.value)
    with pytest.raises(SpecError, match="not a known data set"):
        Data("x" * 5000).load()
    with pytest.raises(SpecError, match="not a known data set"):
        Data("../data/mine").load()
    with pytest.raises(DataError, match=r"the file cifar10\.npz was not found in") as missing:
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
        "single": "is a single array",
        "half": r"lacks the arrays y_train, x_test, y_test, and has only x_train, other",
        "objects": "Object arrays cannot be loaded when allow_pickle=False",
        "wrong": "data.name = 'wrong': y_train has 3 values for 20 samples",
        "torn": "is damaged",
        "text": "damaged",
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
    with pytest.raises(
        SpecError,
        match=r"did you mean 'limit'\? Use one of: name, normalize, limit, .*scale, augment, custom\.",
    ):
        build(Data, {"limits": 1})


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def header(text):
    """A .npy file of which there is nothing but the header."""
    body = text.encode().ljust(127 - 10) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(body).to_bytes(2, "little") + body


def claims(shape, descr="<f8"):
    return header(f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}")


@pytest.mark.parametrize(
    ("member", "content", "message"),
    [
        ("x_train", header("{'descr': '<f8', 'fortran_order': False, 'shape': (4, 2"), "is damaged: .*EOF"),
        ("x_train", header("(" * 100), "is damaged: "),
        ("x_train", b"\x93NUMPY\x09\x00", "is damaged: "),
        ("x_train", b"", "is damaged: "),
        ("x_train", b"no header", "is damaged: "),
        ("x_train", claims((4, 2 * 10**12)), "is damaged: Unable to allocate 58.2 TiB"),
        ("x_train", claims((4, 10**30)), "is damaged: .*too large"),
        ("x_train", claims((1, 1), "|V2000000000"), "is damaged: EOF: reading array data, expected 2000000000 bytes"),
        ("x_train", claims((-4, -2)) + bytes(64), "is damaged: "),
        ("y_train", npy(np.arange(20) % 4)[:-1], "is damaged: EOF: reading array data, expected 160 bytes"),
        ("classes", npy(np.array("abcd")), r"classes is of type <U4 and shape \(\)\. Give a list of names\."),
        (
            "classes",
            npy(np.array([["a"], ["b"]])),
            r"classes is of type <U1 and shape \(2, 1\)\. Give a list of names\.",
        ),
        (
            "classes",
            npy(np.array([b"\xff"])),
            r"classes contains the bytes b'\\xff', which are not UTF-8\. Store text as strings\.",
        ),
        ("domains", npy(np.array(0)), r"domains is of type int64 and shape \(\)\. Give a list of names\."),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_member_that_is_no_array_is_named_and_nothing_is_allocated_for_it(folder, member, content, message):
    write(folder / "mine.npz")
    with zipfile.ZipFile(folder / "mine.npz") as good, zipfile.ZipFile(folder / "bad.npz", "w") as bad:
        for name in good.namelist():
            if name != f"{member}.npy":
                bad.writestr(name, good.read(name))
        bad.writestr(f"{member}.npy", content)
    with pytest.raises(DataError, match=message):
        Data("bad").load()


def test_names_of_bytes_are_text(folder):
    write(folder / "mine.npz", classes=np.array(["ä".encode(), b"b", b"c", b"d"]))
    assert Data("mine").load().class_names == ("ä", "b", "c", "d")


def test_an_archive_that_memory_cannot_hold_is_refused_by_what_it_declares(folder):
    """A zip bomb: it packs 1 MiB of zeros, and says it were 2**60 bytes."""
    write(folder / "bomb.npz")
    with zipfile.ZipFile(folder / "bomb.npz", "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("classes.npy", bytes(1 << 20))
        archive.getinfo("classes.npy").file_size = 1 << 60
    with pytest.raises(DataError, match=r"bomb.npz contains 1,073,741,824.0 GiB of arrays. Use at most 256"):
        Data("bomb").load()


def test_an_encrypted_archive_a_pipe_and_a_home_of_nobody(folder):
    write(folder / "mine.npz")
    content = bytearray((folder / "mine.npz").read_bytes())
    for mark, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        place = content.find(mark)
        while place >= 0:
            content[place + flags] |= 1
            place = content.find(mark, place + 1)
    (folder / "locked.npz").write_bytes(content)
    os.mkfifo(folder / "pipe.npz")
    for name, message in {
        str(folder / "locked.npz"): "encrypted",
        str(folder / "pipe.npz"): "is not a file",
        "~nobody_of_that_name/mine.npz": "home directory",
        "a\0b.npz": "null byte",
    }.items():
        with pytest.raises(DataError, match=message):
            Data(name).load()


@pytest.mark.slow
def test_no_damaged_byte_ends_in_a_traceback(folder):
    write(folder / "mine.npz")
    content, chance = (folder / "mine.npz").read_bytes(), np.random.default_rng(0)
    for _ in range(300):
        damaged = bytearray(content)
        for place in chance.integers(0, len(content), 3):
            damaged[place] = chance.integers(256)
        (folder / "damaged.npz").write_bytes(damaged)
        with contextlib.suppress(DataError), warnings.catch_warnings(action="ignore"):
            Data("damaged").load()


@pytest.mark.slow
def test_threads_read_files_at_once(tmp_path: Path) -> None:
    """CPython's issue 106905: sound files were said to be damaged, where the collector let another thread in."""
    np.savez(tmp_path / "x.npz", x_train=np.zeros(4), y_train=np.zeros(4))
    found: list[object] = []

    def read(deep: int) -> None:
        if deep:
            read(deep - 1)
            return
        for _ in range(60):
            try:
                read_arrays(tmp_path / "x.npz", ("x_train", "y_train"))
            except DataError as error:
                found.append(error)

    def let_others(*_: object) -> None:
        time.sleep(0.00001)

    before = gc.get_threshold()
    gc.callbacks.append(let_others)
    gc.set_threshold(20)
    try:
        threads = [threading.Thread(target=read, args=(3 * i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(let_others)
    assert found == []
