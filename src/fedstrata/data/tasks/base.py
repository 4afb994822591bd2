"""Define the base class of learning tasks, and the task names that a spec accepts.

A *target* is what a model learns to predict for a sample: a class, numbers, several labels, or one class for each token
or pixel. A task defines how to check and store targets, how to compute losses, and what an evaluation records for each
sample. A task also divides samples into *strata*, such as classes or ranges of values.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedstrata.base.arrays import Ints
from fedstrata.base.config import FromRegistry, Registry, Setting
from fedstrata.base.errors import SpecError

if TYPE_CHECKING:
    from fedstrata.data.fitting import Statistics


@dataclass(frozen=True, eq=False)
class Targets:
    """The targets of a data set, in the form in which a ``Dataset`` stores them.

    Args:
        train: The targets of the training samples, shape (N, …).
        test: The targets of the test samples, in the same form as ``train``.
        names: The name of each output of the model, such as the name of a class; empty if outputs have no names.
        outputs: The number of model outputs per sample, token or pixel.
    """

    train: Tensor
    test: Tensor
    names: tuple[str, ...]
    outputs: int


class Task(Setting):
    """Base class of learning tasks, including your own tasks; see the guide "Your task".

    In all methods, *outputs* are the values that the model returns for a batch of B samples, and *targets* are the
    stored targets of the batch, shape (B, …).
    """

    default_metrics: ClassVar[tuple[str, ...]] = ()
    """The default metrics of an evaluation. The first metric is the primary metric."""

    tables: ClassVar[tuple[str, ...]] = ()
    """The keys of ``rows`` whose values are summed over all samples to compute metrics."""

    weighted: ClassVar[bool] = False
    """Whether samples have different weights, such as their numbers of tokens."""

    has_classes: ClassVar[bool] = False
    """Whether each sample belongs to one class, which is its target."""

    @property
    def has_accuracy(self) -> bool:
        """Whether evaluations measure an accuracy, such as the fraction of tokens that are predicted correctly."""
        return "accuracy" in self.default_metrics

    @property
    def plain(self) -> bool:
        """Whether the loss is exactly the mean cross-entropy of classes, so that handwritten gradients may be used."""
        return False

    @abstractmethod
    def targets(self, train: Any, test: Any, names: Sequence[str] | None, sizes: tuple[int, int]) -> Targets:
        """Check the targets of both splits, and convert them to the form in which they are stored.

        Args:
            train: The targets of the training samples, as the user gave them.
            test: The targets of the test samples.
            names: The names of the classes or labels; None if the user gave no names.
            sizes: The number of training samples and of test samples.

        Raises:
            DataError: The targets have the wrong length, shape or type, or an invalid value.
        """

    @abstractmethod
    def losses(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the loss of each sample.

        Returns:
            The loss of each sample, summed over its tokens or pixels, and the weight of each sample, both of shape
            (B,). The weight is 1, or the number of tokens or pixels that are not ignored.
        """

    def mean_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of a batch as a scalar: the sum of the losses, divided by the sum of the weights."""
        losses, weights = self.losses(outputs, targets)
        return losses.sum() / weights.sum().clamp(min=1e-12)

    def total_loss(self, outputs: Tensor, targets: Tensor) -> float:
        """Return the sum of the losses of all samples in a batch."""
        return float(self.losses(outputs, targets)[0].sum())

    def weights(self, targets: Tensor) -> Tensor:
        """Return the weight of each sample, shape (B,), float64."""
        return torch.ones(len(targets), dtype=torch.float64)

    @abstractmethod
    def rows(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return the values that an evaluation records for each sample, as small tensors (B, …).

        An evaluation adds up the entries in ``tables`` over all samples, and computes metrics from the sums. The
        entries ``targets`` and ``predictions``, if present, are the arguments of a user's own metric functions.
        """

    @abstractmethod
    def predictions(self, outputs: Tensor) -> dict[str, Tensor]:
        """Return predictions for users: a mapping from names, such as ``labels``, to tensors (B, …)."""

    def strata(self, targets: Tensor, names: Sequence[str]) -> Ints | None:
        """Return the index of each sample's stratum, shape (N,); None if the task does not divide samples into strata.

        Args:
            targets: The targets of N samples.
            names: The names of the model's outputs.
        """
        return None

    def stratum_names(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the name of each stratum.

        Args:
            names: The names of the model's outputs.
        """
        return ()

    @property
    def stratum_hint(self) -> str:
        """A sentence that says how to define strata, for error messages."""
        return "Give each sample a domain, which then serves as its class."

    def order(self, targets: Tensor) -> Ints:
        """Return a sort key per sample, shape (N,). Held-out samples are chosen at regular intervals in this order."""
        return np.zeros(len(targets), dtype=np.int64)

    @property
    def fits(self) -> bool:
        """Whether the task needs statistics of the clients' training targets; see ``fitted``."""
        return False

    def fitted(self, known: Statistics) -> Task:
        """Return a copy of the task whose settings, such as the mean, are computed from the training targets.

        Args:
            known: The statistics of the clients' training targets, with one column for each component of a target. The
                entry ``counts["y"]`` says how often each value of ``counted`` occurs.
        """
        return self

    def counted(self, targets: Tensor) -> Tensor | None:
        """Return the values whose frequencies ``fitted`` needs, shape (N,); None if frequencies are not needed."""
        return None

    def check_at_sites(self, label: str | None, n_classes: int) -> None:
        """Raise ``SpecError`` if the task cannot be used in a deployment.

        Args:
            label: The column with the labels; None for arrays.
            n_classes: The number of classes that the spec lists; 0 if the spec does not list classes.
        """
        problem = "cannot be used in a deployment, where the label of a sample must be one class or one number."
        raise SpecError("task", f"{problem} Use the task in a simulation.", self.name)

    def check_outputs(self, outputs: Tensor, targets: Tensor, n_outputs: int) -> str:
        """Check the outputs' shape. Return an empty string if the shape is right, otherwise the required shape.

        Args:
            outputs: The outputs of the model.
            targets: The targets of the batch.
            n_outputs: The number of outputs that the data set needs.
        """
        needed = (len(targets), n_outputs)
        return "" if tuple(outputs.shape) == needed else f"(B, {n_outputs})"


def require_strata(task: Task, key: str, value: object) -> SpecError:
    """Return the error about a setting that needs strata, for a task without strata."""
    problem = f"needs classes, but the task {task.name!r} has no classes. {task.stratum_hint}".rstrip()
    return SpecError(key, problem, value)


TASKS: Registry[Task] = Registry(
    "task",
    Task,  # type: ignore[type-abstract]
    {
        "classification": "fedstrata.data.tasks.classification:Classification",
        "regression": "fedstrata.data.tasks.regression:Regression",
        "multilabel": "fedstrata.data.tasks.multilabel:MultiLabel",
        "next-token": "fedstrata.data.tasks.tokens:NextToken",
        "segmentation": "fedstrata.data.tasks.segmentation:Segmentation",
    },
)
"""The possible values of ``task.name``."""

AnyTask = Annotated[Task, FromRegistry(TASKS)]
