"""Files of one JSON object a line, and of one object."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.base.errors import DataError
from fedstrata.base.jsonl import MetricsLog, jsonable, read_jsonl, replace_file

RECORDS = [
    {"round": 1, "accuracy": 0.5, "bytes_up": 10, "seconds": 0.5, "strata": {"a": 1.0}},
    {"round": 2, "bytes_up": 10, "seconds": 0.25, "sizes": [1, 2]},
    {"round": 3, "accuracy": 0.8, "bytes_up": 10, "seconds": 0.25, "strata": {"a": 2.0}},
    {"round": 4, "accuracy": 0.8, "bytes_up": 5, "seconds": 0.0},
    {"round": 5, "accuracy": 0.6, "bytes_up": 5, "seconds": 0.0, "samples": 40},
]


@pytest.mark.slow
def test_log_survives_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.append({"round": 1, "name": "é"}, {"round": 2, "loss": math.nan})
    whole = path.read_bytes()
    assert b"NaN" not in whole
    for cut in range(1, len(whole)):
        path.write_bytes(whole + b'{"round": 3, "name": "\xc3')
        assert [record["round"] for record in read_jsonl(path)] == [1, 2]
        path.write_bytes(whole[:cut])
        MetricsLog(path).append({"round": 9})
        rounds = [record["round"] for record in read_jsonl(path)]
        assert rounds in ([9], [1, 9], [1, 2, 9])
        assert len(rounds) - 1 == whole[: cut + 1].count(b"\n")


def test_a_write_that_broke_off_does_not_swallow_the_next_record(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append({"round": 1})
    with log.path.open("ab") as file:  # as a full disk leaves it
        file.write(b'{"round": 2, "na')
    log.append({"round": 2})
    assert [record["round"] for record in read_jsonl(log.path)] == [1, 2]


def test_truncate_for_resume(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = MetricsLog(path)
    log.truncate_after(3)  # nothing there yet
    assert not path.exists()
    log.append(*({"round": round, "kind": "late"} for round in (0, 1, 1, 2, 3)))
    kept = b"".join(path.read_bytes().splitlines(keepends=True)[:3])
    log.truncate_after(1)
    assert path.read_bytes() == kept
    assert [entry.name for entry in tmp_path.iterdir()] == ["events.jsonl"]


@pytest.mark.parametrize("line", ["[1]", '{"loss": 1}', '{"round": "1"}', '{"round": 1', '{"round": true}'])
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"round": 1}}\n{line}\n{{"round": 3}}\n')
    with pytest.raises(DataError, match="line 2"):
        read_jsonl(path)
    with pytest.raises(DataError, match="line 2"):
        MetricsLog(path).append({"round": 4})


def test_a_line_that_is_changed_together_with_its_checksum_shows_in_the_next_line(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(*RECORDS)
    lines = log.path.read_bytes().splitlines(keepends=True)
    forged = MetricsLog(tmp_path / "forged.jsonl")
    forged.append(*RECORDS[:2], {**RECORDS[2], "accuracy": 0.9})
    changed = forged.path.read_bytes().splitlines(keepends=True)
    assert changed[:2] == lines[:2]
    log.path.write_bytes(b"".join([*lines[:2], changed[2], *lines[3:]]))
    with pytest.raises(
        DataError,
        match=r"line 4: the checksum is wrong, because this line was changed, or an earlier line was removed\. Re",
    ):
        read_jsonl(log.path)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@given(values)
def test_jsonable_is_what_json_gives_back(value: object) -> None:
    plain = jsonable(value)
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert jsonable(plain) == plain


def test_jsonable_names_what_it_cannot_record() -> None:
    assert jsonable({"t": torch.arange(2), "s": {3, 1}, "n": np.int64(2)}) == {"t": [0, 1], "s": [1, 3], "n": 2}
    with pytest.raises(TypeError, match="complex"):
        jsonable({"z": 1j})


KILLED = """
import os, signal
from pathlib import Path
from fedstrata.base.jsonl import replace_file

os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
replace_file(Path("spec.toml"), b"half")
"""


@pytest.mark.slow
def test_what_a_killed_process_left_goes_with_the_next_write(tmp_path: Path) -> None:
    assert subprocess.run([sys.executable, "-c", KILLED], cwd=tmp_path, check=False).returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".spec.toml.")
    kept = [".note.tmp", ".a.b.tmp", f".other.{os.getppid()}.tmp"]  # nobody's, and that of a process that runs
    for name in kept:
        (tmp_path / name).touch()
    replace_file(tmp_path / "run.json", b"whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, "run.json"])
