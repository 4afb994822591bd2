"""Regression on the sites' own files: the bytes of a simulation, from statistics that the policies of sites allow."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from asked import Site
from waiting import free_port

import fedstrata as fs
from fedstrata.base import records
from fedstrata.base.errors import DataError, FedstrataError, SpecError
from fedstrata.base.jsonl import read_jsonl
from fedstrata.cli import main
from fedstrata.data.fitting import RawTargets, Unfitted, fit
from fedstrata.data.schema import Schema
from fedstrata.data.tasks.regression import Regression
from fedstrata.sites.data_schema import prepare_server, survey_of
from fedstrata.sites.disclosure import declaration_of, hash_of
from fedstrata.sites.policy import Policy
from fedstrata.sites.rehearsal import rehearse_file
from fedstrata.sites.wire import Refused, Survey

NAMES = ("north", "south", "west")
HEAD = "site,part,age,ward,days"
SCHEMA: dict[str, Any] = {
    "label": "days",
    "client": "site",
    "test": "part",
    "columns": {
        "age": {"range": [0, 130]},
        "ward": {"categories": ["acute", "ER"]},
        "days": {"range": [0, 60], "unit": "days"},
    },
}
BINS = {"name": "regression", "bins": 3, "step": 1}
TOLD = {"name": "regression", "edges": [4, 6], "mean": [5.0], "deviation": [2.0]}
VOLATILE = ("seconds", "bytes_evaluation")


def rows_of(count: int = 180) -> list[list[str]]:
    """Return rows of three sites, whose days depend on age and ward; every fifth one is a test sample."""
    draw, rows = np.random.default_rng(0), []
    for number in range(count):
        age, ward = draw.normal(60, 12), draw.choice(["acute", "ER"])
        days = max(0.0, 4 + 0.1 * (age - 60) + 2 * (ward == "ER") + draw.normal())
        part = "test" if number % 5 == 0 else "train"
        rows.append([draw.choice(NAMES), part, f"{age:.1f}", ward, f"{days:.1f}"])
    return rows


def write(path: Path, rows: list[list[str]]) -> Path:
    path.write_text("\n".join([HEAD, *map(",".join, rows)]) + "\n")
    return path


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a table of three sites, and the rows of each site in its own file."""
    rows = rows_of()
    write(tmp_path / "pooled.csv", rows)
    for name in NAMES:
        write(tmp_path / f"{name}.csv", [row for row in rows if row[0] == name])
    sites = "".join(f"[site.{name}]\ndata = '{name}.csv'\n" for name in NAMES)
    (tmp_path / "sites.toml").write_text(f"own_data = true\nfewer = 'go-on'\n{sites}")
    return tmp_path


def spec_of(place: Path, task: Any = BINS, schema: Any = SCHEMA, **table: Any) -> fs.Experiment:
    data = {"name": str(place / "pooled.csv"), "schema": schema, **table.pop("data", {})}
    return fs.Experiment.from_table(
        {
            "task": task,
            "data": data,
            "partition": "natural",
            "privacy": {"min_samples": 5},
            "model": {"name": "mlp", "hidden": [6]},
            **table,
            "training": {"rounds": 2, "batch_size": 8, "lr": 0.05, "execution": "per-client"},
        }
    )


def same(there: fs.History, here: fs.History) -> None:
    """Check that the models have the same bytes. Metrics may differ by how float32 rounds in batches of other sizes."""
    assert all(torch.equal(there.params[name], here.params[name]) for name in here.params)
    for far, near in zip(there, here, strict=True):
        assert far["train_loss"] == near["train_loss"]
        assert far["test"] == pytest.approx(near["test"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "normalize"),
    [
        pytest.param("fedavg", "standard", id="asks"),
        pytest.param("sfl", "standard", id="relays"),
        pytest.param({"name": "stratify", "batch_size": 24}, "standard", id="together"),
        pytest.param("fedavg", "none", id="asks, none"),
        pytest.param("sfl", "none", id="relays, none", marks=pytest.mark.long),
        pytest.param({"name": "stratify", "batch_size": 24}, "none", id="together, none", marks=pytest.mark.long),
    ],
)
def test_files_of_sites_and_the_pooled_table_give_the_same_model(place: Path, method: Any, normalize: str) -> None:
    spec = spec_of(place, method=method, data={"normalize": normalize})
    here = fs.run(spec, out=place / "here")
    there = rehearse_file(spec, place / "sites.toml", place / "there")
    same(there, here)
    near, far = (json.loads((place / name / "model.json").read_text()) for name in ("here", "there"))
    assert near == far
    assert near["task"].keys() >= {"mean", "deviation", "edges"}
    assert "days" not in near["table"]["features"]
    rows = [dict(zip(HEAD.split(","), row, strict=True)) for row in rows_of(9)]
    table = {name: [row[name] for row in rows] for name in ("age", "ward")}
    assert (fs.load(place / "there").predict(table) == fs.load(place / "here").predict(table)).all()


@pytest.mark.slow
def test_samples_that_the_spec_holds_out_are_the_same_at_sites(place: Path) -> None:
    spec = spec_of(place, evaluation={"client_test": 0.25, "validation": 0.2})
    there, here = rehearse_file(spec, place / "sites.toml", place / "there"), fs.run(spec)
    assert all(torch.equal(there.params[name], here.params[name]) for name in here.params)
    assert there[-1]["validation"] == pytest.approx(here[-1]["validation"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("task", [{"class_weights": [1, 3]}, {"label_smoothing": 0.1}], ids=str)
def test_weighted_classes_are_the_same_at_sites(place: Path, task: Any) -> None:
    schema = {**SCHEMA, "label": "ward", "classes": ["ER", "acute"], "columns": {"age": {}}, "ignore": ["days"]}
    spec = spec_of(place, {"name": "classification", **task}, schema)
    there, here = rehearse_file(spec, place / "sites.toml", place / "there"), fs.run(spec)
    assert all(torch.equal(there.params[name], here.params[name]) for name in here.params)
    assert there[-1]["accuracy"] == here[-1]["accuracy"]
    with pytest.raises(SpecError, match=r"task\.class_weights = .*: has 3 weights for 2 classes"):
        prepare_server(spec_of(place, {"name": "classification", "class_weights": [1, 2, 3]}, schema), None, 3)


@pytest.mark.slow
def test_the_server_may_have_test_samples_and_labels_stay_masked(place: Path) -> None:
    """Sites tell nothing of their targets, because the spec knows their mean, deviation and ranges."""
    head, _, rest = (place / "sites.toml").read_text().partition("[site.")
    write(place / "test.csv", rows_of(20))
    (place / "sites.toml").write_text(f"{head}[server]\ndata = 'test.csv'\n[site.{rest}")
    masked = {"name": "stratify", "batch_size": 24, "masking": "prf"}
    told = rehearse_file(spec_of(place, TOLD, method=masked), place / "sites.toml", place / "there")
    assert told[-1]["test"]["rmse"] < 10
    (statistics,) = [records.decode((place / "there" / "statistics").read_bytes())]
    assert (len(statistics.count), statistics.counts.keys()) == (2, {"ward"})


def survey(place: Path, spec: fs.Experiment, name: str = "south", least: int = 2) -> Any:
    return survey_of(Survey(spec.to_toml(), [NAMES.index(name)], 3, False), place / f"{name}.csv", least=least)


def test_statistics_of_targets_by_hand() -> None:
    cells, y = torch.tensor([[1.0], [3.0], [9.0]]), torch.tensor([[4.9], [5.1], [7.0]], dtype=torch.float64)
    task = Regression(bins=2, step=2.5)
    raw = Unfitted("standard", cells, cells[:0], Schema(label="y", columns={"x": {}}), None, RawTargets(task, y, "y"))
    known = raw.statistics([np.array([0]), np.array([1, 2])])
    assert (known.samples, known.count.tolist()) == (3, [3, 3])
    assert known.mean.tolist() == pytest.approx([13 / 3, 17 / 3])
    assert known.squares[1].item() == pytest.approx(0.7667**2 + 0.5667**2 + 1.3333**2, abs=1e-3)
    assert known.counts["y"].tolist() == [[2.5, 1], [5, 2]], "4.9 is rounded down to 2.5"
    raw.refuse_unlike(records.decode(records.encode(known)))
    data = fs.Dataset("d", cells, y, cells, y, (), unfitted=raw, task=task, n_outputs=1)
    fitted = fit(data, known).task
    assert isinstance(fitted, Regression)
    assert (fitted.edges, fitted.strata(y, ())) == ((5.0,), pytest.approx([0, 1, 1]))
    assert fitted.mean == pytest.approx((17 / 3,))


def test_a_step_gives_the_ranges_of_the_rounded_targets() -> None:
    """Also in a simulation, which otherwise counts the targets themselves."""
    y = np.arange(40) / 4
    x, task = np.zeros((40, 1)), Regression(bins=4, step=3)
    spec = fs.Experiment(task=task, partition=fs.IID(clients=2))
    assert fs.prepare(spec, data=(x, y, x, y)).data.task.edges == (3.0, 6.0, 9.0)  # type: ignore[attr-defined]
    exact = fs.Experiment(task=Regression(bins=4), partition=fs.IID(clients=2))
    assert fs.prepare(exact, data=(x, y, x, y)).data.task.edges == (2.5, 5.0, 7.5)  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("evaluation", [{}, {"validation": 0.2, "client_test": 0.2}], ids=["table", "held out"])
def test_statistics_are_those_of_training_samples(place: Path, evaluation: Any) -> None:
    spec = spec_of(place, evaluation=evaluation)
    prepared = fs.prepare(spec)
    rows = [row for row in rows_of() if row[0] == "south"]
    trained = [number for number, row in enumerate(rows) if row[1] == "train"]
    held = np.zeros(prepared.data.train_size, dtype=bool)
    held[prepared.held.samples] = True
    mine = held[fs.prepare(spec_of(place)).assignment[NAMES.index("south")]]
    kept = [row for row, gone in zip(trained, mine, strict=True) if not gone]
    first, here = records.encode(survey(place, spec)), prepared.data.task
    told, hidden = (kept[0], sorted(set(range(len(rows))) - set(kept)))
    assert len(hidden) >= 10

    def with_days(numbers: list[int], days: str) -> tuple[bytes, Any]:
        changed = [[*row[:-1], days] if number in numbers else row for number, row in enumerate(rows)]
        write(place / "south.csv", changed)
        write(place / "pooled.csv", [*(row for row in rows_of() if row[0] != "south"), *changed])
        return records.encode(survey(place, spec)), fs.prepare(spec).data.task

    if not evaluation:  # samples are held out evenly over the targets, so that their choice depends on the targets
        assert with_days(hidden, "59.5") == (first, here)
    else:
        assert with_days([number for number in hidden if rows[number][1] == "test"], "59.5") == (first, here)
    other, there = with_days([told], "59.5")
    assert other != first
    assert there.mean != here.mean  # type: ignore[attr-defined]


def refusal(place: Path, spec: fs.Experiment) -> str:
    """Return what the server's events say of the one site whose file is wrong, while the others go on."""
    history = rehearse_file(spec, place / "sites.toml", place / "out")
    assert [record["clients_returned"] for record in history] == [2] * len(history)
    events = read_jsonl(place / "out" / "events.jsonl")
    (reason,) = [event["reason"] for event in events if event["kind"] == "absent"]
    assert str(place) not in reason
    return reason


@pytest.mark.slow
@pytest.mark.parametrize(
    ("days", "public", "private"),
    [
        ("nan", "column 'days': a label is not a number", "line 4, column 'days' = 'nan': is not a number"),
        pytest.param(
            "a week",
            "column 'days': a label is not a number",
            "column 'days' = 'a week': is not a number. This task",
            marks=pytest.mark.long,
        ),
        ("", "column 'days': a label is missing. Give a value", "line 4, column 'days' = '': the label is missing"),
        ("-", "column 'days': a label is missing. Give a value", "column 'days' = '-': the label is missing"),
        pytest.param(
            "inf",
            "column 'days': a label is not a number",
            "column 'days' = 'inf': is not a number",
            marks=pytest.mark.long,
        ),
        ("61", "column 'days': not all labels are in range. Use numbers from 0 to 60 days", "'61': is out of range"),
        ("4000", "column 'days': not all labels are in range.", "Check the unit, because a thousandth of the n"),
    ],
)
def test_a_label_that_cannot_be_a_target(
    place: Path, caplog: pytest.LogCaptureFixture, days: str, public: str, private: str
) -> None:
    rows = [row for row in rows_of() if row[0] == "south"]
    rows[2][-1] = days
    write(place / "south.csv", rows)
    label = {**SCHEMA["columns"]["days"], "missing": ["-"]}
    spec = spec_of(place, schema={**SCHEMA, "columns": {**SCHEMA["columns"], "days": label}})
    reason = refusal(place, spec)
    assert public in reason
    assert "line" not in reason
    assert private in caplog.text, "the site's log has all of it"
    write(place / "pooled.csv", rows)
    with pytest.raises(DataError) as error:
        fs.prepare(spec)
    assert private in str(error.value), "a simulation says the same"


@pytest.mark.parametrize(
    ("task", "schema", "problem"),
    [
        (
            {"name": "regression", "bins": 3},
            {},
            "task.step: is required in a deployment, because task.bins requires counts of rounded values of "
            "column 'days'. Set task.step, or use task.edges instead of task.bins.",
        ),
        (BINS, {"classes": ["1", "2"]}, ("data.schema.classes = ['1', '2']: has no effect, because the labels of this "
            "t")),
        (None, {}, "data.schema.columns.days: describes the label as a number, but the task has classes. Set task ="),
        (None, {"columns": {"age": {}}}, "data.schema.classes: is required in a deployment, because the sites' rows "),
        (BINS, {"columns": {"days": {}}, "features": ["days"]}, "data.schema.features = 'days': this column is the"),
        (BINS, {"columns": {"days": {}}}, "data.schema.columns: describes no feature. Describe at least one "),
        ("multilabel", {}, "task = 'multilabel': cannot be used in a deployment, where the label of a sample must be "),
        ("next-token", {}, "task = 'next-token': cannot be used in a deployment"),
        ("segmentation", {}, "task = 'segmentation': cannot be used in a deployment"),
    ],
    ids=str,
)  # fmt: skip
def test_a_spec_that_does_not_fit_regression_at_sites(place: Path, task: Any, schema: Any, problem: str) -> None:
    table = {"task": task} if task is not None else {}
    data = {"name": str(place / "pooled.csv"), "schema": {**SCHEMA, **schema}}
    with pytest.raises(SpecError) as error:
        prepare_server(fs.Experiment.from_table({**table, "data": data}), None, 3)
    assert str(error.value).startswith(problem)


def test_arrays_of_sites_are_classes() -> None:
    spec = fs.Experiment.from_table({"task": "regression", "data": {"name": "own", "shape": [4], "classes": 2}})
    with pytest.raises(SpecError, match="task = 'regression': needs numeric labels, but sites read these"):
        prepare_server(spec, None, 3)


@pytest.mark.parametrize(
    ("column", "problem"),
    [
        ({"categories": ["1", "2"]}, "columns.days: this column is the label, so it cannot be a feature. If the"),
        ({"impute": "mean"}, "columns.days: this column is the label"),
        ({"type": "number", "indicator": True}, "columns.days: this column is the label"),
    ],
)
def test_a_label_is_described_as_a_number_only(column: Any, problem: str) -> None:
    with pytest.raises(SpecError) as error:
        Schema(label="days", columns={"age": {}, "days": column})
    assert str(error.value).startswith(problem)


# --- what the policy of a site allows ----------------------------------------------------------------------------


def site(place: Path, spec: fs.Experiment, **policy: Any) -> Site:
    """Return a site with its own file and policy."""
    table = tomllib.loads(spec.to_toml())
    made = {"jobs": "within-policy", **policy}
    return Site(place / f"site-{len(list(place.iterdir()))}", table, policy=Policy(**made), data=place / "south.csv")


def asked(made: Site) -> Any:
    return made.call(Survey(made.spec.to_toml(), [1], 3, False))


@pytest.mark.slow
def test_a_site_does_not_tell_counts_of_few_targets(place: Path) -> None:
    spec = spec_of(place, {**BINS, "step": 0.25}, {**SCHEMA, "columns": {"age": {}, "days": {}}})
    few = site(place, spec)
    refused = asked(few)
    assert isinstance(refused, Refused)
    assert "refused by the rule 'policy.min_samples'" in refused.reason
    assert "targets (for 'bins')" in refused.reason
    assert not few.ledger.answered
    few.site_server.policy = Policy(approved=[hash_of(few.spec)])
    assert asked(few).statistics.counts["days"][:, 1].min() < 5
    coarse = asked(site(place, spec_of(place, {**BINS, "step": 20}, spec.data.schema)))
    assert coarse.statistics.counts["days"].tolist() == [[0, coarse.statistics.samples]]


@pytest.mark.slow
def test_a_spec_can_require_more_samples_than_the_site(place: Path) -> None:
    task, schema = {**BINS, "step": 2.5}, {**SCHEMA, "columns": {"age": {}, "days": {}}}
    counts = asked(site(place, spec_of(place, task, schema), min_samples=2)).statistics.counts["days"][:, 1]
    smallest = int(counts.min())
    strict = spec_of(place, task, schema, privacy={"min_samples": smallest + 1})
    refused = asked(site(place, strict, min_samples=2))
    assert isinstance(refused, Refused)
    assert f"this site would send a count below {smallest + 1}." in refused.reason


@pytest.mark.slow
def test_a_site_tells_of_targets_only_what_the_task_needs(place: Path) -> None:
    schema = {**SCHEMA, "columns": {"age": {}, "days": {}}}
    edges = asked(site(place, spec_of(place, {"name": "regression", "edges": [4, 6]}, schema))).statistics
    assert (len(edges.count), edges.counts) == (2, {})
    told = asked(site(place, spec_of(place, TOLD, schema))).statistics
    assert len(told.count) == 1, "the age only"
    raw = spec_of(place, {"name": "regression"}, schema, data={"normalize": "none"})
    days = asked(site(place, raw)).statistics
    assert days.count.tolist() == [0, days.samples], "the days only"
    assert days.samples > 0, "so that the answer counts as a survey"
    nothing = asked(site(place, spec_of(place, TOLD, schema, data={"normalize": "none"}))).statistics
    assert (nothing.samples, nothing.count.tolist()) == (0, [0])


def test_another_seed_is_another_survey_of_targets(place: Path) -> None:
    """Two surveys that differ by one sample would tell its target."""
    schema = {**SCHEMA, "test": 0.2, "columns": {"age": {}, "days": {}}}
    table: Any = {"task": {"name": "regression"}, "schema": schema, "data": {"normalize": "none"}}
    made = site(place, spec_of(place, **table))
    assert not isinstance(asked(made), Refused)
    made.spec = spec_of(place, **table, seed=1)
    refused = asked(made)
    assert "policy.surveys" in refused.reason


def test_too_few_targets_are_not_told(place: Path) -> None:
    write(place / "south.csv", [row for row in rows_of() if row[0] == "south"][:5])
    spec = spec_of(place, {"name": "regression"}, {**SCHEMA, "columns": {"age": {}, "days": {}}})
    refused = asked(site(place, spec))
    assert "too few training samples" in refused.reason


def test_targets_are_labels_that_a_job_tells(place: Path) -> None:
    spec = spec_of(place)
    asked = declaration_of(spec)
    assert asked.discloses == {"labels", "sizes"}
    text = "\n".join(asked.lines())
    assert "the mean and the spread of the labels, how often each multiple of the label's step occurs" in text
    with pytest.raises(FedstrataError, match="but the survey of the sites' data discloses them"):
        Policy(jobs="within-policy", masking=True).check(asked)
    told = spec_of(place, TOLD, data={"normalize": "none"})
    assert (declaration_of(told).survey, declaration_of(told).discloses) == ("", {"sizes"})
    masked = spec_of(place, BINS, method={"name": "stratify", "masking": "prf"})
    with pytest.raises(SpecError, match="task = 'regression': statistics of the targets would disclose the sites' la"):
        prepare_server(masked, place / "pooled.csv", 3)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"count": [40.0, 39.0]}, "exactly one target for each of the 40 samples"),
        ({"counts": {"y": [[1.0, 39.0]]}}, "exactly one target for each of the 40 samples"),
        ({"counts": {}}, r"counts for the columns \[\], but must have counts for the columns \['y'\]"),
        ({"mean": [0.0]}, "the statistics have shape"),
    ],
    ids=str,
)
def test_statistics_that_no_targets_have_are_refused(change: Any, problem: str) -> None:
    draw = np.random.default_rng(0)
    cells, y = torch.from_numpy(draw.normal(size=(40, 1))), torch.from_numpy(draw.normal(size=(40, 1)))
    targets = RawTargets(Regression(bins=2, step=1), y)
    raw = Unfitted("standard", cells, cells[:0], Schema(label="y", columns={"x": {}}), None, targets)
    known = raw.statistics([np.arange(40)])
    raw.refuse_unlike(known)
    made = {
        key: {name: torch.tensor(table, dtype=torch.float64) for name, table in value.items()}
        if isinstance(value, dict)
        else torch.tensor(value, dtype=torch.float64)
        for key, value in change.items()
    }
    with pytest.raises(DataError, match=problem):
        raw.refuse_unlike(type(known)(**{**vars(known), **made}))


# --- real sites --------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.xdist_group("servers")
@pytest.mark.filterwarnings("ignore:ssl_context is deprecated:DeprecationWarning")
def test_three_sites_with_mutual_tls_end_with_the_model_of_a_simulation(place: Path) -> None:
    pytest.importorskip("nvflare")
    spec = place / "spec.toml"
    spec.write_text(spec_of(place, method={"name": "stratify", "batch_size": 24}).to_toml())
    assert main(["run", str(spec), "--quiet", "--out", str(place / "here")]) == 0
    assert main(["run", str(spec), "--quiet", "--sites", str(place / "sites.toml"), "--out", str(place / "near")]) == 0
    sites = (place / "sites.toml").read_text()
    for name in NAMES:
        sites = sites.replace(f"'{name}.csv'", f"'{place / name}.csv'")
    (place / "real.toml").write_text(f"{sites}[server]\nport = {free_port()}\n")
    deploy = ["deploy", str(spec), "--sites", str(place / "real.toml"), "--out", str(place / "fed"), "--try"]
    assert main(deploy) == 0
    there, here, near = (fs.History.load(place / name) for name in ("fed/result", "here", "near"))
    for file in ("model.safetensors", "model.json"):
        assert (place / "fed" / "result" / file).read_bytes() == (place / "here" / file).read_bytes()
    same(there, here)
    for far, close in zip(there, near, strict=True):
        assert {key: far[key] for key in far if key not in VOLATILE} == {
            key: close[key] for key in close if key not in VOLATILE
        }, "a simulation that measures at each site has the same metrics, to the last bit"
    readme = (place / "fed" / "north" / "README.md").read_text()
    assert "`days` (numbers from 0 to 60 days)" in readme
