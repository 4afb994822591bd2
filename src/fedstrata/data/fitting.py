"""What training samples come to, and features by it: what stands in for missing values, and what is normal.

Statistics of several clients add up. So sites that keep their samples, and a simulation of these sites, come to the
same numbers; and both leave out what is held out, which is known only after the samples were divided.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstrata.base.errors import DataError
from fedstrata.base.records import Message, record
from fedstrata.data.arrays import Normalize, precise
from fedstrata.data.schema import Column, Schema

LOG = logging.getLogger(__name__)

if TYPE_CHECKING:
    from fedstrata.data.dataset import Dataset

Reals = NDArray[np.float64]
Ints = NDArray[np.int64]

CHUNK = 1 << 20
"""Rows that are cast to float64 at once, for memory."""


@record("Statistics")
class Statistics(Message):
    """What training samples come to; those of several clients add up.

    Args:
        samples: How many.
        count: Values of each column of a table, or channel of images, that are not missing, (K,) float64.
        mean: Their mean, (K,) float64.
        squares: The sum of their squared distances from it, (K,) float64.
        low: The least value, (K,) float64; (0,) where nobody needs it.
        high: The greatest.
        counts: How often a column has each value, (V, 2) float64, by value: of categories, and of columns in which the
            median or the most frequent value stands in.

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
        """Those of both, without the rounding of large sums (Chan, Golub and LeVeque 1979)."""
        count = self.count + other.count
        share, apart = other.count / count.clamp(min=1), other.mean - self.mean
        return Statistics(
            self.samples + other.samples,
            count,
            self.mean + apart * share,
            self.squares + other.squares + apart * apart * share * self.count,
            torch.minimum(self.low, other.low),
            torch.maximum(self.high, other.high),
            {name: _added(each, other.counts[name]) for name, each in self.counts.items()},
        )

    def value(self, name: str, column: Column, place: int) -> float:
        """What stands in for a missing value of a column.

        Raises:
            DataError: No training sample has a value.
        """
        if column.impute is None:
            problem = f"column {name!r}: values are missing; accepted: all of them, or a rule such as impute = 'mean'"
            raise DataError(problem).publicly(problem)
        if column.impute == "constant":
            return column.number(column.value)
        if not self.count[place]:
            problem = f"no training row has a value that may be told, so there is no {column.impute}; "
            problem += "accepted: impute = 'constant', or a smaller privacy.min_samples where clients have a few"
            raise DataError(f"column {name!r}: {problem}").publicly(f"column {name!r}: {problem}")
        if column.impute == "mean":
            return float(self.mean[place])
        values, counts = self.counts[name].numpy().T
        if column.impute == "most-frequent":
            return float(values[counts.argmax()])
        return float(values[np.searchsorted(counts.cumsum(), counts.sum() / 2)])

    def refuse_unlike(self, other: Statistics) -> None:
        """What another party sends must be what one's own data would give.

        Raises:
            DataError: It is of other columns, or holds what no counting gives.
        """
        for name in ("count", "mean", "squares", "low", "high"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if theirs.shape != mine.shape or theirs.dtype != mine.dtype:
                raise DataError(f"statistics of shape {list(theirs.shape)}; expected {list(mine.shape)}")
        tables = list(other.counts.values())
        formed = all(each.dim() == 2 and each.shape[1] == 2 and each.dtype == torch.float64 for each in tables)
        if other.counts.keys() != self.counts.keys() or not formed:
            raise DataError(f"counts of the columns {sorted(other.counts)}; expected {sorted(self.counts)}")
        sums = [other.count, other.mean, other.squares, *tables]
        if not all(bool(each.isfinite().all()) for each in sums):
            raise DataError("statistics that are not finite")
        numbers = [other.count, *(table[:, 1] for table in tables)]
        if other.samples < 0 or (other.squares < 0).any() or any(bool((each < 0).any()) for each in numbers):
            raise DataError("counts or sums of squares below 0")
        if any(float(table[:, 1].sum()) > other.samples for table in tables):
            raise DataError(f"more values than samples, which are {other.samples}")
        some = other.count > 0 if len(other.low) else other.count[:0] > 0
        low, high = other.low[some], other.high[some]
        if not bool((low.isfinite() & high.isfinite() & (low <= high)).all()):
            raise DataError("a smallest value that is not finite, or above the largest one")
        if len(other.low) and not bool(((other.low[~some] == math.inf) & (other.high[~some] == -math.inf)).all()):
            raise DataError("ends of a column without values")


@dataclass(frozen=True, eq=False)
class Unfitted:
    """Samples as they came, of which features can be made anew.

    Args:
        normalize: See ``from_arrays``.
        train: Training samples: the cells of a table as numbers, (N, K) float64, NaN where a value is missing; or
            arrays as stored.
        test: Test samples.
        schema: Of a table, completed.
        given: Shift and scale where these are known beforehand.
    """

    normalize: Normalize
    train: Tensor
    test: Tensor
    schema: Schema | None = None
    given: tuple[Tensor, Tensor] | None = None

    @property
    def needed(self) -> bool:
        """Whether statistics change anything."""
        found = self.given is None and self.normalize != "none"
        return found or any(column.impute not in (None, "constant") for _, column in self._columns())

    def statistics(self, groups: Iterable[Ints], least: int = 1) -> Statistics:
        """Those of the training samples of each client, added up in order: sites give the same to the last bit.

        Args:
            groups: Numbers of each client's training samples; nobody's are looked at where nothing depends on them.
            least: Fewest values behind a number: a column of which a client has some, but fewer, counts as one of
                which it has none.
        """
        groups = groups if self.needed else ()
        each = (self._without_few(self._of(self.train[torch.tensor(rows)]), least) for rows in groups)
        return reduce(lambda whole, part: whole + part, each, self._of(self.train[:0]))

    def _without_few(self, known: Statistics, least: int) -> Statistics:
        few = (known.count > 0) & (known.count < least) & (known.count < known.samples)
        if not few.any():
            return known
        nothing, ends = self._of(self.train[:0]), few if len(known.low) else few[:0]
        hidden = {name: known.count[place].item() for place, (name, _) in enumerate(self._columns()) if few[place]}
        for name, count in hidden.items():
            why = f"too few of those that it trains on have a value ({count:g}; accepted: {least} or more)"
            LOG.warning("column %r is left out of what a client tells of its samples: %s", name, why)
        return Statistics(
            known.samples,
            torch.where(few, nothing.count, known.count),
            torch.where(few, nothing.mean, known.mean),
            torch.where(few, nothing.squares, known.squares),
            torch.where(ends, nothing.low, known.low),
            torch.where(ends, nothing.high, known.high),
            {name: _NONE if name in hidden else table for name, table in known.counts.items()},
        )

    def refuse_unlike(self, other: Statistics) -> None:
        """What another party sends must be what such data would give.

        Raises:
            DataError: It is of other columns, holds what no counting gives, or lacks values where none may be missing.
        """
        self.statistics(()).refuse_unlike(other)
        for place, (name, column) in enumerate(self._columns()):
            count = float(other.count[place])
            if count > other.samples or (column.impute is None and count < other.samples):
                raise DataError(f"column {name!r}: {count:g} values of {other.samples} samples")

    def _of(self, samples: Tensor) -> Statistics:
        # NumPy's sums are the same whatever the number of threads.
        flat = samples.reshape(-1, samples.shape[-1]).numpy()
        nothing = np.zeros(flat.shape[1])
        known = self._part(len(samples), nothing, nothing, nothing, flat[:0].astype(np.float64), self._counts(flat))
        for begin in range(0, len(flat), CHUNK):
            values = flat[begin : begin + CHUNK].astype(np.float64)
            there = ~np.isnan(values)
            count = there.sum(axis=0).astype(np.float64)
            mean = np.where(there, values, 0.0).sum(axis=0) / np.maximum(count, 1)
            squares = (np.where(there, values - mean, 0.0) ** 2).sum(axis=0)
            known = known + self._part(0, count, mean, squares, values, dict.fromkeys(known.counts, _NONE))
        return known

    def _part(
        self, samples: int, count: Reals, mean: Reals, squares: Reals, values: Reals, counts: dict[str, Tensor]
    ) -> Statistics:
        ends = np.zeros((2, 0))
        if self.normalize == "unit":
            ends = np.stack([np.fmin.reduce(values, initial=np.inf), np.fmax.reduce(values, initial=-np.inf)])
        n, m, s, low, high = map(torch.from_numpy, (count, mean, squares, *ends))
        return Statistics(samples, n, m, s, low, high, counts)

    def _counts(self, cells: Reals) -> dict[str, Tensor]:
        found = {}
        for place, (name, column) in enumerate(self._columns()):
            if column.counted:
                values = cells[~np.isnan(cells[:, place]), place]
                values = values if column.step is None else np.round(values / column.step) * column.step
                found[name] = torch.from_numpy(np.stack(np.unique(values, return_counts=True), axis=1).astype(float))
        return found

    def _columns(self) -> list[tuple[str, Column]]:
        return [] if self.schema is None else list((self.schema.columns or {}).items())

    def fitted(self, known: Statistics) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Training and test samples as a data set stores them, and their shift and scale.

        Args:
            known: Of the samples that are trained on.

        Raises:
            DataError: A value is missing of which no training sample has any.
        """
        train, test = self.train, self.test
        if self.schema is not None:
            train, test, known = self._features(known)
        shift, scale = self.given or (None, None)
        if self.given is None and self.normalize != "none":
            shift, scale = _normal(known, train, unit=self.normalize == "unit")
        if self.schema is not None and (shift is None or shift.dtype == torch.float32):
            train, test = train.float(), test.float()
        return train, test, shift, scale

    def _features(self, known: Statistics) -> tuple[Tensor, Tensor, Statistics]:
        """What a model sees of both parts, (N, F), in the order of ``Schema.names``, and the statistics of that."""
        parts: tuple[list[Tensor], list[Tensor]] = ([], [])
        # Count, mean, squares, least and greatest of every feature.
        about: list[tuple[Any, ...]] = []
        n = known.samples

        def add_share(yes: float, features: Iterable[Tensor]) -> None:
            """A feature that is 1 for ``yes`` of the training samples."""
            for part, feature in zip(parts, features, strict=True):
                part.append(feature.double())
            share = yes / max(n, 1)
            about.append((n, share, yes * (1 - share), float(0 < n <= yes), float(yes > 0)))

        for place, (name, column) in enumerate(self._columns()):
            cells = [part[:, place] for part in (self.train, self.test)]
            gone = [values.isnan() for values in cells]
            lacks = n - float(known.count[place])
            value = known.value(name, column, place) if lacks or any(each.any() for each in gone) else 0.0
            cells = [values.nan_to_num(value) for values in cells]
            if column.type == "category":
                counts = dict(known.counts[name].tolist())
                for code in range(len(column.categories or ())):
                    yes = counts.get(float(code), 0.0) + (lacks if code == value else 0.0)
                    add_share(yes, [values == code for values in cells])
            else:
                for part, values in zip(parts, cells, strict=True):
                    part.append(values)
                about.append(_filled(known, place, lacks, value))
            if column.indicator:
                add_share(lacks, gone)
        count, mean, squares, low, high = torch.tensor(about, dtype=torch.float64).T
        train, test = (torch.stack(part, dim=1) for part in parts)
        return train, test, Statistics(n, count, mean, squares, low, high, {})


_NONE = torch.zeros(0, 2, dtype=torch.float64)


def _added(first: Tensor, second: Tensor) -> Tensor:
    """Two tables of values and how often they come."""
    both = torch.cat([first, second]).numpy()
    values, where = np.unique(both[:, 0], return_inverse=True)
    counts = np.bincount(where, weights=both[:, 1], minlength=len(values))
    return torch.from_numpy(np.stack([values, counts], axis=1))


def _filled(known: Statistics, place: int, lacks: float, value: float) -> tuple[float, ...]:
    """A column's count, mean, squares, least and greatest after ``value`` stands in for what is missing."""
    ends = [value, value]
    if len(known.low):
        ends = [float(known.low[place]), float(known.high[place])]
        ends = [min(ends[0], value), max(ends[1], value)] if lacks else ends
    count = float(known.count[place])
    apart, share = value - float(known.mean[place]), lacks / max(count + lacks, 1)
    squares = float(known.squares[place]) + apart * apart * share * count
    return count + lacks, float(known.mean[place]) + apart * share, squares, *ends


def _normal(known: Statistics, train: Tensor, *, unit: bool) -> tuple[Tensor, Tensor]:
    """Shift and scale by the statistics of features; see ``from_arrays``."""
    if unit:
        spread = known.high - known.low
        return precise(train, known.low, torch.where(spread > 0, 1 / spread, 1.0), spread)
    deviation = (known.squares / known.count.clamp(min=1)).sqrt()
    varies = deviation > 1e-7 * known.mean.abs()
    return precise(train, known.mean, torch.where(varies, 1 / deviation, 1.0), deviation)


def fit(data: Dataset, known: Statistics, *, again: bool = False) -> Dataset:
    """A data set with the features that these statistics give.

    Args:
        data: A data set of which features can be made anew.
        known: Of the samples that are trained on.
        again: Whether this is not the last time.
    """
    assert data.unfitted is not None
    x_train, x_test, shift, scale = data.unfitted.fitted(known)
    unfitted = data.unfitted if again else None
    return replace(data, x_train=x_train, x_test=x_test, shift=shift, scale=scale, unfitted=unfitted)
