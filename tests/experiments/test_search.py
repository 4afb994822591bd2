"""Searches: what ranges say, what is pruned and judged, and that no kill loses or repeats a trial."""

from __future__ import annotations

import json
import random
import signal
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from lazy import Lazy
from processes import started

import fedstrata as fs
from fedstrata.base.errors import ExtraMissingError, SpecError
from fedstrata.cli import main
from fedstrata.experiments.search import PRUNED, STUDY, Range, called, opened
from fedstrata.experiments.sweep import BEST, FIGURES, TABLE, TUNED
from fedstrata.runs.run_folder import rounds_done
from fedstrata.spec.experiment import Experiment

optuna = Lazy("optuna")


@pytest.fixture(scope="module", autouse=True)
def _needed() -> Iterator[None]:
    """Import optuna when the first test of this file runs, because the import takes seconds.

    Files are not compared with earlier versions of optuna, which takes longer than a short run.
    """
    pytest.importorskip("optuna")
    with pytest.MonkeyPatch.context() as patch:
        manager = "optuna.storages._rdb.storage._VersionManager"
        patch.setattr(f"{manager}.check_table_schema_compatibility", lambda self: None)
        yield


TABLES = {
    "partition": {"clients": 4},
    "training": {"rounds": 4, "local_epochs": 1},
    "model": {"name": "mlp", "hidden": [8]},
    "evaluation": {"validation": 0.2, "checkpoint_every": 1},
}
SPACE = {
    "training.lr": "log:0.0001..0.5",
    "training.batch_size": "choice:8,32",
    "training.local_epochs": "int:1..2",
    "training.momentum": "uniform:0..0.9",
}


def trials(out: Path) -> list[optuna.trial.FrozenTrial]:
    with opened(out / STUDY) as study:
        found: list[optuna.trial.FrozenTrial] = study.get_trials()
    return found


def rounds_run(out: Path) -> dict[str, list[int]]:
    return {
        path.parts[-3]: [r["round"] for r in fs.History.load(path.parent)] for path in out.glob("*/*/metrics.jsonl")
    }


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "0.1,0.2",
            r"not a range for training.lr. Use one of: uniform:…, log:…, int:…, choice:…, such as log:0\.001\.\.0\.5",
        ),
        ("logg:0.1..1", "did you mean 'log'"),
        ("log:0..1", r"Use log:LOW\.\.HIGH with LOW < HIGH and LOW > 0"),
        ("uniform:1..0", r"is not a range for training\.lr\. Use uniform:LOW\.\.HIGH with LOW < HIGH"),
        ("uniform:1", r"is not a range for training\.lr\. Use uniform:LOW\.\.HIGH"),
        ("uniform:0..nan", r"is not a range for training\.lr\. Use uniform:LOW\.\.HIGH"),
        ("uniform:0..inf", r"is not a range for training\.lr\. Use uniform:LOW\.\.HIGH"),
        ("int:0.5..2", r"HIGH \(integers\)"),
        ("int:1.." + "9" * 400, r"HIGH \(integers\)"),
        ("choice:8", r"training\.lr must have at least two values, all different\."),
        ("choice:8, 8", r"training\.lr must have at least two values, all different\."),
    ],
)
def test_what_is_no_range(text, problem):
    with pytest.raises(SpecError, match=problem):
        Range.parse("training.lr", text)


@pytest.mark.parametrize(("seeds", "problem"), [([], r"is empty\. Give at least one seed\."), ([-1], "seed = -1")])
def test_seeds_that_are_none_are_refused_before_anything_is_written(tmp_path, seeds, problem):
    with pytest.raises(SpecError, match=problem):
        fs.search(TABLES, SPACE, out=tmp_path / "out", trials=2, jobs=1, seeds=seeds)
    with pytest.raises(SpecError, match=problem):
        fs.compare({"fedavg": fs.Experiment()}, out=tmp_path / "out", seeds=seeds)
    assert not (tmp_path / "out").exists()


def test_ranges_say_what_specs_can_hold():
    assert Range.parse("k", "uniform:-1..2.5").ends == [-1.0, 2.5]
    assert Range.parse("k", "int:1..8").ends == [1, 8]
    assert Range.parse("k", "choice:fedavg,0.5,[8, 8],true").ends == ["fedavg", 0.5, [8, 8], True]
    log = Range.parse("k", "log:0.00012345..0.5")
    assert log.value(0.123456) == 0.1235
    assert log.value(0.00012345) == 0.00012345  # never below its end
    for text in ("log:0.001..0.5", "int:1..8", "choice:[8],[8, 8]"):
        assert Range.parse("k", str(Range.parse("k", text))) == Range.parse("k", text)


@pytest.mark.parametrize(
    ("space", "changes", "message"),
    [
        ({}, {}, r"--search: is required, but not given\. Give a setting and its range, such as"),
        ({"training.lr": "log:0.1..1"}, {"evaluation": {}}, "evaluation.validation: is required, because a sweep"),
        ({"training.lr": "uniform:-1..1"}, {}, r"training.lr = -1\.0: must be greater than 0"),
        ({"training.lrr": "uniform:0..1"}, {}, "training.lrr = 0.0: is not a known key"),
        ({"training.clients_per_round": "int:1..5"}, {}, "training.clients_per_round = 5"),
        ({"method.name": "choice:fedavg,fedvag"}, {}, "not a known method"),
    ],
)
def test_everything_is_checked_before_anything_is_written(space, changes, message, tmp_path):
    with pytest.raises(SpecError, match=message):
        fs.search({**TABLES, **changes}, space, out=tmp_path / "out", trials=2, jobs=1)
    assert not (tmp_path / "out").exists()


def test_without_optuna_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ExtraMissingError, match=r"pip install 'fedstrata\[sweep\]'"):
        fs.search(TABLES, SPACE, out=tmp_path / "out")


@pytest.mark.long
def test_a_search_by_a_lower_primary_metric_looks_for_the_smallest(tmp_path):
    table = TABLES | {"evaluation": {"validation": 0.2, "primary": "loss"}, "training": {"rounds": 2}}
    found = fs.search(table, {"training.lr": "log:0.0001..0.5"}, out=tmp_path, trials=4, jobs=1)
    losses = {label: runs[0].column("validation.loss")[1][-1] for label, runs in found.histories.items()}
    assert found.best == min(losses, key=losses.__getitem__)
    assert {called(trial.number): trial.value for trial in trials(tmp_path)} == losses
    with opened(tmp_path / STUDY) as study:
        assert study.direction == optuna.study.StudyDirection.MINIMIZE


FEW = TABLES | {
    "data": {"name": "digits", "limit": 80},
    "training": {"rounds": 3, "local_epochs": 1, "clients_per_round": 1},
}
FEW_SPACE = {"training.lr": "choice:0.1,1e-9", "training.batch_size": "int:8..9", "training.momentum": "uniform:0..0.5"}


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A search of four trials with two seeds, which may be pruned after one whole trial instead of five."""
    out = tmp_path_factory.mktemp("search") / "short"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedstrata.experiments.search.STARTUP", 1)
        return out, fs.search(FEW, FEW_SPACE, out=out, trials=4, jobs=1, seeds=[0, 1])


@pytest.mark.slow
def test_a_trial_counts_with_the_mean_of_its_seeds_on_validation_samples(short):
    out, found = short
    whole = {called(t.number): t.value for t in trials(out) if t.state == optuna.trial.TrialState.COMPLETE}
    assert found.best == max(whole, key=whole.__getitem__)
    for label, value in whole.items():
        runs = [fs.History.load(out / label / f"seed-{seed}") for seed in (0, 1)]
        assert value == pytest.approx(sum(run.column("validation.accuracy")[1][-1] for run in runs) / 2)
    assert Experiment.from_toml(out / BEST) == found.cells[found.best].spec
    assert found.cells[found.best].settings["training.lr"] == 0.1
    assert {type(cell.settings["training.batch_size"]) for cell in found.cells.values()} == {int}


@pytest.mark.slow
def test_a_pruned_trial_ends_early_and_has_one_seed(short):
    out, found = short
    told = {called(trial.number): trial for trial in trials(out)}
    pruned = [label for label, trial in told.items() if trial.state == optuna.trial.TrialState.PRUNED]
    assert pruned, "this search has to prune for the test to say anything"
    assert set(pruned) == {label for label, note in found.notes.items() if note.startswith("pruned after round ")}
    for label in pruned:
        (history,) = found.histories[label]
        assert len(history) < 3
        assert history.stopped == f"{PRUNED}: the validation accuracy is below the median of earlier trials"
        assert not (out / label / "seed-1").exists()


@pytest.mark.slow
def test_an_interrupted_search_ends_alike(short, tmp_path, monkeypatch):
    out, found = short
    monkeypatch.setattr("fedstrata.experiments.search.STARTUP", 1)
    deaths = [("trial-002", 1)]

    def die(label: str, seed: int, rounds: int) -> None:
        if deaths and (label, rounds) == deaths[0]:
            del deaths[0]
            raise KeyboardInterrupt

    again = None
    while again is None:
        try:
            again = fs.search(FEW, FEW_SPACE, out=tmp_path / "out", trials=4, jobs=1, seeds=[0, 1], watch=die)
        except KeyboardInterrupt:
            assert trials(tmp_path / "out")[-1].state == optuna.trial.TrialState.RUNNING
    assert deaths == []
    assert again.best == found.best
    for name in (TABLE, FIGURES, BEST):
        assert (tmp_path / "out" / name).read_bytes() == (out / name).read_bytes()
    assert rounds_run(tmp_path / "out") == rounds_run(out)


@pytest.mark.slow
def test_other_arguments_cannot_continue_a_search(short):
    out, _ = short
    with pytest.raises(SpecError, match=r"--search = .*the search in this folder was started with .*0\.1,1e-9"):
        fs.search(FEW, {**FEW_SPACE, "training.lr": "log:0.01..0.5"}, out=out, trials=4, seeds=[0, 1])
    with pytest.raises(SpecError, match="--seeds = "):
        fs.search(FEW, FEW_SPACE, out=out, trials=4)
    with pytest.raises(SpecError, match=r"--trials = 0: must be an integer of at least 1"):
        fs.search(FEW, FEW_SPACE, out=out, trials=0)


@pytest.mark.slow
def test_settings_that_do_not_go_together_are_a_refused_trial(tmp_path):
    pair = {"method.name": "choice:fedavg,scaffold", "training.momentum": "choice:0,0.9"}
    table = FEW | {"training": FEW["training"] | {"rounds": 1}}
    found = fs.search(table, pair, out=tmp_path, trials=3, seeds=[7], jobs=1, prune=False)
    refused = {label for label, note in found.notes.items() if "SCAFFOLD" in note}
    assert refused, "this search has to meet the pair for the test to say anything"
    assert refused == {
        label for label, cell in found.cells.items() if tuple(cell.settings.values()) == ("scaffold", 0.9)
    }
    assert all(found.histories[label] == [] for label in refused)
    assert found.best not in refused


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A search that nobody disturbed."""
    out = tmp_path_factory.mktemp("search") / "whole"
    return out, fs.search(TABLES, SPACE, out=out, trials=10, jobs=1)


@pytest.mark.long
@pytest.mark.slow
def test_what_is_best_by_the_validation_samples(whole):
    out, found = whole
    told = trials(out)
    assert [called(trial.number) for trial in told] == list(found.cells)
    assert len(told) == 10
    complete = {called(t.number): t.value for t in told if t.state == optuna.trial.TrialState.COMPLETE}
    assert found.best == max(complete, key=complete.__getitem__)
    assert found.values[found.best].mean == pytest.approx(complete[found.best])
    for label, value in complete.items():
        assert value == found.histories[label][0].column("validation.accuracy")[1][-1]
    assert Experiment.from_toml(out / BEST) == found.cells[found.best].spec
    table = (out / TABLE).read_text()
    assert f"Best settings: {found.best}. Test accuracy: " in table
    assert len([line for line in table.splitlines() if line.startswith("| 0.")]) == 10
    assert json.loads((out / FIGURES).read_text())["best"] == found.best
    assert list(fs.load_runs(out)) == list(found.cells)


@pytest.mark.long
@pytest.mark.slow
def test_only_what_does_worse_than_the_median_is_pruned(whole):
    """The rule by hand: after five whole trials, the best value so far against the median of theirs in that round."""
    out, _ = whole
    done: list[dict[int, float]] = []
    pruned = 0
    for trial in trials(out):
        label = called(trial.number)
        history = fs.History.load(out / label / "seed-0")
        curve = dict(zip(*map(list, history.column("validation.accuracy")), strict=True))
        end = 4
        for round in (1, 2, 3):
            best = max(value for r, value in curve.items() if r <= round)
            others = sorted(each[round] for each in done)
            if len(done) >= 5 and best < (others[(len(others) - 1) // 2] + others[len(others) // 2]) / 2:
                end = round
                break
        assert len(history) == end, label
        assert history.stopped.startswith(PRUNED) == (end < 4)
        pruned += end < 4
        if end == 4:
            done.append(curve)
    assert pruned, "this search has to prune for the test to say anything"


@pytest.mark.long
@pytest.mark.slow
def test_a_search_that_is_killed_at_random_ends_alike(whole, tmp_path):
    out, found = whole
    generator, told = random.Random(3), list[tuple[str, int]]()

    def die(label: str, seed: int, rounds: int) -> None:
        told.append((label, rounds))
        if generator.random() < 0.15:
            raise KeyboardInterrupt

    deaths = 0
    while True:
        try:
            again = fs.search(TABLES, SPACE, out=tmp_path / "killed", trials=10, jobs=1, watch=die)
            break
        except KeyboardInterrupt:
            deaths += 1
    assert deaths > 2
    assert again.best == found.best
    for name in (TABLE, FIGURES, BEST):
        assert (tmp_path / "killed" / name).read_bytes() == (out / name).read_bytes()
    assert rounds_run(tmp_path / "killed") == rounds_run(out)
    # More of them go on from there, and nothing that is there runs again.
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "killed").glob("*/*/model.safetensors")}
    more = fs.search(TABLES, SPACE, out=tmp_path / "killed", trials=12, jobs=1)
    assert list(more.cells) == [called(number) for number in range(12)]
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.long
@pytest.mark.slow
def test_another_search_in_the_same_folder_is_refused(whole):
    out, _ = whole
    with pytest.raises(SpecError, match=r"--search = .*the search in this folder was started with .*log:0\.0001"):
        fs.search(TABLES, {**SPACE, "training.lr": "log:0.01..0.5"}, out=out, trials=10)
    with pytest.raises(SpecError, match="SPEC = "):
        fs.search({**TABLES, "seed": 1}, SPACE, out=out, trials=10, seeds=[0])
    with pytest.raises(SpecError, match="--seeds = "):
        fs.search(TABLES, SPACE, out=out, trials=10, seeds=[0, 1])


@pytest.mark.long
@pytest.mark.slow
def test_what_does_not_go_together_and_what_took_no_step_is_never_best(tmp_path):
    table = {**TABLES, "model": {"name": "mlp", "hidden": [8, 8, 8]}}
    space = {"training.lr": "choice:0.1,1e17", "training.rounds": "choice:1,2"}
    found = fs.search(table, space, out=tmp_path / "lr", trials=4, seeds=[0, 1], jobs=1, prune=False)
    assert {cell.settings["training.lr"] for cell in found.cells.values()} == {0.1, 1e17}
    for label, cell in found.cells.items():
        assert (label in found.notes) == (cell.settings["training.lr"] == 1e17)
        assert len(found.histories[label]) == 2
    assert found.cells[found.best].settings["training.lr"] == 0.1
    assert "no reply could be used" in (tmp_path / "lr" / TABLE).read_text()

    pair = {"method.name": "choice:fedavg,scaffold", "training.momentum": "choice:0,0.9"}
    with pytest.raises(SpecError):  # an end that is impossible by itself is refused at once
        fs.search(
            TABLES, {"method.name": "choice:scaffold,fedavg", "training.momentum": "choice:0.9,0"}, out=tmp_path / "no"
        )
    found = fs.search(TABLES, pair, out=tmp_path / "pair", trials=8, jobs=1)
    refused = [label for label, note in found.notes.items() if "SCAFFOLD" in note]
    assert refused, "this search has to meet the pair for the test to say anything"
    assert {tuple(found.cells[label].settings.values()) for label in refused} == {("scaffold", 0.9)}
    assert all(found.histories[label] == [] for label in refused)
    assert found.best not in refused
    assert set(found.best_of_methods) == {"fedavg", "scaffold"}
    assert fs.variants(tomllib.loads((tmp_path / "pair" / TUNED).read_text())) == found.tuned


SPEC = "[partition]\nclients = 4\n[training]\nrounds = 30\nlocal_epochs = 1\n[model]\nhidden = [8]\n"
SPEC += "[evaluation]\nvalidation = 0.2\ncheckpoint_every = 1\n"
COMMAND = (
    "-m",
    "fedstrata",
    "sweep",
    "spec.toml",
    "--search",
    "training.lr=log:0.001..0.5",
    "--trials",
    "6",
    "--quiet",
)


def rounds_in(out: Path) -> int:
    """How many rounds its runs have written down."""
    return sum(rounds_done(path.parent) for path in out.glob("*/*/metrics.jsonl"))


@pytest.mark.long
@pytest.mark.parametrize("jobs", [1, 2])
def test_after_kill_9_no_trial_is_lost_or_repeated(tmp_path, jobs):
    """The whole session is killed at random, workers too, again and again."""
    (tmp_path / "spec.toml").write_text(SPEC)
    command = (*COMMAND, "--jobs", str(jobs))
    generator, finished = random.Random(jobs), dict[str, int]()
    kills = 0
    while True:
        goal = rounds_in(tmp_path / "out") + generator.randint(10, 50)
        with started(*command, "--out", "out", cwd=tmp_path) as process:
            while rounds_in(tmp_path / "out") < goal and process.process.poll() is None:
                time.sleep(0.01)
            if process.process.poll() is not None:
                assert process.ended() == 0, process.said
                break
            process.process.send_signal(signal.SIGKILL)
            assert process.ended() == -signal.SIGKILL
            assert process.leaves_nothing()
            kills += 1
        models = {path.parts[-3]: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*/*/summary.json")}
        assert {label: models[label] for label in finished} == finished
        finished = models
    assert kills > 1
    found = trials(tmp_path / "out")
    assert [trial.number for trial in found] == list(range(6))
    assert all(trial.state.is_finished() for trial in found)
    shown = json.loads((tmp_path / "out" / FIGURES).read_text())
    assert [cell["label"] for cell in shown["cells"]] == [called(number) for number in range(6)]
    if jobs == 1:
        with started(*command, "--out", "whole", cwd=tmp_path) as process:
            assert process.ended() == 0, process.said
        for name in (TABLE, FIGURES, BEST):
            assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.slow
def test_the_command_line_says_what_it_takes(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = ["sweep", "--set", "evaluation.validation=0.2", "--quiet"]
    for arguments, message in [
        (
            ["--search", "training.lr"],
            "--search = 'training.lr': must have the form SECTION.KEY=RANGE. Use, for example,",
        ),
        (["--search", "training.lr=0.1"], "--search = '0.1': is not a range for training.lr. Use one of: uniform:…"),
        (
            ["--search", "training.lr=log:0.1..1", "--search", "training.lr=log:0.1..1"],
            "the key is given twice. Remove one of the options.",
        ),
        (
            ["--search", "training.lr=log:0.1..1", "--trials", "0"],
            "--trials = 0: must be an integer of at least 1.",
        ),
        (["--search", "training.lr=log:0.1..1", "--set", "seed=0,1"], "several values of a key cannot be combined"),
    ]:
        assert main([*base, *arguments]) == 2
        assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
