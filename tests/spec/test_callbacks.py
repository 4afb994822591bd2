"""What looks at a run, ends it early, and may fail without losing anything."""

from __future__ import annotations

import itertools
import json
import tomllib

import pytest
import safetensors.torch
import torch
import watching

import fedstrata as fs
from fedstrata.base.errors import SpecError
from fedstrata.base.jsonl import read_jsonl
from fedstrata.experiments import compare as comparison
from fedstrata.runs import checkpoint

TABLE = {
    "partition": {"name": "dirichlet", "alpha": 0.3, "clients": 6},
    "model": {"name": "mlp", "hidden": [8]},
    "training": {"rounds": 12, "local_epochs": 1, "clients_per_round": 2, "lr": 0.3},
    "evaluation": {"checkpoint_every": 3, "validation": 0.1, "metrics": ["accuracy", "log-loss"]},
}
STOPPING = {"name": "early-stopping", "patience": 2}


def spec(*callbacks, evaluation=None, **more):
    evaluation = {**TABLE["evaluation"], **(evaluation or {})}
    return fs.Experiment.from_table({**TABLE, "callbacks": list(callbacks), "evaluation": evaluation, **more})


def timeless(records):
    return [{key: value for key, value in record.items() if key != "seconds"} for record in records]


def model_bytes(folder, name="model.safetensors"):
    return (folder / name).read_bytes()


class Killed(BaseException):
    """As if the process had been."""


def killed_after(round):
    def kill(record):
        if record["round"] == round:
            raise Killed

    return kill


def model_after(rounds):
    """The model after some rounds of the same run, without any callback."""
    with fs.Simulation(fs.prepare(spec())) as simulation:
        values = [simulation.step()["validation"]["accuracy"] for _ in range(rounds)]
        weights = simulation.evaluated()
    return values, {**weights.params, **weights.buffers}


@pytest.mark.slow
def test_early_stopping_leaves_the_model_of_the_best_validation_round(tmp_path):
    history = fs.run(spec(STOPPING), out=tmp_path / "run")
    rounds = len(history)
    assert rounds < 12, "this spec has to stop early for the test to say anything"
    values, _ = model_after(rounds)
    assert [record["validation"]["accuracy"] for record in history] == values
    best = values.index(max(values)) + 1
    # The first stretch of two evaluations without anything better than what was before ends it.
    assert rounds == best + 2
    assert history.model_round == history.best_round == best
    assert history.best_on == "validation"
    assert history.best_accuracy == history[best - 1]["accuracy"]
    _, params = model_after(best)
    assert all(torch.equal(w, history.params[name]) for name, w in params.items())
    assert all(
        torch.equal(w, params[name]) for name, w in safetensors.torch.load(model_bytes(tmp_path / "run")).items()
    )
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    since = f"2 evaluations; the best evaluation was in round {best}"
    assert summary["stopped"] == f"validation accuracy has not improved for {since}"
    assert (summary["model_round"], summary["best_on"]) == (best, "validation")
    (event,) = [event for event in read_jsonl(tmp_path / "run" / "events.jsonl") if event["kind"] == "stopped"]
    assert event == {"round": rounds, "kind": "stopped", "reason": summary["stopped"]}
    loaded = fs.History.load(tmp_path / "run")
    assert (loaded.stopped, loaded.model_round) == (summary["stopped"], best)


@pytest.mark.slow
@pytest.mark.parametrize("when", [1, 3, 4])
def test_early_stopping_after_a_kill_is_the_same_to_the_byte(tmp_path, when):
    whole = fs.run(spec(STOPPING, "keep-best"), out=tmp_path / "whole")
    when = min(when, len(whole) - 1)
    with pytest.raises(Killed):
        fs.run(spec(STOPPING, "keep-best"), out=tmp_path / "run", callbacks=[killed_after(when)])
    again = fs.run(spec(STOPPING, "keep-best"), out=tmp_path / "run", resume=True)
    assert timeless(again) == timeless(whole)
    for name in ("model.safetensors", "best.safetensors", "evaluation.json"):
        assert model_bytes(tmp_path / "run", name) == model_bytes(tmp_path / "whole", name)
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("run", "whole")]
    assert [summary.pop("seconds") > 0 for summary in summaries] == [True, True]
    assert summaries[0] == summaries[1]


@pytest.mark.slow
def test_a_run_that_was_stopped_stays_so(tmp_path):
    history = fs.run(spec(STOPPING), out=tmp_path / "run")
    before = model_bytes(tmp_path / "run")
    more = spec(STOPPING, training={**TABLE["training"], "rounds": 20})
    again = fs.run(more, out=tmp_path / "run", resume=True)
    assert len(again) == len(history)
    assert again.stopped == history.stopped
    assert model_bytes(tmp_path / "run") == before
    # Also where no checkpoint was kept.
    plain = spec("watching:Enough", evaluation={"checkpoint_every": 0})
    fs.run(plain, out=tmp_path / "none")
    assert len(fs.run(plain, out=tmp_path / "none", resume=True)) == 2


@pytest.mark.slow
def test_early_stopping_by_another_metric_and_direction():
    values = [record["validation"]["log-loss"] for record in fs.run(spec())]
    history = fs.run(spec({"name": "early-stopping", "metric": "log-loss", "patience": 1}))
    first = next((n for n, (a, b) in enumerate(itertools.pairwise(values), 2) if b >= a), 12)
    assert len(history) == first
    assert history.model_round == min(range(first), key=values.__getitem__) + 1
    # The wrong way round: what gets better is no improvement then.
    upside_down = {"name": "early-stopping", "metric": "log-loss", "patience": 1, "mode": "max"}
    rises = next((n for n, (a, b) in enumerate(itertools.pairwise(values), 2) if b <= a), 12)
    assert len(fs.run(spec(upside_down))) == rises


def test_what_has_no_value_is_never_better():
    with fs.Simulation(fs.prepare(spec())) as simulation:
        best = fs.KeepBest(metric="log-loss")
        assert best.improves(simulation, 0.5, None)
        assert not best.improves(simulation, None, None)
        assert not best.improves(simulation, None, 0.5)
        assert [best.improves(simulation, value, 0.5) for value in (0.25, 0.5, 0.75)] == [True, False, False]
        # A round without a value leaves nothing behind.
        best.on_round(simulation, {"round": 1, "accuracy": None, "loss": None, "validation": {"log-loss": None}})
        assert simulation.memory == {}


@pytest.mark.slow
def test_callbacks_compare_the_primary_metric_by_default(tmp_path):
    assert [each["metric"] for each in spec(STOPPING, "keep-best").to_spec()["callbacks"]] == ["accuracy"] * 2
    by_loss = {"primary": "log-loss"}
    named = [{**STOPPING, "metric": "log-loss"}, {"name": "keep-best", "metric": "log-loss"}]
    assert spec(STOPPING, "keep-best", evaluation=by_loss) == spec(*named, evaluation=by_loss)
    by_accuracy = fs.run(spec(STOPPING))
    values = [record["validation"]["log-loss"] for record in fs.run(spec())]
    passed = fs.run(spec(evaluation=by_loss), callbacks=[fs.EarlyStopping(patience=2)])
    assert passed.model_round != by_accuracy.model_round
    assert passed.model_round == min(range(len(passed)), key=values.__getitem__) + 1
    assert passed.confusion["best"].round == passed.best_round == passed.model_round


@pytest.mark.slow
def test_the_primary_metric_may_change_when_a_run_is_resumed(tmp_path):
    with pytest.raises(Killed):
        fs.run(spec(), out=tmp_path, callbacks=[killed_after(6)])
    history = fs.run(spec(evaluation={"primary": "log-loss"}), out=tmp_path, resume=True)
    values = history.column("validation.log-loss")[1]
    assert history.best_round == values.argmin() + 1
    # The evaluations before the checkpoint of round 6 were compared by the accuracy.
    assert history.confusion["best"].round == values[6:].argmin() + 7


def test_small_improvements_do_not_count():
    assert len(fs.run(spec({"name": "early-stopping", "patience": 3, "min_delta": 1.0}))) == 4


@pytest.mark.slow
def test_the_best_model_is_left_where_the_rounds_run_out():
    history = fs.run(spec({"name": "early-stopping", "patience": 50}))
    assert len(history) == 12
    assert history.stopped == ""
    assert history.model_round == history.best_round
    assert history.summary["model_round"] == history.best_round


@pytest.mark.slow
def test_keep_best_keeps_the_best(tmp_path):
    history = fs.run(spec("keep-best"), out=tmp_path / "run")
    _, params = model_after(history.best_round)
    kept = safetensors.torch.load(model_bytes(tmp_path / "run", "best.safetensors"))
    assert all(torch.equal(w, kept[name]) for name, w in params.items())
    unaware = fs.Experiment.from_table({**TABLE, "callbacks": ["keep-best"], "evaluation": {}})
    found = fs.run(unaware, out=tmp_path / "test")
    assert found.summary["best_on"] == "test"
    assert (tmp_path / "test" / "best.safetensors").exists()


@pytest.mark.slow
def test_one_of_ones_own_by_the_spec_and_from_python(tmp_path):
    own = watching.Enough(rounds=3)
    history = fs.run(spec(), callbacks=[own])
    assert own.calls == ["start", 1, 2, 3, "end"]
    assert (len(history), history.stopped) == (3, "that is enough")
    named = spec({"name": "watching:Enough", "rounds": 3})
    assert fs.Experiment.from_table(tomllib.loads(named.to_toml())) == named
    again = fs.run(named, out=tmp_path / "run")
    assert timeless(again) == timeless(history)
    assert checkpoint.load(tmp_path / "run" / "checkpoint").round == 3


@pytest.mark.slow
def test_what_a_callback_remembers_survives_a_kill(tmp_path):
    with pytest.raises(Killed):
        fs.run(spec("watching:Counter"), out=tmp_path / "run", callbacks=[killed_after(7)])
    assert checkpoint.load(tmp_path / "run" / "checkpoint").loop_state.memory == {"rounds": [1, 2, 3, 4, 5, 6]}
    fs.run(spec("watching:Counter"), out=tmp_path / "run", resume=True)
    assert checkpoint.load(tmp_path / "run" / "checkpoint").loop_state.memory == {"rounds": list(range(1, 13))}


@pytest.mark.slow
def test_one_that_raises_loses_nothing(tmp_path):
    whole = fs.run(spec(), out=tmp_path / "whole")
    with pytest.raises(ZeroDivisionError, match="on purpose") as caught:
        fs.run(spec("watching:Clumsy"), out=tmp_path / "run")
    assert timeless(caught.value.history) == timeless(whole)[:2]
    (note,) = caught.value.__notes__
    assert (
        note
        == f"raised by callback 'watching:Clumsy' after round 2; the run is in {tmp_path / 'run'} and can be resumed"
    )
    assert timeless(fs.History.load(tmp_path / "run")) == timeless(whole)[:2]
    assert checkpoint.load(tmp_path / "run" / "checkpoint").round == 2, "although one is due after round 3"
    again = fs.run(spec("watching:Clumsy"), out=tmp_path / "run", resume=True)
    assert timeless(again) == timeless(whole)
    assert model_bytes(tmp_path / "run") == model_bytes(tmp_path / "whole")


@pytest.mark.slow
def test_a_function_that_raises_after_a_checkpoint_does_not_make_another(tmp_path):
    """The second one listed no states: clients of SCAFFOLD went on with those of an earlier round."""

    def clumsy(record):
        if record["round"] == 6:
            raise KeyError("mine")

    whole = fs.run(spec(method="scaffold"), out=tmp_path / "whole")
    with pytest.raises(KeyError):
        fs.run(spec(method="scaffold"), out=tmp_path / "run", callbacks=[clumsy])
    again = fs.run(spec(method="scaffold"), out=tmp_path / "run", resume=True)
    assert timeless(again) == timeless(whole)
    assert model_bytes(tmp_path / "run") == model_bytes(tmp_path / "whole")


def test_a_function_that_raises_is_named_too():
    def clumsy(record):
        raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        fs.run(spec(), callbacks=[clumsy])
    assert "clumsy' after round 1" in caught.value.__notes__[0]
    assert len(caught.value.history) == 1


@pytest.mark.parametrize(
    ("callbacks", "evaluation", "problem"),
    [
        (
            ["early-stoping"],
            {},
            r"callbacks.name = 'early-stoping': is not a known callback; did you mean 'early-stopping'\? Use one of: ",
        ),
        ([{"name": "early-stopping", "patience": 0}], {}, "callbacks.patience = 0"),
        (
            [{"name": "early-stopping", "metric": "auroc"}],
            {},
            r"callbacks.metric = 'auroc': is not a metric of this run; did you mean 'accuracy'\? Add the metric to ",
        ),
        (
            ["early-stopping"],
            {"validation": None},
            "callbacks: 'early-stopping' requires validation samples, because it never",
        ),
        (
            ["fedstrata.evaluation.history:History"],
            {},
            r"history:History': is not a subclass of Callback\. Derive",
        ),
    ],
)
def test_what_does_not_fit(callbacks, evaluation, problem):
    with pytest.raises(SpecError, match=problem):
        fs.prepare(spec(*callbacks, evaluation=evaluation))


def test_one_from_python_is_checked_before_anything_is_written(tmp_path):
    with pytest.raises(SpecError, match=r"Set evaluation\.validation"):
        fs.run(spec(evaluation={"validation": None}), out=tmp_path / "run", callbacks=[fs.EarlyStopping()])
    assert not (tmp_path / "run").exists()


def test_in_another_process_the_spec_names_them():
    with pytest.raises(
        SpecError,
        match=r"callbacks: the engine 'nvflare' runs the rounds in another process, which cannot call Python objects",
    ):
        fs.run(spec(), engine="nvflare", callbacks=[fs.KeepBest()])


@pytest.mark.slow
def test_a_comparison_does_not_run_again_what_was_stopped(tmp_path):
    stopped, going = spec("watching:Enough"), spec(training={**TABLE["training"], "rounds": 2})
    fs.run(stopped, out=tmp_path / "stopped")
    fs.run(going, out=tmp_path / "going")
    assert comparison.is_done(tmp_path / "stopped", stopped)
    assert comparison.is_done(tmp_path / "going", going)
    assert not comparison.is_done(tmp_path / "going", spec())
