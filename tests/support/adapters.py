"""Passages of words, and the spec of a small encoder with LoRA adapters, which is the encoder of ``examples/lora``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedstrata as fs

FOLDER = Path(__file__).parents[2] / "examples" / "lora"
CLASSES, WORDS, LENGTH = 3, 60, 9
TRAIN, TEST = 96, 48


def passages(seed: int = 0) -> tuple[Any, Any, Any, Any]:
    """Return passages of 3 to 9 words; four of five words are typical of the class."""
    draw, n = np.random.default_rng(seed), TRAIN + TEST
    y = np.arange(n) % CLASSES
    ids = draw.integers(1, WORDS, (n, LENGTH))
    typical = 1 + CLASSES * draw.integers(0, (WORDS - CLASSES) // CLASSES, ids.shape) + y[:, None]
    ids = np.where(draw.random(ids.shape) < 0.8, typical, ids)
    mask = (np.arange(LENGTH) < draw.integers(3, LENGTH + 1, n)[:, None]).astype(np.int64)
    train, test = (
        {"input_ids": (ids * mask)[part], "attention_mask": mask[part]} for part in (slice(TRAIN), slice(TRAIN, n))
    )
    return train, y[:TRAIN], test, y[TRAIN:]


def write_passages(path: Path) -> str:
    """Write the passages to a ``.npz`` file, and return its name."""
    (train, y_train, test, y_test) = passages()
    named = {f"x_{split}.{name}": array for split, x in (("train", train), ("test", test)) for name, array in x.items()}
    np.savez(path, **named, y_train=y_train, y_test=y_test)
    return str(path)


def spec_of(method: Any = "fedavg", model: dict[str, Any] | None = None, **tables: Any) -> fs.Experiment:
    """Return a spec with four clients that train adapters."""
    training = {"rounds": 2, "clients_per_round": 4, "batch_size": 8, "local_epochs": 1, "lr": 0.1}
    table = {
        "method": method,
        "partition": {"name": "iid", "clients": 4},
        "model": {"name": "bert:adapted", "words": WORDS, "hidden": 64, "layers": 1} | (model or {}),
        "training": training | tables.pop("training", {}),
        "evaluation": {"checkpoint_every": 1},
    }
    return fs.Experiment.from_table(table | tables)


def find_example(patch: pytest.MonkeyPatch) -> None:
    """Let this process, and processes that it starts, import the example's modules."""
    patch.syspath_prepend(FOLDER)
    patch.setenv("PYTHONPATH", str(FOLDER), prepend=":")


def unseeded(shape: Any, classes: int) -> Any:
    """Return an encoder whose base is another one in each process."""
    import torch
    from bert import adapted

    torch.seed()
    return adapted(shape, classes, words=WORDS, hidden=64, layers=1)
