"""Batches of Stratify and updates compressed by PowerSGD in secure sums at real sites."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cryptography")

from secure_sites import Deployment, spec

import fedstrata as fs
from fedstrata.base.jsonl import read_jsonl
from fedstrata.federation.communication.messages import Coefficients, Encoded
from fedstrata.federation.secure.requests import Masked
from fedstrata.sites.disclosure import declaration_of
from fedstrata.sites.wire import Ask

pytestmark = pytest.mark.slow

POWERSGD = {"up": {"name": "powersgd", "rank": 2}}


def batches(sites: int = 3, method: Any = "stratify", **table: Any) -> fs.Experiment:
    """Return a spec whose clients do not keep the state of an optimiser."""
    training = {"momentum": 0.0, "optimizer_state": "reset", "batch_size": 60} | table.pop("training", {})
    return spec(sites, method=method, training=training, **table)


def same(one: fs.History, other: fs.History) -> bool:
    return all(torch.equal(one.params[name], other.params[name]) for name in one.params)


CASES: dict[str, dict[str, Any]] = {
    "batches": {},
    "compressed batches": {"communication": POWERSGD},
    "compressed, several steps": {"communication": POWERSGD, "method": {"name": "stratify", "local_steps": 2}},
    "few samples in a batch": {"communication": POWERSGD, "privacy": {"min_samples": 4}},
    "compressed fedavg": {"method": "fedavg", "communication": POWERSGD},
}


@pytest.mark.parametrize(
    "case", [each if "batches" in each else pytest.param(each, marks=pytest.mark.long) for each in CASES]
)
def test_sums_over_sites_have_the_model_of_a_simulation(case: str, tmp_path: Path) -> None:
    made = batches(**CASES[case])
    deployment = Deployment(made, tmp_path)
    history = deployment.run()
    expected = fs.run(made)
    assert same(history, expected)
    for one, other in zip(history, expected, strict=True):
        for name in ("samples", "train_loss", "scaled", "clients_returned"):
            assert one.get(name) == other.get(name)
    for ledger in deployment.ledgers.values():
        kinds = {entry.kind for entry in ledger.entries}
        # Nothing but the requests about labels and reserved samples is answered without masks.
        plain = {kind for kind in kinds if kind.startswith(("Fit", "Gradient", "Encoded", "Coefficients"))}
        assert plain == set()
        assert {"Masked of Coefficients"} <= kinds or "communication" not in CASES[case]
        assert not [entry for entry in ledger.entries if entry.refused]


def test_one_roster_serves_both_sums_of_many_batches(tmp_path: Path) -> None:
    deployment = Deployment(batches(communication=POWERSGD, rounds=1), tmp_path)
    (record,) = deployment.run()
    assert len(deployment.entries("a", "Roster")) == 1
    sums = len(deployment.entries("a", "Masked of Coefficients"))
    assert len(deployment.entries("a", "Masked of Encoded of Gradient")) == sums > 5
    reserved = sum(
        isinstance(body, Ask) and type(body.requests[0]).__name__ == "Reserve" for _, body in deployment.sent
    )
    assert record["exchanges"] <= reserved + 1 + 4 * sums


def inner(body: Any) -> Any:
    """Return the encoded request in the body of a message to a site; None for another body."""
    request = body.requests[0] if isinstance(body, Ask) else None
    return request.request if isinstance(request, Masked) else None


@pytest.mark.parametrize(("kind", "failed"), [(Encoded, 0), (Coefficients, 1)])
def test_a_run_goes_on_without_a_site_that_is_lost_before_or_between_the_sums(
    kind: type, failed: int, tmp_path: Path
) -> None:
    """A batch that loses a site between its two sums is skipped, because the sums would be about different sites."""
    made = batches(4, communication=POWERSGD)
    deployment = Deployment(made, tmp_path)

    def kill(site: str, body: Any) -> None:
        request = inner(body)
        if site == "c" and isinstance(request, kind) and request.exchange == 3:
            deployment.dead.add("c")

    deployment.before = kill
    history = deployment.run(tmp_path / "run")
    assert "c" in deployment.dead
    events = [event["kind"] for event in read_jsonl(tmp_path / "run" / "events.jsonl")]
    assert events.count("secure sum failed") == failed
    assert all(record["samples"] > 100 for record in history)
    first, second = ({entry.exchange for entry in deployment.entries("a", name)} for name in ("Propose", "RevealSet"))
    assert len(first) == len(second) == 1 - failed


def test_a_declaration_lists_what_the_server_reads_singly() -> None:
    lines = list(declaration_of(batches(communication=POWERSGD), clients=3, own_data=False).lines())
    text = "\n".join(lines)
    assert "Masked of Encoded of Gradient" in text
    assert "Masked of Coefficients" in text
    assert "the requested positions for which it has no sample left (as often as the method needs it; Reserve)" in text
    assert "From the replies, the server learns" in text
