"""What a site refuses, asked directly: each question comes as a hostile server would put it."""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import asking
import numpy as np
import pytest
import torch
from asked import CLIENTS, Site

import fedstrata as fs
from fedstrata.base import records
from fedstrata.clients.handlers.fedtan import FitTogether
from fedstrata.clients.handlers.sequential import Visit
from fedstrata.evaluation.messages import Evaluate
from fedstrata.federation.communication.codecs import PowerSGD, pack
from fedstrata.federation.communication.messages import Coefficients, Encoded, ModelDelivery
from fedstrata.federation.messages import Fit, FitReply, Request, Weights
from fedstrata.sampling.client_sizes import SizeReply, SizeReport
from fedstrata.sampling.label_counts import LabelReport
from fedstrata.sampling.sketches import Compress
from fedstrata.sites.disclosure import hash_of
from fedstrata.sites.guard import Guard, Quota, declared
from fedstrata.sites.ledger import Entry
from fedstrata.sites.policy import Policy, RuleError
from fedstrata.sites.settings import SiteSettings
from fedstrata.sites.wire import Begin, BeginOnBase, Begun, Failed, Fetch, Hopped, Refused, Survey, Total
from fedstrata.stratify.masking.messages import CountReport
from fedstrata.stratify.messages import Gradient, GradientReply, Reserve, Steps

sys.path.insert(0, str(Path(__file__).parents[2]))
Make = Callable[..., Site]
ALL = (0.0, 1.0)


@pytest.fixture
def site(tmp_path: Path) -> Make:
    def make(table: dict[str, Any] | None = None, *, begin: bool = True, **settings: Any) -> Site:
        made = Site(tmp_path / "site", table, **settings)
        if begin:
            assert isinstance(made.begin(), Begun)
        return made

    return make


def fit(site: Site, round: int = 1, **other: Any) -> Fit:
    return dataclasses.replace(Fit(round, site.weights, {}, 1.0), **other)


def reserve(*batches: int, round: int = 1, fresh: bool = True, label: int = 0, **other: Any) -> Reserve:
    labels = torch.full((len(batches),), label)
    made = Reserve(round, torch.tensor(batches), labels, torch.zeros(0, dtype=torch.int64), fresh, ALL)
    return dataclasses.replace(made, **other)


def ruled(outcome: Any) -> str:
    """The rule by which something was refused."""
    assert isinstance(outcome, (Failed, Refused)), outcome
    assert "refused by the rule" in outcome.reason
    if isinstance(outcome, Failed):
        assert outcome.refused
    return str(outcome.reason).partition("rule '")[2].partition("'")[0]


STRATIFY = {"method": {"name": "stratify", "cap": 4}}


def test_what_is_declared_is_answered_and_written_down(site: Make) -> None:
    made = site()
    one, two = made.ask(fit(made), clients=[0, 1])
    assert isinstance(one, FitReply)
    assert isinstance(two, FitReply)
    assert made.ledger.answered == ["Fit", "Fit"]
    assert [(entry.client, entry.round, entry.phase) for entry in made.ledger.entries] == [
        (0, 1, "round"),
        (1, 1, "round"),
    ]
    assert all(entry.samples == 30 and entry.bytes > 1000 for entry in made.ledger.entries)


def test_labels_stay_where_labels_are_masked(site: Make) -> None:
    made = site({"method": {"name": "stratify", "masking": "prf"}})
    assert [ruled(outcome) for outcome in made.ask(LabelReport(), clients=[0, 1])] == ["kind", "kind"]
    assert made.ledger.refused == ["kind", "kind"]


def test_the_plain_size_stays_where_it_is_private(site: Make) -> None:
    made = site({"method": {"name": "fedstas", "epsilon": 3.0, "bound": 50, "strata": 2}})
    assert ruled(*made.ask(SizeReport(1, 0, 1.0))) == "bounds"
    assert ruled(*made.ask(SizeReport(1, 50, 1.0))) == "bounds", "the truth, with the agreed bound"
    allowed = next(a for a in made.site_server._running().guard.declaration.allowed or () if a.request is SizeReport)
    agreed = SizeReport(1, 50, allowed.where["alpha"])
    assert isinstance(*made.ask(agreed), SizeReply)
    assert ruled(*made.ask(agreed)) == "repeat", "the mean of many answers would be the truth"
    assert [entry.epsilon for entry in made.ledger.entries if entry.kind == "SizeReport" and not entry.refused] == [3.0]


@pytest.mark.parametrize("kind", ["labels", "sizes", "evaluate", "reserve", "visit", "own"])
def test_a_job_answers_no_question_of_another_one(site: Make, kind: str) -> None:
    made = site()
    weights = made.weights
    requests: dict[str, Request] = {
        "labels": LabelReport(),
        "sizes": SizeReport(0, 0, 1.0),
        "evaluate": Evaluate(1, weights, "test", False, 0, 8, 15),
        "reserve": reserve(0),
        "visit": Visit(1),
        "own": asking.HowOften(),
    }
    assert ruled(*made.ask(requests[kind])) == "kind"


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"keep": 0.01}, "bounds"),
        ({"keep": float("nan")}, "bounds"),
        ({"counts": False}, "bounds"),
        ({"round": 0}, "rounds"),
        ({"round": 4}, "rounds"),
        ({"round": -1}, "rounds"),
    ],
    ids=str,
)
def test_parameters_are_those_of_the_spec(site: Make, change: dict[str, Any], rule: str) -> None:
    made = site()
    assert ruled(*made.ask(fit(made, **change))) == rule
    assert isinstance(*made.ask(fit(made)), FitReply)


@pytest.mark.slow
def test_rounds_do_not_come_back_and_questions_not_again(site: Make) -> None:
    made = site()
    assert isinstance(*made.ask(fit(made)), FitReply)
    assert ruled(*made.ask(fit(made))) == "repeat"
    assert isinstance(*made.ask(fit(made), clients=[1]), FitReply), "the other one was not asked yet"
    assert isinstance(*made.ask(fit(made, 3)), FitReply), "a client may be left out of a round"
    for round in (1, 2):
        assert ruled(*made.ask(fit(made, round), clients=[1])) == "rounds"


def test_an_answer_refused_to_one_client_is_given_by_the_other(site: Make) -> None:
    made = site()
    outcomes = made.ask(fit(made), fit(made, keep=0.1))
    assert isinstance(outcomes[0], FitReply)
    assert ruled(outcomes[1]) == "bounds"


def test_a_client_is_asked_once_in_a_message(site: Make) -> None:
    made = site()
    (outcome,) = made.ask(fit(made), clients=[0, 0])
    assert isinstance(outcome, Refused)
    assert "exactly one request" in outcome.reason


def test_enrolment_is_over_when_the_rounds_begin(site: Make) -> None:
    made = site(STRATIFY)
    assert not isinstance(*made.ask(LabelReport()), Failed)
    assert ruled(*made.ask(LabelReport())) == "repeat"
    assert not isinstance(*made.ask(reserve(0)), Failed)
    assert ruled(*made.ask(LabelReport(), clients=[1])) == "phase"


def _enrolled(site: Make) -> Site:
    made = site(STRATIFY)
    made.ask(LabelReport())
    return made


@pytest.mark.slow
def test_gradients_are_of_what_was_set_aside_and_once(site: Make) -> None:
    made = _enrolled(site)
    assert ruled(*made.ask(Gradient(1, 0, made.weights))) == "order"
    made.ask(reserve(0, 2, 2))
    reserved = [made.counts(0)]
    assert isinstance(*made.ask(Gradient(1, 0, made.weights), acks=reserved), GradientReply)
    assert ruled(*made.ask(Gradient(1, 0, made.weights))) == "order", "at another model"
    assert ruled(*made.ask(Gradient(1, 1, made.weights))) == "order", "nothing is there"
    assert isinstance(*made.ask(Gradient(1, 2, made.weights)), GradientReply)
    assert ruled(*made.ask(reserve(2, fresh=False))) == "order", "a batch that was trained"
    assert ruled(*made.ask(reserve(5, fresh=True))) == "order", "the epoch anew"
    assert not isinstance(*made.ask(reserve(5, fresh=False)), Failed)
    assert ruled(*made.ask(reserve(6, fresh=False, window=(0.0, 0.1)))) == "bounds"


@pytest.mark.parametrize(
    "other",
    [
        {"batches": torch.zeros(0, dtype=torch.int64), "labels": torch.zeros(0, dtype=torch.int64)},
        {"batches": torch.tensor(3)},
        {"batches": torch.tensor([0.5])},
        {"batches": torch.tensor([-1])},
        {"labels": torch.tensor([[0]])},
        {"refill": torch.tensor(0)},
    ],
    ids=str,
)
def test_a_malformed_reservation_is_refused(site: Make, other: dict[str, Any]) -> None:
    assert ruled(*_enrolled(site).ask(reserve(0, **other))) == "order"


def test_the_very_same_question_comes_again_in_a_group_that_broke(site: Make) -> None:
    made = site(STRATIFY)
    made.ask(LabelReport())
    made.ask(reserve(0, 0))
    guard, weights = made.site_server._running().guard, made.weights
    same = Gradient(1, 0, weights)
    guard.take(guard.check(0, same, together=True))
    guard.take(guard.check(0, Gradient(1, 0, weights), together=True))
    other = Weights({name: tensor + 1 for name, tensor in weights.params.items()}, weights.buffers)
    with pytest.raises(Exception, match="rule 'order'"):
        guard.check(0, Gradient(1, 0, other), together=True)
    with pytest.raises(Exception, match="rule 'order'"):
        guard.check(0, same)


IN_A_GROUP = {**STRATIFY, "communication": {"up": {"name": "powersgd", "rank": 1}, "down": "bf16"}}


def test_a_group_that_broke_begins_anew_under_another_exchange(site: Make) -> None:
    """The question inside is the same; the number of the exchange, and how the model comes, is not."""
    made = site(IN_A_GROUP)
    made.ask(LabelReport())
    made.ask(reserve(0, 0))
    guard, whole = made.site_server._running().guard, made.weights.params
    codec = PowerSGD(rank=1)
    packed = [pack(codec.first_basis(whole, np.random.default_rng(n)), codec.forms_of_basis(whole)) for n in (0, 1)]
    way = ModelDelivery(3, b"name", -1, [], whole)
    question = Encoded(Gradient(1, 0, Weights({}, {})), 1, 1, way, False, packed[0])

    def ask(**other: Any) -> None:
        guard.take(guard.check(0, dataclasses.replace(question, **other), together=True))

    def refused(rule: str, **other: Any) -> None:
        with pytest.raises(RuleError) as raised:
            ask(**other)
        assert raised.value.rule == rule

    ask()
    refused("order")  # the exchange is over
    ask(exchange=2)
    held = dataclasses.replace(way, base=3, params={})
    ask(exchange=5, delivery=held)  # whoever got it keeps it
    another = {name: tensor + 1 for name, tensor in whole.items()}
    for number, other in enumerate(
        (
            {"request": Gradient(1, 0, Weights({}, {"more": torch.ones(1)}))},
            {"basis": packed[1]},
            {"delivery": dataclasses.replace(way, params=another)},
            {"delivery": dataclasses.replace(held, version=4)},
            {"delivery": dataclasses.replace(held, digest=b"other")},
            {"delivery": dataclasses.replace(held, base=2, changes=[torch.ones(1, dtype=torch.uint8)])},
            {"exchange": 4},
        )
    ):
        refused("order", **{"exchange": 6 + number, **other})
    with pytest.raises(RuleError) as alone:
        guard.check(0, dataclasses.replace(question, exchange=20))
    assert alone.value.rule == "order"
    ask(exchange=21)
    refused("repeat", exchange=22)
    # The second sum is that of the last exchange.
    with pytest.raises(RuleError):
        guard.check(0, Coefficients(5, packed[0]), together=True)
    assert guard.check(0, Coefficients(21, packed[0]), together=True) is not None


@pytest.mark.slow
def test_a_group_that_begins_anew_finds_no_other_model_under_the_same_name(site: Make) -> None:
    """Two gradients of the same samples at two models would tell more than one."""
    table = {"method": {"name": "stratify", "cap": 4}, "communication": {"down": "bf16"}}
    made = site(table, policy=Policy(jobs="within-policy", min_samples=1))
    (report,) = made.ask(LabelReport(), clients=[0])
    label = int(report.labels[0])
    made.ask(reserve(0, 1, label=label), clients=[0], acks=[made.counts(0)])

    def norm(batch: int, exchange: int, way: ModelDelivery, **other: Any) -> Any:
        question = Encoded(Gradient(1, batch, Weights({}, {})), 1, exchange, way, False, pack({}, {}))
        (answer,) = made.ask(question, clients=[0], **other)
        return answer if isinstance(answer, Failed) else float(answer.payload.view(torch.float32).norm())

    whole = ModelDelivery(3, b"name", -1, [], made.weights.params)
    another = {name: tensor * 3 + 1 for name, tensor in made.weights.params.items()}
    there = norm(0, 1, dataclasses.replace(whole, params=another), acks=[made.counts(0)])
    assert isinstance(there, float)
    refused = norm(1, 2, whole, group="g", acks=[made.counts(0)])
    assert isinstance(refused, Failed), "the client has settled another model of this name"
    held = dataclasses.replace(whole, base=3, params={})
    assert isinstance(norm(1, 3, held, group="h"), float), "once, at the model that it has"
    assert isinstance(norm(1, 4, whole, group="i"), Failed), "and not at this one"


def test_no_group_where_none_is_declared(site: Make) -> None:
    made = site()
    one, other = made.ask(fit(made), clients=[0, 1], group="g")
    assert (ruled(one), ruled(other)) == ("kind", "kind")


ENCODED = {"communication": {"up": {"name": "powersgd", "rank": 1}}}


@pytest.mark.slow
def test_the_question_inside_an_envelope_is_looked_at(site: Make) -> None:
    made = site(ENCODED)
    assert ruled(*made.ask(fit(made))) == "kind", "agreed is an encoded one"

    def wrapped(question: Any, **other: Any) -> Encoded:
        return dataclasses.replace(Encoded(question, 1, 1, None, False, torch.empty(0, dtype=torch.uint8)), **other)

    for question, rule in (
        (Compress(1, made.weights, 9, 0), "kind"),
        (fit(made, keep=0.01), "bounds"),
        (fit(made, 2), "rounds"),
    ):
        assert ruled(*made.ask(wrapped(question))) == rule
    assert ruled(*made.ask(wrapped(fit(made), plain=True))) == "bounds"
    nothing = torch.empty(0, dtype=torch.uint8)
    assert ruled(*made.ask(Coefficients(1, nothing))) == "rounds", "none has begun"
    codec, like = PowerSGD(rank=1), made.weights.params
    basis = pack(codec.first_basis(like, np.random.default_rng(0)), codec.forms_of_basis(like))
    assert not isinstance(*made.ask(wrapped(fit(made), basis=basis)), Failed)
    assert ruled(*made.ask(wrapped(fit(made), basis=basis, exchange=2))) == "repeat"
    assert ruled(*made.ask(Coefficients(2, nothing))) == "order"


@pytest.mark.parametrize("masking", ["prf", "none"])
def test_masked_labels_are_not_asked_for_by_their_numbers(site: Site, masking: str) -> None:
    """A client that nobody told what a placeholder is took it for the label, which told the server all counts."""
    made = site({"method": {"name": "stratify", "cap": 8, "masking": masking}})
    none = torch.zeros(0, dtype=torch.int64)
    question = Reserve(1, torch.zeros(10, dtype=torch.int64), torch.arange(10), none, True, (0.0, 1.0))
    if masking == "none":
        assert not isinstance(*made.ask(question), Failed)
    else:
        assert ruled(*made.ask(question)) == "order"


def test_who_was_told_what_its_placeholders_are_is_asked_by_them(site: Site) -> None:
    """Only an answer counts, and a checkpoint keeps it."""
    made = site({"method": {"name": "stratify", "cap": 8, "masking": "prf"}})
    guard = made.site_server._running().guard
    count = guard.check(0, CountReport(torch.arange(2), 2))
    guard.take(count)
    none = torch.zeros(0, dtype=torch.int64)
    question = Reserve(1, torch.zeros(2, dtype=torch.int64), torch.arange(2), none, True, (0.0, 1.0))
    with pytest.raises(RuleError, match="Reserve came before CountReport"):
        guard.check(0, question)
    guard.answered(count, None)
    assert guard.check(0, question) is not None
    with pytest.raises(RuleError, match="Reserve came before CountReport"):
        guard.check(1, question)
    again = Guard(guard.declaration, guard.policy, guard.quota)
    again.times_in_run = dict(guard.times_in_run)
    assert again.check(0, question) is not None


# --- relays ----------------------------------------------------------------------------------------------------------


def visit(site: Site, round: int = 1, **other: Any) -> Visit:
    return dataclasses.replace(Visit(round), **other)


def test_only_who_has_the_ticket_gets_the_model_of_a_relay(site: Make) -> None:
    made = site({"method": "sfl"})
    assert isinstance(made.hop(visit(made), ticket="secret"), Hopped)
    for caller in ("b", "server", "c"):
        for ticket in ("", "guess", "secre"):
            assert ruled(made.call(Fetch(1, 0, ticket), caller=caller)) == "relay"
    assert isinstance(made.call(Fetch(1, 0, "secret"), caller="b"), Weights)
    assert isinstance(made.call(Fetch(1, 0, "secret")), Weights)
    assert [entry.to for entry in made.ledger.entries if entry.kind == "Fetch" and not entry.refused] == ["b", ""]


def test_a_model_without_a_ticket_is_nobodys(site: Make) -> None:
    made = site({"method": "sfl"})
    made.hop(visit(made), ticket="")
    assert ruled(made.call(Fetch(1, 0, ""), caller="b")) == "relay"


def test_tasks_of_relays_are_looked_at_too(site: Make) -> None:
    made = site({"method": "sfl"})
    for task, rule in ((visit(made, 7), "rounds"), (fit(made), "kind")):
        outcome = made.hop(task)
        assert isinstance(outcome, Hopped)
        assert ruled(outcome.reply) == rule
    assert ruled(*made.ask(visit(made))) == "kind", "no task of a relay"
    assert not isinstance(made.hop(visit(made)).reply, Failed)
    assert ruled(made.hop(visit(made)).reply) == "repeat"


def test_a_task_that_could_not_be_done_for_lack_of_a_model_comes_again(site: Make) -> None:
    made = site({"method": "sfl"})
    made.hop(visit(made), base=0, hop=1, holder="b", weights=None, key="x")
    assert not isinstance(made.hop(visit(made), base=0, hop=1).reply, Failed)


@pytest.mark.slow
def test_tasks_hold_no_more_samples_than_agreed(site: Make) -> None:
    made = site({"method": {"name": "stratify", "mode": "single", "chunk_size": 3}})
    made.ask(LabelReport())
    nothing = torch.zeros(0, dtype=torch.int64)
    assert ruled(made.hop(Steps(1, torch.tensor([0] * 4), nothing, True, ALL)).reply) == "bounds"
    assert not isinstance(made.hop(Steps(1, torch.tensor([0] * 3), nothing, True, ALL)).reply, Failed)


# --- a run that goes on ----------------------------------------------------------------------------------------------


def test_a_run_goes_on_where_the_server_says_and_not_before(site: Make) -> None:
    made = site()
    made.ask(fit(made), clients=[0, 1])
    made.save(1, made.counts(0, 1))
    made.ask(fit(made, 2))
    made.start()  # the site was killed
    assert made.begin(1) == Begun(1, [])
    assert ruled(*made.ask(fit(made, 1))) == "rounds"
    assert isinstance(*made.ask(fit(made, 2)), FitReply), "round 2 is not in any checkpoint"


def test_a_site_uses_the_agreed_share_of_its_samples_and_does_not_tell_their_number(site: Make) -> None:
    sampler = {"name": "fedstas", "share": 0.5}
    made = site({"method": {"name": "fedavg", "data_sampler": sampler, "aggregator": "mean"}})
    assert ruled(*made.ask(SizeReport(1, 0, 1.0))) == "kind"
    assert ruled(*made.ask(fit(made, keep=0.6, counts=False))) == "bounds"
    assert ruled(*made.ask(fit(made, keep=0.5))) == "bounds"
    assert isinstance(*made.ask(fit(made, keep=0.5, counts=False)), FitReply)


@pytest.mark.parametrize("settings", [{"name": "fedsampling"}, {"name": "fedstas", "strata": 2, "reuse": True}])
def test_what_is_asked_once_in_a_run_is_remembered_by_a_checkpoint(site: Make, settings: dict[str, Any]) -> None:
    made = site({"method": {**settings, "epsilon": 1.0}})
    allowed = next(a for a in made.site_server._running().guard.declaration.allowed or () if a.request is SizeReport)

    def size(round: int) -> SizeReport:
        return SizeReport(round, allowed.where["bound"], allowed.where["alpha"])

    assert isinstance(*made.ask(size(1)), SizeReply)
    assert ruled(*made.ask(size(2))) == "repeat"
    made.save(2)
    made.start()
    made.begin(2)
    assert ruled(*made.ask(size(3))) == "repeat"
    assert isinstance(*made.ask(size(3), clients=[1]), SizeReply)


def test_states_are_stored_of_rounds_that_there_are(site: Make) -> None:
    made = site()
    for round in (-1, 4):
        assert ruled(made.save(round)) == "rounds"


def test_the_books_of_a_job_outlive_its_processes(site: Make) -> None:
    made = site()
    made.ask(fit(made))
    made.ask(fit(made, 2))
    made.save(2)
    made.start()
    made.begin()
    quota = Quota(made.folder, made.site_server._running().guard.declaration.job)
    assert quota.starts == 2
    assert quota.exchanges == 2
    assert quota.bytes > 1000


def test_a_method_that_declares_nothing_runs_only_in_a_simulation(tmp_path: Path) -> None:
    table = {"method": "asking:Counted"}
    refused = Site(tmp_path / "real", table, allow=["asking"]).begin()
    assert ruled(refused) == "declared"
    assert "asking:Counted" in refused.reason
    made = Site(tmp_path / "trial", table, simulated=True)
    assert isinstance(made.begin(), Begun)
    assert not isinstance(*made.ask(asking.HowOften()), Failed)


# --- what a spec names -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "section",
    [
        "[data]\nname = '/etc/own.npz'",
        "[data]\nname = 'rows.csv'",
        "[data]\nname = 'hub:owner/name'",
        "[data]\nname = 'mnist'",
        "data = 'patients'",
        "[partition]\nname = 'given'\nfile = '/etc/passwd'",
        "[availability]\nname = 'trace'\nfile = '/etc/passwd'",
        "[partition]\nname = 'single-client'\nof = { name = 'given', file = '/etc/passwd' }",
    ],
)
def test_a_spec_names_no_file_of_a_site(site: Make, monkeypatch: pytest.MonkeyPatch, section: str) -> None:
    from fedstrata.sites.wire import Begin

    read: list[object] = []
    monkeypatch.setattr(Path, "open", lambda self, *_, **__: read.append(self))
    made = site(begin=False)
    refused = made.call(Begin("run", section, None, [0, 1], CLIENTS, 0))
    assert ruled(refused) == "data"
    assert "root:" not in refused.reason
    assert made.ledger.refused == ["data"]
    assert read == []


def test_a_column_may_be_called_file() -> None:
    columns = {"file": "category", "age": {"range": [0, 9]}}
    table = {"data": {"name": "a.csv", "schema": {"label": "sick", "classes": ["no", "yes"], "columns": columns}}}
    declared(fs.Experiment.from_table(table).to_toml(), SiteSettings(), clients=2, own_data=True)


def test_a_site_lists_what_a_spec_may_name(site: Make, tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("client,first,last\n0,1,1\n1,1,2\n")
    file = str(tmp_path / "trace.csv")
    table = {"availability": {"name": "trace", "file": file}}
    assert ruled(site(table, begin=False).begin()) == "data"
    assert isinstance(site(table, begin=False, catalog=[file]).begin(), Begun)


@pytest.mark.long
def test_ten_thousand_questions_out_of_order_and_malformed(tmp_path: Path) -> None:
    """None is answered that the declaration forbids; see ``tests/sites/questions.py``."""
    from tests.fuzz.cases import RAN, REFUSED
    from tests.fuzz.worker import FAMILIES, outcome_of
    from tests.sites.questions import QUESTIONS

    cases = 10_000 // QUESTIONS
    outcomes = [outcome_of(FAMILIES["questions"], 1, number, tmp_path / str(number)) for number in range(cases)]
    assert [(number, *outcome) for number, outcome in enumerate(outcomes) if outcome[0] not in (RAN, REFUSED)] == []
    assert sum(outcome[0] == RAN for outcome in outcomes) > cases / 2


def test_no_answer_leaves_while_another_thread_fails_to_write_it_down(site: Make) -> None:
    made = site()
    site_server, took, go = made.site_server, threading.Event(), threading.Event()
    site_server.note("Fit", client=0)

    class Full:
        def append(self, entries: Iterable[Entry]) -> None:
            took.set()
            go.wait(5)
            raise OSError("no space left")

    def fail() -> None:
        with pytest.raises(OSError, match="no space"):
            site_server._write_ledger()

    site_server.ledger = Full()
    other = threading.Thread(target=fail)
    other.start()
    took.wait(5)
    threading.Timer(0.1, go.set).start()
    with pytest.raises(OSError, match="no space"):
        site_server._write_ledger()
    other.join()
    assert [entry.kind for _, entry in site_server._entries] == ["Fit"], "kept until it can be written"


def test_an_answer_that_is_too_large_to_leave_is_not_booked_as_one(tmp_path: Path) -> None:
    made = Site(tmp_path, policy=Policy(jobs="within-policy", megabytes=0.001))
    made.begin()
    assert ruled(made.ask(fit(made))[0]) == "policy.megabytes"
    assert made.ledger.answered == []


OWN = {
    "data": {"name": "x", "shape": [3], "classes": 2, "normalize": "standard"},
    "evaluation": {"validation": 0.3},
}


@pytest.fixture
def hospital(tmp_path: Path) -> Callable[..., Site]:
    """A site with data of its own."""
    drawn = np.random.default_rng(0)
    x, y = drawn.normal(size=(30, 3)).astype(np.float32), drawn.integers(0, 2, 30)
    np.savez(tmp_path / "own.npz", x_train=x, y_train=y, x_test=x[:6], y_test=y[:6])

    def make(table: dict[str, Any] | None = None, **policy: Any) -> Site:
        return Site(
            tmp_path / "site",
            {**OWN, **(table or {})},
            policy=Policy(**{"jobs": "within-policy", **policy}),
            data=tmp_path / "own.npz",
        )

    return make


def survey(site: Site, client: int = 0, total: int = 2) -> Any:
    return site.call(Survey(site.spec.to_toml(), [client], total, False))


def begin_own(site: Site, statistics: Any, client: int = 0, total: int = 2, round: int = 0) -> Any:
    return site.call(Begin("run", site.spec.to_toml(), statistics, [client], total, round))


@pytest.mark.slow
def test_what_own_data_come_to_is_told_once_and_for_one_client(hospital: Callable[..., Site]) -> None:
    made = hospital()
    first = records.encode(survey(made))
    assert ruled(survey(made, 1)) == ruled(survey(made, 0, 3)) == "repeat"
    assert records.encode(survey(made)) == first
    made.start()
    assert ruled(survey(made, 1)) == "repeat", "also another process knows"
    assert records.encode(survey(made)) == first
    statistics = records.decode(first).statistics
    assert ruled(begin_own(made, statistics, 1)) == ruled(begin_own(made, statistics, 0, 3)) == "bounds"
    assert isinstance(begin_own(made, statistics), Begun)
    made.save(0)
    assert records.encode(survey(made)) == first
    made.start()
    assert isinstance(begin_own(made, statistics), Begun), "a job that goes on"


def test_a_survey_counts_by_the_policys_limits(hospital: Callable[..., Site]) -> None:
    made = hospital(exchanges=2)
    spent = [survey(made), survey(made)]
    assert not any(isinstance(answer, Refused) for answer in spent)
    assert ruled(survey(made)) == "policy.exchanges"
    made = hospital(megabytes=1e-9)
    made.site_server.folder = made.site_server.folder / "other"
    assert ruled(survey(made)) == "policy.megabytes"
    assert made.ledger.answered == []


def test_data_that_changed_are_not_told_to_the_same_job(hospital: Callable[..., Site]) -> None:
    made = hospital()
    survey(made)
    file = made.settings.data
    assert file is not None
    arrays = dict(np.load(file))
    np.savez(file, **(arrays | {"x_train": arrays["x_train"] + 1}))
    assert ruled(survey(made)) == "repeat"


@pytest.mark.slow
def test_another_seed_is_no_other_survey(hospital: Callable[..., Site]) -> None:
    """Where nothing is held out, and where one sample is, the sums differ by that one."""
    shares = ({"evaluation": {"validation": share}} for share in (0.01, 0.04))
    one, other = (hospital(table, surveys=2) for table in shares)
    first, second = survey(one).statistics, survey(other).statistics
    assert first.samples - second.samples == 1
    gone = first.count * first.mean - second.count * second.mean
    assert one.settings.data is not None
    rows = np.load(one.settings.data)["x_train"]
    assert np.abs(rows - gone.numpy()).max(axis=1).min() < 1e-6, "the control: that sample, to the last digit"
    same = {"training": {"rounds": 2}, "evaluation": {"validation": 0.04}}
    for table in ({"seed": 1}, {"evaluation": {"validation": 0.4}}, {"seed": 2}):
        made = hospital(table, surveys=2)
        assert ruled(survey(made)) == "policy.surveys"
        assert made.ledger.refused == ["policy.surveys"]
    assert not isinstance(survey(hospital(same, surveys=2)), Refused), "the same again"
    assert ruled(survey(hospital({"seed": 3}))) == "policy.surveys"
    approved = hospital({"seed": 3})
    approved.policy = Policy(approved=[hash_of(approved.spec)])
    approved.start()
    assert not isinstance(survey(approved), Refused)


def test_what_a_job_spends_in_two_processes_adds_up(tmp_path: Path) -> None:
    one, other = Quota(tmp_path, "job"), Quota(tmp_path, "job")
    one.start(Policy(starts=2))
    other.start(Policy(starts=2))
    one.exchanges, other.exchanges, other.bytes = 3, 4, 50
    for each in (one, other, one):
        each.save()
    after = Quota(tmp_path, "job")
    assert [(each.starts, each.exchanges, each.bytes) for each in (one, after)] == [(2, 7, 50)] * 2
    with pytest.raises(RuleError, match="began 2 times"):
        Quota(tmp_path, "job").start(Policy(starts=2))
    one.settle([0], 3, "bounds")
    with pytest.raises(RuleError, match="but earlier the site had"):
        other.settle([1], 3, "bounds")


@pytest.mark.slow
def test_two_jobs_that_ask_at_once_are_not_both_told(
    hospital: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs are processes; here each has the other's time between the look and the entry."""
    known = Quota.surveys

    def slowly(self: Quota) -> list[bytes]:
        found = known(self)
        time.sleep(0.5)
        return found

    monkeypatch.setattr(Quota, "surveys", slowly)
    with ThreadPoolExecutor() as pool:
        answers = list(
            pool.map(survey, [hospital({"evaluation": {"validation": 0.2}, "seed": seed}) for seed in (0, 1)])
        )
    assert sorted(isinstance(answer, Refused) for answer in answers) == [False, True]


@pytest.mark.slow
def test_the_only_sample_of_a_class_is_measured_feature_by_feature(tmp_path: Path) -> None:
    """A row of the confusion matrix is one sample: which of two classes a model takes it for is the server's question.

    What no rule stops: a measurement is over enough samples, and each round may have one.
    """
    drawn = np.random.default_rng(0)
    x, y = drawn.normal(size=(30, 3)).astype(np.float32), drawn.integers(0, 2, 30)
    only = np.array([0.34, -1.2, 0.7], dtype=np.float32)
    x_test, y_test = np.concatenate([x[:7], only[None]]), np.array([0] * 7 + [1])
    np.savez(tmp_path / "own.npz", x_train=x, y_train=y, x_test=x_test, y_test=y_test)
    rounds = 12
    table = {
        "data": {"name": "x", "shape": [3], "classes": 2, "normalize": "none"},
        "evaluation": {"every": 1},
        "training": {"rounds": rounds},
    }
    made = Site(tmp_path / "site", table, policy=Policy(jobs="within-policy"), data=tmp_path / "own.npz")
    assert isinstance(begin_own(made, survey(made).statistics), Begun)
    allowed = next(a for a in made.site_server._running().guard.declaration.allowed or () if a.request is Evaluate)
    bins = {key: allowed.where[key] for key in ("score_bins", "confidence_bins")}
    weight, bias = made.site_server._running().context.config.model.params()
    low, high = -2.0, 2.0
    for round in range(1, rounds + 1):
        middle = (low + high) / 2
        model = {weight: torch.tensor([[0.0] * 3, [100.0, 0.0, 0.0]]), bias: torch.tensor([0.0, -100 * middle])}
        (reply,) = made.ask(Evaluate(round, Weights(model, {}), "test", False, 0, **bins), clients=[0])
        above = bool(reply.sums.confusion[1, 1])
        low, high = (middle, high) if above else (low, middle)
    assert abs((low + high) / 2 - 0.34) < 4 / 2**rounds
    assert made.ledger.refused == []


@pytest.mark.slow
def test_a_survey_counts_a_category_of_a_single_row(tmp_path: Path) -> None:
    """Only for a job that the site approved: its most frequent category stands in for missing ones."""
    rows = "".join(f"{kind},{label}\n" for kind, label in zip("a" * 14 + "b" * 15 + "c", "nyn" * 10, strict=True))
    (tmp_path / "own.csv").write_text("kind,ill\n" + rows)
    column = {"type": "category", "categories": ["a", "b", "c"], "impute": "most-frequent"}
    table = {
        "data": {"name": "own.csv", "schema": {"label": "ill", "classes": ["n", "y"], "columns": {"kind": column}}}
    }
    made = Site(tmp_path / "site", {**OWN, **table}, policy=Policy(jobs="within-policy"), data=tmp_path / "own.csv")
    assert ruled(survey(made)) == "policy.min_samples"
    made.site_server.policy = Policy(approved=[hash_of(made.spec)])
    assert 1 in survey(made).statistics.counts["kind"][:, 1].tolist()


@pytest.mark.slow
def test_one_answer_is_told_unless_the_policy_says_more(hospital: Callable[..., Site]) -> None:
    assert not isinstance(survey(hospital({"data": {**OWN["data"], "normalize": "none"}})), Refused), "tells nothing"
    assert not isinstance(survey(hospital()), Refused)
    assert ruled(survey(hospital({"seed": 1}))) == "policy.surveys"
    assert not isinstance(survey(hospital()), Refused)


@pytest.mark.parametrize(("client", "total"), [(0, 0), (0, -1), (2, 2), (-1, 2), (0, 1_000_001), (True, 2), (0, 2.0)])
def test_there_are_so_many_clients_at_most(hospital: Callable[..., Site], client: Any, total: Any) -> None:
    made = hospital()
    # A wrong type may be no message at all.
    for refused in (survey(made, client, total), begin_own(made, None, client, total)):
        assert isinstance(refused, Refused)
        if type(client) is type(total) is int:
            assert ruled(refused) == "bounds"


TOGETHER = {
    "method": {"name": "fedtan"},
    "model": {"name": "resnet20", "norm": "bn"},
    "training": {"batch_size": 8, "local_steps": 1},
}


@pytest.mark.slow
def test_parts_of_a_group_are_counted_and_booked_also_when_it_breaks(tmp_path: Path) -> None:
    made = Site(tmp_path, TOGETHER, policy=Policy(jobs="within-policy", megabytes=3.0))
    made.begin()
    sent: list[bytes] = []

    def send(target: str, data: bytes) -> bytes:
        sent.append(data)
        return records.encode(Refused("broken") if len(sent) % 2 == 0 else Total(sum(records.decode(data).tensors)))

    made.site_server.send = send
    asked = FitTogether(1, made.weights)
    outcomes = [made.ask(asked, clients=[0], group=f"g{number}")[0] for number in range(6)]
    assert ruled(outcomes[-1]) == "repeat"
    parts = [entry.bytes for entry in made.ledger.entries if entry.kind == "Part"]
    assert len(parts) == 4, "the first time, and three times again"
    assert sum(parts) == sum(map(len, sent))
    quota = made.site_server._running().guard.quota
    assert quota.bytes > sum(parts)
    quota.bytes = 3_000_000
    before = len(sent)
    made.ask(dataclasses.replace(asked, round=2), clients=[0], group="large")
    assert len(sent) == before
    assert "policy.megabytes" in made.ledger.refused


def test_a_site_with_another_base_is_refused_before_the_first_round(site: Make) -> None:
    made = site(begin=False)
    frozen = {"base.weight": "0123456789abcdef"}
    refused = made.call(BeginOnBase("run", made.spec.to_toml(), None, [0, 1], CLIENTS, 0, frozen))
    assert "weight differs: its checksum is missing here, but 0123456789ab… in the server's model" in refused.reason
    begun = made.call(BeginOnBase("run", made.spec.to_toml(), None, [0, 1], CLIENTS, 0, {}))
    assert isinstance(begun, Begun)
