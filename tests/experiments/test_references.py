"""Each client alone, and one client with everything: what a comparison measures methods against."""

from __future__ import annotations

import json
import statistics

import numpy as np
import pytest
import torch

import fedstrata as fs
from fedstrata.base.errors import SpecError
from fedstrata.cli import main
from fedstrata.experiments.references import reference_runs

SPEC = {
    "data": {"name": "digits", "limit": 120},
    "partition": {"name": "dirichlet", "alpha": 0.5, "clients": 3},
    "model": {"name": "mlp", "hidden": [8]},
    "training": {"rounds": 2, "clients_per_round": 3, "local_epochs": 2, "batch_size": 16, "workers": 1},
    "availability": {"name": "bernoulli", "p": 0.5},
    "method": "scaffold",
}


def spec(**changes):
    table = {key: dict(value) if isinstance(value, dict) else value for key, value in SPEC.items()}
    for key, value in changes.items():
        table["training"][key] = value
    return fs.Experiment.from_table(table)


@pytest.mark.slow
def test_a_client_alone_is_that_client_without_the_others():
    """The run of a client equals plain SGD on its samples: FedAvg on these samples as the only client."""
    experiment = spec()
    run = reference_runs("local", {"a": experiment})["client-1"]
    prepared = fs.prepare(experiment)
    mine = prepared.assignment[1]
    by_hand = fs.run(
        fs.Experiment(
            data=experiment.data,
            partition=fs.Given(indices=[mine]),
            model=experiment.model,
            training=fs.Training(rounds=2, clients_per_round=1, local_epochs=2, batch_size=16),
        )
    )
    found = fs.run(run)
    assert all(torch.equal(found.params[name], by_hand.params[name]) for name in found.params)
    assert found[0]["samples"] == 2 * len(mine)


@pytest.mark.slow
def test_everything_in_one_place_has_the_same_work():
    whole = reference_runs("centralised", {"a": spec()})["everything"]
    history = fs.run(whole)
    assert history[0]["samples"] == 2 * 120  # all are invited: two epochs of everything
    part = fs.run(reference_runs("centralised", {"a": spec(clients_per_round=1)})["everything"])
    assert part[0]["samples"] == 16 * round(2 * 120 / 3 / 16)  # a third of that, in whole batches
    steps = fs.run(
        reference_runs("centralised", {"a": spec(local_epochs=None, local_steps=4, clients_per_round=2)})["everything"]
    )
    assert steps[0]["samples"] == 4 * 2 * 16


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "centralized",
            {},
            "--references = 'centralized': is not a reference; did you mean 'centralised'? Use one of: local",
        ),
        ("local", {"rounds": 3}, "requires that all experiments have the same rounds, clients, local work and batches"),
    ],
)
def test_what_no_reference_can_be_of(name, changes, message):
    with pytest.raises(SpecError) as error:
        reference_runs(name, {"a": spec(), "b": spec(**changes)})
    assert message in str(error.value)


def test_experiments_may_differ_in_method_and_learning_rate():
    runs = reference_runs("local", {"a": spec(), "b": spec(lr=0.01)})
    assert {run.training.lr for run in runs.values()} == {0.1}


@pytest.mark.long
@pytest.mark.slow
def test_rows_of_a_comparison_that_goes_on(tmp_path, capsys):
    own_parts = fs.Evaluation(client_test=0.3, metrics=["macro-f1"])
    experiment = spec().model_copy(update={"evaluation": own_parts})
    (tmp_path / "spec.toml").write_text(experiment.to_toml())
    command = ["compare", str(tmp_path / "spec.toml"), "--methods", "fedavg", "--seeds", "0,1", "--out"]
    command += [str(tmp_path / "out"), "--references", "local,centralised", "--jobs", "1", "--quiet"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "local" in shown
    assert "centralised" in shown
    rows = {row["label"]: row for row in json.loads((tmp_path / "out" / "table.json").read_text())}
    assert list(rows) == ["fedavg", "local", "centralised"]
    each = [
        [fs.History.load(tmp_path / "out" / "local" / f"seed-{seed}" / f"client-{k}").final_accuracy for k in range(3)]
        for seed in (0, 1)
    ]
    means = [statistics.fmean(accuracies) for accuracies in each]
    assert rows["local"]["final_accuracy"]["mean"] == pytest.approx(statistics.fmean(means))
    assert rows["local"]["final_accuracy"]["sd"] == pytest.approx(statistics.stdev(means))
    assert rows["local"]["bytes_up"]["mean"] == 0
    folded = fs.History.load(tmp_path / "out" / "local" / "seed-0")
    assert folded[-1]["accuracy_sd_clients"] == pytest.approx(np.std(each[0]))
    assert folded[-1]["accuracy_min_clients"] == min(each[0])
    assert folded[-1]["clients_invited"] == 3
    runs = [fs.History.load(tmp_path / "out" / "local" / "seed-0" / f"client-{k}")[-1] for k in range(3)]
    own = [run["clients"]["macro-f1"]["mean"] for run in runs]
    assert folded[-1]["clients"]["macro-f1"]["mean"] == pytest.approx(statistics.fmean(own))
    assert folded[-1]["clients"]["macro-f1"]["worst"] == min(own)
    assert folded[-1]["test"]["macro-f1"] == pytest.approx(statistics.fmean(run["test"]["macro-f1"] for run in runs))
    # Broken off in the middle of it: what is there stays as it is, and what is lost comes again.
    files = {path: path.read_bytes() for path in (tmp_path / "out").glob("*/*/*/model.safetensors")}
    assert len(files) == 8
    gone = tmp_path / "out" / "local" / "seed-1" / "client-2"
    for file in (gone / "summary.json", gone / "model.safetensors", gone.parent / "metrics.jsonl"):
        file.unlink()
    assert main(command) == 0
    assert {path: path.read_bytes() for path in files} == files
    assert {
        row["label"]: row["final_accuracy"] for row in json.loads((tmp_path / "out" / "table.json").read_text())
    } == {label: row["final_accuracy"] for label, row in rows.items()}


def test_a_label_cannot_be_called_like_a_reference(tmp_path):
    with pytest.raises(
        SpecError, match=r"--methods = 'local': labels become names of folders, but this label is reserved or not"
    ):
        fs.compare({"local": spec()}, out=tmp_path / "out", references=["local"])


@pytest.mark.long
@pytest.mark.slow
def test_a_client_alone_has_its_own_results_in_the_table_of_clients(tmp_path):
    experiment = spec().model_copy(update={"evaluation": fs.Evaluation(client_test=0.3)})
    fs.compare({"fedavg": experiment.replace(method="fedavg")}, out=tmp_path, references=["local", "centralised"])
    together, alone = (fs.History.load(tmp_path / label / "seed-0").clients for label in ("fedavg", "local"))
    assert [row["client"] for row in alone] == [row["client"] for row in together]
    own = [fs.History.load(tmp_path / "local" / "seed-0" / f"client-{row['client']}") for row in alone]
    assert [row["accuracy"] for row in alone] == [history.clients[0]["accuracy"] for history in own]
    assert not fs.History.load(tmp_path / "centralised" / "seed-0").clients
