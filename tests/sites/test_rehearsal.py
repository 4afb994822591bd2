"""A deployment rehearsed on one machine, over the sites' own files: the bytes of a run, and of the deployment."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import fedstrata as fs
from fedstrata.base.jsonl import read_jsonl
from fedstrata.cli import main
from fedstrata.clients.training import local as training

pytestmark = pytest.mark.slow

HOSPITALS = Path(__file__).parents[2] / "examples" / "hospitals"
MODEL = "model.safetensors"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two hospitals of the example, and the same rows in one table."""
    folder = tmp_path / "examples" / "hospitals"
    shutil.copytree(HOSPITALS, folder)
    rows = (folder / "heart.csv").read_text().splitlines(keepends=True)
    two = [row for row in rows if row.startswith(("hospital,", "Hungary,", "Switzerland,"))]
    (folder / "heart.csv").write_text("".join(two))
    head, _, _ = (folder / "sites.toml").read_text().partition("[site.cleveland]")
    names = "".join(f'[site.{name}]\ndata = "sites/{name}.csv"\n' for name in ("hungary", "switzerland"))
    (folder / "sites.toml").write_text(head + names)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rehearse(place: Path, out: str, *settings: str, code: int = 0) -> Path:
    base = ("training.rounds=2", "training.clients_per_round=2", "training.execution='per-client'")
    words = [word for each in (*base, *settings) for word in ("--set", each)]
    spec = "examples/hospitals/hospitals.toml"
    sites = ["--sites", "examples/hospitals/sites.toml"] if not out.startswith("here") else []
    assert main(["run", spec, *words, *sites, "--quiet", "--out", out]) == code
    return place / out


@pytest.mark.parametrize(
    "method",
    [pytest.param("method.name='scaffold'", marks=pytest.mark.long), "method.masking='prf'"],
    ids=["scaffold", "masked"],
)
def test_a_rehearsal_ends_with_the_bytes_of_a_run(place: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    settings = [method, "privacy.min_samples=2"]  # as the sites' policy has it
    if "masking" in method:
        # Keys order the labels, and sums are taken in that order: the same bytes need the same keys.
        assert main(["keys", "--out", "keys"]) == 0
        monkeypatch.setenv("FEDSTRATA_KEYS", "keys")
        # what sites tell of their samples would tell their labels: the server has test samples
        settings += ["method.name='stratify'"]
        file = place / "examples" / "hospitals" / "sites.toml"
        file.write_text(file.read_text().replace('# data = "test.csv"', 'data = "sites/cleveland.csv"'))
    there, here = rehearse(place, "there", *settings), rehearse(place, "here", *settings)
    assert (there / MODEL).read_bytes() == (here / MODEL).read_bytes()
    assert (there / "model.json").read_bytes() == (here / "model.json").read_bytes()
    assert {record["clients_returned"] for record in fs.History.load(there)} == {2}


def test_a_rehearsal_finds_the_file_that_is_not_what_the_spec_says(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = place / "examples/hospitals/sites/switzerland.csv"
    header, first, *rest = file.read_text().splitlines()
    file.write_text("\n".join([header, "900" + first[first.index(",") :], *rest]) + "\n")
    there = rehearse(place, "there")
    reasons = [event["reason"] for event in read_jsonl(there / "events.jsonl") if event["kind"] == "absent"]
    assert any("site switzerland does not take part" in reason and "'age'" in reason for reason in reasons)
    sites = place / "examples/hospitals/sites.toml"
    sites.write_text(sites.read_text().replace("least = 1 ", "least = 2 ").replace('"wait"', '"abort"'))
    rehearse(place, "again", code=1)
    assert "the setting 'least' requires 2: site switzerland does not take part" in capsys.readouterr().err


def test_every_thread_that_answers_computes_with_the_specs_number(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were there before a site began had the machine's, and sums in another order."""
    found: list[int] = []
    train = training.train

    def counted(*arguments: Any, **more: Any) -> Any:
        found.append(torch.get_num_threads())
        return train(*arguments, **more)

    def send(transport: Any, site: str, data: bytes, patience: float, number: int) -> object:
        torch.set_num_threads(2)  # as a thread has it that began before
        return transport.site_servers[site].call("server", data)

    monkeypatch.setattr("fedstrata.clients.handlers.fit.train", counted)
    monkeypatch.setattr("fedstrata.sites.rehearsal._Transport.send", send)
    rehearse(place, "there")
    assert found == [1] * 4


def test_a_rehearsal_is_refused_what_the_sites_policy_refuses(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rehearse(place, "there", "method.name='stratify'", "method.mode='single'", code=1)
    assert "policy.min_samples" in capsys.readouterr().err


def test_a_rehearsal_goes_on(place: Path) -> None:
    whole = rehearse(place, "whole")
    rehearse(place, "part", "training.rounds=1", "evaluation.checkpoint_every=1")
    words = ["--set", "training.rounds=2", "--sites", "examples/hospitals/sites.toml", "--quiet"]
    assert main(["run", "--resume", "part", *words]) == 0
    assert (place / "part" / MODEL).read_bytes() == (whole / MODEL).read_bytes()


@pytest.mark.long
def test_a_site_with_one_value_of_a_column_takes_part_and_the_bytes_are_those_of_a_run(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In Long Beach a single training patient has a value of ``ca``: the site took no part."""
    shutil.rmtree(place / "examples")
    shutil.copytree(HOSPITALS, place / "examples" / "hospitals")
    four = "training.clients_per_round=4"
    there = rehearse(place, "there", four)
    assert {record["clients_returned"] for record in fs.History.load(there)} == {4}
    assert "column 'ca': a client does not send the column's statistics, because only" in caplog.text
    # A run counts the same way, client by client, where its own minimum is the sites'.
    here = [rehearse(place, "here", four, "privacy.min_samples=2"), rehearse(place, "here-all", four)]
    assert [(each / MODEL).read_bytes() == (there / MODEL).read_bytes() for each in here] == [True, False]


@pytest.mark.parametrize("changed", [True, False])
def test_a_rehearsal_does_not_go_on_with_other_data(place: Path, changed: bool) -> None:
    """Statistics are those of the first survey: with other data the result would be neither run's."""
    rehearse(place, "part", "training.rounds=1", "evaluation.checkpoint_every=1")
    if changed:
        file = place / "examples/hospitals/sites/switzerland.csv"
        file.write_text(file.read_text().replace("\n32,male", "\n33,male", 1))
    words = ["--set", "training.rounds=2", "--sites", "examples/hospitals/sites.toml", "--quiet"]
    assert main(["run", "--resume", "part", *words]) == 0
    reasons = [event["reason"] for event in read_jsonl(place / "part" / "events.jsonl") if event["kind"] == "absent"]
    assert [record["clients_returned"] for record in fs.History.load(place / "part")] == [2, 1 if changed else 2]
    assert bool(reasons) == changed
    problem = "site switzerland does not take part: the site's data have changed since the run began"
    assert all(problem in reason for reason in reasons)


def test_a_rehearsal_runs_here(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments: list[Any] = ["run", "examples/hospitals/hospitals.toml", "--sites", "examples/hospitals/sites.toml"]
    assert main([*arguments, "--engine", "ray", "--out", "x"]) == 2
    assert "has no effect together with --sites" in capsys.readouterr().err
