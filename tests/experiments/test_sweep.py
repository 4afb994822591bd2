"""Grids: their cells, what is best by hand, and the same table after any number of interruptions."""

from __future__ import annotations

import json
import random
import tomllib
from pathlib import Path

import pytest

import fedstrata as fs
from fedstrata.base.config import build
from fedstrata.base.errors import SpecError
from fedstrata.evaluation.history import History
from fedstrata.experiments.sweep import (
    BEST,
    FIGURES,
    TABLE,
    TUNED,
    Cell,
    cells,
    comparison_toml,
    figures,
    judge,
    to_markdown,
)
from fedstrata.spec.experiment import Experiment

TABLES = {
    "partition": {"clients": 5},
    "training": {"rounds": 2, "local_epochs": 1},
    "model": {"name": "mlp", "hidden": [8]},
    "evaluation": {"validation": 0.2, "checkpoint_every": 1},
}
GRID = {"training.lr": [0.0001, 0.01, 0.1], "training.local_steps": [1, 4], "training.batch_size": [8, 32]}


def seeds(*ends: float | None) -> list[History]:
    """Runs that ended with these validation accuracies; all are at their best earlier, and on the test set."""
    records = [
        [{"round": 1, "accuracy": 0.99, "validation": {"accuracy": 0.9}}, {"round": 2, "accuracy": 0.5}] for _ in ends
    ]
    for (_, last), end in zip(records, ends, strict=True):
        last["validation"] = {"accuracy": end}
    return [History(each, seed=seed) for seed, each in enumerate(records)]


def planned(*labels: str) -> dict[str, Cell]:
    return {label: Cell({"training.lr": label}, build(Experiment, {})) for label in labels}


def test_the_best_cell_by_hand() -> None:
    histories = {"a": seeds(0.5, 0.7), "b": seeds(0.6, 0.8), "c": seeds(0.7, 0.7)}
    found = judge(planned(*histories), histories)
    assert found.best == "b"  # 0.6, 0.7 and 0.7: the first of those that are alike
    assert [each.mean for each in found.values.values()] == pytest.approx([0.6, 0.7, 0.7])
    assert "| b | **70.00 ± 14.14** |" in to_markdown(found)
    assert "Best settings: b. Test accuracy: 50.00 % (2 seeds" in to_markdown(found)
    assert "with the models of the last evaluation." in to_markdown(found)
    told = figures(found)
    assert told["best"] == "b"
    assert told["cells"][0]["settings"] == {"training.lr": "a"}
    assert told["cells"][0]["validation.accuracy"]["mean"] == pytest.approx(0.6)


@pytest.mark.parametrize(("primary", "best"), [("accuracy", "a"), ("auroc", "b"), ("loss", "c"), ("ece", "a")])
def test_the_primary_metric_picks_the_best_cell_in_its_direction(primary: str, best: str) -> None:
    spec = build(Experiment, {"evaluation": {"metrics": ["auroc", "ece"], "primary": primary}})
    ends = {"a": (0.98, 0.5, 0.9, 0.1), "b": (0.97, 0.8, 0.8, 0.2), "c": (0.96, 0.7, 0.4, 0.3)}
    histories = {}
    for label, (accuracy, auroc, loss, ece) in ends.items():
        values = {"accuracy": accuracy, "auroc": auroc, "loss": loss, "ece": ece}
        record = {"round": 1, "accuracy": 0.5, "loss": 2.0, "test": {"auroc": 0.6, "ece": 0.4}, "validation": values}
        histories[label] = [History([record], primary=primary)]
    found = judge({label: Cell({"training.lr": label}, spec) for label in ends}, histories)
    assert found.best == best
    value = ends[best][["accuracy", "auroc", "loss", "ece"].index(primary)]
    text, unit = to_markdown(found), "%" if primary == "accuracy" else ""
    assert f"| training.lr | validation {primary}{', %' if unit else ''} |" in text
    assert f"**{value * 100:.2f}**" in text if unit else f"**{value:.4f}**" in text
    on_test = {"accuracy": "50.00 %", "auroc": "0.6000", "loss": "2.0000", "ece": "0.4000"}
    assert f"Best settings: {best}. Test {primary}: {on_test[primary]} (" in text
    assert figures(found)["cells"][0][f"validation.{primary}"]["n"] == 1


@pytest.mark.slow
def test_each_method_has_its_own_best_settings() -> None:
    ends = {"fedavg": (0.6, 0.8, 0.7), "my_module:Mine": (0.5, 0.4, 0.9), "scaffold": (0.9, 0.9, 0.9)}
    of_methods = {name: fs.Experiment(method="fedavg") for name in ends}
    of_methods["scaffold"] = fs.Experiment(method="scaffold")
    of_methods["my_module:Mine"] = fs.Experiment(method=f"{__name__}:Mine")
    cells = {
        f"{name},{lr}": Cell({"method": name, "lr": lr}, spec) for name, spec in of_methods.items() for lr in "abc"
    }
    histories = {label: seeds(ends[label[:-2]]["abc".index(label[-1])]) for label in cells}
    for lr in "abc":
        histories[f"scaffold,{lr}"] = [History([{"round": 1, "accuracy": 0.9}])]  # without validation results
    mine = f"{__name__}.Mine"
    found = judge(cells, histories, {"my_module:Mine,c": "pruned after round 1"})
    assert found.best == "fedavg,b"
    assert found.best_of_methods == {"fedavg": "fedavg,b", mine: "my_module:Mine,a"}  # not the pruned; none of scaffold
    assert found.tuned == {"fedavg": of_methods["fedavg"], mine: of_methods["my_module:Mine"]}
    assert figures(found)["best_of_methods"] == found.best_of_methods
    rows = "| fedavg | b | **80.00** |\n| my_module:Mine | a | 50.00 |\n"
    heading = "| method | lr | validation accuracy, % |\n| --- | --- | ---: |\n"
    assert f"\nThe best settings of each method:\n\n{heading}{rows}\nBest settings: fedavg,b" in to_markdown(found)
    assert "each method" not in to_markdown(judge(planned("a", "b"), {"a": seeds(0.5), "b": seeds(0.6)}))


class Mine(fs.FedAvg):
    """A method of a user's own."""


@pytest.mark.slow
def test_the_best_settings_of_each_method_can_be_compared(tmp_path: Path) -> None:
    spec = {**TABLES, "training": {"rounds": 1, "local_epochs": 1}}
    grid = {
        "method": ["fedavg", {"name": "fedprox", "mu": 0.1}, {"name": "fedprox", "mu": 50.0}],
        "communication.up": ["none", "qsgd"],
    }
    found = fs.sweep(spec, grid, out=tmp_path / "sweep", jobs=1)
    assert list(found.tuned) == ["fedavg", "fedprox"]
    for method, tuned in found.tuned.items():
        values = {
            label: found.values[label].mean for label, cell in found.cells.items() if cell.spec.method.name == method
        }
        assert values[found.best_of_methods[method]] == max(values.values())
        assert tuned == found.cells[found.best_of_methods[method]].spec
    assert fs.variants(tomllib.loads((tmp_path / "sweep" / TUNED).read_text())) == found.tuned
    mixed = {"fedavg": found.cells["method=fedavg,up=qsgd"].spec, "fedprox": list(found.cells.values())[2].spec}
    assert fs.variants(tomllib.loads(comparison_toml(mixed))) == mixed  # also if only one of them has a section
    runs = fs.compare(found.tuned, seeds=[1], out=tmp_path / "compared", jobs=1, report=False)
    assert list(runs) == ["fedavg", "fedprox"]
    fs.sweep(spec, {"training.lr": [0.1]}, out=tmp_path / "sweep", jobs=1)
    assert not (tmp_path / "sweep" / TUNED).exists()  # a sweep of one method leaves no comparison of an earlier one


def test_a_cell_of_which_a_seed_diverged_is_not_best() -> None:
    broken = History([{"round": 1, "accuracy": 0.9}], seed=1)
    histories = {"a": [*seeds(0.9), broken], "b": seeds(0.2, 0.3)}
    found = judge(planned(*histories), histories)
    assert found.best == "b"
    assert "| a | 90.00 (1 of 2) |" in to_markdown(found)
    none = judge(planned("a"), {"a": [broken]})
    assert none.best is None
    assert "None of the settings has a validation accuracy for every seed." in to_markdown(none)


def test_a_cell_that_never_took_a_step_is_said_and_is_not_best() -> None:
    histories = {"a": seeds(0.9, 0.9), "b": seeds(0.2, 0.3)}
    histories["a"][1].warning = "the model never changed"
    found = judge(planned(*histories), histories)
    assert found.best == "b"
    assert "| a | 90.00 | broke down: no reply could be used from some round to the end |" in to_markdown(found)
    assert "| b | **25.00 ± 7.07** |  |" in to_markdown(found)
    assert figures(found)["cells"][0]["note"] == "broke down: no reply could be used from some round to the end"


def test_nothing_is_judged_by_the_test_set() -> None:
    without = {key: value for key, value in TABLES.items() if key != "evaluation"}
    with pytest.raises(SpecError, match=r"evaluation\.validation: is required, because a sweep"):
        cells(without, GRID)


def test_a_sweep_needs_values_to_try() -> None:
    for grid in ({}, {"training.lr": []}):
        with pytest.raises(SpecError, match="a sweep needs a setting with several values"):
            cells(TABLES, grid)


def test_cells_are_every_combination_and_called_by_it() -> None:
    found = cells(TABLES, {"training.lr": [0.1, 1], "model.hidden": [[8], [4, 4]]})
    assert list(found) == ["lr=0.1,hidden=[8]", "lr=0.1,hidden=[4, 4]", "lr=1,hidden=[8]", "lr=1,hidden=[4, 4]"]
    last = found["lr=1,hidden=[4, 4]"]
    assert last.settings == {"training.lr": 1, "model.hidden": [4, 4]}
    assert (last.spec.training.lr, last.spec.model.hidden, last.spec.training.rounds) == (1.0, (4, 4), 2)
    assert TABLES["model"] == {"name": "mlp", "hidden": [8]}
    alike = cells(TABLES, {"model.name": ["mlp"], "method.name": ["fedavg"]})
    assert list(alike) == ["model.name=mlp,method.name=fedavg"]
    steps = cells(TABLES, {"training.local_steps": [3]})["local_steps=3"].spec.training
    assert (steps.local_steps, steps.local_epochs) == (3, None)  # it replaces the spec's epochs
    with pytest.raises(SpecError, match=r"a value is listed twice\. Remove one of the two\."):
        cells(TABLES, {"data.name": ["a/b", "a_b"]})


@pytest.mark.long
@pytest.mark.slow
def test_a_grid_that_is_killed_at_random_ends_alike(tmp_path: Path) -> None:
    whole = fs.sweep(TABLES, GRID, out=tmp_path / "whole", jobs=1)
    assert len(whole.cells) == 12
    assert whole.best == max(whole.values, key=lambda label: whole.values[label].mean or 0)
    generator, runs = random.Random(5), 0

    def die(label: str, seed: int, rounds: int) -> None:
        nonlocal runs
        runs += 1
        if generator.random() < 0.2:
            raise KeyboardInterrupt

    deaths = 0
    while True:
        try:
            found = fs.sweep(TABLES, GRID, out=tmp_path / "killed", jobs=1, watch=die)
            break
        except KeyboardInterrupt:
            deaths += 1
            assert not (tmp_path / "killed" / BEST).exists()
    assert deaths > 1
    assert runs == 24  # of 12 cells of two rounds none was repeated
    assert found.best == whole.best
    for name in (TABLE, FIGURES, BEST):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert json.loads((tmp_path / "whole" / FIGURES).read_text())["best"] == whole.best
    assert Experiment.from_toml(tmp_path / "whole" / BEST) == whole.cells[str(whole.best)].spec
    assert not (tmp_path / "whole" / "report.html").exists()
