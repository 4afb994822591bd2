"""Define the settings in the section ``[evaluation]`` of a spec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, PositiveInt, field_validator, model_validator

from fedstrata.base.config import MayChange, Setting, plain
from fedstrata.base.errors import SpecError, not_among
from fedstrata.data.tasks.base import Task
from fedstrata.evaluation.metrics import METRICS, AnyMetric, Metric

Share = Annotated[float | None, Field(gt=0, lt=1)]

TARGETS = [0.5, 0.8, 0.9, 0.95]


class Evaluation(Setting):
    """Metrics, held-out samples and checkpoints.

    When you resume a run, you may change all settings except ``validation``, ``client_test``, ``test_clients`` and
    ``weight_diversity``.

    Args:
        every: Number of rounds from one evaluation to the next. With 0, only the last round is evaluated.
        batch_size: Number of samples per batch in evaluations.
        metrics: Metrics to compute, in addition to the loss.
        primary: Metric that selects the best round of a run and the best settings of a sweep: ``accuracy``, ``loss`` or
            a metric in ``metrics``.
        targets: Target accuracies in (0, 1]. The run's summary gives the first round that reached each target. For
            other metrics, use a table such as ``{ macro-f1 = [0.5] }``.
        validation: Fraction of training samples held out for validation, to choose the best round and stop early.
        client_test: Fraction of each client's samples held out for testing, stratified by label. Sites with separate
            test samples ignore this setting.
        test_clients: Fraction of clients that never train. The model is also evaluated on these clients' samples.
        fine_tune: Number of epochs for which each client fine-tunes the global model before evaluating it on the
            client's test samples. With 0, clients do not train: each client evaluates the global model with its own
            state, such as BatchNorm statistics.
        unheard: A client is *unheard* if the server has used none of its replies since the n-th last evaluation. This
            key sets n. Results of unheard clients are also reported separately.
        checkpoint_every: Number of rounds from one checkpoint to the next. With 0, checkpoints are not written.
        per_class: Whether to record the accuracy and other metrics of each class.
        weight_diversity: Whether to record Λ, the mean squared distance between the clients' models and their mean. SFL
            and Stratify never record Λ.
    """

    every: Annotated[int, Field(ge=0), MayChange()] = 1
    batch_size: Annotated[PositiveInt, MayChange()] = 1000
    metrics: Annotated[list[AnyMetric], Field(min_length=1), MayChange()] = ["accuracy"]  # type: ignore[list-item]
    primary: Annotated[str, MayChange()] = "accuracy"
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
            raise ValueError(f"the list contains {twice[0]!r} twice. Remove one of the two.")
        return metrics

    @field_validator("targets", mode="before")
    @classmethod
    def _a_list(cls, targets: object) -> object:
        if isinstance(targets, int | float):
            shown = targets / 100 if 1 < targets <= 100 else targets if 0 < targets <= 1 else 0.9
            raise ValueError(f"must be a list of accuracies, as fractions. Use, for example, [{shown:g}].")
        return targets

    @field_validator("targets")
    @classmethod
    def _in_unit_interval(cls, targets: list[float] | dict[str, list[float]]) -> Any:
        for target in targets.get("accuracy", []) if isinstance(targets, dict) else targets:
            if not 0 < target <= 1:
                shown = target / 100 if 1 < target <= 100 else 0.9
                raise ValueError(f"{target} is not between 0 (excluded) and 1. Use fractions, such as [{shown:g}].")
        return targets

    @model_validator(mode="after")
    def _fits(self) -> Evaluation:
        for name in self.metric_targets:
            if name not in self.measured:
                raise SpecError("targets", not_among("is not a metric of this run", name, self.measured), name)
        if self.primary not in self.measured:
            use = "Add the metric to evaluation.metrics, or use one of"
            problem = not_among("is not a metric of this run", self.primary, self.measured, use)
            raise SpecError("primary", problem, self.primary)
        if self.fine_tune is not None and self.client_test is None:
            problem = "requires that clients have their own test samples. Set evaluation.client_test too."
            raise SpecError("fine_tune", problem, self.fine_tune)
        return self

    def of_task(self, task: Task) -> Evaluation:
        """Return the settings, with the task's default metrics if ``metrics`` is not set."""
        changed: dict[str, Any] = {}
        if not self.chosen and task.default_metrics and not task.has_classes:
            changed["metrics"] = [METRICS.make(name, {}) for name in task.default_metrics]
        first = (changed.get("metrics") or self.metrics)[0].label
        if self.primary == "accuracy" and not task.has_accuracy and not task.has_classes:
            changed["primary"] = first
        return self.model_copy(update=changed) if changed else self

    @property
    def labels(self) -> list[str]:
        """The names of the metrics, which are also the keys of the metrics' values in records."""
        return [metric.label for metric in self.metrics]

    @property
    def measured(self) -> list[str]:
        """The names of all results of an evaluation: accuracy, loss and the metrics in ``metrics``."""
        return list(dict.fromkeys(["accuracy", "loss", *self.labels]))

    @property
    def chosen(self) -> bool:
        """Whether ``metrics`` differs from the default, which is only the accuracy."""
        return self.labels != ["accuracy"]

    @property
    def accuracy_targets(self) -> list[float]:
        """The accuracies in ``targets``."""
        return self.targets.get("accuracy", []) if isinstance(self.targets, dict) else self.targets

    @property
    def metric_targets(self) -> Mapping[str, list[float]]:
        """A mapping from the name of each metric (except the accuracy) to its targets."""
        targets = self.targets if isinstance(self.targets, dict) else {}
        return {name: values for name, values in targets.items() if name != "accuracy"}

    @property
    def lower(self) -> frozenset[str]:
        """The names of the metrics for which lower values are better, including ``loss``."""
        return frozenset({"loss"} | {metric.label for metric in self.metrics if not metric.higher_is_better})

    def metric(self, label: str) -> Metric:
        """Return the metric that has the given name in records.

        Raises:
            SpecError: The run does not have a metric with this name.
        """
        metrics = dict(zip(self.labels, self.metrics, strict=True))
        if label not in metrics:
            problem = not_among("is not a metric of this run (evaluation.metrics)", label, metrics)
            raise SpecError("metric", problem, label)
        return metrics[label]

    def evaluated_rounds(self, last: int) -> frozenset[int]:
        """Return the rounds after which the model is evaluated in a run whose last round is ``last``."""
        return frozenset([*range(self.every, last, self.every), last] if self.every else [last])

    def to_spec(self) -> dict[str, Any]:
        """Return the settings as a mapping for a spec.

        A metric without settings is written as its name. The mapping omits ``primary`` if its value is the default, so
        that specs are the same as in earlier versions.
        """
        tables = [plain(metric) for metric in self.metrics]
        table = super().to_spec() | {"metrics": [t["name"] if len(t) == 1 else t for t in tables]}
        return {key: value for key, value in table.items() if (key, value) != ("primary", "accuracy")}


__all__ = ["Evaluation"]
