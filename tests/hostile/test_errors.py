"""A hostile server that reads a site's data from its errors: what leaves names column and rule, and is counted.

Whether data are what a spec says is up to the server, who writes the spec: each probe asks for something that the data
are not, and learns one cell of them where the error shows it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedstrata as fs
from fedstrata.base import records
from fedstrata.sites.data_schema import prepare_server
from fedstrata.sites.disclosure import hash_of
from fedstrata.sites.ledger import PLACE, Ledger, check
from fedstrata.sites.policy import Policy
from fedstrata.sites.settings import SiteSettings
from fedstrata.sites.site_server import SERVER, SiteServer
from fedstrata.sites.wire import Begin, Begun, Commit, Envelope, Refused, Save, Survey, Surveyed

pytestmark = pytest.mark.slow

PATIENTS = 40
MIN_SAMPLES = 5
SCHEMA = {"label": "disease", "classes": ["no", "yes"], "columns": {"age": "number"}}
COUNTED = re.compile(r"\b(line|row) \d|\d+ (training|values|rows|clients|samples)|thousand")
"""How a message would tell a place, a count, or how far off a value is."""


def names(seed: int) -> list[str]:
    draw = np.random.default_rng(seed)
    return ["".join(draw.choice(list("bdfgklmprstvz"), 9)).title() + f" {seed}" for _ in range(PATIENTS)]


def write(path: Path, seed: int) -> list[str]:
    """A table of patients; its cells."""
    draw = np.random.default_rng(seed)
    ages, chol = draw.uniform(31, 90, PATIENTS).round(3), draw.uniform(150, 350, PATIENTS).round(3)
    rows = list(zip(names(seed), ages.astype(str), chol.astype(str), strict=True))
    text = "".join(f"{','.join(row)},{'yes' if n % 2 else 'no'}\n" for n, row in enumerate(rows))
    path.write_text("name,age,chol,disease\n" + text)
    return [cell for row in rows for cell in row]


def probes() -> list[dict[str, Any]]:
    """Schemas that the table does not fit."""
    category = ({"columns": {"name": {"type": "category", "categories": ["?", f"guess{n}"]}}} for n in range(12))
    narrow = ({"columns": {"age": {"type": "number", "range": [0, n]}}} for n in range(8))
    units = ({"columns": {"chol": {"range": [0, n / 10], "unit": "g"}}} for n in range(1, 4))
    odd: list[dict[str, Any]] = [
        {"columns": {"name": "number"}},
        {"columns": {"name": "boolean"}},
        {"columns": {"chol": {"type": "category", "categories": ["?"], "impute": "constant", "value": "?"}}},
        {"columns": {"age": {"impute": "mean"}, "weight": {"impute": "median", "step": 1}}},
        {"classes": ["well", "ill"]},
        {"label": "name", "classes": ["?"]},
        {"label": "sick"},
        {"client": "name"},
        {"test": "chol"},
        {"test": "age"},
        {"ignore": ["weight"]},
        {"delimiter": ";"},
        {"missing": ["no"]},
        {"missing": ["yes"], "columns": {"chol": {"impute": "median", "step": 1}}},
    ]
    return [{**SCHEMA, **probe} for probe in (*category, *narrow, *units, *odd)]


@cache
def probing() -> list[tuple[fs.Experiment, str]]:
    """The jobs of all probes, each with its hash. All tests share them, because making them takes long."""
    specs = [job(table) for table in tables_of(probes())]
    return [(spec, hash_of(spec)) for spec in specs]


def tables_of(schemas: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    found = [{"data": {"name": "x.csv", "schema": schema, "normalize": "none"}} for schema in schemas]
    few = {"partition": {"name": "natural", "min_size": 500}}
    return [*found, {**found[-1], "data": {"name": "x.csv", "schema": SCHEMA}, **few}]


class Hospital:
    """A site as it is deployed; what leaves it is kept."""

    def __init__(self, folder: Path, data: Path, policy: Policy) -> None:
        self.folder, self.data, self.policy, self.left = folder, data, policy, list[bytes]()
        self.start()

    def start(self) -> None:
        """Its process starts, also once more."""
        place = self.folder / "states"
        self.site_server = SiteServer(
            "a", place, lambda target, data: b"", SiteSettings(patience=5.0, data=self.data), policy=self.policy,
            ledger=Ledger(self.folder / PLACE),
        )  # fmt: skip

    def call(self, body: Any) -> Any:
        self.left.append(self.site_server.call(SERVER, records.encode(Envelope([], body))))
        return records.decode(self.left[-1])

    def survey(self, spec: fs.Experiment) -> Any:
        return self.call(Survey(spec.to_toml(), [0], 2, False))

    @property
    def entries(self) -> list[dict[str, Any]]:
        found = check(self.folder / PLACE)
        assert found.problems == []
        return found.entries


def job(table: dict[str, Any], **more: Any) -> fs.Experiment:
    return fs.Experiment.from_table({"partition": {"name": "natural"}, "model": "tabular", **table, **more})


def attack(folder: Path, seed: int, policy: Callable[[list[str]], Policy]) -> tuple[Hospital, list[str], list[Any]]:
    """All probes at a site, which starts again in between; its cells, and what they were answered."""
    folder.mkdir()
    cells = write(folder / "own.csv", seed)
    site, answers = Hospital(folder, folder / "own.csv", policy([each for _, each in probing()])), []
    for number, (spec, _) in enumerate(probing()):
        if number == 15:
            site.start()
        answers.append(site.survey(spec))
    return site, cells, answers


POLICIES: dict[str, tuple[Callable[[list[str]], Policy], int, str]] = {
    "the default": (lambda jobs: Policy(), 0, "policy.approved"),
    "within-policy": (lambda jobs: Policy(jobs="within-policy"), 1, "policy.surveys"),
    "within-policy, generous": (lambda jobs: Policy(jobs="within-policy", surveys=30), 30, "policy.surveys"),
    "approved": (lambda jobs: Policy(approved=jobs), 10**6, ""),
}


@pytest.mark.parametrize(
    "policy",
    ["the default", "within-policy", *(pytest.param(name, marks=pytest.mark.long) for name in list(POLICIES)[2:])],
)
def test_no_cell_leaves_in_an_error_and_all_probes_are_in_the_ledger(tmp_path: Path, policy: str) -> None:
    made, most, rule = POLICIES[policy]
    site, cells, answers = attack(tmp_path / "one", 1, made)
    _, others, elsewhere = attack(tmp_path / "other", 2, made)
    probed = len(answers)
    assert probed > 35
    assert all(isinstance(answer, Refused) for answer in answers)
    assert answers == elsewhere, "what leaves is the same whatever the cells are"
    assert set(cells).isdisjoint(others), "the control: no cell is the same"
    for data, answer in zip(site.left, answers, strict=True):
        assert not [cell for cell in cells if cell.encode() in data]
        assert not COUNTED.search(answer.reason), answer.reason
    told = [answer.reason for answer in answers if "policy." not in answer.reason]
    assert len(told) == min(most, probed), "each that was read counts, also after a restart"
    if most > 1:
        accepted = "column 'name': some cells are not allowed. Use one of '?', 'guess0'"
        assert accepted in told[0], "column and rule are told"
    entries = site.entries
    assert [entry["kind"] for entry in entries] == ["Survey"] * probed
    assert [entry.get("failed", entry.get("refused")) for entry in entries] == [
        "UnusableDataError" if "policy." not in answer.reason else rule for answer in answers
    ]
    assert [entry["run"] for entry in entries] == [each for _, each in probing()]


def test_the_site_itself_is_told_all_of_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "own.csv", 1)
    spec, hash = probing()[0]
    Hospital(tmp_path, tmp_path / "own.csv", Policy(approved=[hash])).survey(spec)
    assert f"own.csv, line 2, column 'name' = {names(1)[0]!r}: is not a category" in caplog.text


def test_nobody_finds_an_extreme_by_ranges_that_become_narrower(tmp_path: Path) -> None:
    """Also that data fit is an answer: with those alone a single failure would tell the greatest age."""
    write(tmp_path / "own.csv", 1)
    site = Hospital(tmp_path, tmp_path / "own.csv", Policy(jobs="within-policy", surveys=3))
    ranges = [{**SCHEMA, "columns": {"age": {"range": [0, end]}}} for end in (140, 130, 120, 110, 100, 60, 140)]
    answers = [
        site.survey(job({"data": {"name": "x.csv", "schema": schema, "normalize": "none"}})) for schema in ranges
    ]
    assert [isinstance(answer, Surveyed) for answer in answers] == [True] * 3 + [False] * 3 + [True]
    other = {"data": {"name": "y.csv", "schema": ranges[0]}, "training": {"rounds": 7}}
    assert isinstance(site.survey(job(other)), Surveyed), "another job with the same description"


def test_a_job_is_told_again_what_it_was_told_and_goes_on_once_the_file_is_mended(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    write(path, 1)
    whole = path.read_text()
    site = Hospital(tmp_path, path, Policy(jobs="within-policy"))
    mine = job({"data": {"name": "x.csv", "schema": SCHEMA}})
    path.write_text(whole + "?,old,1,no\n")
    first, again = site.survey(mine), site.survey(mine)
    assert first == again
    assert "column 'age'" in first.reason
    other = job({"data": {"name": "x.csv", "schema": SCHEMA}}, training={"rounds": 7})
    assert "policy.surveys" in site.survey(other).reason
    path.write_text(whole)
    assert isinstance(site.survey(mine), Surveyed)
    assert isinstance(site.survey(other), Surveyed)
    assert [entry.get("failed", "") for entry in site.entries].count("UnusableDataError") == 2


@pytest.mark.parametrize("approved", [False, True])
def test_arrays_tell_no_extreme(tmp_path: Path, approved: bool) -> None:
    x, y = np.random.default_rng(0).normal(size=(30, 3)).astype(np.float32), np.arange(30) % 3
    x[7, 1], x[9, 2] = 5.125, -6.625
    np.savez(tmp_path / "own.npz", x_train=x, y_train=y)
    data = {"name": "x", "shape": [3], "classes": 3, "normalize": "none"}
    changes = [{"range": [-9, n / 2]} for n in range(10)] + [{"range": [n / -2, 9]} for n in range(10)]
    changes += [{"shape": [4]}, {"shape": [1, 8, 8]}, {"classes": 2}, {"classes": 1}]
    specs = [job({"data": {**data, **change}, "model": {"name": "mlp"}}) for change in changes]
    jobs = {"approved": [hash_of(spec) for spec in specs]} if approved else {"jobs": "within-policy", "surveys": 100}
    site = Hospital(tmp_path, tmp_path / "own.npz", Policy(**jobs))
    for spec in specs:
        reason = site.survey(spec).reason
        assert not re.search(r"5\.1|6\.6|holds|30|\[3\]|thousand", reason), reason
        assert "Use " in reason or "data.shape is" in reason
    assert len([entry for entry in site.entries if "failed" in entry]) == len(specs)


@pytest.mark.long
@pytest.mark.parametrize("surveys", [1, 100])
def test_who_begins_without_asking_learns_no_more(tmp_path: Path, surveys: int) -> None:
    cells = write(tmp_path / "own.csv", 1)
    site = Hospital(tmp_path, tmp_path / "own.csv", Policy(jobs="within-policy", surveys=surveys))
    probed = 0
    for table in tables_of(probes()):
        spec = job(table)
        unfitted = prepare_server(spec, None, 2).data.unfitted
        assert unfitted is not None
        answer = site.call(Begin(f"run{probed}", spec.to_toml(), unfitted.statistics(()), [0], 2, 0))
        assert isinstance(answer, Refused)
        assert not [cell for cell in cells if cell in answer.reason]
        assert not COUNTED.search(answer.reason)
        probed += 1
    failed = [entry for entry in site.entries if entry.get("failed") == "UnusableDataError"]
    assert len(failed) == min(surveys, probed)
    assert len(site.entries) == probed
    assert all(entry["kind"] == "Begin" and entry["run"] for entry in site.entries)


def test_what_a_server_says_of_all_samples_finds_no_missing_values(tmp_path: Path) -> None:
    """Where nobody is said to have a value, a job fails at a site that lacks one: that is told once."""
    path = tmp_path / "own.csv"
    write(path, 1)
    path.write_text(path.read_text() + "?,,,no\n" * 3)
    columns = {name: {"impute": "mean"} for name in ("age", "chol")}
    spec = job({"data": {"name": "x.csv", "schema": {**SCHEMA, "columns": columns}}})
    site = Hospital(tmp_path, path, Policy(jobs="within-policy"))
    true = site.survey(spec).statistics
    reasons = []
    for place in (0, 1):
        count = true.count.clone()
        count[place] = 0
        lie = type(true)(true.samples, count, true.mean, true.squares, true.low, true.high, true.counts)
        reasons.append(site.call(Begin("run", spec.to_toml(), lie, [0], 2, 0)).reason)
    assert "column 'age': too few training rows have a value" in reasons[0]
    assert "policy.surveys" in reasons[1]


def test_a_spec_that_leaves_something_to_the_rows_is_refused_before_they_are_read(tmp_path: Path) -> None:
    """Otherwise a constant that is no category would list those of the table."""
    cells = write(tmp_path / "own.csv", 1)
    open_schemas: list[dict[str, Any]] = [
        {**SCHEMA, "columns": {"name": {"type": "category", "impute": "constant", "value": "?"}}},
        {**SCHEMA, "columns": None},
        {"label": "name"},
    ]
    tables = [
        {"data": {"name": "x.csv", "schema": {k: v for k, v in s.items() if v is not None}}} for s in open_schemas
    ]
    site = Hospital(tmp_path, tmp_path / "own.csv", Policy(approved=[hash_of(job(table)) for table in tables]))
    for table in tables:
        reason = site.survey(job(table)).reason
        assert "is required in a deployment, because the sites' rows cannot be read in advance" in reason
        assert not [cell for cell in cells if cell in reason]


def test_no_error_leaves_that_the_ledger_does_not_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "own.csv", 1)
    site = Hospital(tmp_path, tmp_path / "own.csv", Policy(jobs="within-policy"))
    spec = job(tables_of(probes())[0])

    def full(self: Ledger, tables: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "_write", full)
        assert site.survey(spec).reason == "OSError. Read the log of site a."
    assert "column 'name'" in site.survey(spec).reason
    assert [entry["failed"] for entry in site.entries] == ["UnusableDataError"] * 2


def test_an_approved_job_that_fits_begins(tmp_path: Path) -> None:
    """The control: the site of these tests takes part."""
    write(tmp_path / "own.csv", 1)
    spec = job({"data": {"name": "x.csv", "schema": SCHEMA}})
    site = Hospital(tmp_path, tmp_path / "own.csv", Policy(approved=[hash_of(spec)]))
    statistics = site.survey(spec).statistics
    assert isinstance(site.call(Begin("run", spec.to_toml(), statistics, [0], 2, 0)), Begun)


def counted_probes() -> list[dict[str, Any]]:
    """Schemas that the table fits, and whose statistics would be cells, or counts of single patients."""
    first = names(1)
    exact = {"impute": "median", "step": 0.001}
    named = {"type": "category", "categories": first, "impute": "most-frequent"}
    columns = [{"age": exact}, {"chol": {**exact, "impute": "most-frequent"}}, {"age": "number", "name": named}]
    return [{**SCHEMA, "columns": each} for each in columns]


def numbers_of(answer: Any) -> list[float]:
    """All numbers of an answer, however deep."""
    if isinstance(answer, torch.Tensor):
        return [float(each) for each in answer.double().flatten()]
    if isinstance(answer, (bool, str, bytes)) or answer is None:
        return []
    if isinstance(answer, (int, float)):
        return [float(answer)]
    if isinstance(answer, dict):
        return [number for each in answer.values() for number in numbers_of(each)]
    if isinstance(answer, (list, tuple)):
        return [number for each in answer for number in numbers_of(each)]
    return numbers_of(vars(answer))


def spoilt(spec: fs.Experiment) -> list[Any]:
    """Messages of wrong types, and specs that are hardly specs."""
    text = spec.to_toml()
    return [
        Survey("=", [0], 2, False),
        Survey(text.replace("csv", "npz"), [0], 2, True),
        Survey(text, [0, 1], 2, False),
        Survey(text, [7], 2, False),
        Survey(text, [], 2, False),
        Begin("../run", text, None, [0], 2, 0),
        Begin("run", text, None, [0], 2, 3),
        Save(1),
        Commit(1, [0]),
    ]


@pytest.mark.parametrize(
    ("surveys", "jobs"),
    [
        *[(1, "within-policy"), (3, "within-policy"), (1, "approved")],
        pytest.param(3, "approved", marks=pytest.mark.long),  # the number of surveys does not limit approved jobs
    ],
)
@pytest.mark.parametrize(
    "min_samples", [pytest.param(1, marks=pytest.mark.long), 5, pytest.param(50, marks=pytest.mark.long)]
)
def test_no_policy_lets_values_lines_or_small_counts_leave(
    tmp_path: Path, jobs: Any, min_samples: int, surveys: int
) -> None:
    """Several jobs, each with another hash, that fit the table, do not fit it or are no jobs."""
    cells = write(tmp_path / "own.csv", 1)
    values = {float(cell) for cell in cells if cell[0].isdigit()}
    fits = [job({"data": {"name": "x.csv", "schema": SCHEMA}}, seed=seed) for seed in range(3)]
    wrong = [job(table, seed=seed) for seed, table in enumerate(tables_of(probes())[::2])]
    counted = [job({"data": {"name": "x.csv", "schema": schema}}) for schema in counted_probes()]
    approved = [hash_of(spec) for spec in (fits[0], *wrong[::3])]
    policy = Policy(jobs=jobs, approved=approved, min_samples=min_samples, surveys=surveys)
    site = Hospital(tmp_path, tmp_path / "own.csv", policy)
    answers, asked = [], 0
    for spec in (*counted, *fits, *wrong, *counted):
        unfitted = prepare_server(spec, None, 2).data.unfitted
        assert unfitted is not None
        answers.append(site.survey(spec))
        known = answers[-1].statistics if isinstance(answers[-1], Surveyed) else unfitted.statistics(())
        answers.append(site.call(Begin(f"run{asked}", spec.to_toml(), known, [0], 2, 0)))
        asked += 1
    site.start()
    answers += [site.call(body) for body in spoilt(fits[0])]
    assert len(site.left) == len(answers) == 2 * asked + len(spoilt(fits[0]))
    for data, answer in zip(site.left, answers, strict=True):
        assert not [cell for cell in cells if cell.encode() in data]
        if isinstance(answer, Refused):
            rule = re.sub(r"below \d+|policy\.\S+", "", answer.reason)
            assert not COUNTED.search(rule), answer.reason
        found = numbers_of(answer)
        assert values.isdisjoint(round(number, 3) for number in found), answer
        if isinstance(answer, Surveyed):
            tables = [table[:, 1] for table in answer.statistics.counts.values()]
            counts = [answer.statistics.samples, *numbers_of([answer.statistics.count, tables])]
            assert all(count == 0 or count >= max(min_samples, 2) for count in counts), answer
    told = [answer for answer in answers if isinstance(answer, Surveyed)]
    assert bool(told) == (min_samples < PATIENTS), "the control: a job that fits is answered"
    # Each probe is in the ledger: its kind, its job and what became of it.
    entries = [entry for entry in site.entries if entry["kind"] in ("Survey", "Begin")]
    began = len([answer for answer in answers if isinstance(answer, Begun)])
    sent = 2 * asked + len([body for body in spoilt(fits[0]) if isinstance(body, (Survey, Begin))])
    assert len(entries) == sent - began
    outcomes = [bool(entry.get("refused") or entry.get("failed")) for entry in entries]
    assert outcomes.count(False) == len(told)
    assert {hash_of(spec) for spec in (*counted, *fits, *wrong)} <= {entry["run"] for entry in entries}
