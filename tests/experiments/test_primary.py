"""An imbalanced data set with early stopping: every output tells how good the model is that was kept."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

import fedstrata as fs
from fedstrata.cli import main

TABLE = {
    "callbacks": [{"name": "early-stopping", "patience": 4}],
    "data": {"name": "rare.npz"},
    "partition": {"name": "iid", "clients": 3},
    "model": {"name": "mlp", "hidden": [8]},
    "training": {"rounds": 25, "lr": 0.3, "batch_size": 16, "local_epochs": 1},
    "evaluation": {"validation": 0.3, "metrics": ["accuracy", "auroc"], "primary": "auroc"},
}
SEEDS = (0, 1)


def rare(seed: int, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Samples of which 5 % belong to class 1, which is a little above the others in each feature."""
    generator = np.random.default_rng(seed)
    labels = (np.arange(samples) % 20 == 0).astype(np.int64)
    return (generator.normal(size=(samples, 6)) + 0.6 * labels[:, None]).astype(np.float32), labels


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    """A compare folder, and the AUROC of the model in each of its run folders, by scikit-learn."""
    folder = tmp_path_factory.mktemp("rare")
    (x_train, y_train), (x_test, y_test) = rare(0, 800), rare(1, 400)
    np.savez(folder / "rare.npz", x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    spec = fs.Experiment.from_table(TABLE | {"data": {"name": str(folder / "rare.npz")}})
    (folder / "spec.toml").write_text(spec.to_toml())
    arguments = ["compare", str(folder / "spec.toml"), "--methods", "fedavg,fedprox", "--seeds", "0,1", "--jobs", "1"]
    assert main([*arguments, "--out", str(folder / "out"), "--quiet"]) == 0
    by_hand = {
        method: [
            roc_auc_score(y_test, fs.load(folder / "out" / method / f"seed-{seed}").predict_proba(x_test)[:, 1])
            for seed in SEEDS
        ]
        for method in ("fedavg", "fedprox")
    }
    return folder / "out", by_hand


@pytest.mark.long
def test_the_kept_models_differ_from_the_last_ones(compared: tuple[Path, dict[str, list[float]]]) -> None:
    out, by_hand = compared
    for method, values in by_hand.items():
        for seed, value in zip(SEEDS, values, strict=True):
            history = fs.History.load(out / method / f"seed-{seed}")
            assert history.model_round == history.best_round == history.confusion["best"].round
            assert abs(history.column("test.auroc")[1][-1] - value) > 1e-4, "otherwise these tests say nothing"


@pytest.mark.slow
def test_every_output_has_the_auroc_of_the_kept_model(
    compared: tuple[Path, dict[str, list[float]]], capsys: pytest.CaptureFixture[str]
) -> None:
    out, by_hand = compared
    page = (out / "report.html").read_text()
    data = json.loads(re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)[0])[0]
    table = json.loads((out / "table.json").read_text())
    text = (out / "table.md").read_text()
    assert main(["table", str(out), "--format", "latex"]) == 0
    latex = capsys.readouterr().out
    said = "from the saved model (round of the best validation auroc)"
    assert all(said in each for each in (text, page, latex))
    methods = {method["name"]: method for method in data["methods"]}
    for row in table:
        values, method = by_hand[row["label"]], methods[row["label"]]
        mean, sd = np.mean(values), np.std(values, ddof=1)
        assert row["final_auroc"]["mean"] == pytest.approx(mean, abs=1e-6)
        assert method["final"] == pytest.approx([mean, sd], abs=1e-4)
        shown = f"{mean:.4f} ± {sd:.4f}"
        assert f"| {shown} |" in text
        assert re.search(rf"{mean:.3f}(</b>)? <small>± {sd:.3f}</small>", page)
        assert f"{mean:.4f}" in latex.partition(r"\begin{table}")[2]
        for seed, value in zip(SEEDS, values, strict=True):
            summary = json.loads((out / row["label"] / f"seed-{seed}" / "summary.json").read_text())
            assert summary["final_auroc"] == summary["best_auroc"] == pytest.approx(value, abs=1e-6)
            assert f"auroc</dt><dd>{value:.4f} after {summary['rounds']} rounds, of the saved model" in page
    assert (out / "auroc.png").exists()


@pytest.mark.slow
def test_a_sweep_picks_by_the_validation_auroc_of_the_kept_models(
    compared: tuple[Path, dict[str, list[float]]], tmp_path: Path
) -> None:
    table = TABLE | {"data": {"name": str(compared[0].parent / "rare.npz")}}
    found = fs.sweep(table, {"training.lr": [0.001, 0.3]}, out=tmp_path, jobs=1)
    kept = {label: history.column("validation.auroc")[1].max() for label, [history] in found.histories.items()}
    assert {label: value.mean for label, value in found.values.items()} == kept
    assert found.best == max(kept, key=kept.__getitem__)
    assert "with the models that the runs saved" in (tmp_path / "sweep.md").read_text()


@pytest.mark.slow
def test_a_kept_model_whose_round_was_not_evaluated_is_evaluated_at_the_end(tmp_path: Path) -> None:
    class Second(fs.Callback):
        def on_round(self, simulation, record):
            if record["round"] == 2:
                self.weights = simulation.evaluated()

        def on_end(self, simulation, history):
            simulation.leave(self.weights, 2)

    evaluation = {"every": 0, "metrics": ["auroc"], "client_test": 0.2, "checkpoint_every": 0}
    short = {"partition": {"clients": 4, "min_size": 5}, "model": {"name": "mlp", "hidden": [8]}}
    spec = fs.Experiment.from_table(short | {"training": {"rounds": 3}, "evaluation": evaluation})
    history = fs.run(spec, out=tmp_path / "run", callbacks=[Second()])
    two = fs.run(fs.Experiment.from_table(short | {"training": {"rounds": 2}, "evaluation": evaluation}))
    assert history.final_accuracy == two.final_accuracy != history[-1]["accuracy"]
    assert history.final("test.auroc") == two.final("test.auroc")
    assert [row["auroc"] for row in history.clients] == [row["auroc"] for row in two.clients]
    assert fs.History.load(tmp_path / "run").summary == history.summary
    assert history.summary["model"]["round"] == 2
