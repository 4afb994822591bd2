"""Several methods and seeds side by side: in processes or not, again, after a kill, and with settings per label."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
import tomllib
from pathlib import Path

import pytest
import torch
from processes import started

import fedstrata as fs
from fedstrata.base.errors import SpecError
from fedstrata.base.locking import LOCK
from fedstrata.experiments.compare import compare, forks, rounds_done
from fedstrata.spec.experiment import variants

pytestmark = pytest.mark.slow
SPEC = """
seed = 0
[partition]
name = "dirichlet"
alpha = 0.5
clients = 6
[training]
rounds = 3
clients_per_round = 3
local_epochs = 1
lr = 0.1
[model]
name = "mlp"
hidden = [12]
[evaluation]
every = 3
checkpoint_every = 1
[method]
name = "fedavg"
[compare.prox]
method = { name = "fedavg", objective = { name = "fedprox", mu = 2.0 } }
training = { lr = 0.02 }
[compare.uncapped]
method = { name = "stratify", schedule = "uncapped" }
partition = { name = "classes", per_client = 2 }
"""
TABLE = tomllib.loads(SPEC)
METHODS = ["fedavg", "scaffold"]


def models(out: Path) -> dict[str, bytes]:
    return {str(path.parent.relative_to(out)): path.read_bytes() for path in out.glob("*/*/model.safetensors")}


@pytest.fixture(scope="module")
def in_turn(tmp_path_factory):
    """Two methods with two seeds, one after another."""
    out = tmp_path_factory.mktemp("compare") / "in-turn"
    told: list[tuple[str, int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedstrata.reporting.plots.plot_comparison", lambda histories, folder: None)
        histories = compare(
            variants(TABLE, METHODS), seeds=(0, 1), out=out, jobs=1, watch=lambda *progress: told.append(progress)
        )
    return out, histories, told


@pytest.fixture
def unreported(monkeypatch):
    """No tables and pictures, which take longer than these runs."""
    monkeypatch.setattr("fedstrata.reporting.html.write_comparison", lambda out: None)


@pytest.mark.long
def test_every_method_runs_with_every_seed(in_turn):
    out, histories, told = in_turn
    assert list(histories) == METHODS
    for label, runs in histories.items():
        assert [(run.method, run.seed, len(run)) for run in runs] == [(label, 0, 3), (label, 1, 3)]
    assert told == [(label, seed, t) for label in METHODS for seed in (0, 1) for t in (1, 2, 3)]
    found = models(out)
    assert sorted(found) == [f"{label}/seed-{seed}" for label in METHODS for seed in (0, 1)]
    assert len(set(found.values())) == 4
    assert (out / "report.html").stat().st_size > 1000


def test_a_compared_run_is_the_run_itself(in_turn, tmp_path):
    out, histories, _ = in_turn
    alone = fs.run({**{key: TABLE[key] for key in TABLE if key != "compare"}, "seed": 1}, out=tmp_path / "alone")
    assert (tmp_path / "alone" / "model.safetensors").read_bytes() == models(out)["fedavg/seed-1"]
    assert alone.final_accuracy == histories["fedavg"][1].final_accuracy


@pytest.mark.long
def test_processes_give_the_same_bytes(in_turn, unreported, tmp_path):
    out, histories, _ = in_turn
    both = compare(variants(TABLE, METHODS), seeds=(0, 1), out=tmp_path, jobs=2)
    assert models(tmp_path) == models(out)
    for label in METHODS:
        for one, two in zip(histories[label], both[label], strict=True):
            assert [{**r, "seconds": 0} for r in one] == [{**r, "seconds": 0} for r in two]


def test_again_nothing_is_repeated_and_more_seeds_are_added(in_turn, unreported):
    out, _, _ = in_turn
    before = {path: path.stat().st_mtime_ns for path in out.glob("*/*/*") if path.is_file()}
    told: list[tuple[str, int, int]] = []
    compare(variants(TABLE, ["fedavg"]), seeds=(0, 2), out=out, jobs=1, watch=lambda *p: told.append(p))
    assert told == [("fedavg", 2, t) for t in (1, 2, 3)]
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_run_that_was_killed_goes_on(in_turn, unreported, tmp_path):
    out, _, _ = in_turn

    def kill(label: str, seed: int, rounds: int) -> None:
        if (label, seed, rounds) == ("scaffold", 0, 2):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(variants(TABLE, METHODS), seeds=(0, 1), out=tmp_path, jobs=1, watch=kill)
    assert not (tmp_path / "scaffold" / "seed-0" / "summary.json").exists()
    assert not (tmp_path / "scaffold" / "seed-1").exists()
    told: list[tuple[str, int, int]] = []
    histories = compare(variants(TABLE, METHODS), seeds=(0, 1), out=tmp_path, jobs=1, watch=lambda *p: told.append(p))
    # Round 3 of the one that was killed, and the other seed from its beginning: nothing else.
    assert told == [("scaffold", 0, 3), *(("scaffold", 1, t) for t in (1, 2, 3))]
    assert [record["round"] for record in histories["scaffold"][0]] == [1, 2, 3]
    expected = models(out)
    assert models(tmp_path) == {run: expected[run] for run in models(tmp_path)}
    assert len(models(tmp_path)) == 4


def test_labels_lay_their_settings_over_the_spec():
    found = variants(TABLE)
    assert list(found) == ["prox", "uncapped"]
    prox, uncapped = found.values()
    assert (prox.method.name, prox.method.objective.mu, prox.training.lr) == ("fedavg", 2.0, 0.02)
    assert (prox.training.rounds, prox.partition.clients) == (3, 6)  # the rest is the spec's
    assert (uncapped.method.schedule, uncapped.training.lr) == ("uncapped", 0.1)
    # Another kind of partition starts from its own defaults.
    assert (uncapped.partition.name, uncapped.partition.per_client) == ("classes", 2)
    assert uncapped.partition.clients == type(uncapped.partition)().clients
    assert list(variants(TABLE, ["stratify", "prox"])) == ["stratify", "prox"]


def test_a_methods_settings_are_inherited_by_the_same_method_alone():
    base = {"method": {"name": "fedavg", "objective": {"name": "fedprox", "mu": 0.5}}}
    overlays = {"strong": {"method": {"name": "fedavg", "data_sampler": "fedstas"}}}
    found = variants({**base, "compare": overlays}, ["fedavg", "stratify", "strong"])
    assert found["fedavg"].method.objective.mu == found["strong"].method.objective.mu == 0.5
    assert found["strong"].method.data_sampler.name == "fedstas"
    assert found["stratify"].method.to_spec() == fs.Stratify().to_spec()


def test_labels_are_the_folders(unreported, tmp_path):
    histories = compare(variants(TABLE, ["prox"]), out=tmp_path, jobs=1)
    assert histories["prox"][0].method == "fedavg"
    spec = tomllib.loads((tmp_path / "prox" / "seed-0" / "spec.toml").read_text())
    assert spec["method"]["objective"] == {"name": "fedprox", "mu": 2.0}
    changed = variants({**TABLE, "training": {**TABLE["training"], "batch_size": 7}}, ["prox"])
    with pytest.raises(SpecError, match=r"training.batch_size = 7: the run in this folder has 32.*prox/seed-0"):
        compare(changed, out=tmp_path, jobs=1)


@pytest.mark.parametrize(
    ("labels", "changes", "key", "words"),
    [
        (["fedavg", "fedvag"], {}, "--methods", "did you mean 'fedavg'"),
        (["fedavg", "bad"], {"compare": {"bad": {"method": "fedavg", "training": {"lr": -1}}}}, "compare.bad.", "lr"),
        (["fedavg", "scaffold"], {"training": {"momentum": 0.9}}, "training.momentum", "SCAFFOLD"),
        (["fedavg"], {"training": {"clients_per_round": 7}}, "training.clients_per_round", "6 clients"),
        (["fedavg"], {"data": "digitz"}, "data", "digits"),
        ([], {"compare": {}}, "--methods", "is required"),
        (["fedavg", "a/b"], {"compare": {"a/b": {"method": "fedavg"}}}, "--methods", "folder"),
    ],
)
def test_everything_is_checked_before_anything_is_written(labels, changes, key, words, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(SpecError, match=words) as caught:
        compare(variants({**TABLE, **changes}, labels), out=out, jobs=1)
    assert caught.value.key.startswith(key)
    assert not out.exists()


def test_a_run_that_was_extended_and_broken_off_is_finished(unreported, tmp_path):
    experiments = variants(tomllib.loads(SPEC), ["fedavg"])
    compare(experiments, out=tmp_path, jobs=1)
    longer = variants(tomllib.loads(SPEC), ["fedavg"], ["training.rounds=5"])
    folder = tmp_path / "fedavg" / "seed-0"
    (folder / "spec.toml").write_text((folder / "spec.toml").read_text().replace("rounds = 3", "rounds = 5"))
    assert len(compare(longer, out=tmp_path, jobs=1)["fedavg"][0]) == 5


def test_a_finished_folder_counts_as_done_only_as_the_very_run(unreported, tmp_path):
    """Without its spec it counted as done under any settings."""
    compare(variants(tomllib.loads(SPEC), ["fedavg"]), out=tmp_path, jobs=1)
    (tmp_path / "fedavg" / "seed-0" / "spec.toml").unlink()
    with pytest.raises(SpecError, match=r"training\.lr = 0\.3: the run in this folder has 0\.1"):
        compare(variants(tomllib.loads(SPEC), ["fedavg"], ["training.lr=0.3"]), out=tmp_path, jobs=1)
    told = []
    compare(variants(tomllib.loads(SPEC), ["fedavg"]), out=tmp_path, jobs=1, watch=lambda *p: told.append(p))
    assert told == []


def test_what_only_this_process_has_needs_forks(monkeypatch):
    class Mine(fs.FedAvg):
        pass

    spec = fs.Experiment()
    mine = spec.replace(method=Mine())
    assert forks([spec], in_memory=False) is False
    assert forks([spec], in_memory=True) is True
    assert forks([spec, mine], in_memory=False) is True
    several = spec.replace(training={"threads": 2})
    with pytest.warns(UserWarning, match=r"one after another, .* and because training\.threads is not 1\."):
        assert forks([several], in_memory=True) is None
    monkeypatch.setattr("fedstrata.experiments.compare.can_fork", lambda: False)
    with pytest.warns(UserWarning, match=r"one after another, .* and because this process cannot be forked\."):
        assert forks([mine], in_memory=False) is None


def test_seeds_that_differ_between_experiments_are_refused(tmp_path):
    specs = {"a": fs.Experiment(seed=2), "b": fs.Experiment(seed=1)}
    with pytest.raises(SpecError, match=r"seed = \[1, 2\]: differs between the experiments\. Use one seed"):
        compare(specs, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_a_failing_comparison_ends_its_own_processes_alone(unreported, tmp_path):
    mine = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    mine.start()
    try:
        experiments = variants(tomllib.loads(SPEC), ["fedavg", "prox"])
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "prox").write_text("no folder")
        with pytest.raises(SpecError, match="the folder cannot be created"):
            compare(experiments, out=tmp_path / "out", jobs=2)
        assert mine.is_alive()
    finally:
        mine.kill()
        mine.join()


def test_a_run_that_was_broken_off_is_in_no_table(tmp_path, monkeypatch):
    monkeypatch.setattr("fedstrata.reporting.plots.plot_comparison", lambda histories, folder: None)
    monkeypatch.setattr("fedstrata.reporting.html.render", lambda runs, *, every, folder: "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedstrata.reporting.html.write_comparison", lambda out: None)
        compare(variants(tomllib.loads(SPEC), ["fedavg"]), out=tmp_path, jobs=1)
    other = tmp_path / "prox" / "seed-0"
    other.mkdir(parents=True)
    for name in ("spec.toml", "metrics.jsonl"):
        (other / name).write_bytes((tmp_path / "fedavg" / "seed-0" / name).read_bytes())
    compare(variants(tomllib.loads(SPEC), ["fedavg"]), out=tmp_path, jobs=1)
    assert "prox" not in (tmp_path / "table.md").read_text()
    compare(variants(tomllib.loads(SPEC), ["prox", "fedavg"]), seeds=[1], out=tmp_path, jobs=1)
    assert "| prox |" in (tmp_path / "table.md").read_text()
    assert list(fs.load_runs(tmp_path)) == ["prox", "fedavg"]  # as it was asked
    assert json.loads((tmp_path / "labels.json").read_text()) == ["prox", "fedavg"]


LONG = """
seed = 0
[partition]
clients = 6
[training]
rounds = 200
local_epochs = 1
lr = 0.1
[model]
name = "mlp"
hidden = [12]
[evaluation]
every = 10
checkpoint_every = 3
[method]
name = "fedavg"
"""
COMMAND = ("-m", "fedstrata", "compare", "spec.toml", "--methods", "fedavg,scaffold", "--jobs", "2", "--out", "out")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed")
    compare(variants(tomllib.loads(LONG), METHODS), out=out, jobs=1)
    return models(out)


def begun(out: Path) -> bool:
    """Whether both runs are past their first checkpoint."""
    return all(rounds_done(out / method / "seed-0") > 4 for method in METHODS)


@pytest.mark.long
@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGKILL], ids=lambda kind: kind.name)
def test_workers_end_with_their_parent_and_the_same_command_goes_on(tmp_path, undisturbed, kind):
    (tmp_path / "spec.toml").write_text(LONG)
    with started(*COMMAND, "--quiet", cwd=tmp_path) as command:
        command.wait_until(lambda: begun(tmp_path / "out"))
        assert len(command.alive()) > 2
        command.process.send_signal(kind)
        assert command.ended() == (143 if kind == signal.SIGTERM else -signal.SIGKILL)
        assert ("terminated. To continue from the last checkpoint" in command.said) == (kind == signal.SIGTERM)
        assert len(list((tmp_path / "out").glob("*/*/model.safetensors"))) < 2
        assert command.leaves_nothing()
    with started(*COMMAND, "--quiet", cwd=tmp_path) as command:
        assert command.ended() == 0, command.said
    assert models(tmp_path / "out") == undisturbed


@pytest.mark.long
def test_a_worker_that_is_killed_costs_its_own_run_alone(tmp_path, undisturbed):
    (tmp_path / "spec.toml").write_text(LONG)
    with started(*COMMAND, "--quiet", cwd=tmp_path) as command:
        command.wait_until(lambda: begun(tmp_path / "out"))
        # The process that works in a run folder has its lock file open.
        victim = next(pid for pid in command.alive() if holds(pid, tmp_path / "out" / "scaffold" / "seed-0"))
        os.kill(victim, signal.SIGKILL)
        assert command.ended() == 1
        said = command.said
    assert "1 of 2 runs ended unexpectedly: the run in out/scaffold/seed-0 was killed by SIGKILL" in said
    assert models(tmp_path / "out") == {run: undisturbed[run] for run in ["fedavg/seed-0"]}
    compare(variants(tomllib.loads(LONG), METHODS), out=tmp_path / "out", jobs=1)
    assert models(tmp_path / "out") == undisturbed


def holds(pid: int, folder: Path) -> bool:
    return any(entry.resolve() == folder / LOCK for entry in Path(f"/proc/{pid}/fd").iterdir())


@pytest.mark.long
@pytest.mark.slow
def test_a_script_needs_no_main_guard(tmp_path):
    (tmp_path / "script.py").write_text(f"""
import tomllib
import fedstrata as fs
from fedstrata.spec.experiment import variants

print("once")
table = tomllib.loads({SPEC!r})
fs.compare(variants(table, ["fedavg", "prox"]), out="out", jobs=2)
""")
    with started("script.py", cwd=tmp_path) as command:
        assert (command.ended(), command.said) == (0, "once\n")
    assert len(models(tmp_path / "out")) == 2


OWN = f"""
import tomllib
import warnings
import numpy as np
import torch
from sklearn.cluster import KMeans
import fedstrata as fs

# The threads of PyTorch and of scikit-learn have worked here: those of a fork are gone.
torch.set_num_threads(2)
torch.nn.functional.conv2d(torch.ones(8, 8, 32, 32), torch.ones(8, 8, 3, 3)).relu().sum()
KMeans(3, n_init=1).fit(np.random.default_rng(0).normal(size=(2000, 8)))

class Own(fs.FedAvg): ...

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(2, 3)
    def forward(self, x):
        return self.head(x)

generator = np.random.default_rng(0)
y = np.arange(90) % 3
x = np.eye(3)[y][:, :2] + generator.normal(scale=0.3, size=(90, 2))
table = tomllib.loads({SPEC.split("[compare.")[0]!r})
spec = fs.Experiment.from_table(table)
stas = fs.Experiment.from_table(table | {{"method": {{"name": "fedstas", "strata": 3}}}})
specs = {{"own": spec.model_copy(update={{"method": Own()}}), "stas": stas}}
with warnings.catch_warnings():
    warnings.simplefilter("error")
    fs.compare(specs, seeds=[0, 1], data=(x, y, x, y), model=Net, out="turn", jobs=1, report=False)
    runs = fs.compare(specs, seeds=[0, 1], data=(x, y, x, y), model=Net, out="out", jobs=2, report=False)
print(list(runs), [run.final_accuracy > 0.1 for each in runs.values() for run in each])
"""
"""A program without a main guard, with a method, a model and data of its own."""
SAID = "['own', 'stas'] [True, True, True, True]"


@pytest.mark.long
@pytest.mark.parametrize("how", ["script.py", "-c"])
def test_what_is_the_programs_own_needs_no_main_guard(tmp_path, how):
    (tmp_path / "script.py").write_text(OWN)
    with started(*([how] if how != "-c" else ["-c", OWN]), cwd=tmp_path) as command:
        assert (command.ended(), command.said) == (0, f"{SAID}\n")
        assert command.leaves_nothing()
    assert len(models(tmp_path / "out")) == 4
    assert models(tmp_path / "out") == models(tmp_path / "turn")


@pytest.mark.long
def test_a_notebook_compares_what_it_defines(tmp_path):
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    definitions, comparison = OWN.split("generator = ")
    comparison = "generator = " + comparison.replace("jobs=2", "jobs=2, progress=True")
    again = "import asyncio\nawait asyncio.sleep(0.2)\nprint(fs.run(spec, progress=True).final_accuracy > 0)"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in (definitions, comparison, again)])
    # Its own process: it is not for this one's warnings, nor for this one's event loop.
    nbformat.write(notebook, tmp_path / "notebook.ipynb")
    code = (
        "import nbclient, nbformat, sys\n"
        "book = nbformat.read('notebook.ipynb', 4)\n"
        "nbclient.NotebookClient(book, timeout=300, kernel_name='python3').execute()\n"
        "nbformat.write(book, 'done.ipynb')\n"
    )
    with started("-c", code, cwd=tmp_path) as command:
        assert command.ended() == 0, command.said
    first, second, third = nbformat.read(tmp_path / "done.ipynb", 4).cells
    said = "".join(output.get("text", "") for cell in (first, second) for output in cell.outputs)
    assert said == f"{SAID}\n"
    (shown,) = [output.data["text/html"] for output in second.outputs if output.output_type == "display_data"]
    assert "4 runs" in shown
    assert "12/12 rounds" in shown
    (shown,) = [output.data["text/html"] for output in third.outputs if output.output_type == "display_data"]
    assert 'fedavg</td><td><progress value="3" max="3">' in shown
    assert len(models(tmp_path / "out")) == 4
    assert models(tmp_path / "out") == models(tmp_path / "turn")


def test_where_nothing_can_be_forked_runs_take_turns(in_turn, unreported, tmp_path, monkeypatch):
    monkeypatch.setattr("fedstrata.experiments.compare.can_fork", lambda: False)
    data = fs.prepare(variants(TABLE, ["fedavg"])["fedavg"]).data
    with pytest.warns(UserWarning, match="one after another, because they use objects of this process, and because"):
        compare(variants(TABLE, METHODS), seeds=(0, 1), data=data, out=tmp_path, jobs=2)
    there = models(in_turn[0])  # with the same data, handed over; another test may have added a seed
    assert models(tmp_path) == {run: there[run] for run in there if "seed-2" not in run}


def test_with_data_of_ones_own_it_goes_on_with_the_same_data_alone(unreported, tmp_path):
    data = fs.prepare(variants(TABLE, ["fedavg"])["fedavg"]).data
    compare(variants(TABLE, ["fedavg"]), data=data, out=tmp_path, jobs=1, references=["centralised"])
    compare(variants(TABLE, ["fedavg"]), data=data, out=tmp_path, jobs=1, references=["centralised"])
    other = fs.from_arrays(data.x_train[:900], data.y_train[:900], data.x_test, data.y_test)
    with pytest.raises(SpecError, match=r"data\.custom.*: the run in this folder has"):
        compare(variants(TABLE, ["fedavg"]), data=other, out=tmp_path, jobs=1)


WILD = {
    **{key: TABLE[key] for key in TABLE if key != "compare"},
    "model": {"name": "mlp", "hidden": [12, 12, 12]},
    "compare": {"wild": {"method": {"name": "fedavg"}, "training": {"lr": 1e17}}, "fedavg": {}, "away": {
        "availability": {"name": "trace", "file": "nobody.csv"}
    }},
}  # fmt: skip


@pytest.mark.long
def test_one_that_never_took_a_step_is_marked_and_the_others_end(tmp_path, trace):
    away = variants({**WILD, "compare": {"away": {"availability": trace({0: [99]})}}}, ["away"])
    experiments = variants(WILD, ["wild", "fedavg"]) | away
    with pytest.warns(UserWarning, match="never changed") as told:
        runs = compare(experiments, out=tmp_path / "out", jobs=2)
    assert [str(each.message) for each in told] == [
        "wild, seed 0: the model never changed, because no reply could be used in 3 rounds (9 failed or refused)",
        "away, seed 0: the model never changed, because no reply could be used in 3 rounds (9 dropped out)",
    ]
    assert runs["fedavg"][0].warning == ""
    assert json.loads((tmp_path / "out/wild/seed-0/summary.json").read_text())["warning"] == runs["wild"][0].warning
    text = (tmp_path / "out" / "table.md").read_text()
    assert "| wild † |" in text
    assert "| away † |" in text
    assert "| fedavg |" in text
    sentence = "† 1 run of wild, 1 run of away broke down: no reply could be used from some round to the end."
    assert sentence in text
    page = (tmp_path / "out" / "report.html").read_text()
    assert sentence in page
    assert "wild †</th>" in page
    assert "fedavg</th>" in page
    order = json.loads((tmp_path / "out" / "labels.json").read_text())
    assert order == ["wild", "fedavg", "away"]


def test_a_module_that_all_seeds_would_start_from_is_warned_of(tmp_path):
    def network():
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))

    spec = fs.Experiment.from_table({"partition": {"clients": 3}, "training": {"rounds": 1, "local_steps": 1}})
    few = {"jobs": 1, "report": False}
    with pytest.warns(UserWarning, match="model: all seeds start from the weights of this module. For different"):
        fs.compare({"a": spec}, seeds=[0, 1], model=network(), out=tmp_path / "module", **few)
    # No warning: the seed decides, the weights are meant, or there is one seed.
    fs.compare({"a": spec}, seeds=[0, 1], model=network, out=tmp_path / "function", **few)
    fs.compare({"a": spec}, seeds=[0, 1], model=fs.Model(network()), out=tmp_path / "meant", **few)
    fs.compare({"a": spec}, seeds=[0], model=network(), out=tmp_path / "one", **few)
    assert len(models(tmp_path / "function")) == 2


@pytest.mark.long
def test_a_method_that_is_added_does_not_become_the_baseline(tmp_path):
    table = tomllib.loads(SPEC)
    compare(variants(table, ["fedavg"]), out=tmp_path, jobs=1)
    compare(variants(table, ["prox"]), out=tmp_path, jobs=1)
    assert list(fs.load_runs(tmp_path)) == ["fedavg", "prox"]


def test_a_comparison_is_a_frame_and_a_table(tmp_path):
    pytest.importorskip("pandas")
    experiments = variants(tomllib.loads(SPEC), ["fedavg", "prox"], ["evaluation.metrics=['accuracy', 'ece']"])
    runs = compare(experiments, seeds=[0, 1], out=tmp_path, jobs=1, report=False)
    frame = runs.to_frame()
    assert frame[["label", "seed"]].values.tolist() == [["fedavg", 0], ["fedavg", 1], ["prox", 0], ["prox", 1]]
    assert frame["final_accuracy"].tolist() == [history.final_accuracy for label in runs for history in runs[label]]
    for shown in (frame, fs.load_runs(tmp_path).to_frame()):  # also of a metric that is not the primary one
        finals = [history.column("test.ece")[1][-1] for label in runs for history in runs[label]]
        assert shown["final_ece"].tolist() == finals
        assert shown["final_loss"].tolist() == [history[-1]["loss"] for label in runs for history in runs[label]]
    page = runs._repr_html_()
    assert "<td>fedavg</td><td>prox</td>" in page
    assert "final accuracy, %" in page
