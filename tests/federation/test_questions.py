"""What a declaration can say, and when a class's own still holds."""

from __future__ import annotations

from typing import Any

import pytest

from fedstrata.federation.questions import SHARE, RequestRule, asks_no_more, by_round, joined
from fedstrata.sampling.messages import LossReport, SizeReport
from fedstrata.stratify.messages import Gradient, GradientSteps

PLAIN = RequestRule(SizeReport, "its size", where={"bound": 0, "alpha": 1.0})


@pytest.mark.parametrize(
    ("request_", "wrong"),
    [
        (SizeReport(1, 0, 1.0), ""),
        (SizeReport(1, 5, 1.0), "SizeReport.bound = 5; accepted: 0"),
        (SizeReport(1, 0, float("nan")), "SizeReport.alpha = nan; accepted: 1.0"),
    ],
    ids=str,
)
def test_fields_are_what_was_agreed(request_: Any, wrong: str) -> None:
    assert PLAIN.wrong(request_, 1) == wrong


def test_a_bound_is_of_a_round() -> None:
    question = RequestRule(SizeReport, "its size", where={"bound": by_round("ten times the round", lambda r: 10 * r)})
    assert question.wrong(SizeReport(2, 20, 1.0), 2) == ""
    assert question.wrong(SizeReport(2, 10, 1.0), 2) == "SizeReport.bound = 10; accepted: ten times the round"
    assert [SHARE.holds(value, 1) for value in (0.0, 1e-9, 1.0, 1.1, float("nan"))] == [False, True, True, False, False]


def test_a_question_is_of_one_kind_and_no_subclass_of_it() -> None:
    assert RequestRule(Gradient, "").is_of(Gradient(1, 0, None))  # type: ignore[arg-type]
    assert not RequestRule(Gradient, "").is_of(GradientSteps(1, 0, None))  # type: ignore[arg-type]


def test_rounds_in_which_a_question_comes() -> None:
    question = RequestRule(LossReport, "its loss", first=2, last=4, due=lambda round: round % 2 == 0)
    assert [round for round in range(7) if question.comes_in(round)] == [2, 4]
    assert RequestRule(LossReport, "its loss").comes_in(10**9)
    assert RequestRule(LossReport, "its loss", first=2, last=4).table()["rounds"] == [2, 4]


def test_what_one_part_does_not_declare_nobody_has_declared() -> None:
    assert joined([PLAIN], (), [PLAIN]) == (PLAIN, PLAIN)
    assert joined([PLAIN], None) is None


class Base:
    def asks(self) -> None: ...

    def declares(self) -> None: ...


class Same(Base):
    def other(self) -> None: ...


class More(Same):
    def asks(self) -> None: ...


class Both(More):
    def declares(self) -> None: ...


class Mixed(Same, Base): ...


@pytest.mark.parametrize(("cls", "holds"), [(Base, True), (Same, True), (More, False), (Both, True), (Mixed, True)])
def test_a_declaration_holds_where_nothing_below_it_asks(cls: type, holds: bool) -> None:
    assert asks_no_more(cls, "declares", "asks") == holds
    assert not asks_no_more(object, "declares", "asks")
