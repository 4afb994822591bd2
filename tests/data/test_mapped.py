"""Inputs in memory-mapped files: the same results as in memory, without a copy of them."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from task_cases import Networks, data_of, spec_of

import fedstrata as fs
from fedstrata.base.errors import DataError
from fedstrata.data.mapped import MappedFile
from fedstrata.evaluation.holdouts import without
from fedstrata.runs.identity import fingerprint_of_data

CASE = "classification, several inputs"


def arrays(kind: str) -> dict[str, Any]:
    draw = np.random.default_rng(3)
    x = {"bytes": draw.integers(0, 256, (60, 6, 6)), "floats": draw.normal(size=(60, 4)).astype(np.float32)}[kind]
    x = x.astype(np.uint8) if kind == "bytes" else x
    y = np.arange(60) % 3
    return {"x_train": x[:40], "y_train": y[:40], "x_test": x[40:], "y_test": y[40:]}


def folder_of(place: Path, given: dict[str, Any]) -> str:
    place.mkdir()
    for name, array in given.items():
        np.save(place / f"{name}.npy", array)
    return f"{place}/"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bytes", "floats"])
@pytest.mark.parametrize("evaluation", [{}, {"validation": 0.2}, {"client_test": 0.2}])
def test_a_folder_gives_the_same_run_as_arrays_in_memory(kind: str, evaluation: Any, tmp_path: Path):
    given = arrays(kind)
    spec = spec_of(model={"name": "mlp", "hidden": [8]}, evaluation=evaluation)
    mapped = spec.replace(data=fs.Data(folder_of(tmp_path / "data", given)))
    data = mapped.data.load()
    assert set(data.mapped) == {"x_train", "x_test"}
    memory = fs.from_arrays(**given)
    assert fingerprint_of_data(data) == fingerprint_of_data(memory)
    assert torch.equal(data.inputs(slice(None)), memory.inputs(slice(None)))
    one, other = fs.run(spec, data=memory), fs.run(mapped)
    assert all(torch.equal(one.params[name], other.params[name]) for name in one.params)
    assert one[-1]["accuracy"] == other[-1]["accuracy"]


@pytest.mark.slow
def test_several_inputs_in_a_folder(tmp_path: Path):
    made = data_of(CASE)
    parts = {"train": made.x_train, "test": made.x_test}
    named = {f"x_{split}.{name}": part.numpy() for split, x in parts.items() for name, part in x.items()}
    spec = spec_of(data=folder_of(tmp_path / "data", {"y_train": made.y_train, "y_test": made.y_test, **named}))
    data = spec.data.load()
    assert set(data.mapped) == set(named)
    assert data.inputs(slice(0, 2))["mask"].dtype == torch.bool
    history = fs.run(spec, model=Networks(CASE))
    assert history.final_accuracy == fs.run(spec_of(), data=made, model=Networks(CASE)).final_accuracy


def test_tokens_stay_in_their_file(tmp_path: Path):
    ids = np.arange(20).reshape(5, 4) % 7
    place = folder_of(tmp_path / "data", {"x_train": ids, "y_train": ids, "x_test": ids, "y_test": ids})
    data = fs.Data(place, normalize="keep").load(task=fs.NextToken())
    assert set(data.mapped) == {"x_train", "x_test"}
    assert data.inputs(slice(0, 1)).tolist() == [[0, 1, 2, 3]]


def test_a_change_of_a_tensor_does_not_change_the_file(tmp_path: Path):
    np.save(tmp_path / "x.npy", np.zeros((3, 2), dtype=np.float32))
    file = MappedFile.of(np.load(tmp_path / "x.npy", mmap_mode="r"))
    assert file is not None
    file.open()[0] = 1.0
    assert np.load(tmp_path / "x.npy").sum() == 0.0
    assert MappedFile.of(np.load(tmp_path / "x.npy", mmap_mode="r")[1:]) is None


def test_a_limit_copies_its_samples_and_a_division_copies_none(tmp_path: Path):
    place = folder_of(tmp_path / "data", arrays("bytes"))
    limited = fs.Data(place, limit=9).load()
    assert not limited.mapped
    assert len(limited.x_train) == 9
    data = fs.Data(place).load()
    divided, left = without(data, np.array([0, 1]))
    assert len(divided.x_train) == 0
    assert len(divided.y_train) == len(left) == 38


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (
            np.zeros((4, 2)),
            "x_train: the memory-mapped file has the type float64 and the shape (4, 2). Use one of the types",
        ),
        (np.zeros((4, 3, 8, 8), np.uint8), "x_train is memory-mapped with shape (4, 3, 8, 8). Use shape (N, F), (N"),
        (np.array([[0, np.nan]], np.float32), "x_train: the value at index (0, 1) is NaN or infinite. Replace or remo"),
    ],
)
def test_files_that_would_have_to_be_converted_are_refused(x: Any, message: str, tmp_path: Path):
    y = np.arange(len(x)) % 2
    place = folder_of(tmp_path / "data", {"x_train": x, "y_train": y, "x_test": x, "y_test": y})
    with pytest.raises(DataError) as caught:
        fs.Data(place).load()
    assert message in str(caught.value)


def test_missing_files_are_named(tmp_path: Path):
    with pytest.raises(DataError, match="does not exist"):
        fs.Data(f"{tmp_path}/none/").load()
    place = folder_of(tmp_path / "data", {"x_train": np.zeros((2, 2), np.float32), "y_train": [0, 1]})
    with pytest.raises(DataError, match=r"lacks x_test\.npy, y_test\.npy\. Save each array with np\.save"):
        fs.Data(place).load()
    (tmp_path / "data/x_test.npy").write_bytes(b"no array")
    with pytest.raises(DataError, match=r"x_test\.npy is not a \.npy file, or is damaged"):
        fs.Data(place).load()


RUN = """
    import threading, time
    import fedstrata as fs

    def anonymous():
        lines = open("/proc/self/status").read().splitlines()
        return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) << 10

    spec = fs.Experiment.from_table({
        "data": "PLACE/", "partition": {"name": "iid", "clients": 500}, "evaluation": {"validation": 0.1},
        "model": {"name": "mlp", "hidden": [8]}, "training": {"rounds": 1, "clients_per_round": 10, "workers": 1},
    })
    fs.run(spec.replace(data=fs.Data(), partition=fs.IID(clients=20)))  # imports all that a run needs
    most, before = [0], anonymous()
    def watch():
        while True:
            most[0] = max(most[0], anonymous())
            time.sleep(0.002)
    threading.Thread(target=watch, daemon=True).start()
    fs.run(spec)
    print(most[0] - before)
"""


@pytest.mark.long
@pytest.mark.slow
def test_a_run_keeps_no_copy_of_the_inputs_in_memory(tmp_path: Path):
    rows, width = 50_000, 2048
    file = np.lib.format.open_memmap(tmp_path / "x_train.npy", "w+", np.float32, (rows, width))
    draw = np.random.default_rng(0)
    for begin in range(0, rows, 5000):
        file[begin : begin + 5000] = draw.random((5000, width), dtype=np.float32)
    file.flush()
    np.save(tmp_path / "x_test.npy", np.asarray(file[:100]))
    np.save(tmp_path / "y_train.npy", np.arange(rows) % 2)
    np.save(tmp_path / "y_test.npy", np.arange(100) % 2)
    code = textwrap.dedent(RUN).replace("PLACE", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < rows * width * 4 / 2, "the inputs take 391 MiB"
