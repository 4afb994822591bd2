"""Fixtures that write run folders like those of real runs."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

SPEC = """seed = {seed}

[data]
name = "digits"

[method]
name = "{method}"

[evaluation]
targets = [0.5, 0.8]
"""


def records(rounds: int, seed: int, *, best: float = 0.9, every: int = 1, method: str = "fedavg") -> list[dict]:
    """Return the records of a run whose accuracy rises towards ``best``, with some clients missing in every round."""
    generator = np.random.default_rng([seed, int(best * 1000)])
    made = []
    for round in range(1, rounds + 1):
        dropped, late, failed = int(generator.integers(0, 4)), int(generator.integers(0, 2)), int(round % 7 == 0)
        record = {"round": round, "clients_invited": 10, "clients_returned": 10 - dropped - late - failed}
        record |= {"clients_dropped": dropped, "clients_late": late, "clients_failed": failed}
        record |= {"samples": 360, "bytes_up": 70_000, "bytes_down": 90_000, "exchanges": 1, "seconds": 0.25}
        record["train_loss"] = float(2.3 * np.exp(-round / 6) + 0.02)
        if round % every == 0 or round == rounds:
            record["accuracy"] = float(best * (1 - np.exp(-round / 5)) + generator.normal(0, 0.01))
            record["loss"] = float(2.3 * np.exp(-round / 7) + 0.2)
        if method == "fedstas":
            record |= {"strata_sizes": [4, 3, 3], "neyman_sd": float(1 / round), "keep_probability": 0.1}
            record["estimate"] = {"samples": 1800 + round, "clipped": 0}
        made.append(record)
    return made


def png(width: int = 4, height: int = 3) -> bytes:
    """Return a PNG file with grey pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = b"".join(b"\0" + b"\x80" * width for _ in range(height))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


Maker = Callable[..., Path]


def write_run(folder: Path, *, method: str = "fedavg", seed: int = 0, rounds: int = 20, **how: float) -> Path:
    folder.mkdir(parents=True)
    lines = records(rounds, seed, method=method, **how)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "spec.toml").write_text(SPEC.format(seed=seed, method=method))
    events = [{"round": r["round"], "kind": "dropped", "clients": [3, 8]} for r in lines if r["clients_dropped"]]
    events.append({"round": rounds, "kind": "failed", "clients": [5], "reason": "out of <memory>"})
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (folder / "partition.png").write_bytes(png())
    return folder


def write_evaluation(
    folder: Path, *, seed: int = 0, names: Sequence[str] = ("cat", "dog", "owl"), clients: int = 12
) -> Path:
    """Write class names, a confusion matrix and a table of clients, as a run with ``client_test`` does."""
    generator = np.random.default_rng(seed)
    counts = generator.integers(0, 5, (len(names), len(names))) + 20 * np.eye(len(names), dtype=int)
    table = {"last": {"round": 1, "confusion": counts.tolist()}}
    (folder / "evaluation.json").write_text(json.dumps(table))
    (folder / "model.json").write_text(json.dumps({"class_names": list(names)}))
    rows = [f"{client},20,{client % 5},5,{generator.uniform(0.3, 1):.3f}\n" for client in range(clients)]
    (folder / "clients.csv").write_text("client,train_samples,heard,samples,accuracy\n" + "".join(rows))
    return folder


@pytest.fixture
def make_run(tmp_path: Path) -> Maker:
    def make(place: str, **how: float) -> Path:
        return write_run(tmp_path / place, **how)

    return make


@pytest.fixture(scope="session")
def write_measured() -> Maker:
    """Return a function that writes a run with all kinds of evaluation."""

    def write(folder: Path, *, names: Sequence[str] = ("cat", "dog", "owl"), clients: int = 12, **how: float) -> Path:
        return write_evaluation(write_run(folder, **how), seed=how.get("seed", 0), names=names, clients=clients)

    return write


@pytest.fixture
def compare(make_run: Maker, tmp_path: Path) -> Path:
    """Write a comparison of two methods with three seeds each."""
    for seed in range(3):
        make_run(f"cmp/fedavg/seed-{seed}", seed=seed, best=0.8)
        make_run(f"cmp/fedstas/seed-{seed}", seed=seed, best=0.93, method="fedstas")
    return tmp_path / "cmp"
