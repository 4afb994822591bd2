"""Augmentation in local training: which batches it changes, with which random numbers, and what it leaves alone."""

from __future__ import annotations

import copy
import importlib
import json
import linecache
from pathlib import Path
from typing import Any

import augmentations
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fedstrata as fs
from fedstrata.base.errors import SpecError
from fedstrata.base.rng import rng
from fedstrata.cli import main
from fedstrata.clients.client import Client
from fedstrata.clients.training.local import LocalData
from fedstrata.data.augmentation import CropFlip
from fedstrata.experiments.references import reference_runs
from fedstrata.runs.simulation import make_context

CNN = {"name": "cnn", "channels": [4, 8], "hidden": 16}
SHORT = {"training": {"local_steps": 2, "local_epochs": None}}
CROPS = {"name": "crop-flip", "padding": 2}

WAYS: dict[str, dict[str, Any]] = {
    "by hand": {},
    "by hand, clipped": {"training": {"clip": 0.5}},
    "autograd": {"model": CNN, "training": {"momentum": 0.9}},
    "batchnorm": {"model": "resnet20", **SHORT},
    "adamw": {"training": {"optimizer": "adamw", "lr": 0.01}},
    "accumulate": {"training": {"accumulate": 3}},
    "local steps": {"training": {"local_steps": 3, "local_epochs": None}},
    "moon": {"method": "moon"},
    "rebafl": {"method": "rebafl"},
    "scaffold": {"method": "scaffold"},
    "fedssar": {"method": "fedssar"},
    "fedsts": {"method": {"name": "fedsts", "strata": 2}},
    "fedtan": {"method": "fedtan", "model": "resnet20", **SHORT},
    "sfl": {"method": "sfl"},
    "stratify": {"method": {"name": "stratify", "cap": 10}},
    "stratify, per client": {"method": {"name": "stratify", "cap": 10}, "training": {"execution": "per-client"}},
    "stratify, local steps": {"method": {"name": "stratify", "cap": 10, "local_steps": 2}},
    "stratify, batchnorm": {"method": {"name": "stratify", "cap": 4}, "model": "resnet20"},
    "stratify, single": {"method": {"name": "stratify", "mode": "single", "cap": 5}},
    "stratify, hybrid": {"method": {"name": "stratify", "mode": "hybrid", "cap": 5}},
    "fine-tuned": {"evaluation": {"client_test": 0.3, "fine_tune": 1}},
}
"""A spec for each way in which clients train."""


def spec_of(way: str, augment: Any = None, **sections: Any) -> fs.Experiment:
    table = WAYS[way]
    training = {"rounds": 2, "clients_per_round": 3, "batch_size": 8, "lr": 0.05, "workers": 1, "local_epochs": 1}
    training = {key: value for key, value in (training | table.get("training", {})).items() if value is not None}
    data = {"name": "digits", "limit": 120} | ({} if augment is None else {"augment": augment})
    common = {"seed": 3, "partition": {"name": "dirichlet", "alpha": 1.0, "clients": 4}}
    model = {"model": {"name": "mlp", "hidden": [8]}}
    return fs.Experiment.from_table({**common, **model, **table, **sections, "data": data, "training": training})


def rows_of(history: fs.History) -> str:
    return json.dumps([{key: value for key, value in row.items() if key != "seconds"} for row in history])


def same(one: fs.History, other: fs.History) -> bool:
    return rows_of(one) == rows_of(other) and all(torch.equal(w, other.params[name]) for name, w in one.params.items())


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_each_way_of_training_augments_and_the_identity_changes_no_byte(way: str) -> None:
    plain = fs.run(spec_of(way))
    assert same(plain, fs.run(spec_of(way, "augmentations:same")))
    cropped = fs.run(spec_of(way, CROPS))
    assert same(cropped, fs.run(spec_of(way, CROPS)))
    assert any(not torch.equal(w, cropped.params[name]) for name, w in plain.params.items())


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_by_hand(accumulate: int) -> None:
    """Each step draws from a generator of its own, before its samples are cut into mini-batches."""
    sections = {"model": {"name": "mlp", "hidden": [8]}, "partition": {"name": "iid", "clients": 2}}
    spec = spec_of("by hand", CROPS, **sections).replace(
        training={"batch_size": 20 // accumulate, "accumulate": accumulate, "clients_per_round": 2}
    )
    with fs.Simulation(fs.prepare(spec)) as simulation:
        config, context = simulation.prepared.config, make_context(simulation.prepared)
        client = Client(1, context)
        data = LocalData(client, np.arange(len(client)))
        batches = list(data.shuffled(spec.training, client.rng("batches", 2), pairs=False))
        assert [len(batch.y) for batch in batches] == [20, 20, 20]
        module = copy.deepcopy(config.model.module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        for step, batch in enumerate(batches):
            seed = int(rng(3, f"augment/{step}", 2, 1).integers(2**63))
            x = CropFlip(padding=2)(batch.x, torch.Generator().manual_seed(seed))
            optimizer.zero_grad()
            F.cross_entropy(module(x), batch.y).backward()
            optimizer.step()
        federation = simulation.federation
        federation.begin(2)
        sent = fs.Weights(config.model.params(), config.model.buffers())
        reply = federation.ask([1], fs.Fit(2, sent, {}, 1.0))[1]
    for name, w in module.named_parameters():
        torch.testing.assert_close(reply.weights.params[name], w.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_rounds_clients_and_steps_draw_other_numbers_and_the_samples_stay_as_they_are() -> None:
    augmentations.SEEN.clear()
    spec = spec_of("by hand", "augmentations:recorded", partition={"name": "iid", "clients": 3})
    spec = spec.replace(training={"local_epochs": 2, "batch_size": 10})
    prepared = fs.prepare(spec)
    trials, before = len(augmentations.SEEN), prepared.data.inputs(slice(None)).clone()
    fs.run(spec)
    batches = augmentations.SEEN[2 * trials :]
    assert len(batches) == 2 * 3 * 2 * 4  # rounds, clients, epochs, steps; no other pass is augmented
    rows = torch.cat(batches).flatten(1)
    assert len(torch.unique(rows, dim=0)) == len(rows)
    raw = prepared.data.inputs(slice(None))
    assert torch.equal(raw, before)
    # The noise of no two batches is the same: their differences from the samples are different.
    noises = [batch.flatten(1)[0] - raw.flatten(1) for batch in batches]
    first = torch.stack([noise[noise.square().sum(1).argmin()] for noise in noises])
    assert len(torch.unique(first.mul(1e3).round(), dim=0)) == len(batches)


@pytest.mark.slow
def test_evaluations_predictions_and_measurements_are_not_augmented(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a learning rate of almost zero, the model stays the same, and so does everything that is measured."""
    for way in ("moon", "fedsts", "rebafl"):
        histories = [
            fs.run(spec_of(way, augment, evaluation={"every": 1, "client_test": 0.3}).replace(training={"lr": 1e-30}))
            for augment in (None, {"name": "augmentations:noise", "scale": 10.0})
        ]
        plain, noisy = (json.loads(rows_of(history)) for history in histories)
        for key in plain[0].keys() - {"train_loss", "weight_diversity"}:
            assert [row[key] for row in plain] == [row[key] for row in noisy], (way, key)
        assert [row["train_loss"] for row in plain] != [row["train_loss"] for row in noisy]


@pytest.mark.slow
def test_layers_that_draw_random_numbers_draw_the_same() -> None:
    class Masks(torch.nn.Module):
        seen: list[torch.Tensor] = []

        def __init__(self) -> None:
            super().__init__()
            self.drop, self.head = torch.nn.Dropout(0.5), torch.nn.Linear(64, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = self.drop(torch.ones(len(x), 64))
            if self.training:
                Masks.seen.append(mask.clone())
            return self.head(x.flatten(1) * mask)

    masks = []
    for augment in (None, CROPS):
        Masks.seen.clear()
        fs.run(spec_of("by hand", augment), model=Masks)
        masks.append(torch.cat(Masks.seen))
    assert torch.equal(*masks)


@pytest.mark.slow
def test_references_are_augmented_too() -> None:
    for name in ("local", "centralised"):
        (plain, *_), (cropped, *_) = (
            reference_runs(name, {"a": spec_of("by hand", augment)}).values() for augment in (None, CROPS)
        )
        assert cropped.data.augment == CropFlip(padding=2)
        runs = fs.run(plain), fs.run(cropped)
        assert any(not torch.equal(w, runs[1].params[key]) for key, w in runs[0].params.items())


@pytest.mark.slow
@pytest.mark.parametrize("way", ["stratify", "stratify, batchnorm", "stratify, local steps"])
def test_a_fused_pass_of_stratify_augments_as_single_clients_do(way: str) -> None:
    spec = spec_of(way, CROPS).replace(training={"rounds": 1}, method={"cap": 2})
    fused, alone = fs.run(spec), fs.run(spec.replace(training={"execution": "per-client"}))
    for name, w in fused.params.items():
        torch.testing.assert_close(alone.params[name], w, rtol=1e-3, atol=1e-5)


NOISE = """import torch

def add(x, generator, scale=0.1):
    return x + scale * torch.randn(x.shape, generator=generator)
"""


@pytest.fixture
def beside(in_an_empty_folder: None, monkeypatch: pytest.MonkeyPatch, request: Any) -> str:
    """Return the name of a module with an augmentation in the working directory."""
    name = f"noise_{request.node.name}".partition("[")[0]
    Path(f"{name}.py").write_text(NOISE)
    monkeypatch.syspath_prepend(Path.cwd())
    return name


BASE = "[data]\nlimit = 60\n[partition]\nclients = 3\n[training]\nrounds = 2\nlocal_epochs = 1\n"


@pytest.mark.slow
def test_a_function_of_a_file_on_the_command_line(beside: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("s.toml").write_text(BASE)
    augment = ["--set", f"data.augment={beside}:add", "--set", "data.augment.scale=0.5"]
    assert main(["run", "s.toml", *augment, "--out", "noisy", "--quiet"]) == 0
    assert main(["run", "s.toml", "--out", "plain", "--quiet"]) == 0
    assert f'name = "{beside}:add"\nscale = 0.5' in Path("noisy/spec.toml").read_text()
    assert "augment" not in Path("plain/spec.toml").read_text()
    assert Path("noisy/model.safetensors").read_bytes() != Path("plain/model.safetensors").read_bytes()
    assert main(["settings", "data.augment", f"{beside}:add"]) == 0
    assert "scale" in capsys.readouterr().out
    assert main(["run", "s.toml", "--set", f"data.augment={beside}:sub", "--out", "no", "--quiet"]) == 2
    assert f"data.augment.name = '{beside}:sub': the module '{beside}' does not define 'sub'" in capsys.readouterr().err
    assert not Path("no").exists()


@pytest.mark.slow
def test_a_run_with_another_augmentation_or_with_changed_code_is_not_resumed(beside: str) -> None:
    Path("s.toml").write_text(BASE)
    spec = fs.Experiment.from_toml("s.toml", [f"data.augment={beside}:add"])
    fs.run(spec, out="run")
    with pytest.raises(SpecError, match=r"^data\.augment\.\w+ = .*: the run in this folder has"):
        fs.run(spec.replace(data={"augment": "crop-flip"}), out="run", resume=True)
    Path(f"{beside}.py").write_text(NOISE.replace("0.1", "0.3"))
    linecache.checkcache()
    importlib.reload(importlib.import_module(beside))
    with pytest.raises(SpecError, match=f"code: the Python module '{beside}' has changed since the run in this folder"):
        fs.run(spec, out="run", resume=True)
