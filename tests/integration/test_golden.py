"""Short specs whose final bytes are known: a commit that moves one raises ``identity.RESULTS`` and says so.

    python tests/integration/test_golden.py     # writes golden.json anew, on this processor

The bytes are those of one version of PyTorch on one type of processor; elsewhere the tests skip.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

import fedstrata as fs
from fedstrata.identity import RESULTS, environment

FILE = Path(__file__).with_name("golden.json")
TABLES: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedavg, cnn": {"model": {"name": "cnn", "channels": [4, 8], "hidden": 16}},
    "fedavg, momentum and clip": {"training": {"momentum": 0.9, "clip": 0.5, "weight_decay": 1e-3}},
    "fedavg, batchnorm": {"model": "resnet20", "training": {"local_steps": 1, "batch_size": 8}},
    "scaffold, drop-out": {"method": "scaffold", "availability": {"name": "bernoulli", "p": 0.6}},
    "moon": {"method": "moon"},
    "rebafl": {"method": "rebafl"},
    "fedstas": {"method": {"name": "fedstas", "strata": 3, "epsilon": 3.0, "bound": 200}},
    "fedssar": {"method": "fedssar"},
    "clustered": {"method": "clustered"},
    "fedavg, adam": {"method": {"name": "fedavg", "aggregator": {"name": "size", "server": "adam"}}},
    "sfl": {"method": "sfl"},
    "stratify": {"method": {"name": "stratify", "cap": 15}},
    "stratify, single": {"method": {"name": "stratify", "mode": "single", "cap": 10}},
}


def spec(label: str) -> fs.Experiment:
    training = {"rounds": 2, "clients_per_round": 4, "batch_size": 16, "lr": 0.05, "workers": 1}
    training |= TABLES[label].get("training", {})
    return fs.Experiment.from_table(
        {
            "seed": 5,
            "data": {"name": "digits", "limit": 300},
            "partition": {"name": "dirichlet", "alpha": 0.3, "clients": 6},
            "model": {"name": "mlp", "hidden": [16]},
            "evaluation": {"every": 0},
            **TABLES[label],
            "training": training | ({} if "local_steps" in training else {"local_epochs": 1}),
        }
    )


def digest(label: str) -> str:
    return hashlib.sha256(safetensors.torch.save(fs.run(spec(label)).params)).hexdigest()


def made_on() -> dict[str, str]:
    return {key: environment()[key] for key in ("torch", "processor")}


@pytest.mark.parametrize("label", TABLES)
def test_the_bytes_are_those_of_this_results_version(label: str) -> None:
    golden = json.loads(FILE.read_text())
    if golden["made_on"] != made_on():
        pytest.skip(f"golden.json was made on {golden['made_on']}")
    assert golden["results_version"] == RESULTS, "write golden.json anew: python tests/integration/test_golden.py"
    assert digest(label) == golden["digests"][label], "results moved: raise identity.RESULTS, in a commit that says why"


if __name__ == "__main__":
    table = {"made_on": made_on(), "results_version": RESULTS, "digests": {label: digest(label) for label in TABLES}}
    FILE.write_text(json.dumps(table, indent=1) + "\n")
