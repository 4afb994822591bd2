"""Compute statistics of training samples, and use the statistics to impute and normalise features.

The server adds up the clients' statistics, so it gets the statistics of all samples without seeing a sample. A
deployment and its simulation compute the same statistics. Statistics exclude samples that are held out of training, for
example for validation. The held-out samples are known only after the partition. Features are then computed again,
with the statistics of the remaining samples.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedstrata.base.arrays import Floats, Ints
from fedstrata.base.config import MOST
from fedstrata.base.errors import DataError
from fedstrata.base.records import Message, record
from fedstrata.data.normalisation import Normalize, precise
from fedstrata.data.schema import Column, Schema

LOG = logging.getLogger(__name__)

if TYPE_CHECKING:
    from fedstrata.data.dataset import Dataset
    from fedstrata.data.tasks.base import Task


TARGET = "y"
"""The key of the targets' frequencies in ``Statistics.counts``."""
CHUNK = 1 << 20
"""The number of rows that are cast to float64 at once, to limit memory use."""


@record("Statistics")
class Statistics(Message):
    """Statistics that can be added up over clients, computed from training samples.

    Args:
        samples: The number of samples.
        count: The number of non-missing values in each of K table columns or image channels, shape (K,), float64.
        mean: The mean of the non-missing values, shape (K,), float64.
        squares: The sum of the squared distances of the non-missing values from the mean, shape (K,), float64.
        low: The minimum of each column or channel, shape (K,), float64; empty if the normalisation does not need it.
        high: The maximum of each column or channel, in the same form as ``low``.
        counts: A mapping from column name to the column's distinct values and their frequencies, shape (V, 2), float64,
            sorted by value. The mapping contains only category columns, and columns with ``impute`` set to ``median``
            or ``most-frequent``.

    >>> one, none = (torch.tensor(x, dtype=torch.float64) for x in ([2.0], []))
    >>> both = Statistics(2, one, one, one, none, none, {}) + Statistics(2, one, 2 * one, one, none, none, {})
    >>> both.samples, both.mean.item(), both.squares.item()
    (4, 3.0, 8.0)
    """

    samples: int
    count: Tensor
    mean: Tensor
    squares: Tensor
    low: Tensor
    high: Tensor
    counts: dict[str, Tensor]

    def __add__(self, other: Statistics) -> Statistics:
        """Combine two sets of statistics with a numerically stable formula (Chan, Golub and LeVeque 1979)."""
        count = self.count + other.count
        share, distance = other.count / count.clamp(min=1), other.mean - self.mean
        return Statistics(
            self.samples + other.samples,
            count,
            self.mean + distance * share,
            self.squares + other.squares + distance * distance * share * self.count,
            torch.minimum(self.low, other.low),
            torch.maximum(self.high, other.high),
            {name: _added(each, other.counts[name]) for name, each in self.counts.items()},
        )

    def beside(self, targets: Statistics) -> Statistics:
        """Append the statistics of the targets to the statistics of the features."""
        tensors = {
            key: torch.cat([getattr(self, key), getattr(targets, key)])
            for key in ("count", "mean", "squares", "low", "high")
        }
        return Statistics(targets.samples, **tensors, counts={**self.counts, **targets.counts})

    def imputed(self, name: str, column: Column, index: int) -> float:
        """Return the value that replaces a missing value of a column.

        Raises:
            DataError: ``impute`` is not set for the column, or the column has no value in any training sample.
        """
        if column.impute is None:
            problem = (
                f"column {name!r}: some values are missing. Add these values, or set a rule such as impute = 'mean'."
            )
            raise DataError(problem).publicly(problem)
        if column.impute == "separate-category":
            return -1.0  # stands for a missing value, because no category has the index -1
        if column.impute == "constant":
            return column.number(column.value)
        if not self.count[index]:
            problem = f"too few training rows have a value, so the {column.impute} value cannot be computed. "
            problem += "Use impute = 'constant', or a smaller privacy.min_samples."
            raise DataError(f"column {name!r}: {problem}").publicly(f"column {name!r}: {problem}")
        if column.impute == "mean":
            return float(self.mean[index])
        values, counts = self.counts[name].numpy().T
        if column.impute == "most-frequent":
            return float(values[counts.argmax()])
        return float(values[np.searchsorted(counts.cumsum(), counts.sum() / 2)])

    def refuse_unlike(self, other: Statistics) -> None:
        """Check that statistics from another party have the right shapes and plausible values.

        Raises:
            DataError: The statistics do not describe the expected columns, or have impossible values.
        """
        for name in ("count", "mean", "squares", "low", "high"):
            expected, given = getattr(self, name), getattr(other, name)
            if given.shape != expected.shape or given.dtype != expected.dtype:
                raise DataError(
                    f"the statistics have shape {list(given.shape)}, but must have shape {list(expected.shape)}"
                )
        tables = list(other.counts.values())
        pairs = all(each.dim() == 2 and each.shape[1] == 2 and each.dtype == torch.float64 for each in tables)
        if other.counts.keys() != self.counts.keys() or not pairs:
            raise DataError(
                f"the statistics have counts for the columns {sorted(other.counts)}, but must have counts for the "
                f"columns {sorted(self.counts)}"
            )
        if not all(each.isfinite().all() for each in (other.count, other.mean, other.squares, *tables)):
            raise DataError("the statistics contain NaN or infinity")
        sums = [other.squares, other.count, *(table[:, 1] for table in tables)]
        if other.samples < 0 or any((each < 0).any() for each in sums):
            raise DataError("a count or a sum of squares is negative")
        if other.samples > MOST:
            raise DataError(f"the statistics cover {other.samples} samples, but the limit is {MOST}")
        if any(float(table[:, 1].sum()) > other.samples for table in tables):
            raise DataError(
                f"in one column, the counts of the values add up to more than the number of samples ({other.samples})"
            )
        some = other.count[: len(other.low)] > 0
        low, high = other.low[some], other.high[some]
        if not bool((low.isfinite() & high.isfinite() & (low <= high)).all()):
            raise DataError("the minimum of a column is not finite, or is above the maximum")
        if len(other.low) and not bool(((other.low[~some] == math.inf) & (other.high[~some] == -math.inf)).all()):
            raise DataError("a column without values must not have a minimum or a maximum")


@dataclass(frozen=True, eq=False)
class Features:
    """Computes features from the rows of a table, for training and for predictions.

    Args:
        schema: The completed schema of the table.
        imputed: A mapping from column name to the number that replaces missing values of the column. For a category
            column, the number is the index of a category, or −1 if missing values are a category of their own.
    """

    schema: Schema
    imputed: dict[str, float]

    def of(self, cells: Tensor) -> Tensor:
        """Return the features of rows, shape (N, F), float64, in the order of ``Schema.names``.

        Args:
            cells: The cells as numbers, shape (N, K), float64, with NaN for missing values, as ``parsed`` returns them.
        """
        features: list[Tensor] = []
        for (name, column), values in zip(self.schema.inputs.items(), cells.unbind(1), strict=True):
            filled = values.nan_to_num(self.imputed.get(name, 0.0))
            if column.type == "category":
                features += [filled == code for code in range(len(column.categories or ()))]
            else:
                features.append(filled)
            features += [values.isnan()] if column.marks_missing else []
        return torch.stack([feature.double() for feature in features], dim=1)


@dataclass(frozen=True, eq=False)
class RawTargets:
    """The training targets of a task that needs statistics of the targets, such as the mean.

    Args:
        task: The task that needs the statistics.
        train: The targets of the training samples, shape (N, K), float64.
        name: The key of the first target in ``Statistics.counts``. A feature must not have this name.
    """

    task: Task
    train: Tensor
    name: str = TARGET

    def moments(self, rows: Tensor) -> Statistics:
        """Return the count, mean and sum of squared deviations of some samples' targets.

        Args:
            rows: The indices of the samples, shape (M,).
        """
        return Unfitted("standard", self.train, self.train[:0])._of(self.train[rows])

    def counts(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the frequencies of the target values, under the key ``name``.

        The mapping is empty if the task does not need frequencies.

        Args:
            rows: The indices of the samples, shape (M,).
        """
        values = self.task.counted(self.train[rows])
        return {} if values is None else {self.name: _frequencies(values.numpy())}


@dataclass(frozen=True, eq=False)
class Unfitted:
    """Raw samples, from which features can be computed again with other statistics.

    Args:
        normalize: See ``from_arrays``.
        train: Training samples. For a table, these are the cells as numbers, shape (N, K), float64, with NaN for
            missing values. Arrays have the form in which a ``Dataset`` stores them.
        test: Test samples, in the same form as ``train``.
        schema: The completed schema of a table; None for arrays.
        given: The shift and scale that the spec sets; None if shift and scale are computed from the training samples.
        targets: The training targets, if the task needs their statistics. The last columns of the statistics then
            describe the targets.
    """

    normalize: Normalize
    train: Tensor
    test: Tensor
    schema: Schema | None = None
    given: tuple[Tensor, Tensor] | None = None
    targets: RawTargets | None = None

    @property
    def needed(self) -> bool:
        """Whether the features or the task depend on statistics."""
        return self._fits_features or self.targets is not None

    @property
    def _fits_features(self) -> bool:
        normalised = self.given is None and self.normalize != "none"
        return normalised or any(column.learnt for _, column in self._columns())

    def statistics(self, groups: Iterable[Ints], least: int = 1) -> Statistics:
        """Compute the statistics of each client's training samples, and add up the statistics client by client.

        In a deployment, the server adds up the sites' statistics in the order of the clients. A simulation and a
        deployment therefore compute exactly the same statistics.

        Args:
            groups: The indices of each client's training samples. The indices are used only if the features or the task
                depend on statistics.
            least: The minimum number of non-missing values per client and column. If a client's column has fewer than
                ``least`` values, all values of the column count as missing in the client's statistics.
        """
        groups = groups if self.needed else ()
        none = torch.empty(0, dtype=torch.int64)
        return sum((self._of_rows(torch.tensor(rows), least) for rows in groups), start=self._of_rows(none, least))

    def _of_rows(self, rows: Tensor, least: int) -> Statistics:
        known = self._without_few(self._of(self.train[rows if self._fits_features else rows[:0]]), least)
        if self.targets is None:
            return known
        return known.beside(replace(self.targets.moments(rows), counts=self.targets.counts(rows)))

    def divided(self, known: Statistics) -> tuple[Statistics, Statistics]:
        """Return the statistics of the features, and the statistics of the targets in the form that the task needs."""
        k, counts = self.train.shape[-1], dict(known.counts)
        name = "" if self.targets is None else self.targets.name
        counts_of_targets = {TARGET: counts.pop(name)} if name in counts else {}
        low, high, samples = known.low, known.high, known.samples if self._fits_features else 0
        return (
            Statistics(samples, known.count[:k], known.mean[:k], known.squares[:k], low, high, counts),
            Statistics(
                known.samples, known.count[k:], known.mean[k:], known.squares[k:], low[:0], high[:0], counts_of_targets
            ),
        )

    def _without_few(self, known: Statistics, least: int) -> Statistics:
        few = (known.count > 0) & (known.count < least) & (known.count < known.samples)
        if not few.any():
            return known
        empty = self._of(self.train[:0])
        hidden = {name: known.count[index].item() for index, (name, _) in enumerate(self._columns()) if few[index]}
        for name, count in hidden.items():
            why = f"only {count:g} of its training samples have a value, but at least {least} are required"
            LOG.warning("column %r: a client does not send the column's statistics, because %s", name, why)
        keys = ("count", "mean", "squares", *(("low", "high") if len(known.low) else ()))
        changed: dict[str, Any] = {key: torch.where(few, getattr(empty, key), getattr(known, key)) for key in keys}
        changed["counts"] = {name: _NONE if name in hidden else table for name, table in known.counts.items()}
        return replace(known, **changed)

    def refuse_unlike(self, other: Statistics) -> None:
        """Check that statistics from another party have the right shapes, plausible values and all required entries.

        Raises:
            DataError: The statistics do not describe the expected columns, or have impossible or missing values.
        """
        self.statistics(()).refuse_unlike(other)
        other, targets = self.divided(other)
        if (targets.count != targets.samples).any() or any(
            float(table[:, 1].sum()) != targets.samples for table in targets.counts.values()
        ):
            raise DataError(f"there must be exactly one target for each of the {targets.samples} samples")
        for index, (name, column) in enumerate(self._columns()):
            count = float(other.count[index])
            if count > other.samples or (column.impute is None and count < other.samples):
                raise DataError(f"column {name!r} has {count:g} values, but there are {other.samples} samples")
            if column.counted and (counted := float(other.counts[name][:, 1].sum())) != count:
                problem = f"{count:g} values were reported, but the counts of the values add up to {counted:g}"
                raise DataError(f"column {name!r}: {problem}")

    def _of(self, samples: Tensor) -> Statistics:
        # Use NumPy, whose sums do not depend on the number of threads. PyTorch's sums do.
        flat = samples.reshape(-1, samples.shape[-1]).numpy()
        zeros = np.zeros(flat.shape[1])
        total = self._part(len(samples), zeros, zeros, zeros, flat[:0].astype(np.float64), self._counts(flat))
        for begin in range(0, len(flat), CHUNK):
            values = flat[begin : begin + CHUNK].astype(np.float64)
            present = ~np.isnan(values)
            count = present.sum(axis=0).astype(np.float64)
            mean = np.where(present, values, 0.0).sum(axis=0) / np.maximum(count, 1)
            squares = (np.where(present, values - mean, 0.0) ** 2).sum(axis=0)
            total = total + self._part(0, count, mean, squares, values, dict.fromkeys(total.counts, _NONE))
        return total

    def _part(
        self, samples: int, count: Floats, mean: Floats, squares: Floats, values: Floats, counts: dict[str, Tensor]
    ) -> Statistics:
        ends = np.zeros((2, 0))
        if self.normalize == "unit":
            ends = np.stack([np.fmin.reduce(values, initial=np.inf), np.fmax.reduce(values, initial=-np.inf)])
        n, m, s, low, high = map(torch.from_numpy, (count, mean, squares, *ends))
        return Statistics(samples, n, m, s, low, high, counts)

    def _counts(self, cells: Floats) -> dict[str, Tensor]:
        counts = {}
        for index, (name, column) in enumerate(self._columns()):
            if column.counted:
                values = cells[~np.isnan(cells[:, index]), index]
                values = values if column.step is None else np.round(values / column.step) * column.step
                counts[name] = _frequencies(values)
        return counts

    def _columns(self) -> list[tuple[str, Column]]:
        return [] if self.schema is None else list(self.schema.inputs.items())

    def fitted(self, known: Statistics) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return training samples, test samples, shift and scale, in the form in which a ``Dataset`` stores them.

        Args:
            known: The statistics of the clients' training samples.

        Raises:
            DataError: A missing value cannot be imputed, because the column has no value in any training sample.
        """
        train, test = self.train, self.test
        if (features := self.features(known)) is not None:
            train, test = features.of(train), features.of(test)
            known = self._of_features(known, features.imputed)
        shift, scale = self.given or (None, None)
        if self.given is None and self.normalize != "none":
            shift, scale = _normal(known, train, unit=self.normalize == "unit")
        if self.schema is not None and (shift is None or shift.dtype == torch.float32):
            train, test = train.float(), test.float()
        return train, test, shift, scale

    def features(self, known: Statistics) -> Features | None:
        """Return the object that computes the features of a table; None for arrays.

        Args:
            known: The statistics of the clients' training samples.

        Raises:
            DataError: A missing value cannot be imputed, because the column has no value in any training sample.
        """
        if self.schema is None:
            return None
        imputed = {}
        for index, (name, column) in enumerate(self._columns()):
            splits = (self.train[:, index], self.test[:, index])
            if (
                column.impute is not None
                or known.count[index] < known.samples
                or any(values.isnan().any() for values in splits)
            ):
                imputed[name] = known.imputed(name, column, index)
        return Features(self.schema, imputed)

    def _of_features(self, known: Statistics, imputed: dict[str, float]) -> Statistics:
        """Convert the statistics of columns to statistics of features, in the order of ``Schema.names``."""
        rows: list[tuple[Any, ...]] = []
        """The count, mean, sum of squares, minimum and maximum of each feature."""
        n = known.samples

        def add_binary(ones: float) -> None:
            """Add a feature that is 1 for ``ones`` training samples, and 0 for all other training samples."""
            share = ones / max(n, 1)
            rows.append((n, share, ones * (1 - share), float(0 < n <= ones), float(ones > 0)))

        for index, (name, column) in enumerate(self._columns()):
            n_missing = n - float(known.count[index])
            value = imputed[name] if n_missing else 0.0
            if column.type == "category":
                counts = dict(known.counts[name].tolist())
                for code in range(len(column.categories or ())):
                    add_binary(counts.get(float(code), 0.0) + (n_missing if code == value else 0.0))
            else:
                rows.append(_filled(known, index, n_missing, value))
            if column.marks_missing:
                add_binary(n_missing)
        count, mean, squares, low, high = torch.tensor(rows, dtype=torch.float64).T
        return Statistics(n, count, mean, squares, low, high, {})


_NONE = torch.zeros(0, 2, dtype=torch.float64)


def _frequencies(values: Floats) -> Tensor:
    """Return the distinct values and their frequencies, shape (V, 2), float64, sorted by value."""
    return torch.from_numpy(np.stack(np.unique(values, return_counts=True), axis=1).astype(float))


def _added(first: Tensor, second: Tensor) -> Tensor:
    """Merge two arrays of distinct values and their counts, each of shape (V, 2). Add the counts of equal values."""
    both = torch.cat([first, second]).numpy()
    values, index = np.unique(both[:, 0], return_inverse=True)
    counts = np.bincount(index, weights=both[:, 1], minlength=len(values))
    return torch.from_numpy(np.stack([values, counts], axis=1))


def _filled(known: Statistics, index: int, n_missing: float, value: float) -> tuple[float, ...]:
    """Return count, mean, sum of squares, minimum and maximum of a column with ``value`` in place of missing values."""
    low = high = value
    if len(known.low):
        low, high = float(known.low[index]), float(known.high[index])
        low, high = (min(low, value), max(high, value)) if n_missing else (low, high)
    count, mean = float(known.count[index]), float(known.mean[index])
    distance, share = value - mean, n_missing / max(count + n_missing, 1)
    squares = float(known.squares[index]) + distance * distance * share * count
    return count + n_missing, mean + distance * share, squares, low, high


def _normal(known: Statistics, train: Tensor, *, unit: bool) -> tuple[Tensor, Tensor]:
    """Compute shift and scale from the statistics of features; see ``from_arrays``."""
    if unit:
        spread = known.high - known.low
        return precise(train, known.low, torch.where(spread > 0, 1 / spread, 1.0), spread)
    deviation = (known.squares / known.count.clamp(min=1)).sqrt()
    varies = deviation > 1e-7 * known.mean.abs()
    return precise(train, known.mean, torch.where(varies, 1 / deviation, 1.0), deviation)


def fit_targets(data: Dataset, groups: Iterable[Ints]) -> Dataset:
    """Compute values that the task needs, such as the mean of the targets, from the clients' training targets.

    Args:
        data: The data set.
        groups: The indices of each client's training samples.
    """
    targets, rows = RawTargets(data.task, data.y_train.double()), [torch.tensor(each) for each in groups]
    known = sum((targets.moments(each) for each in rows), start=targets.moments(torch.empty(0, dtype=torch.int64)))
    return replace(data, task=data.task.fitted(replace(known, counts=targets.counts(torch.cat(rows)))))


def fit(data: Dataset, known: Statistics, *, again: bool = False) -> Dataset:
    """Impute and normalise features with given statistics. In a deployment, also compute values that the task needs.

    Args:
        data: A data set that contains raw samples (``Dataset.unfitted``).
        known: The statistics of the clients' training samples.
        again: Whether to keep the raw samples, so that features can be computed again with other statistics.
    """
    assert data.unfitted is not None
    task = data.task
    if data.unfitted.targets is not None:
        known, of_targets = data.unfitted.divided(known)
        task = task.fitted(of_targets)
    x_train, x_test, shift, scale = data.unfitted.fitted(known)
    return replace(
        data,
        x_train=x_train,
        x_test=x_test,
        shift=shift,
        scale=scale,
        unfitted=data.unfitted if again else None,
        features=data.unfitted.features(known),
        task=task,
    )
