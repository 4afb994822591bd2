"""What the parts of batches give away: labels, samples that stand in a row of a gradient, and inversion."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fedstrata as fs
from fedstrata.audits.gradients import (
    GradientAudit,
    Layers,
    attack,
    audit_gradients,
    inputs_from,
    invert,
    labels_from,
)
from fedstrata.audits.pixels import Pixels
from fedstrata.base.errors import CheckpointError, SpecError
from fedstrata.base.rng import torch_seeded
from fedstrata.cli import main
from fedstrata.models.model import Model
from fedstrata.runs.preparation import prepare


def spec(least: int = 1, **changes: object) -> fs.Experiment:
    table: dict[str, object] = {
        "data": {"name": "digits", "limit": 400},
        "partition": {"name": "dirichlet", "alpha": 0.5, "clients": 6},
        "method": {"name": "stratify", "batch_size": 12},
        "model": {"name": "mlp", "hidden": [32]},
        "training": {"rounds": 2, "lr": 0.1},
        "privacy": {"min_samples": least},
        "evaluation": {"checkpoint_every": 1},
    }
    return fs.Experiment.from_table(table | changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gradients") / "run"
    fs.run(spec(), out=path)
    return path


@pytest.fixture(scope="module")
def audit(folder: Path) -> GradientAudit:
    return audit_gradients(folder, parts=4, steps=60)


@pytest.mark.slow
@given(st.lists(st.floats(-5, 5), min_size=2, max_size=8), st.integers(0, 7))
def test_the_label_of_a_single_sample_is_always_right(logits: list[float], label: int) -> None:
    z = torch.tensor([logits], requires_grad=True)
    label %= len(logits)
    F.cross_entropy(z, torch.tensor([label])).backward()
    assert labels_from(z.grad[0], 1).tolist() == [label]


@pytest.mark.slow
@given(st.lists(st.integers(0, 9), min_size=1, max_size=9))
def test_before_training_so_are_those_of_fewer_samples_than_classes(labels: list[int]) -> None:
    """p = 1/C: an entry is n/C − n_c, and n/C is less than one sample."""
    z = torch.zeros(len(labels), 10, requires_grad=True)
    F.cross_entropy(z, torch.tensor(labels), reduction="sum").backward()
    assert sorted(labels_from(z.grad.sum(dim=0), len(labels)).tolist()) == sorted(labels)


def chain(features: int = 6) -> nn.Module:
    with torch_seeded(0, "module"):
        return nn.Sequential(nn.Linear(features, 12), nn.ReLU(), nn.Linear(12, 3))


def test_a_row_of_the_first_layers_gradient_is_the_sample() -> None:
    module, x = chain(), torch.linspace(-1, 2, 6)[None]
    F.cross_entropy(module(x), torch.tensor([2])).backward()
    rows = inputs_from(module[0].weight.grad, module[0].bias.grad)
    assert 0 < len(rows) < 12  # units that were not active say nothing
    torch.testing.assert_close(rows, x.expand(len(rows), -1), rtol=1e-4, atol=1e-5)


def test_of_two_samples_that_no_unit_shares_each_stands_in_a_row() -> None:
    layer, head = nn.Linear(2, 2, bias=True), nn.Linear(2, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, -1.0], [-1.0, 1.0]]))
        layer.bias.zero_()
    x = torch.tensor([[1.0, 0.25], [0.25, 0.75]])
    F.cross_entropy(head(F.relu(layer(x))), torch.tensor([0, 1]), reduction="sum").backward()
    torch.testing.assert_close(inputs_from(layer.weight.grad, layer.bias.grad), x)


def test_which_layers_are_read() -> None:
    assert Layers.of(Model(chain()), 6) == Layers("2.bias", ("0.weight", "0.bias"))
    assert Layers.of(Model(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))), 16).first is None
    with pytest.raises(
        SpecError, match=r"the audit recovers labels from the last layer's bias, but this layer does not have a"
    ):
        Layers.of(Model(nn.Sequential(nn.Linear(6, 3, bias=False))), 6)


@pytest.mark.slow
def test_inversion_finds_a_single_image() -> None:
    prepared = prepare(spec())
    data, model = prepared.data, prepared.config.model
    pixels, where = Pixels.of(data), torch.tensor([5])
    with model.loaded(model.params(), train=True) as params:
        loss = F.cross_entropy(model(params, data.inputs(where)), data.y_train[where])
        gradient = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
        with torch_seeded(0, "start"):
            drawn = invert(model, params, pixels, gradient, data.y_train[where], steps=300)
    image = pixels.images(where)
    error, mean = (float((found - image).square().mean()) for found in (drawn, pixels.images(slice(None)).mean(dim=0)))
    assert error < 0.02 < mean


@pytest.mark.long
@pytest.mark.slow
def test_of_single_samples_everything_is_read_off(audit: GradientAudit) -> None:
    one = audit.findings[0]
    assert (one.size, one.attacked, one.labels, one.rows) == (1, 4, 1.0, 1.0)
    assert one.labels_chance < 0.4
    assert one.error < one.error_mean / 2
    two, four = audit.findings[1:3]
    assert four.error > two.error * 0.5 > 0


@pytest.mark.slow
def test_parts_are_counted_as_they_were_sent(audit: GradientAudit, folder: Path) -> None:
    history = fs.History.load(folder)
    assert audit.rounds == (2, 2)
    assert sum(size * count for size, count in audit.counts.items()) == history[-1]["samples"]
    assert sum(audit.counts.values()) == history[-1]["transfers"]
    for finding in audit.findings:
        assert finding.sent == audit.counts.get(finding.size, 0)
        assert finding.attacked == min(finding.sent, 4)


@pytest.mark.slow
@pytest.mark.parametrize("execution", ["fused", "per-client"])
def test_playing_again_changes_nothing_and_a_minimum_shows(execution: str) -> None:
    private = spec(4, training={"rounds": 1, "lr": 0.1, "execution": execution})
    found = attack(prepare(private), None, 1, sizes=[1, 4], parts=2, steps=2)
    assert min(found.counts) >= 4
    assert [finding.attacked for finding in found.findings] == [0, 2]
    assert found == attack(prepare(private), None, 1, sizes=[1, 4], parts=2, steps=2)


@pytest.mark.slow
def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["audit", "gradients", str(folder), "--out", str(tmp_path), "--quiet", "--steps", "3", "--parts", "1"]
    assert main([*arguments, "--sizes", "1", "11"]) == 0
    out = capsys.readouterr().out
    assert "| 1 |" in out
    assert "| 11 | 0 | 0 | – |" in out
    assert {path.name for path in tmp_path.iterdir()} == {"gradients.md", "gradients.json"}
    assert (tmp_path / "gradients.md").read_text() in out


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"method": "fedavg"}, "method"),
        ({"method": {"name": "stratify", "mode": "single"}}, "method"),
        ({"method": {"name": "stratify", "local_steps": 2}}, "method.local_steps"),
        ({"communication": {"up": "bf16"}}, "communication"),
        ({"model": {"name": "resnet20"}}, "model"),
        ({"task": {"name": "classification", "label_smoothing": 0.1}}, "task"),
    ],
    ids=str,
)
def test_what_it_cannot_attack_it_says(changes: dict[str, object], key: str) -> None:
    with pytest.raises(SpecError) as error:
        attack(prepare(spec(**changes)), None, 1)
    assert error.value.key == key


def test_samples_that_are_no_images_are_refused() -> None:
    x = np.zeros((20, 4), dtype=np.float32)
    data = fs.from_arrays(x, np.arange(20) % 2, x, np.arange(20) % 2)
    with pytest.raises(SpecError, match="the audit requires images of at least 7x7 pixels, but the samples have the"):
        attack(prepare(spec(), data=data), None, 1)


@pytest.mark.slow
def test_a_run_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    fs.run(spec(evaluation={"checkpoint_every": 0}, training={"rounds": 1}), out=tmp_path / "run")
    with pytest.raises(CheckpointError, match="does not have a checkpoint"):
        audit_gradients(tmp_path / "run")
    with pytest.raises(SpecError, match="steps"):
        audit_gradients(tmp_path / "run", steps=0)
