"""The section ``[evaluation]`` of a spec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, PositiveInt, field_validator, model_validator

from fedstrata.base.config import MayChange, Setting, plain
from fedstrata.base.errors import SpecError, nearest
from fedstrata.evaluation.metrics import AnyMetric, Metric

Share = Annotated[float | None, Field(gt=0, lt=1)]

TARGETS = [0.5, 0.8, 0.9, 0.95]


class Evaluation(Setting):
    """What is measured, when, on which samples and by which metrics; and when checkpoints are written.

    What decides who trains on what (``validation``, ``client_test``, ``test_clients``) and ``weight_diversity`` stay
    as they are when a run is resumed; all else may change.

    Args:
        every: Rounds between two evaluations on the test set; the last round is always evaluated. 0: only the last.
        batch_size: Samples evaluated at once.
        metrics: What is measured beside the loss.
        targets: Accuracies in (0, 1] for which the summary gives the first round that reached them; for other metrics
            a table of lists, such as ``{ macro-f1 = [0.5] }``.
        validation: Share of the training samples that is held out by label before the partition (where clients come
            with the data: of each client's). The best round and early stopping then look at it, and never at the test
            set.
        client_test: Share of each client's samples that is held out by label, at least one, as its own test part. Real
            sites hold it out too, unless they bring test samples.
        test_clients: Share of the clients that never train, and are evaluated on all their samples.
        fine_tune: Epochs in which each client tunes the global model on its own samples before its own test part
            measures that personal model; 0 takes only what a client keeps of its own, such as BatchNorm's statistics.
        unheard: Evaluations after which a client without a reply that counted is one of the unheard, who are recorded
            on their own.
        checkpoint_every: Rounds between two checkpoints; 0: none.
        per_class: Record the accuracy of every class too, and the other metrics by class where they have that.
        weight_diversity: Record how far the clients' models of a round are from their mean: the mean squared distance Λ
            (ReBaFL, Eq. 24). Not of SFL and Stratify, whose clients have no models of their own.
    """

    every: Annotated[int, Field(ge=0), MayChange()] = 1
    batch_size: Annotated[PositiveInt, MayChange()] = 1000
    metrics: Annotated[list[AnyMetric], Field(min_length=1), MayChange()] = ["accuracy"]  # type: ignore[list-item]
    targets: Annotated[list[float] | dict[str, list[float]], MayChange()] = TARGETS
    validation: Share = None
    client_test: Share = None
    test_clients: Share = None
    fine_tune: Annotated[int | None, Field(ge=0), MayChange()] = None
    unheard: Annotated[PositiveInt, MayChange()] = 10
    checkpoint_every: Annotated[int, Field(ge=0), MayChange()] = 10
    per_class: Annotated[bool, MayChange()] = False
    weight_diversity: bool = False

    @field_validator("metrics")
    @classmethod
    def _different(cls, metrics: list[Metric]) -> list[Metric]:
        labels = [metric.label for metric in metrics]
        if twice := [label for label in labels if labels.count(label) > 1]:
            raise ValueError(f"{twice[0]!r} is there twice, and records could not tell which")
        return metrics

    @field_validator("targets", mode="before")
    @classmethod
    def _a_list(cls, targets: object) -> object:
        if isinstance(targets, int | float):
            shown = targets / 100 if 1 < targets <= 100 else targets if 0 < targets <= 1 else 0.9
            raise ValueError(f"expected a list of accuracies, which are fractions, such as [{shown:g}]")
        return targets

    @field_validator("targets")
    @classmethod
    def _in_unit_interval(cls, targets: list[float] | dict[str, list[float]]) -> Any:
        for target in targets.get("accuracy", []) if isinstance(targets, dict) else targets:
            if not 0 < target <= 1:
                shown = target / 100 if 1 < target <= 100 else 0.9
                raise ValueError(f"{target} is no accuracy in (0, 1]; accuracies are fractions, such as [{shown:g}]")
        return targets

    @model_validator(mode="after")
    def _fits(self) -> Evaluation:
        labels = ["accuracy", "loss", *self.labels]
        for name in self.metric_targets:
            if name not in labels:
                accepted = ", ".join(dict.fromkeys(labels))
                problem = f"no metric of this run; there are: {accepted}{nearest(name, labels)}"
                raise SpecError("targets", problem, name)
        if self.fine_tune is not None and self.client_test is None:
            problem = "a personal model is measured on its client's own test part: give evaluation.client_test too"
            raise SpecError("fine_tune", problem, self.fine_tune)
        return self

    @property
    def labels(self) -> list[str]:
        """What records call the metrics."""
        return [metric.label for metric in self.metrics]

    @property
    def chosen(self) -> bool:
        """Whether other metrics than the accuracy are measured."""
        return self.labels != ["accuracy"]

    @property
    def accuracy_targets(self) -> list[float]:
        """Those of the accuracy."""
        return self.targets.get("accuracy", []) if isinstance(self.targets, dict) else self.targets

    @property
    def metric_targets(self) -> Mapping[str, list[float]]:
        """Those of other metrics, by their label."""
        found = self.targets if isinstance(self.targets, dict) else {}
        return {name: values for name, values in found.items() if name != "accuracy"}

    @property
    def lower(self) -> frozenset[str]:
        """The measures of which the lower value is the better one."""
        return frozenset({"loss"} | {metric.label for metric in self.metrics if not metric.higher_is_better})

    def metric(self, label: str) -> Metric:
        """The metric that records call so.

        Raises:
            SpecError: There is none.
        """
        found = {metric.label: metric for metric in self.metrics}
        if label not in found:
            problem = (
                f"no metric of this run (evaluation.metrics); there are: {', '.join(found)}{nearest(label, found)}"
            )
            raise SpecError("metric", problem, label)
        return found[label]

    def due(self, round: int, last: int) -> bool:
        """Whether a round is evaluated."""
        return round == last or (self.every > 0 and round % self.every == 0)

    def to_spec(self) -> dict[str, Any]:
        """As a table; a metric without settings of its own is its name."""
        tables = [plain(metric) for metric in self.metrics]
        return super().to_spec() | {"metrics": [t["name"] if len(t) == 1 else t for t in tables]}


__all__ = ["Evaluation"]
