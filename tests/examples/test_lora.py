"""The data of ``examples/lora``: gaps where plays have a pronoun of address."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parents[2] / "examples" / "lora"


def load_prepare():
    spec = importlib.util.spec_from_file_location("lora_prepare", FOLDER / "prepare.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_sample_is_a_gap_and_the_words_around_it():
    texts = ["My lord!", "See me: lord, see\nMe see my and and"]
    source = {
        "text": np.frombuffer("".join(texts).encode(), dtype=np.uint8),
        "ends": np.cumsum([len(text) for text in texts]),
        "roles": np.array(["hamlet: GHOST", "lear: FOOL"]),
    }
    arrays = load_prepare().arrays(source)
    see, lord, both = 3, 5, 7  # by frequency, then by first use; my (4) and me (6) are gaps
    assert arrays["x_train.input_ids"].tolist() == [
        [2, 0, 0, lord, 0],
        [2, 0, see, lord, see],
        [2, lord, see, see, 2],
        [2, 2, see, both, both],
    ]
    assert (arrays["x_train.attention_mask"] == (arrays["x_train.input_ids"] > 0)).all()
    assert arrays["y_train"].tolist() == [0, 1, 1, 0]
    assert arrays["client_train"].tolist() == ["hamlet", "lear", "lear", "lear"]
    assert len(arrays["y_test"]) == 0


def test_its_scripts_are_short():
    for path in FOLDER.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 40
