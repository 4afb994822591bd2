"""A site's privacy budget: exact for Gaussian mechanisms, over jobs and restarts, and spent before the first step."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import asked
import numpy as np
import pytest
from scipy.stats import norm
from waiting import until

from fedstrata.base.errors import DataError
from fedstrata.cli import main
from fedstrata.runs.accountant import ORDERS, Accountant
from fedstrata.sites.ledger import PLACE, Entry, Ledger
from fedstrata.sites.policy import FILE as POLICY
from fedstrata.sites.policy import Policy, RuleError
from fedstrata.sites.privacy_budget import FILE, PrivacyBudget

DELTA, NOISE = 1e-5, 20.0
POLICY_OF_3 = Policy(budget=3.0, delta=DELTA)


def epsilon_of(order: int, steps: int) -> float:
    """The ε of Gaussian mechanisms with all samples in each step: Mironov 2017 and Canonne et al. 2020."""
    return steps * order / (2 * NOISE**2) + math.log1p(-1 / order) - math.log(DELTA * order) / (order - 1)


def longest() -> tuple[int, int]:
    """The largest number of full steps within ε = 3, and the order that allows it."""
    most, order = max(((3 - epsilon_of(order, 0)) * 2 * NOISE**2 / order, order) for order in range(2, 65))
    return math.floor(most), order


def spend(budget: PrivacyBudget, job: str, steps: int = 1, client: int = 0, rate: float = 1.0) -> None:
    budget.spend(job, client, noise=NOISE, rate=rate, steps=steps)


@pytest.mark.slow
def test_jobs_and_restarts_share_one_budget_and_its_last_step_is_exact(tmp_path: Path) -> None:
    most, order = longest()
    spend(PrivacyBudget(tmp_path, POLICY_OF_3), "a", most - 7)
    spend(PrivacyBudget(tmp_path, POLICY_OF_3), "b", 6)
    again = PrivacyBudget(tmp_path, POLICY_OF_3)
    with pytest.raises(RuleError, match=r"'policy\.budget'.* for all jobs together, ε = 3 at δ = 1e-05") as refused:
        spend(again, "c", 2)
    assert refused.value.rule == "policy.budget"
    spend(again, "c", 1)
    with pytest.raises(RuleError):
        spend(again, "a")
    report = again.report()
    assert report["order"] == order
    assert report["epsilon"] == pytest.approx(epsilon_of(order, most), rel=1e-9)
    assert [(job["job"], job["steps"]) for job in report["jobs"]] == [("a", most - 7), ("b", 6), ("c", 1)]


@pytest.mark.slow
def test_the_epsilon_of_a_job_is_that_of_one_gaussian_mechanism(tmp_path: Path) -> None:
    budget = PrivacyBudget(tmp_path, Policy())
    spend(budget, "a", 100)
    (job,) = budget.report()["jobs"]
    epsilon, sigma = job["epsilon"], NOISE / math.sqrt(100)
    # The exact δ of one Gaussian mechanism: Balle and Wang 2018, Theorem 8.
    delta = norm.cdf(0.5 / sigma - epsilon * sigma) - math.exp(epsilon) * norm.cdf(-0.5 / sigma - epsilon * sigma)
    assert delta == pytest.approx(DELTA, rel=0.01)
    assert epsilon < budget.report()["epsilon"], "Rényi divergences give a larger bound"


@pytest.mark.slow
def test_clients_of_a_job_have_different_samples_but_jobs_may_share_them(tmp_path: Path) -> None:
    budget = PrivacyBudget(tmp_path, Policy())
    spend(budget, "a", 50, client=0)
    alone = budget.report()["epsilon"]
    spend(budget, "a", 30, client=1)
    assert budget.report()["epsilon"] == alone
    spend(budget, "b", 30, client=1)
    assert budget.report()["epsilon"] == pytest.approx(min(epsilon_of(order, 80) for order in ORDERS), rel=1e-9)


@pytest.mark.slow
def test_a_budget_that_is_set_later_counts_the_earlier_steps(tmp_path: Path) -> None:
    most, order = longest()
    spend(PrivacyBudget(tmp_path, Policy()), "a", most)
    later = PrivacyBudget(tmp_path, POLICY_OF_3)
    with pytest.raises(RuleError):
        spend(later, "a")
    assert json.loads((tmp_path / FILE).read_text())["order"] is None, "a refused step changes nothing"
    raised = PrivacyBudget(tmp_path, Policy(budget=3.1))
    spend(raised, "a")
    assert abs(raised.report()["order"] - order) <= 1


@pytest.mark.slow
def test_a_job_spends_the_epsilon_that_the_server_records(tmp_path: Path) -> None:
    site = asked.Site(tmp_path, {"privacy": {"dp": {"clip": 1.0, "noise": 1.0}}, "training": {"batch_size": 8}})
    training, dp = site.spec.training, site.spec.privacy.dp
    assert dp is not None
    rate, steps = training.poisson(24)
    budget = PrivacyBudget(tmp_path, Policy())
    for _ in range(3):
        budget.spend("a", 0, noise=dp.noise, rate=rate, steps=steps)
    assert budget.report()["epsilon"] == Accountant(dp, training, np.array([24])).largest(np.array([3]))


@pytest.mark.slow
def test_the_ledger_command_shows_what_was_spent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / POLICY.parent).mkdir()
    (tmp_path / POLICY).write_text("budget = 3.0\n")
    Ledger(tmp_path / PLACE).append([Entry("a", "Fit", 0, "round", 1, 40, 1000)])
    assert main(["ledger", str(tmp_path)]) == 0
    assert "privacy" not in capsys.readouterr().out
    spend(PrivacyBudget(tmp_path / PLACE, POLICY_OF_3), "a", 5)
    assert main(["ledger", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "privacy of samples: all jobs spent ε = " in printed
    assert " of 3 (δ = 1e-05, by the Rényi order " in printed
    assert "a  privacy of samples: ε = " in printed
    assert main(["ledger", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["privacy"]["jobs"][0]["steps"] == 5


TRAINING = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import asked
site = asked.long_site(Path(sys.argv[1]))
site.begin()
site.ask(asked.fit(site, 1))
print("answered")
"""


def has_spent_the_round(folder: Path) -> bool:
    """Return True if a site that starts in this folder refuses one more round, because the first one is spent."""
    (row,) = json.loads((folder / FILE).read_text())["steps"]
    site = asked.long_site(folder)
    assert row[-1] == site.spec.training.local_steps
    site.begin()
    (refused,) = site.ask(asked.fit(site, 1))
    assert "refused by the rule 'policy.budget'" in refused.reason
    return site.ledger.refused == ["policy.budget"]


@pytest.mark.slow
def test_a_site_that_dies_in_its_first_step_has_spent_the_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*arguments: object, **how: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedstrata.clients.training.local.descend_privately", die)
    site = asked.long_site(tmp_path)
    site.begin()
    with pytest.raises(KeyboardInterrupt):
        site.ask(asked.fit(site, 1))
    assert has_spent_the_round(tmp_path)


@pytest.mark.long
@pytest.mark.slow
def test_a_site_that_is_killed_before_it_answers_has_spent_the_round(tmp_path: Path) -> None:
    support = str(Path(asked.__file__).parent)
    process = subprocess.Popen([sys.executable, "-c", TRAINING, str(tmp_path), support], stdout=subprocess.PIPE)
    try:
        until("the steps to be stored", (tmp_path / FILE).exists, 120)
    finally:
        process.kill()
    assert process.communicate()[0] == b""
    assert has_spent_the_round(tmp_path)


def test_a_job_with_the_same_spec_in_another_federation_is_another_job(tmp_path: Path) -> None:
    """The total over both was the maximum of the two clients, as if they had different samples."""
    spend(PrivacyBudget(tmp_path, Policy(), "one"), "a", 50, client=0)
    spend(PrivacyBudget(tmp_path, Policy(), "two"), "a", 30, client=1)
    report = PrivacyBudget(tmp_path, Policy()).report()
    assert report["epsilon"] == pytest.approx(min(epsilon_of(order, 80) for order in ORDERS), rel=1e-9)
    assert [(job["job"], job["steps"]) for job in report["jobs"]] == [("a", 50), ("a", 30)]


def test_a_forecast_is_what_a_job_then_spends_and_writes_nothing(tmp_path: Path) -> None:
    budget = PrivacyBudget(tmp_path, POLICY_OF_3)
    spend(budget, "a", 9)
    before = (tmp_path / FILE).read_bytes()
    job = budget.epsilon_of(noise=NOISE, rate=0.5, steps=40)
    total = budget.total_after("b", 0, noise=NOISE, rate=0.5, steps=40)
    assert (tmp_path / FILE).read_bytes() == before
    spend(budget, "b", 25, rate=0.5)
    assert budget.total_after("b", 0, noise=NOISE, rate=0.5, steps=40) > total, "a second run of the job adds steps"
    assert budget.total_after("b", 0, noise=NOISE, rate=0.5, steps=15) == total
    spend(budget, "b", 15, rate=0.5)
    report = budget.report()
    assert (job, total) == (report["jobs"][1]["epsilon"], report["epsilon"])


@pytest.mark.parametrize("content", ['{"order": nul', "[]", '{"order": 2, "steps": [["a"]]}'])
def test_a_damaged_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    with pytest.raises(DataError, match=rf"{FILE}: the file is damaged.* Restore the file from a copy"):
        spend(PrivacyBudget(tmp_path, POLICY_OF_3), "a")
    assert (tmp_path / FILE).read_text() == content
