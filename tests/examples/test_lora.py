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
    texts = ["Art thou mad?", "I see you see your see and and\nyou"]
    source = {
        "text": np.frombuffer("".join(texts).encode(), dtype=np.uint8),
        "ends": np.cumsum([len(text) for text in texts]),
        "roles": np.array(["hamlet: GHOST", "lear: FOOL"]),
    }
    arrays = load_prepare().arrays(source, every=1)
    see, _, both, art, mad, i = 3, 4, 5, 6, 8, 9  # by frequency, then by first use; you (4) and thou (7) are gaps
    assert arrays["x_train.input_ids"].tolist() == [
        [2, 0, 0, 0, art, mad, 0, 0, 0],
        [2, 0, 0, i, see, see, 2, see, both],
        [2, i, see, 2, see, see, both, both, 2],
        [2, 2, see, both, both, 0, 0, 0, 0],
    ]
    assert (arrays["x_train.attention_mask"] == (arrays["x_train.input_ids"] > 0)).all()
    assert arrays["y_train"].tolist() == [0, 1, 1, 1]
    assert arrays["client_train"].tolist() == ["hamlet", "lear", "lear", "lear"]
    assert len(arrays["y_test"]) == 0


def test_its_scripts_are_short():
    for path in FOLDER.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 40
