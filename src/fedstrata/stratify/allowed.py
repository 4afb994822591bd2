"""What Stratify may ask: of an epoch only samples that were set aside for it, and batch after batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedstrata.federation.allowed import Allowed, Bound, SampleLimit
from fedstrata.stratify.masking.messages import (
    Assign,
    Compare,
    CountReport,
    Enlist,
    OpenKeys,
    OpenTotals,
    SealLabels,
    ShareReport,
    TagReport,
)
from fedstrata.stratify.messages import Gradient, GradientSteps, LabelReport, Reserve, Steps


def allowed_in_batches(size: int, window: Bound, lr: Bound, local_steps: int, rounds: range | None) -> list[Allowed]:
    """Return the requests of union batches.

    Args:
        size: Samples in a batch.
        window: The part of each label's samples that has arrived.
        lr: The learning rate with which clients step, if they take several steps.
        local_steps: Steps of a client on its part of a batch.
        rounds: The rounds with batches; None for all.
    """
    reserve = Allowed(Reserve, where={"window": window}, times=None, rounds=rounds)
    limit = SampleLimit(size, f"is over a part of a batch of {size} sample{'s' * (size > 1)}")
    if local_steps == 1:
        return [reserve, Allowed(Gradient, times=None, rounds=rounds, limit=limit)]
    rule = replace(Gradient.rule, description=f"{Gradient.rule.description}; along {local_steps} steps on them")
    where = {"steps": local_steps, "lr": lr}
    return [reserve, Allowed(GradientSteps, where=where, times=None, rounds=rounds, limit=limit, rule=rule)]


def allowed_sample_by_sample(window: Bound, longest: int, rounds: range | None) -> list[Allowed]:
    """Return the request of training sample by sample.

    Args:
        window: The part of each label's samples that has arrived.
        longest: Samples of a task at most.
        rounds: The rounds with such training; None for all.
    """
    where = {"window": window, "labels": Bound(f"at most {longest} of them", lambda value, _: len(value) <= longest)}
    limit = SampleLimit(1, "trains a model on one sample at a time")
    return [Allowed(Steps, where=where, times=None, rounds=rounds, limit=limit)]


def allowed_in_enrolment(masking: str, *, weighted: bool, classes: int | None) -> list[Allowed]:
    """Return the requests before the first round.

    Args:
        masking: The mode.
        weighted: Whether clients are chosen by how many samples they have.
        classes: C; None if it is not known.
    """
    if masking == "none":
        return [Allowed(LabelReport), Allowed(Assign)]
    where: dict[str, Any] = {} if classes is None else {"classes": classes}
    prf = masking == "prf"
    labels = [Allowed(TagReport)] if prf else [Allowed(kind, where=where) for kind in (SealLabels, Compare, Enlist)]
    shares = [Allowed(ShareReport)] if weighted else []
    keys = Allowed(OpenKeys, where={"comparing": not prf})
    return [keys, *labels, Allowed(CountReport), Allowed(OpenTotals), *shares]
