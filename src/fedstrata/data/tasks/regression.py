"""Regression with one or several numbers per sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, PositiveFloat, field_validator
from torch import Tensor
from typing_extensions import override

from fedstrata.base.arrays import Floats, Ints
from fedstrata.base.errors import DataError, SpecError
from fedstrata.data import arrays
from fedstrata.data.fitting import TARGET, Statistics
from fedstrata.data.tasks.base import Targets, Task

_LOSSES: dict[str, Callable[..., Tensor]] = {"mse": F.mse_loss, "mae": F.l1_loss, "huber": F.huber_loss}


class Regression(Task):
    """Prediction of one or more numbers per sample, such as a patient's length of stay.

    The model learns standardised targets: (target − mean) / deviation. Losses are computed from standardised targets;
    metrics and predictions are in the unit of the targets. By default, mean and deviation are computed from the
    clients' training targets.

    Args:
        loss: Loss for standardised targets. ``mse``: squared error. ``mae``: absolute error. ``huber``: quadratic for
            errors up to 1, then linear.
        bins: Number of strata. For Stratify and for partitions by label, strata replace classes. A stratum is a range
            of the first target; all strata have equally many training samples.
        edges: Boundaries between strata, in ascending order and in the unit of the target. Set either ``edges`` or
            ``bins``.
        step: Rounding step: targets are rounded down to multiples of this number before the boundaries of the strata
            are computed. Deployments require this setting if ``bins`` is set.
        mean: Mean of each target, for standardisation. Default: computed from the training samples.
        deviation: Standard deviation of each target, for standardisation. Default: computed from the training samples.
    """

    default_metrics = ("rmse", "mae", "r2")
    tables = ("errors",)

    loss: Literal["mse", "mae", "huber"] = "mse"
    bins: Annotated[int | None, Field(ge=2, le=10_000)] = None
    edges: Annotated[tuple[float, ...] | None, Field(min_length=1)] = None
    step: PositiveFloat | None = None
    mean: tuple[float, ...] | None = None
    deviation: tuple[PositiveFloat, ...] | None = None

    @field_validator("edges")
    @classmethod
    def _ascending(cls, edges: tuple[float, ...] | None) -> tuple[float, ...] | None:
        if edges is not None and any(a >= b for a, b in pairwise(edges)):
            raise ValueError("must be in ascending order. Sort the edges, and remove duplicates.")
        return edges

    @override
    def targets(self, train: Any, test: Any, names: Sequence[str] | None, sizes: tuple[int, int]) -> Targets:
        both = [
            arrays.checked_values(y, f"y_{part}", n)
            for y, part, n in zip((train, test), arrays.SPLITS, sizes, strict=True)
        ]
        widths = [values.shape[1] for values in both]
        if widths[0] != widths[1]:
            raise DataError(
                f"y_test has {widths[1]} values for each sample, but y_train has {widths[0]}. Use the same number."
            )
        if names is not None and len(names) != widths[0]:
            raise DataError(
                f"class_names has {len(names)} names for {widths[0]} targets. Give one name for each target."
            )
        train_y, test_y = map(torch.from_numpy, both)
        return Targets(train_y, test_y, tuple(names or ()), widths[0])

    def _units(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and deviation of each target, (K,) float64 on the device of ``targets``."""
        width = targets.shape[1]
        mean, deviation = self.mean or (0.0,) * width, self.deviation or (1.0,) * width
        return (torch.tensor(values, dtype=torch.float64, device=targets.device) for values in (mean, deviation))  # type: ignore[return-value]

    @override
    def losses(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        mean, deviation = self._units(targets)
        wanted = ((targets - mean) / deviation).to(outputs.dtype)
        losses = _LOSSES[self.loss](outputs, wanted, reduction="none").mean(dim=1)
        return losses, torch.ones_like(losses)

    @override
    def rows(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        values = self.predictions(outputs)["values"]
        error = values - targets
        # Return distances from the mean, because sums of the targets themselves would lose digits that R² needs.
        centred = targets - next(iter(self._units(targets)))
        columns = (torch.ones_like(error), error.abs(), error.square(), centred, centred.square())
        return {"targets": targets, "predictions": values, "errors": torch.stack(columns, dim=2)}

    @override
    def predictions(self, outputs: Tensor) -> dict[str, Tensor]:
        mean, deviation = self._units(outputs)
        return {"values": outputs.double() * deviation + mean}

    @override
    def strata(self, targets: Tensor, names: Sequence[str]) -> Ints | None:
        if self.edges is None:
            return None
        return np.searchsorted(np.array(self.edges), targets[:, 0].cpu().numpy(), side="right").astype(np.int64)

    @override
    def stratum_names(self, names: Sequence[str]) -> tuple[str, ...]:
        if self.edges is None:  # before the run, sites know the number of bins, but not their boundaries
            return tuple(f"range {number + 1} of {self.bins}" for number in range(self.bins or 0))
        ends = [f"{edge:g}" for edge in self.edges]
        return (f"below {ends[0]}", *(f"{a} to {b}" for a, b in pairwise(ends)), f"from {ends[-1]}")

    @property
    @override
    def stratum_hint(self) -> str:
        return "Set task.bins, such as task.bins = 10, or task.edges."

    @override
    def order(self, targets: Tensor) -> Ints:
        ranks: Ints = np.unique(targets[:, 0].cpu().numpy(), return_inverse=True)[1].astype(np.int64)
        return ranks

    @property
    @override
    def fits(self) -> bool:
        return self.mean is None or self.deviation is None or self._needs_edges

    @property
    def _needs_edges(self) -> bool:
        return self.bins is not None and self.edges is None

    @override
    def counted(self, targets: Tensor) -> Tensor | None:
        if not self._needs_edges:
            return None
        return targets[:, 0] if self.step is None else (targets[:, 0] / self.step).floor() * self.step

    @override
    def check_at_sites(self, label: str | None, n_classes: int) -> None:
        if label is None:
            problem = "needs numeric labels, but sites read these only from tables. Describe the table in data.schema."
            raise SpecError("task", problem, self.name)
        if self._needs_edges and self.step is None:
            problem = (
                f"is required in a deployment, because task.bins requires counts of rounded values of column {label!r}"
            )
            raise SpecError("task.step", f"{problem}. Set task.step, or use task.edges instead of task.bins.")

    @override
    def fitted(self, known: Statistics) -> Regression:
        deviation = (known.squares / known.count.clamp(min=1)).sqrt()
        varies = deviation > 1e-7 * known.mean.abs()
        learnt: dict[str, Any] = {
            "mean": self.mean or tuple(known.mean.tolist()),
            "deviation": self.deviation or tuple(torch.where(varies, deviation, 1.0).tolist()),
        }
        if self.bins is not None and self.edges is None:
            learnt["edges"] = quantile_edges(known.counts[TARGET].numpy(), self.bins)
        return self.model_copy(update=learnt)


def quantile_edges(counts: Floats, bins: int) -> tuple[float, ...]:
    """Return the boundaries between ranges with equally many values. If values are tied, the ranges may differ in size.

    Args:
        counts: The V distinct values in ascending order, with their frequencies, shape (V, 2).
        bins: The number of ranges.

    Returns:
        At most ``bins`` − 1 distinct boundaries, ascending. A range contains its lower boundary, but not its upper
        boundary.

    Raises:
        DataError: All values are equal.

    >>> quantile_edges(np.array([[1.0, 2], [2.0, 1], [5.0, 3]]), 2)
    (5.0,)
    >>> quantile_edges(np.array([[1.0, 2], [2.0, 9]]), 2)
    (2.0,)
    """
    values, ends = counts[:, 0], counts[:, 1].cumsum()
    places = np.searchsorted(ends, np.arange(1, bins) / bins * (ends[-1] if len(ends) else 0), side="left") + 1
    edges = np.unique(values[places[places < len(values)]])
    if len(values) < 2:
        problem = "all targets are equal, or differ by less than task.step, so task.bins cannot divide the samples. "
        raise DataError(f"y_train: {problem}Remove task.bins.")
    return tuple(edges.tolist()) or (float(values[-1]),)
