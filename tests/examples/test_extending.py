"""Every example of docs/guides/extend.md as its reader would use it: run, compared, listed; and what it promises."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fedstrata as fs
from fedstrata.base.errors import SpecError
from fedstrata.cli import main
from fedstrata.federation.availability import Population
from fedstrata.federation.messages import FitReply
from fedstrata.objectives.base import Batch, Context

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "extending"
SPEC = """
data = { name = "digits", limit = 200, normalize = "unit" }
partition = { name = "dirichlet", alpha = 0.5, clients = 10 }
model = { name = "mlp", hidden = [8] }
training = { rounds = 2, clients_per_round = 4, local_epochs = 1, workers = 1 }
evaluation = { every = 2 }
method = "fedavg"
[compare.plain]
[compare.sampler]
method = { client_sampler = "rotating:Rotating" }
[compare.samples]
method = { data_sampler = { name = "warmup:Warmup", start = 0.5, rounds = 2 } }
[compare.objective]
method = { objective = { name = "focal:Focal", gamma = 1.0 } }
[compare.aggregator]
method = { aggregator = { name = "capped:Capped", cap = 5 } }
[compare.availability]
availability = { name = "drowsy:Drowsy", label = 3, p = 0.0 }
[compare.partition]
partition = { name = "leaning:Leaning", clients = 10 }
[compare.model]
model = { name = "gated:Gated", width = 6 }
[compare.codec]
communication = { up = "halves:Halves" }
[compare.method]
method = "by_loss:ByLoss"
[compare.metric]
evaluation = { metrics = ["accuracy", "macro_f1:macro_f1"] }
"""
KINDS = {
    "method.client_sampler": ("rotating:Rotating", "step"),
    "method.data_sampler": ("warmup:Warmup", "start"),
    "method.objective": ("focal:Focal", "gamma"),
    "method.aggregator": ("capped:Capped", "cap"),
    "availability": ("drowsy:Drowsy", "label"),
    "partition": ("leaning:Leaning", "share"),
    "model": ("gated:Gated", "width"),
    "communication.codec": ("halves:Halves", "halves:Halves"),
    "method": ("by_loss:ByLoss", "power"),
    "evaluation.metrics": ("macro_f1:macro_f1", "F1"),
}


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def beside(monkeypatch, tmp_path):
    """Where the reader stands; the spec is elsewhere."""
    monkeypatch.chdir(FOLDER)
    monkeypatch.syspath_prepend(str(FOLDER))
    (tmp_path / "spec.toml").write_text(SPEC)
    return tmp_path


def test_there_is_one_for_each_kind_on_the_page_and_under_thirty_lines():
    page = (ROOT / "docs" / "guides" / "extend.md").read_text(encoding="utf-8")
    files = sorted(FOLDER.glob("*.py"))
    assert [file.stem for file in files] == sorted(name.partition(":")[0] for name, _ in KINDS.values())
    for file in files:
        assert f"../examples/extending/{file.name}" in page
        assert len(file.read_text(encoding="utf-8").splitlines()) < 30


@pytest.mark.long
@pytest.mark.slow
def test_all_of_them_in_one_comparison(beside, capsys):
    assert main(["compare", str(beside / "spec.toml"), "--out", str(beside / "out"), "--jobs", "1", "--quiet"]) == 0
    rows = {row["label"]: row for row in json.loads((beside / "out" / "table.json").read_text())}
    assert rows.keys() == {"plain", "sampler", "samples", "objective", "aggregator", "availability", "partition",
                           "model", "codec", "method", "metric"}  # fmt: skip
    runs = {label: fs.History.load(beside / "out" / label / "seed-0") for label in rows}
    plain = runs["plain"]
    for label, history in runs.items():
        assert len(history) == 2
        assert history.final_accuracy is not None
        if label not in ("plain", "availability", "metric"):
            assert history[0]["train_loss"] != plain[0]["train_loss"] or label in ("aggregator", "codec", "method")
            assert history[1]["train_loss"] != plain[1]["train_loss"]
    assert 0 < runs["metric"][1]["test"]["macro_f1"] < 1
    assert runs["metric"].final_accuracy == plain.final_accuracy
    assert sum(runs["codec"].column("bytes_up")[1]) < 0.8 * sum(plain.column("bytes_up")[1])
    assert runs["samples"].column("kept")[1].tolist() == [0.5, 1.0]
    assert runs["samples"][0]["samples"] < plain[0]["samples"]


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["method=by_loss:ByLoss", "availability=drowsy:Drowsy"])
def test_from_the_command_line(beside, setting):
    out = beside / "run"
    assert main(["run", str(beside / "spec.toml"), "--set", setting, "--out", str(out), "--quiet"]) == 0
    assert setting.partition("=")[2] in (out / "spec.toml").read_text()
    assert main(["run", "--resume", str(out), "--set", "training.rounds=3", "--quiet"]) == 0
    assert len(fs.History.load(out)) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_line_lists_it(beside, capsys, kind):
    name, key = KINDS[kind]
    assert main(["settings", kind, name]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{kind} {name}: ")
    assert key in shown


def test_a_metric_is_a_function_and_a_word_is_not(capsys):
    assert main(["settings", "evaluation.metrics", "math:pi"]) == 2
    problem = "name = 'math:pi': is the path of a float. Give the path of a class or function."
    assert problem in capsys.readouterr().err


def reply(samples: int, loss: float, value: float) -> FitReply:
    return FitReply(fs.Weights({"w": torch.tensor([value])}, {}), samples, 1, samples, loss, {})


def test_weights_by_loss_by_hand():
    """Clients of 1 and 3 samples with the losses 2 and 1: with power 1, the weights are 2/5 and 3/5."""
    replies = {0: reply(1, 2.0, 1.0), 1: reply(3, 1.0, 2.0)}
    for power, expected in ((0.0, 0.25 + 0.75 * 2), (1.0, 0.4 + 0.6 * 2), (2.0, (4 + 3 * 2) / 7)):
        method = example("by_loss").ByLoss(power=power)
        chosen = fs.Selection.plain(np.array([0, 1]), 2)
        after, _ = method.aggregator.combine(fs.Weights({"w": torch.zeros(1)}, {}), None, chosen, replies)
        assert after.params["w"].item() == pytest.approx(expected)


def test_the_ring_asks_everybody_once_before_anybody_twice():
    spec = fs.Experiment(
        method=fs.FedAvg(client_sampler=example("rotating").Rotating()),
        partition=fs.IID(clients=6),
        training=fs.Training(rounds=4, clients_per_round=3, local_steps=1),
        data={"name": "digits", "limit": 60},
        evaluation={"every": 0},
    )
    asked: list[list[int]] = []
    with fs.Simulation(fs.prepare(spec), listener=lambda _, replies: asked.append(sorted(replies))) as simulation:
        list(simulation)
    assert asked == [[0, 1, 2], [3, 4, 5], [0, 1, 2], [3, 4, 5]]


def test_focal_loss_by_hand_and_at_zero_cross_entropy():
    module = torch.nn.Linear(3, 4)
    model, draw = fs.Model(module), torch.Generator().manual_seed(0)
    batch = Batch(torch.randn(5, 3, generator=draw), torch.tensor([0, 1, 2, 3, 0]))
    context = Context(model.params(), torch.ones(4), {}, None, 0.1)
    with model.loaded(model.params(), model.buffers()) as params:
        logits = module(batch.x)
        p = logits.softmax(1)[range(5), batch.y]
        focal = example("focal").Focal
        torch.testing.assert_close(focal().loss(model, params, batch, context), ((1 - p) ** 2 * -p.log()).mean())
        plain = F.cross_entropy(logits, batch.y)
        torch.testing.assert_close(focal(gamma=0).loss(model, params, batch, context), plain)


def test_nobody_counts_for_more_than_the_cap():
    chosen = fs.Selection.plain(np.array([2, 5, 7]), 10)
    found = example("capped").Capped(cap=30).coefficients(chosen, np.array([0, 1, 2]), np.array([10, 30, 3000]))
    assert found.tolist() == pytest.approx([1 / 7, 3 / 7, 3 / 7])


@pytest.mark.slow
def test_absence_goes_with_the_label():
    drowsy = example("drowsy").Drowsy(label=1, p=0.2)
    y = np.array([0, 1, 1, 1, 0, 1])
    owners = fs.Assignment.from_owners(np.array([0, 0, 1, 1, 2, 2]), 3)
    own = drowsy.model_copy()
    own.check(Population(3, 2, owners, y))
    there = np.array([own.online(np.arange(3), round, 0) for round in range(4000)]).mean(axis=0)
    assert there == pytest.approx([0.6, 0.2, 0.6], abs=5 * 0.5 / np.sqrt(4000))
    for unfit in (Population(3, 2), Population(3, 1, owners, np.zeros(6, dtype=np.int64))):
        with pytest.raises(SpecError, match="label = 1: needs a simulation, and labels 0 to"):
            drowsy.model_copy().check(unfit)


def test_prepared_experiments_keep_what_an_availability_learnt_apart():
    drowsy = example("drowsy").Drowsy(label=0, p=0.0)
    specs = [
        fs.Experiment(seed=seed, availability=drowsy, partition=fs.Dirichlet(alpha=0.1, clients=20)) for seed in (0, 1)
    ]
    first, second = (fs.prepare(spec).spec.availability for spec in specs)
    assert not np.allclose(first._there, second._there)
    assert drowsy._there is None


def test_clients_lean_towards_their_class(labelled):
    labels = np.repeat(np.arange(4), 500)
    assignment = example("leaning").Leaning(clients=8, share=0.8).split(labelled(labels), 0)
    counts = assignment.counts(labels, 4)
    share = counts[np.arange(8), np.arange(8) % 4] / counts.sum(axis=1)
    assert share == pytest.approx(np.full(8, 0.8 + 0.2 / 4), abs=5 * 0.5 / np.sqrt(counts.sum(axis=1).min()))


def test_macro_f1_by_hand():
    """Class 0: precision 1, recall ½; class 1: ½ and 1; class 2 right; class 3 is nowhere."""
    labels, said = np.array([0, 0, 1, 2]), np.array([0, 1, 1, 2])
    assert example("macro_f1").macro_f1(labels, np.eye(4)[said]) == pytest.approx((2 / 3 + 2 / 3 + 1) / 3)
