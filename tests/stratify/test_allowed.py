"""The order in which an epoch's requests may come."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedstrata.federation.messages import Weights
from fedstrata.stratify.allowed import allowed_in_enrolment
from fedstrata.stratify.messages import Epoch, GatheredReply, Gradient, Reserve, ReserveReply, Steps

MODEL = Weights({}, {})
NONE = torch.zeros(0, dtype=torch.int64)


def reserve(*batches: int, fresh: bool = True) -> Reserve:
    return Reserve(1, torch.tensor(batches), torch.zeros(len(batches), dtype=torch.int64), NONE, fresh)


def reply(*missing: bool) -> ReserveReply:
    return ReserveReply(torch.tensor(missing), NONE)


def told(order: Epoch, request: Any, answer: Any = None) -> str:
    """What an order says of a request, which is then answered if it may be."""
    if not (problem := order.refusal(request)):
        order.asked(request)
        order.answered(request, answer)
    return problem


def test_an_epoch_in_order() -> None:
    order = Epoch()
    assert told(order, reserve(0, 1, 1, 3), reply(False, False, True, True)) == ""
    assert told(order, Gradient(1, 0, MODEL)) == ""
    assert told(order, reserve(3, 4, fresh=False), reply(False, False)) == ""
    assert [told(order, Gradient(1, batch, MODEL)) for batch in (1, 3, 4)] == ["", "", ""]


@pytest.mark.parametrize("batch", [2, 3, -1, 9])
def test_a_batch_for_which_nothing_was_set_aside(batch: int) -> None:
    order = Epoch()
    told(order, reserve(0, 1, 3), reply(False, False, True))
    assert "no samples were reserved" in told(order, Gradient(1, batch, MODEL)) or batch == -1


def test_parts_that_were_merged_are_where_the_client_said() -> None:
    order = Epoch()
    answer = GatheredReply(torch.tensor([False, True]), NONE, torch.tensor([5, 7]), torch.tensor([False, True]))
    told(order, reserve(0, 1), answer)
    assert told(order, Gradient(1, 0, MODEL)) == "no samples were reserved for batch 0"
    assert told(order, Gradient(1, 5, MODEL)) == ""
    assert "strictly ascending order, but batch 5 came after 5" in told(order, Gradient(1, 5, MODEL))


def test_what_is_over_is_not_set_aside_again() -> None:
    order = Epoch()
    told(order, reserve(0, 4), reply(False, False))
    told(order, Gradient(1, 4, MODEL))
    assert "batch 4 was already trained" in told(order, reserve(3, 6, fresh=False))
    assert told(order, reserve(6, fresh=False), reply(False)) == ""


def test_an_epoch_begins_once() -> None:
    for first, more in ((reserve(0), reserve(1)), (Steps(1, torch.tensor([0]), NONE, True),) * 2):
        order = Epoch()
        late = Steps(1, torch.tensor([0]), NONE, False)
        assert "has not begun" in told(order, late)
        assert told(order, first, reply(False)) == ""
        assert "has already begun" in told(order, more)
        assert told(order, late) == ""


def test_masking_asks_only_what_it_needs() -> None:
    def kinds(masking: str, weighted: bool = False) -> list[str]:
        return [each.label for each in allowed_in_enrolment(masking, weighted=weighted, classes=3)]

    assert kinds("none") == ["LabelReport", "Assign"]
    assert kinds("none", True) == kinds("none"), "it knows the counts"
    assert kinds("prf") == ["OpenKeys", "TagReport", "CountReport", "OpenTotals"]
    assert kinds("prf", True)[-1] == "ShareReport"
    assert kinds("ckks") == ["OpenKeys", "SealLabels", "Compare", "Enlist", "CountReport", "OpenTotals"]
