from __future__ import annotations

import dataclasses
import json
import math
import shutil
import statistics

import numpy as np
import pytest
import torch
from torch import nn

import fedstrata as fs
from fedstrata.audits import outcome, prototypes
from fedstrata.audits.pixels import Pixels
from fedstrata.audits.prototypes import BASELINE, CLASSES, DRAWS, SIZES, Audit, Target, audit_prototypes, compare
from fedstrata.audits.replay import replay
from fedstrata.base import records
from fedstrata.base.errors import CheckpointError, SpecError
from fedstrata.cli import main
from fedstrata.clients.client import StateStore
from fedstrata.data.partitions.server_data import ServerData
from fedstrata.objectives.rebafl import class_means
from fedstrata.runs import checkpoint
from fedstrata.runs.preparation import prepare
from fedstrata.runs.run_folder import SPEC
from fedstrata.spec.experiment import Experiment

pytestmark = pytest.mark.slow
STEPS = 50


@pytest.fixture(scope="module")
def audit(run) -> Audit:
    return audit_prototypes(run, clients=1, steps=STEPS)


@pytest.fixture
def few(monkeypatch):
    """Few targets: comparing images is most of the work."""
    monkeypatch.setattr(prototypes, "CLASSES", 1)
    monkeypatch.setattr(prototypes, "DRAWS", 1)


@pytest.fixture(scope="module")
def small_run(make_small, tmp_path_factory):
    """A run with a small model and few samples."""
    return make_small(tmp_path_factory.mktemp("audit") / "run", data={"limit": 800})


@pytest.fixture(scope="module")
def small_audit(small_run) -> Audit:
    """An audit of the run with the small model, with few steps and few targets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prototypes, "DRAWS", 1)
        return audit_prototypes(small_run, clients=1, steps=2)


def as_rows(images):
    return {tuple(image.flatten().tolist()) for image in images}


def by_kind(audit, attack, *, sent, size=None):
    return [
        f
        for f in audit.findings
        if f.attack == attack and f.target.sent == sent and (size is None or f.target.size == size)
    ]


@pytest.mark.long
def test_what_is_attacked_is_what_the_run_sent(run, audit):
    [sent] = audit.sent
    stored = records.decode(checkpoint.load(run / "checkpoint").clients[sent.client].read_bytes())["objective"]
    assert sent.difference == 0
    assert sent.round == 3
    assert torch.equal(sent.table["means"], stored["means"])
    for finding in by_kind(audit, BASELINE, sent=True):
        assert torch.equal(finding.target.feature, stored["means"][finding.target.label])
        assert finding.target.size == stored["samples"][finding.target.label]


@pytest.mark.long
def test_the_model_is_the_one_under_which_the_prototypes_were_computed(run, audit):
    prepared = prepare(Experiment.from_toml(run / SPEC))
    [sent] = audit.sent
    mine = prepared.assignment[sent.client]

    class Batch:
        x, y = prepared.data.inputs(mine), prepared.data.targets(mine)

    model = prepared.config.model
    with model.loaded(sent.weights.params, sent.weights.buffers) as params:
        table = class_means(model, params, lambda: [Batch], 10)
    torch.testing.assert_close(table["means"], sent.table["means"], atol=1e-5, rtol=1e-5)


@pytest.mark.long
def test_targets_are_the_clients_own_and_strangers_are_not(run, audit):
    prepared = prepare(Experiment.from_toml(run / SPEC))
    [sent] = audit.sent
    held = as_rows(Pixels.of(prepared.data).images(torch.from_numpy(prepared.assignment[sent.client])))
    targets = [f.target for f in audit.findings if f.attack == BASELINE]
    assert [t.size for t in targets if not t.sent] == [s for _ in range(CLASSES) for s in SIZES for _ in range(DRAWS)]
    for target in targets:
        assert len(target.own) == target.size
        # The other holder of a class may hold one less.
        assert target.size - 1 <= len(target.unseen) <= target.size
        assert as_rows(target.own) <= held
        assert not as_rows(target.unseen) & held


@pytest.mark.long
def test_the_control_leaks_clearly_and_strangers_show_that_it_is_the_image(audit):
    base = statistics.fmean(f.mean.psnr for f in by_kind(audit, BASELINE, sent=False, size=1))
    drawn = by_kind(audit, "feature matching", sent=False, size=1)
    assert statistics.fmean(f.mean.psnr for f in drawn) > base + 1.5
    assert statistics.fmean(f.nearest.psnr - f.stranger.psnr for f in drawn) > 1.5


@pytest.mark.long
def test_a_single_image_is_its_own_mean_nearest_and_average(audit):
    for finding in by_kind(audit, "up-convolutional", sent=False, size=1):
        assert finding.mean == finding.nearest == finding.average


@pytest.mark.long
def test_an_audit_has_one_result(run, few):
    one, again = (audit_prototypes(run, clients=1, steps=5) for _ in range(2))
    assert outcome.to_json(again) == outcome.to_json(one)
    assert all(torch.equal(a.image, b.image) for a, b in zip(one.findings, again.findings, strict=True))


def test_comparing_by_hand():
    def grey(value):
        return torch.full((1, 8, 8), value)

    target = Target(0, 1, 2, True, torch.ones(3), torch.stack([grey(0.0), grey(0.2)]), torch.stack([grey(1.0)]))
    finding = compare("an attack", target, grey(0.1), 0.5)
    assert finding.mean.psnr == pytest.approx(20, abs=1e-4)
    assert finding.nearest.psnr == pytest.approx(20, abs=1e-4)
    assert finding.stranger.psnr == pytest.approx(-20 * math.log10(0.9), abs=1e-4)
    assert finding.average.psnr == 100
    alone = Target(0, 1, 2, True, torch.ones(3), target.own, target.unseen[:0])
    assert compare("an attack", alone, grey(0.1), 0.5).stranger is None


@pytest.mark.long
def test_a_run_without_an_earlier_checkpoint_is_played_from_the_start(make_run, few):
    run = make_run(evaluation={"checkpoint_every": 10})
    told = []
    audit = audit_prototypes(run, clients=1, steps=1, watch=lambda *now: told.append(now))
    assert audit.sent[0].difference == 0
    assert told[:3] == [(0, 3, "replaying round 1"), (1, 3, "replaying round 2"), (2, 3, "replaying round 3")]


def test_other_prototypes_than_the_stored_ones_are_told(small_run, few, monkeypatch):
    monkeypatch.setattr("fedstrata.audits.replay._difference", lambda *tables: 0.25)
    with pytest.warns(UserWarning, match=r"differ by 25\.0% from the stored prototypes"):
        audit_prototypes(small_run, clients=1, steps=1)


@pytest.mark.long
def test_a_composition_with_the_objective_is_audited_too(make_run, few):
    run = make_run(method={"name": "fedavg", "objective": {"name": "rebafl"}})
    assert audit_prototypes(run, clients=1, steps=1).method == "fedavg"


@pytest.mark.long
def test_samples_that_nobody_holds(make_run, run, few):
    spare = make_run(partition={"size": 150})
    audit = audit_prototypes(spare, clients=1, steps=1, held_out="spare")
    assert audit.held_out_images == 1437 - 4 * 150
    # Images of the attacker's own are nobody's strangers: its decoders have seen them.
    prepared = prepare(Experiment.from_toml(spare / SPEC))
    theirs = ServerData(prepared.data, prepared.assignment).indices()
    held = as_rows(Pixels.of(prepared.data).images(torch.from_numpy(theirs)))
    assert not any(as_rows(finding.target.unseen) & held for finding in audit.findings)
    with pytest.raises(
        SpecError, match="held_out = 'spare': the attacker needs at least 64 images, but there are only 0"
    ):
        audit_prototypes(run, clients=1, steps=1, held_out="spare")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"method": {"name": "fedavg"}}, SpecError, "method = 'fedavg': does not send prototypes"),
        ({"method": {"name": "rebafl", "mu": 0.0}}, SpecError, "method = 'rebafl': does not send prototypes"),
        (
            {"method": {"name": "rebafl", "keep_prototypes": False}},
            SpecError,
            "method.keep_prototypes: no client stored the prototypes that it sent after round 2",
        ),
        ({"evaluation": {"checkpoint_every": 0}}, CheckpointError, "does not have a checkpoint"),
    ],
    ids=str,
)
def test_runs_that_cannot_be_audited(make_run, changes, error, message):
    run = make_run(**changes, data={"limit": 200})
    with pytest.raises(error, match=message):
        audit_prototypes(run)


def test_the_table_is_means_over_targets_from_single_images_to_prototypes(small_audit):
    rows = outcome.rows(small_audit)
    assert [row.feature for row in rows[::4]][:3] == ["1 image", "5 images", "25 images"]
    assert rows[-1].feature.startswith("prototype (")
    assert [row.attack for row in rows[:4]] == [BASELINE, "up-convolutional", "variational", "feature matching"]
    assert [row.targets for row in rows] == [CLASSES] * 12 + [CLASSES] * 4
    expected = statistics.fmean(f.nearest.ssim for f in by_kind(small_audit, "variational", sent=True))
    assert rows[-2].ssim["nearest"] == pytest.approx(expected)


def test_the_command(small_run, few, tmp_path, capsys):
    out = tmp_path / "out"
    settings = ["--clients", "2", "--steps", "2", "--seed", "3"]
    assert main(["audit", "prototypes", str(small_run), "--out", str(out), *settings]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""  # no bar where there is no terminal
    said = " ".join(captured.out.split())
    assert "The attacker has 360 images from the test set. Each attack took 2 steps, with seed 3." in said
    assert captured.out.count("  feature matching ") == 4
    *told, written = captured.out.splitlines()
    assert max(map(len, told)) <= 80
    assert written.startswith(f"written to {out}: ")
    assert (out / "prototypes.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "prototypes.md").read_text().count("| 1 image |") == 4
    told = json.loads((out / "prototypes.json").read_text())
    assert len(told["clients"]) == 2
    assert len(told["findings"]) == 4 * 2 * (1 + len(SIZES))
    assert np.isfinite([row["psnr"]["mean"] for row in told["table"]]).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["nowhere"],
            (
                "audit = 'nowhere': is not a run folder, because it does not contain spec.toml. Give the folder of "
                "a run."
            ),
        ),
        (["RUN", "--steps", "0"], "steps = 0: must be an integer of at least 1."),
        (["RUN", "--clients", "0"], "clients = 0: must be an integer of at least 1."),
    ],
    ids=" ".join,
)
def test_bad_arguments(small_run, capsys, monkeypatch, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    given = [str(small_run) if word == "RUN" else word for word in arguments]
    assert main(["audit", "prototypes", *given]) == 2
    assert capsys.readouterr().err == f"fedstrata: error: {message}\n"


@pytest.mark.long
def test_a_client_that_keeps_its_statistics_is_attacked_with_them(tmp_path):
    """Prototypes are means of the features of the model that is attacked, whoever has BatchNorm's statistics."""
    table = {
        "data": {"name": "digits", "limit": 200},
        "partition": {"name": "classes", "clients": 3, "per_client": 4},
        "method": "rebafl",
        "training": {"rounds": 3, "clients_per_round": 3, "local_epochs": 1, "lr": 0.05, "batch_norm": "local"},
        "evaluation": {"checkpoint_every": 1},
    }
    spec = Experiment.from_table(table)
    convolutions = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    module = nn.Sequential(*convolutions, nn.Linear(36, 10))
    fs.run(spec, model=module, out=tmp_path)
    prepared = prepare(spec, model=module)
    for sent in replay(prepared, tmp_path, 4, 0, lambda *told: None):
        mine = prepared.assignment[sent.client]

        class Batch:
            x, y = prepared.data.inputs(mine), prepared.data.targets(mine)

        model = prepared.config.model
        with model.loaded(sent.weights.params, sent.weights.buffers) as params:
            table = class_means(model, params, lambda batch=Batch: [batch], 10)
        assert sent.difference == 0
        torch.testing.assert_close(table["means"], sent.table["means"], atol=1e-5, rtol=1e-5)


@pytest.mark.long
def test_a_run_over_sites_has_nothing_to_attack(run, tmp_path):
    folder = tmp_path / "remote"
    shutil.copytree(run, folder)
    last = checkpoint.load(folder / "checkpoint")
    checkpoint.save(folder / "checkpoint", last.round, last.state, StateStore(), remote=True)
    with pytest.raises(CheckpointError, match="is the run of a deployment, and does not contain"):
        audit_prototypes(folder, steps=1)


def test_a_feature_of_length_zero_has_no_relative_error(small_audit):
    members = [dataclasses.replace(f, feature_error=None) for f in by_kind(small_audit, "feature matching", sent=True)]
    table = outcome.rows(dataclasses.replace(small_audit, findings=members))
    assert [row.feature_error for row in table] == [None]
    assert outcome.cells(table[0])[-1] == "–"
    members[0] = dataclasses.replace(members[0], feature_error=0.5)
    assert outcome.rows(dataclasses.replace(small_audit, findings=members))[0].feature_error == 0.5
