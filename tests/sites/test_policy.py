"""What a site accepts whatever a job says: each rule broken by a job, and each method under the default."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import combinations
import pytest
import torch
from asked import MemoryLedger, Site
from site_engine import make_site_engine

import fedstrata as fs
from fedstrata.base.errors import FedstrataError, SpecError
from fedstrata.base.jsonl import read_jsonl
from fedstrata.cli import main
from fedstrata.clients.handlers.sequential import Visit
from fedstrata.federation.messages import Fit, FitReply, Weights
from fedstrata.runs.simulation import run_prepared
from fedstrata.sampling.label_counts import LabelReport
from fedstrata.sites.policy import FILE, Policy, approve
from fedstrata.sites.settings import SiteSettings
from fedstrata.sites.site_server import SERVER, SiteServer
from fedstrata.sites.sums import Sums
from fedstrata.sites.wire import Begun, Fetch, Hopped, Refused, Survey
from fedstrata.stratify.masking.key_store import KeyRing

PRIVATE = {"method": {"name": "fedstas", "epsilon": 3.0, "bound": 50, "strata": 2}}
MASKED = {"method": {"name": "stratify", "masking": "prf"}}
UNIT = {"data": {"name": "digits", "normalize": "unit", "shape": [1, 8, 8], "classes": 10}}
TRAVELLING = {"method": {"name": "stratify", "mode": "single"}}
SECURE = {"privacy": {"sums": "secure"}}
TWICE = {"training": {"accumulate": 2}}
NOISY = {"privacy": {"dp": {"clip": 1.0, "noise": 1.0}}}
PRESET = NOISY | {"data": {"name": "digits", "limit": 60, "shift": [128.0], "scale": [0.01]}}
TUNED = {"evaluation": {"client_test": 0.2, "fine_tune": 1}}
SMALL = {"method": "fedtan", "model": {"name": "resnet20", "norm": "bn"}, "training": {"batch_size": 8}}


@pytest.mark.parametrize(
    ("policy", "job", "rule", "says"),
    [
        ({"jobs": "approved"}, {}, "policy.approved", "is not approved. To approve it, run 'fedst"),
        ({"methods": ["scaffold", "sfl"]}, {}, "policy.methods", "not accept the method 'fedavg'. Use one of: scaf"),
        ({"methods": []}, {}, "policy.methods", "Use one of: none"),
        ({"rounds": 2}, {}, "policy.rounds", "the job has 3 rounds, but this site accepts at most 2"),
        ({"min_samples": 2}, TRAVELLING, "policy.min_samples", "the reply to Steps uses one sample at a time, but"),
        ({"min_samples": 65}, {}, "policy.min_samples", "training.local_steps × training.batch_size = 2 × 32 = 64"),
        ({"min_samples": 129}, TWICE, "policy.min_samples", "batch_size × training.accumulate = 2 × 32 × 2 = 128 sa"),
        ({"min_samples": 9}, SMALL, "policy.min_samples", "FitTogether uses a batch, which has at most tra"),
        ({"min_samples": 33, "below": "refuse"}, {"method": "stratify"}, "policy.min_samples", "Gradient uses a pa"),
        ({"min_samples": 2}, UNIT, "policy.min_samples", "data.normalize = 'unit' discloses the smallest and"),
        ({"masking": True}, {"method": "stratify"}, "policy.masking", "labels private, but LabelReport discloses"),
        ({"masking": True}, {"method": "rebafl"}, "policy.masking", "but Fit discloses them"),
        ({"ldp": True}, {}, "policy.ldp", "this site keeps numbers of samples private, but Fit discloses them. Use a"),
        ({"ldp": True}, {"method": "weighted-of"}, "policy.ldp", "but SizeReport discloses them"),
        ({"dp": 0.5}, {}, "policy.dp", "requires differential privacy of samples. Set privacy.dp with a noise of"),
        ({"budget": 3.0}, {}, "policy.dp", "this site requires differential privacy of samples. Set privacy.dp."),
        ({"dp": 2.0}, NOISY, "policy.dp", "privacy.dp.noise = 1 is too small for this site. Set privacy.dp with a noi"),
        ({"dp": 1.0, "outside_dp": ["sizes"]}, NOISY, "policy.outside_dp", "('normalization') would be sent without"),
        ({"dp": 1.0, "outside_dp": []}, PRESET, "policy.outside_dp", "samples of each client ('sizes') would be sent"),
        ({"budget": 3.0}, PRESET | TUNED, "policy.outside_dp", "('evaluation') would be sent without noise. This"),
        ({"sums": "secure"}, {}, "policy.sums", "would see individual updates, but this site accepts only privacy"),
        ({"parties": 4}, SECURE, "policy.parties", "a sum may have as few as 3 sites, but this site requires 4 or"),
    ],
    ids=str,
)  # fmt: skip
def test_a_job_that_breaks_a_rule_does_not_begin(
    tmp_path: Path, policy: dict[str, Any], job: dict[str, Any], rule: str, says: str
) -> None:
    if job.get("method") == "weighted-of":
        job = {"method": {"name": "fedavg", "client_sampler": "weighted"}}
    site = Site(tmp_path, job, policy=Policy(**{"jobs": "within-policy", "min_samples": 1, **policy}))
    refused = site.call(Survey(site.spec.to_toml(), [0], 2, False)) if job == UNIT else site.begin()
    assert isinstance(refused, Refused)
    assert f"refused by the rule '{rule}'" in refused.reason
    assert says in refused.reason
    assert site.ledger.refused == [rule]
    assert site.site_server._run is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "job"),
    [
        ({"masking": True}, MASKED),
        ({"ldp": True}, PRIVATE),
        ({"methods": ["fedavg"]}, {}),
        ({"min_samples": 64}, {}),
        ({"min_samples": 128}, TWICE),
        ({"min_samples": 8}, SMALL),
        ({"min_samples": 33}, {"method": "stratify"}),
        ({"dp": 1.0, "outside_dp": ["sizes", "normalization"]}, NOISY),
        ({"dp": 1.0, "budget": 3.0}, PRESET),
        ({"dp": 1.0, "outside_dp": ["sizes", "evaluation"]}, PRESET | TUNED),
    ],
    ids=str,
)
def test_a_job_within_the_rules_begins(tmp_path: Path, policy: dict[str, Any], job: dict[str, Any]) -> None:
    assert isinstance(Site(tmp_path, job, policy=Policy(jobs="within-policy", **policy)).begin(), Begun)


@pytest.mark.slow
def test_an_approved_job_begins_and_another_one_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kit" / "local").mkdir(parents=True)
    (tmp_path / "kit" / FILE).write_text(Policy().to_toml())
    site = Site(tmp_path / "site", policy=Policy.read(tmp_path / "kit"))
    assert isinstance(site.begin(), Refused)
    (tmp_path / "job.toml").write_text(site.spec.to_toml())
    assert main(["approve", str(tmp_path / "job.toml"), "--kit", str(tmp_path / "kit")]) == 0
    capsys.readouterr()
    assert main(["approve", str(tmp_path / "job.toml"), "--kit", str(tmp_path / "kit"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["new"] is False
    policy = Policy.read(tmp_path / "kit")
    assert isinstance(Site(tmp_path / "site", policy=policy).begin(), Begun)
    assert isinstance(Site(tmp_path / "site", {"seed": 1}, policy=policy).begin(), Refused)


def _fit(site: Site, round: int) -> Fit:
    return Fit(round, site.weights, {}, 1.0)


@pytest.mark.slow
def test_so_many_exchanges_and_no_more_also_after_a_restart(tmp_path: Path) -> None:
    site = Site(tmp_path, policy=Policy(jobs="within-policy", exchanges=2))
    site.begin()
    assert isinstance(*site.ask(_fit(site, 1)), FitReply)
    assert isinstance(*site.ask(_fit(site, 2)), FitReply)
    for _ in range(2):
        (refused,) = site.ask(_fit(site, 3))
        assert "policy.exchanges" in refused.reason
    site.save(2)
    site.start()
    site.begin(2)
    assert "policy.exchanges" in site.ask(_fit(site, 3))[0].reason


def test_so_many_bytes_and_no_more(tmp_path: Path) -> None:
    site = Site(tmp_path, policy=Policy(jobs="within-policy", megabytes=0.005))
    site.begin()
    assert isinstance(*site.ask(_fit(site, 1)), FitReply)
    (refused,) = site.ask(_fit(site, 2))
    assert "policy.megabytes" in refused.reason
    assert "sends at most 0.005 MB" in refused.reason


@pytest.mark.slow
def test_so_many_starts_and_no_more_whatever_the_run_is_called(tmp_path: Path) -> None:
    site = Site(tmp_path, policy=Policy(jobs="within-policy", starts=3))
    assert [type(site.begin(run=run)) for run in ("a", "b", "c", "d")] == [Begun, Begun, Begun, Refused]
    assert isinstance(Site(tmp_path, {"seed": 1}, policy=Policy(jobs="within-policy", starts=3)).begin(), Begun), (
        "another job"
    )


@pytest.mark.slow
def test_a_site_takes_the_larger_minimum_of_spec_and_policy(tmp_path: Path) -> None:
    for spec, own, larger in ((3, 7, 7), (7, 3, 7), (1, 5, 5)):
        site = Site(
            tmp_path,
            {"privacy": {"min_samples": spec}},
            policy=Policy(jobs="within-policy", min_samples=own, below="refuse"),
        )
        site.begin()
        privacy = site.site_server._running().context.privacy
        assert privacy.min_samples == larger
        assert privacy.below == ("refuse" if own > spec else "hold-back")


def test_an_update_of_too_few_samples_stays_though_the_spec_says_nothing(tmp_path: Path) -> None:
    site = Site(tmp_path, policy=Policy(jobs="within-policy", min_samples=31))  # each of the two has 30
    site.begin()
    (kept,) = site.ask(_fit(site, 1))
    assert kept.refused
    assert "privacy.min_samples = 31" in kept.reason
    assert site.ledger.refused == ["privacy.min_samples"]


@pytest.mark.slow
def test_the_server_sees_a_travelling_model_at_the_end_of_its_way(tmp_path: Path) -> None:
    site = Site(tmp_path, {"method": "sfl"}, policy=Policy(jobs="within-policy"))
    site.begin()

    def visit(round: int) -> Visit:
        return Visit(round)

    for way in ({"back": True}, {"base": 0, "hop": 1}):
        hopped = site.hop(visit(1), **way)
        assert isinstance(hopped, Hopped)
        assert "policy.relay" in hopped.reply.reason
    assert not getattr(site.hop(visit(1)).reply, "refused", False)
    assert isinstance(site.call(Fetch(1, 0, "t")), Weights)
    again = site.hop(visit(1), hop=1, client=1, holder="a", weights=None)
    assert "relay 1 is over" in again.reply.reason
    open_to_it = Site(tmp_path / "other", {"method": "sfl"}, policy=Policy(jobs="within-policy", relay="server"))
    open_to_it.begin()
    assert open_to_it.hop(visit(1), back=True).weights is not None


# --- its file --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_policy_reads_back_from_its_own_words(tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    for policy in (Policy(), Policy(methods=["sfl"], approved=["0" * 16], jobs="approved", ldp=True, megabytes=0.5)):
        (tmp_path / FILE).write_text(policy.to_toml())
        assert Policy.read(tmp_path) == policy
        absent = ("methods", "budget", "peers")
        assert all(f"\n{key} = " in policy.to_toml() or key in absent for key in Policy.model_fields)
    (tmp_path / FILE).unlink()
    assert Policy.read(tmp_path) == Policy(), "the cautious defaults, where there is no file"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (
            "min_sample = 3",
            r"min_sample = 3 \(.*, line 2\): is not a known key; did you mean 'min_samples'. Use one of: jobs",
        ),
        ("min_samples = 0", r"min_samples = 0 \(.*, line 2\): must be greater than 0"),
        ('jobs = "some"', r"jobs = 'some' \(.*, line 2\): .*'approved' or 'within-policy'"),
        ("relay = 3", r"relay = 3 \(.*, line 2\): .*'direct' or 'server'"),
    ],
)
def test_what_is_wrong_with_a_policy_is_said_and_where(tmp_path: Path, line: str, problem: str) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / FILE).write_text(f"# ours\n{line}\n")
    with pytest.raises(SpecError, match=problem):
        Policy.read(tmp_path)


def test_approving_changes_one_line_of_a_file_that_its_owner_wrote(tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / FILE).write_text(
        '# ours\nrounds = 7  # enough\napproved = ["0000000000000000",\n  "1111111111111111"]\nldp = true\n'
    )
    assert approve(tmp_path, "a" * 16)
    assert not approve(tmp_path, "a" * 16)
    text = (tmp_path / FILE).read_text()
    assert text.startswith("# ours\nrounds = 7  # enough\napproved = [\n")
    assert text.endswith("]\nldp = true\n")
    assert Policy.read(tmp_path) == Policy(rounds=7, ldp=True, approved=["0" * 16, "1" * 16, "a" * 16])
    (tmp_path / FILE).write_text("rounds = 7\n")
    approve(tmp_path, "b" * 16)
    assert Policy.read(tmp_path) == Policy(rounds=7, approved=["b" * 16])


def test_approving_what_is_no_job_or_no_kit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "local").mkdir()
    assert main(["approve", "job.toml", "--kit", str(tmp_path)]) == 2
    assert "is neither a spec nor a hash. Give the spec file, or the 16 digits that" in capsys.readouterr().err
    assert main(["approve", "0" * 16, "--kit", str(tmp_path / "none")]) == 2
    assert (
        "is not the folder of a site, because it does not contain local/. Give a site's folder"
        in capsys.readouterr().err
    )


# --- every method ----------------------------------------------------------------------------------------------------

SHORT = ("fedavg", "sfl", "fedtan", "stratify", "fedstas")


def _at_sites(
    spec: fs.Experiment,
    folder: Path,
    policy: Policy,
    *,
    strict: Policy | None = None,
    method: fs.Method | None = None,
    out: Path | None = None,
) -> tuple[fs.History, list[MemoryLedger]]:
    """Three sites of two clients each; the last with a policy of its own, and a server that runs another method."""
    prepared, sums, ledgers = fs.prepare(spec), Sums(60.0), [MemoryLedger(), MemoryLedger(), MemoryLedger()]
    if method is not None:
        prepared = dataclasses.replace(prepared, spec=spec.model_copy(update={"method": method}))
    keys, site_servers = KeyRing(folder / "keys", create=True), dict[str, SiteServer]()

    class Transport:
        def is_reachable(self, site: str) -> bool:
            return True

        def send(self, site: str, data: bytes, patience: float, number: int) -> object:
            return site_servers[site].call(SERVER, data)

    for name, ledger in zip("abc", ledgers, strict=True):

        def carry(target: str, data: bytes, name: str = name) -> object:
            return sums.add_up(name, data) if target == SERVER else site_servers[target].call(name, data)

        own = strict if strict is not None and name == "c" else policy
        settings, more = SiteSettings(allow=["combinations"]), {"policy": own, "ledger": ledger, "keys": keys}
        site_servers[name] = SiteServer(name, folder / name, carry, settings, **more)  # type: ignore[arg-type]
    engine = make_site_engine(
        prepared.config, Transport(), list("aabbcc"), sums, spec=spec.to_toml(), run="run", patience=60.0
    )
    return run_prepared(prepared, out, engine), ledgers


class Nosy(fs.FedAvg):
    """A server that asks for labels in every round of a job that does not."""

    def run_round(self, federation: Any, state: Any) -> Any:
        """Ask, and go on."""
        assert federation.ask(range(6), LabelReport()) == {}
        return super().run_round(federation, state)


@pytest.mark.slow
def test_a_refused_question_is_an_event_and_the_run_goes_on(tmp_path: Path) -> None:
    spec = combinations.spec_of("fedavg")
    history, ledgers = _at_sites(
        spec, tmp_path / "sites", Policy(jobs="within-policy", min_samples=1), method=Nosy(), out=tmp_path / "out"
    )
    refused = [event for event in read_jsonl(tmp_path / "out" / "events.jsonl") if event["kind"] == "refused"]
    assert len(refused) == 6 * 2
    assert all("refused by the rule 'kind'" in event["reason"] for event in refused)
    assert [ledger.refused for ledger in ledgers] == [["kind"] * 4] * 3
    here = fs.run(spec)
    assert all(torch.equal(history.params[key], here.params[key]) for key in here.params)


@pytest.mark.slow
@pytest.mark.parametrize(("strict", "kind"), [({"exchanges": 1}, "failed"), ({"rounds": 1}, "absent")], ids=str)
def test_a_site_that_refuses_is_absent_and_the_event_names_its_rule(
    tmp_path: Path, strict: dict[str, Any], kind: str
) -> None:
    spec = combinations.spec_of("fedavg", client_sampler="all")
    own = Policy(jobs="within-policy", min_samples=1, **strict)
    history, _ = _at_sites(
        spec, tmp_path / "sites", Policy(jobs="within-policy", min_samples=1), strict=own, out=tmp_path / "out"
    )
    events = [event for event in read_jsonl(tmp_path / "out" / "events.jsonl") if event["kind"] == kind]
    assert {client for event in events for client in event["clients"]} == {4, 5}
    assert all(f"refused by the rule 'policy.{next(iter(strict))}'" in event["reason"] for event in events)
    assert [record["clients_returned"] for record in history] == ([6, 4] if kind == "failed" else [4, 4])


def _marked(*short: str) -> list[Any]:
    return [
        pytest.param(name, marks=[] if name in (*SHORT, *short) else [pytest.mark.long])
        for name in combinations.EVERY_CHOICE
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", _marked())
def test_every_method_gives_the_same_bytes_under_a_policy_with_a_minimum_of_one(name: str, tmp_path: Path) -> None:
    spec = combinations.spec_of(name)
    there, ledgers = _at_sites(spec, tmp_path, Policy(jobs="within-policy", min_samples=1))
    here = fs.run(spec)
    assert [entry for ledger in ledgers for entry in ledger.entries if entry.refused] == []
    assert all(torch.equal(there.params[key], here.params[key]) for key in here.params)
    assert there.params.keys() == here.params.keys()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", _marked("stratify single"))
def test_under_the_default_policy_a_method_runs_or_is_refused_before_its_first_round(name: str, tmp_path: Path) -> None:
    spec = combinations.spec_of(name)
    if name in ("stratify single", "stratify hybrid", "fedtan"):  # the last by its batches of four
        with (
            warnings.catch_warnings(),
            pytest.raises(FedstrataError, match=r"none of the sites takes part.*'policy\.min_samples'"),
        ):
            _at_sites(spec, tmp_path, Policy(jobs="within-policy"))
        return
    history, ledgers = _at_sites(spec, tmp_path, Policy(jobs="within-policy"))
    assert len(history) == spec.training.rounds
    rules = {entry.refused for ledger in ledgers for entry in ledger.entries if entry.refused}
    assert rules <= {"privacy.min_samples"}, "what one small client has stays there"
    assert [entry for ledger in ledgers for entry in ledger.entries if not entry.refused and not entry.failed]
