"""Short specs whose results are known: a commit that moves one says which and why.

Of each, the SHA-256 of the model, of the rounds without their seconds, and of the events. A change of a model also
raises ``identity.RESULTS``.

    python tests/integration/test_golden.py     # writes golden.json again, for this processor

The bytes are those of one version of PyTorch on some types of processors; elsewhere the tests skip.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import fedstrata as fs
from fedstrata.methods.base import METHODS
from fedstrata.runs.identity import RESULTS, environment

FILE = Path(__file__).with_name("golden.json")
CNN = {"name": "cnn", "channels": [4, 8], "hidden": 16}
BATCHNORM = {"name": "cnn", "channels": [4, 8], "hidden": 16, "norm": "batch"}
DROPOUT = {"availability": {"name": "bernoulli", "p": 0.6}}
SLOW = {"name": "bernoulli", "p": 0.8, "speed_spread": 0.8, "seconds_per_sample": 0.01, "latency": 0.05}
SLOW |= {"bandwidth_up": 0.5, "bandwidth_down": 1.0}

TABLES: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedavg, cnn": {"model": CNN},
    "fedavg, momentum and clip": {"training": {"momentum": 0.9, "clip": 0.5, "weight_decay": 1e-3}},
    "fedavg, batchnorm": {"model": "resnet20", "training": {"local_steps": 1, "batch_size": 8}},
    "fedprox": {"method": "fedprox"},
    "scaffold, drop-out": {"method": "scaffold", **DROPOUT},
    "moon": {"method": "moon"},
    "rebafl": {"method": "rebafl"},
    "rebafl, drop-out": {"method": "rebafl", **DROPOUT},
    "fedsts": {"method": {"name": "fedsts", "strata": 3}},
    "fedstas": {"method": {"name": "fedstas", "strata": 3, "epsilon": 3.0, "bound": 200}},
    "fedsampling": {"method": "fedsampling"},
    "fedssar": {"method": "fedssar"},
    "clustered": {"method": "clustered"},
    "power-of-choice": {"method": "power-of-choice"},
    "feddyn": {"method": "feddyn"},
    "fedrs": {"method": "fedrs"},
    "fedlc": {"method": "fedlc"},
    "fedbabu": {"method": "fedbabu"},
    "bsm-fedavg": {"method": "bsm-fedavg"},
    "fedavg-ft": {
        "method": {"name": "fedavg-ft", "per_class": 2},
        "partition": {"name": "classes", "per_client": 2, "clients": 6, "size": 16},
    },
    "fedtan": {"method": "fedtan", "model": "resnet20", "training": {"local_steps": 1, "batch_size": 8}},
    "fedavg, adam": {"method": {"name": "fedavg", "aggregator": {"name": "size", "server": "adam"}}},
    "sfl": {"method": "sfl"},
    "sfl, drop-out": {"method": "sfl", **DROPOUT},
    "stratify": {"method": {"name": "stratify", "cap": 15}},
    "stratify, drop-out": {"method": {"name": "stratify", "cap": 15}, **DROPOUT},
    "stratify, per client": {
        "method": {"name": "stratify", "cap": 15},
        "training": {"execution": "per-client"},
        **DROPOUT,
    },
    "stratify, local steps": {"method": {"name": "stratify", "cap": 15, "local_steps": 2}},
    "stratify, label weights": {
        "method": {"name": "stratify", "cap": 15, "label_weights": True},
        "partition": {"name": "classes", "per_client": 2, "clients": 6, "size": 16},
    },
    "stratify, batchnorm": {"method": {"name": "stratify", "cap": 5}, "model": "resnet20"},
    "stratify, held back": {"method": {"name": "stratify", "cap": 15}, "privacy": {"min_samples": 3}},
    "stratify, single": {"method": {"name": "stratify", "mode": "single", "cap": 10}},
    "stratify, single, drop-out": {"method": {"name": "stratify", "mode": "single", "cap": 10}, **DROPOUT},
    "stratify, hybrid": {"method": {"name": "stratify", "mode": "hybrid", "cap": 10}},
    "stratify, prf": {"method": {"name": "stratify", "masking": "prf", "cap": 15}},
    "stratify, ckks": {"method": {"name": "stratify", "masking": "ckks", "cap": 15}},
    "sampler weighted": {"method": {"name": "fedavg", "client_sampler": "weighted"}},
    "sampler all": {"method": {"name": "fedavg", "client_sampler": "all"}},
    "sampler fedsts": {"method": {"name": "rebafl", "client_sampler": {"name": "fedsts", "strata": 3}}},
    "aggregator mean": {"method": {"name": "fedavg", "aggregator": "mean"}},
    "aggregator stratum": {
        "method": {"name": "fedavg", "client_sampler": {"name": "fedsts", "strata": 3}, "aggregator": "stratum"}
    },
    "aggregator horvitz-thompson": {
        "method": {"name": "fedavg", "client_sampler": "weighted", "aggregator": "horvitz-thompson"}
    },
    "codec bf16": {"communication": {"up": "bf16", "down": "bf16"}},
    "codec qsgd": {"communication": {"up": "qsgd", "down": "qsgd"}},
    "codec top-k": {"communication": {"up": {"name": "top-k", "fraction": 0.05}}, **DROPOUT},
    "codec powersgd": {"communication": {"up": {"name": "powersgd", "rank": 2}}, **DROPOUT},
    "codec powersgd, stratify": {
        "communication": {"up": {"name": "powersgd", "rank": 2}},
        "method": {"name": "stratify", "cap": 15},
    },
    "deadline": {"availability": SLOW | {"deadline": 0.95}},
    "deadline, rebafl, top-k": {
        "availability": SLOW | {"deadline": 0.6},
        "method": "rebafl",
        "communication": {"up": {"name": "top-k", "fraction": 0.05}},
    },
    "early stopping": {
        "callbacks": [{"name": "early-stopping", "patience": 1}, "keep-best"],
        "evaluation": {"every": 1, "validation": 0.2},
        "training": {"rounds": 5, "lr": 0.5},
    },
    "clients evaluate": {"evaluation": {"every": 1, "client_test": 0.3, "test_clients": 0.3}},
}
TABLES |= {name: {"method": name, **DROPOUT} for name in METHODS if name not in TABLES}
ENGINES = {"fedavg": ("ray",), "rebafl, drop-out": ("ray", "nvflare"), "stratify, per client": ("ray", "nvflare")}
"""Engines other than the local one that repeat a spec."""


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


def digests(folder: Path) -> dict[str, str]:
    """Of a run folder: what must stay."""
    model = (folder / "model.safetensors").read_bytes()
    # ``classes_absent`` is younger than the file, and follows from the events and the partition.
    metrics = lines(folder / "metrics.jsonl", without=("seconds", "checksum", "classes_absent"))
    events = lines(folder / "events.jsonl", without=("seconds", "checksum", "at", "versions"))
    parts = {"model": model, "metrics": metrics, "events": events}
    return {name: hashlib.sha256(part).hexdigest() for name, part in parts.items()}


def lines(path: Path, without: tuple[str, ...]) -> bytes:
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    kept = ({k: v for k, v in json.loads(line).items() if k not in without} for line in text.splitlines())
    return json.dumps(list(kept)).encode()


def known(label: str) -> Mapping[str, str]:
    golden, here = json.loads(FILE.read_text()), environment()
    if golden["torch"] != here["torch"] or here["processor"] not in golden["processors"]:
        pytest.skip(f"golden.json has results of {golden['torch']} on {', '.join(golden['processors'])}")
    again = "write golden.json again: python tests/integration/test_golden.py"
    assert golden["results_version"] == RESULTS, again
    results = {processor: found[label] for processor, found in golden["processors"].items() if label in found}
    assert results, again
    if here["processor"] not in results:
        pytest.skip(f"golden.json has this result on {', '.join(results)}")
    return results[here["processor"]]


@pytest.mark.slow
@pytest.mark.parametrize("label", TABLES)
def test_results_stay(label: str, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    before = known(label)
    fs.run(spec(label), out=tmp_path / "run")
    assert digests(tmp_path / "run") == before, "results moved: a commit of their own says which and why"


@pytest.mark.long
@pytest.mark.parametrize(("label", "engine"), [(label, engine) for label in ENGINES for engine in ENGINES[label]])
def test_other_engines_have_the_same_results(label: str, engine: str, tmp_path: Path) -> None:
    before = known(label)
    fs.run(spec(label), out=tmp_path / "run", engine=engine)
    assert digests(tmp_path / "run") == before


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("label", [*METHODS, "rebafl, drop-out", "codec top-k", "stratify, single, drop-out"])
def test_a_killed_run_ends_with_the_same_results(label: str, tmp_path: Path) -> None:
    before, folder = known(label), tmp_path / "run"
    code = "import sys; sys.path.insert(0, sys.argv[1]); import test_golden; test_golden.run_and_die(*sys.argv[2:])"
    command = [sys.executable, "-c", code, str(FILE.parent), label, str(folder)]
    assert subprocess.run(command, check=False).returncode == 9
    fs.run(spec(label), out=folder, resume=True)
    assert digests(folder) == before


def run_and_die(label: str, folder: str) -> None:
    """End this process without any clean-up after the first round."""
    fs.run(spec(label), out=folder, callbacks=[lambda record: os._exit(9)])


if __name__ == "__main__":
    found = {}
    for each in TABLES:
        with tempfile.TemporaryDirectory() as place:
            try:
                fs.run(spec(each), out=Path(place) / "run")
                found[each] = digests(Path(place) / "run")
                print(each, flush=True)
            except Exception as error:
                print("FAILED", each, type(error).__name__, error, flush=True)
    versions = {"torch": environment()["torch"], "results_version": RESULTS}
    before = json.loads(FILE.read_text())
    others = before["processors"] if {key: before[key] for key in versions} == versions else {}
    table = versions | {"processors": others | {environment()["processor"]: found}}
    FILE.write_text(json.dumps(table, indent=1) + "\n")
