"""The conversion of FedScale's traces, whose format its repository describes."""

from __future__ import annotations

import importlib.util
import pickle
from pathlib import Path

import numpy as np
import pytest

import fedstrata as fs

FILE = Path(__file__).parents[2] / "examples" / "fedscale_trace.py"
DEVICES = {
    "a": {"duration": 9, "inactive": [30, 70], "finish_time": 100, "active": [10, 60], "model": "x"},
    "b": {"duration": 9, "inactive": [5, 40], "finish_time": 50, "active": [20, 35, 45], "model": "y"},
}


@pytest.fixture
def convert(tmp_path):
    spec = importlib.util.spec_from_file_location("fedscale_trace", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def write(devices: object) -> Path:
        (tmp_path / "behave").write_bytes(pickle.dumps(devices))
        arguments = ["--clients", "3", "--seconds", "150"]
        module.main([str(tmp_path / "behave"), str(tmp_path / "trace.csv"), *arguments])
        return tmp_path / "trace.csv"

    return write


def online_in_fedscale(device: dict, time: int) -> bool:
    """FedScale's rule, in any order of times."""
    pairs = zip(device["active"], device["inactive"], strict=False)
    return any(first <= time % device["finish_time"] <= last for first, last in pairs)


def test_by_hand(convert):
    rows = ["0,10,30", "0,60,70", "0,110,130", "1,35,40", "1,85,90", "1,135,140", "2,10,30", "2,60,70", "2,110,130"]
    assert convert(DEVICES).read_text().split() == ["client,first,last", *rows]


def test_rounds_are_those_of_fedscale(convert):
    model = fs.Trace(file=str(convert(DEVICES)), round_seconds=3)
    for round in range(1, 51):
        expected = [online_in_fedscale(DEVICES[name], 3 * (round - 1)) for name in "aba"]
        assert model.online(np.arange(3), round, 0).tolist() == expected


def test_a_file_that_would_run_code(convert):
    with pytest.raises(pickle.UnpicklingError, match=r"pathlib.*which is not a plain value"):
        convert({"a": Path("x")})
