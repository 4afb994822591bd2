from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fedstrata.evaluation.history import History
from fedstrata.reporting.runs import Run, keep_order
from fedstrata.reporting.setting import command, count_runs, differences, setting_line

SPEC = """
seed = {seed}
[partition]
name = "dirichlet"
clients = 20
alpha = 0.3
[availability]
name = "bernoulli"
p = 0.6
[model]
name = "mlp"
hidden = [64, 32]
[training]
rounds = {rounds}
clients_per_round = 8
[method]
name = "{method}"
{more}
"""


def run(folder: Path, method: str = "fedavg", seed: int = 0, rounds: int = 25, more: str = "") -> Run:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"made_with": {"fedstrata": "0.1.0"}}))
    spec = SPEC.format(method=method, seed=seed, rounds=rounds, more=more)
    return Run(method, History([], seed=seed), folder, [], spec)


def line(runs: dict[str, list[Run]]) -> str:
    return " · ".join("".join(part) for part in setting_line(runs))


def test_the_line_about_the_setting(tmp_path: Path) -> None:
    runs = {"a": [run(tmp_path / f"a{seed}", seed=seed) for seed in range(3)], "b": [run(tmp_path / "b", rounds=5)]}
    assert line(runs) == (
        "20 clients, dirichlet (alpha 0.3) · 60 % of the invited clients are online · 8 clients invited per round · "
        "5 or 25 rounds · mlp (hidden 64, 32) · 3 seeds (0, 1, 2) · fedstrata 0.1.0"
    )
    assert line({"a": [Run("a", History([]), tmp_path, [], "")]}) == ""


@pytest.mark.parametrize(
    ("availability", "text"), [("always", "100 % of the invited clients are online"), ("markov", "markov availability")]
)
def test_the_line_names_availability_without_a_probability(tmp_path: Path, availability: str, text: str) -> None:
    run_folder = run(tmp_path)
    spec = SPEC.replace('name = "bernoulli"\np = 0.6', f'name = "{availability}"')
    described = line({"a": [replace(run_folder, spec=spec.format(method="fedavg", seed=0, rounds=5, more=""))]})
    assert f" · {text} · " in described


def test_runs_are_counted(tmp_path: Path) -> None:
    runs = {"a": [run(tmp_path / f"a{seed}", seed=seed) for seed in range(3)], "b": [run(tmp_path / "b")]}
    (tmp_path / "a1" / "summary.json").write_text("{}")
    assert count_runs(runs) == "1 of 6 runs finished"
    assert count_runs({"b": runs["b"]}) == "0 of 1 run finished"


def test_differences_are_listed_by_label(tmp_path: Path) -> None:
    runs = {"a": [run(tmp_path, seed=3)], "b": [run(tmp_path, "fedprox", rounds=9, more="mu = 0.1\nwarm = true")]}
    assert differences(runs) == [
        ("a", ["training.rounds = 25"]),
        ("b", ["training.rounds = 9", "method.mu = 0.1", "method.warm = true"]),
    ]


def test_the_command_adds_seeds_to_those_that_are_there(tmp_path: Path) -> None:
    runs = {"a": [run(tmp_path / f"a{seed}", seed=seed) for seed in (0, 7)]}
    assert command(tmp_path, runs, 4) is None
    folder = tmp_path / "my runs"
    folder.mkdir()
    keep_order(folder, ["a"])
    assert command(folder, runs, 4) == "fedstrata compare SPEC.toml --seeds 0,7,1,2 --out 'my runs'"
    assert command(folder, runs, 1000) is None
