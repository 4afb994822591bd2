"""List the requests that Stratify may send to the sites of a deployment. Sites refuse all other requests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedstrata.federation.allowed import Allowed, Bound, SampleLimit
from fedstrata.sampling.label_counts import LabelReport
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
from fedstrata.stratify.messages import Gradient, GradientSteps, LabelWeightedGradient, Reserve, Steps

POSITIVE = Bound("one positive number per label", lambda value, _: value.ndim == 1 and bool((value > 0).all()))


def allowed_in_batches(
    size: int,
    window: Bound,
    lr: Bound,
    local_steps: int,
    rounds: range | None,
    label_weights: bool = False,
) -> list[Allowed]:
    """Return the requests that the server sends in batch mode: to reserve samples, and to compute gradients.

    Args:
        size: The number of samples in a batch, over all clients.
        window: The accepted values of ``Reserve.window``: the range (from, to) of a client's samples that may be used.
        lr: The accepted learning rate for the clients' steps; not used if ``local_steps`` is 1.
        local_steps: The number of steps that a client takes on its samples in a batch.
        rounds: The rounds in which clients train in batches; None for all rounds.
        label_weights: Whether a sample's loss is multiplied by a weight that depends on the sample's label.
    """
    reserve = Allowed(Reserve, where={"window": window}, times=None, rounds=rounds, single=True)
    limit = SampleLimit(size, f"uses a part of a batch of {size} sample{'s' * (size > 1)}")
    if label_weights:
        rule = replace(Gradient.rule, description=f"{Gradient.rule.description}, with a weight for each label")
        weights = {"factors": POSITIVE}
        return [
            reserve,
            Allowed(LabelWeightedGradient, where=weights, times=None, rounds=rounds, limit=limit, rule=rule),
        ]
    if local_steps == 1:
        return [reserve, Allowed(Gradient, times=None, rounds=rounds, limit=limit)]
    rule = replace(Gradient.rule, description=f"{Gradient.rule.description}, summed over {local_steps} local steps")
    where = {"steps": local_steps, "lr": lr}
    return [reserve, Allowed(GradientSteps, where=where, times=None, rounds=rounds, limit=limit, rule=rule)]


def allowed_sample_by_sample(window: Bound, longest: int, rounds: range | None) -> list[Allowed]:
    """Return the request that the server sends in single-sample mode.

    Args:
        window: The accepted values of ``Steps.window``: the range (from, to) of a client's samples that may be used.
        longest: The maximum number of samples per request.
        rounds: The rounds in which clients train sample by sample; None for all rounds.
    """
    where = {"window": window, "labels": Bound(f"at most {longest} labels", lambda value, _: len(value) <= longest)}
    limit = SampleLimit(1, "uses one sample at a time")
    return [Allowed(Steps, where=where, times=None, rounds=rounds, limit=limit)]


def allowed_in_enrolment(masking: str, *, weighted: bool, classes: int | None) -> list[Allowed]:
    """Return the requests of the enrolment, in which the server learns which clients have labels in common.

    Args:
        masking: How labels are hidden from the server; see ``Stratify``.
        weighted: Whether clients are drawn in proportion to their numbers of samples.
        classes: The number C of classes; None if C is not known.
    """
    if masking == "none":
        return [Allowed(LabelReport, single=True), Allowed(Assign, single=True)]
    where: dict[str, Any] = {} if classes is None else {"classes": classes}
    prf = masking == "prf"
    labels = [Allowed(TagReport)] if prf else [Allowed(kind, where=where) for kind in (SealLabels, Compare, Enlist)]
    shares = [Allowed(ShareReport)] if weighted else []
    keys = Allowed(OpenKeys, where={"comparing": not prf})
    requests = [keys, *labels, Allowed(CountReport), Allowed(OpenTotals), *shares]
    return [replace(each, single=True) for each in requests]
