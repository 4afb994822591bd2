"""What a declaration can say, and when a class's own still holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fedstrata.federation.allowed import SHARE, Allowed, by_round, declares, joined
from fedstrata.federation.messages import Fit, Request
from fedstrata.sampling.client_sizes import SizeReport
from fedstrata.sampling.power_of_choice import LossReport
from fedstrata.stratify.messages import Gradient, GradientSteps

PLAIN = Allowed(SizeReport, where={"bound": 0, "alpha": 1.0})


@pytest.mark.parametrize(
    ("request_", "wrong"),
    [
        (SizeReport(1, 0, 1.0), ""),
        (SizeReport(1, 5, 1.0), "SizeReport.bound = 5 does not match the declaration (0)"),
        (SizeReport(1, 0, float("nan")), "SizeReport.alpha = nan does not match the declaration (1.0)"),
    ],
    ids=str,
)
def test_fields_are_what_was_agreed(request_: Any, wrong: str) -> None:
    assert PLAIN.wrong(request_, 1) == wrong


def test_a_bound_is_of_a_round() -> None:
    allowed = Allowed(SizeReport, where={"bound": by_round("ten times the round", lambda r: 10 * r)})
    assert allowed.wrong(SizeReport(2, 20, 1.0), 2) == ""
    problem = "SizeReport.bound = 10 does not match the declaration (ten times the round)"
    assert allowed.wrong(SizeReport(2, 10, 1.0), 2) == problem
    assert [SHARE.holds(value, 1) for value in (0.0, 1e-9, 1.0, 1.1, float("nan"))] == [False, True, True, False, False]


def test_an_allowed_class_does_not_include_its_subclasses() -> None:
    assert Allowed(Gradient).includes(Gradient(1, 0, None))  # type: ignore[arg-type]
    assert not Allowed(Gradient).includes(GradientSteps(1, 0, None))  # type: ignore[arg-type]


def test_rounds_in_which_a_request_comes() -> None:
    allowed = Allowed(LossReport, rounds=range(2, 5))
    assert [round for round in range(7) if allowed.comes_in(round)] == [2, 3, 4]
    assert allowed.table()["rounds"] == [2, 4]
    assert [r for r in range(7) if Allowed(LossReport, rounds=lambda round: round % 3 == 1).comes_in(r)] == [1, 4]
    assert Allowed(LossReport).comes_in(10**9)


class Secret(Request):
    """Its class does not say what a reply sends."""


def test_a_request_says_what_its_reply_sends() -> None:
    with pytest.raises(TypeError, match=r"^Secret\.rule is not set\. Set it to a RequestRule"):
        Allowed(Secret)
    told = replace(Fit.rule, description="a model")
    assert Allowed(Fit).rule is Fit.rule
    assert Allowed(Fit, rule=told).table()["sends"] == "a model"
    assert Allowed(Secret, rule=told).label == "Secret"


def test_what_one_part_does_not_declare_nobody_has_declared() -> None:
    assert joined([PLAIN], [], [PLAIN]) == [PLAIN, PLAIN]
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
    assert declares(cls, "declares", "asks") == holds
    assert not declares(object, "declares", "asks")
