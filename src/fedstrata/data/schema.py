"""Convert a table's cells to numbers, as a schema describes. The module ``fitting`` turns the numbers into features."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time, timedelta
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, PositiveFloat, ValidationInfo, field_validator, model_validator

from fedstrata.base.arrays import Bools, Floats
from fedstrata.base.config import Setting, build, under
from fedstrata.base.errors import DataError, SpecError, nearest
from fedstrata.base.rng import rng
from fedstrata.data.subsets import stratified

if TYPE_CHECKING:
    from fedstrata.data.tasks.base import Task

TRUTH = {"true": 1.0, "yes": 1.0, "1": 1.0, "false": 0.0, "no": 0.0, "0": 0.0}
"""The accepted cells of a boolean column, in lower case, and their values."""
PARTS = {**TRUTH, "test": 1.0, "train": 0.0}
"""The accepted cells of a column that marks test samples. The value 1 means a test sample, 0 a training sample."""
MANY = 20
"""A category column with more non-missing cells than this number causes a warning if most cells are distinct."""
MOST_CATEGORIES = 100
"""A column with more categories than this number causes a warning, because each category becomes a feature."""
_DAY = r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d\d)"
DATE = re.compile(rf"({_DAY})([ T]\d{{1,2}}:\d\d.*)?|\d{{1,2}}:\d\d(:\d\d.*)?")
"""The pattern of strings that are read as a date or a time of day."""
SHOWN = 12
"""The maximum number of categories or columns in a message."""


class Column(Setting):
    """The type and preparation of a feature column.

    Args:
        type: ``number``, ``boolean`` or ``category`` (a 0/1 feature for each value). By default, keys such as
            ``categories`` determine the type. Otherwise, simulations guess the type from the cells, and deployments use
            ``number``.
        unit: Unit of the numbers, such as ``mm``, shown in error messages.
        range: Minimum and maximum allowed number.
        categories: Allowed categories. Default: all categories in the table.
        missing: Cell contents that mark missing values, in addition to the schema's ``missing``.
        impute: Replacement of missing values. ``mean``, ``median`` (the lower of two middle values) and
            ``most-frequent``: a statistic of the training rows. ``constant``: the content of ``value``.
            ``separate-category``: an additional category. Default: a missing value is an error.
        step: Rounding step: numbers are rounded to multiples of this number before ``median`` or ``most-frequent`` is
            computed. In deployments, ``median`` and ``most-frequent`` require ``step``.
        value: Value that replaces missing values if ``impute = "constant"``.
        indicator: Whether to add a feature that is 1 if the value is missing, and 0 otherwise.
    """

    type: Literal["number", "category", "boolean"] | None = None
    unit: str | None = None
    range: tuple[float, float] | None = None
    categories: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    missing: tuple[str, ...] = ()
    impute: Literal["mean", "median", "most-frequent", "constant", "separate-category"] | None = None
    step: PositiveFloat | None = None
    value: bool | float | str | None = None
    indicator: bool = False

    @model_validator(mode="before")
    @classmethod
    def _with_type(cls, given: Any) -> Any:
        """Add the type that other keys of the column imply."""
        if not isinstance(given, Mapping):
            return given
        if "constant" in given:
            raise SpecError("constant", "is not a known key. Set 'value' and impute = 'constant'.", given["constant"])
        if given.get("type") is not None:
            return given
        value = given.get("value")
        named = isinstance(value, str) and not _is_number(value) and value.lower() not in TRUTH
        if named or given.get("categories") is not None or given.get("impute") == "separate-category":
            return {**given, "type": "category"}
        if given.get("impute") in ("mean", "median") or any(given.get(key) for key in ("unit", "range", "step")):
            return {**given, "type": "number"}
        return given

    @model_validator(mode="after")
    def _agree(self) -> Column:
        if self.range is not None and (self.type != "number" or self.range[0] > self.range[1]):
            problem = "must be two numbers, with the smaller number first. The column must be of type 'number'."
            raise SpecError("range", problem, list(self.range))
        names = self.categories
        if names is not None and (self.type != "category" or len(set(names)) < len(names)):
            problem = "must be a list of different names, and the column must be of type 'category'."
            raise SpecError("categories", problem, list(names))
        if self.type == "category" and self.impute in ("mean", "median"):
            accepted = "'most-frequent', 'separate-category' or 'constant'"
            raise SpecError("impute", f"cannot be computed for categories. Use one of: {accepted}.", self.impute)
        if self.type != "category" and self.impute == "separate-category":
            problem = "works only with type = 'category'. For other types, use another value of impute, and mark "
            problem += "missing values with indicator = true."
            raise SpecError("impute", problem, self.impute)
        if self.step is not None and not (self.type == "number" and self.counted):
            raise SpecError(
                "step",
                "has an effect only for a column of numbers with impute = 'median' or 'most-frequent'. Remove the key.",
                self.step,
            )
        if (self.impute == "constant") != (self.value is not None):
            raise SpecError("value", "must be set together with impute = 'constant'. Set both or neither.", self.value)
        if self.value is not None and self.type is not None and (self.type != "category" or self.categories):
            try:
                self.number(self.value)
            except ValueError as error:
                raise SpecError("value", str(error), self.value) from None
        return self

    @property
    def counted(self) -> bool:
        """Whether the column's statistics contain the frequency of each value."""
        return self.type == "category" or self.impute in ("median", "most-frequent")

    @property
    def learnt(self) -> bool:
        """Whether the replacement of missing values depends on the training rows."""
        return self.impute in ("mean", "median", "most-frequent")

    @property
    def marks_missing(self) -> bool:
        """Whether the column has an additional feature that is 1 if the column's value is missing."""
        return self.indicator or self.impute == "separate-category"

    @property
    def accepted(self) -> str:
        """A description of the accepted cells, for error messages."""
        if self.type == "boolean":
            return f"one of {', '.join(TRUTH)}"
        if self.type == "category":
            return f"one of {_listed(map(repr, self.categories or ()))}"
        span = "" if self.range is None else f" from {self.range[0]:g} to {self.range[1]:g}"
        return f"numbers{span}{f' {self.unit}' if self.unit else ''}"

    def number(self, cell: Any) -> float:
        """Convert a cell to a number. For a category, return its index in ``categories``.

        Raises:
            ValueError: The cell's value is not accepted in this column. The message says which values are accepted.
        """
        if self.type == "category":
            assert self.categories is not None
            if (text := text_of(cell)) not in self.categories:
                raise ValueError(f"is not a category{nearest(text, self.categories)} Use {self.accepted}.")
            return float(self.categories.index(text))
        if self.type == "boolean":
            if (text := text_of(cell).lower()) not in TRUTH:
                raise ValueError(f"is neither true nor false. Use {self.accepted}.")
            return TRUTH[text]
        try:
            number = _float(cell)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(
                f"is not a finite number. Use {self.accepted}. If this entry means a missing value, list it in "
                "'missing'."
            )
        if isinstance(cell, (int, str)) and abs(number) >= 2**53 and _digits(cell) not in (None, int(number)):
            raise ValueError(
                f"is too large to be stored exactly. Use {self.accepted} below 2^53, or type = 'category'."
            )
        self.refuse_outside(number)
        return number

    def refuse_outside(self, number: float) -> None:
        """Raise ``ValueError`` if a number is outside ``range``."""
        if self.range is not None and not self.range[0] <= number <= self.range[1]:
            raise ValueError(f"is out of range. Use {self.accepted}.{another_unit(number, self.range)}")


def _columns(value: object, info: ValidationInfo) -> object:
    """Parse the setting ``columns``. If a column has a string instead of settings, the string is the column's type."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ValueError("must be a mapping from column names to types. Use, for example, { age = 'number' }.")

    def column(name: str) -> object:
        given = {"type": value[name]} if isinstance(value[name], str) else value[name]
        key = f"{info.field_name}.{name}"
        return under(key, lambda: build(Column, given)) if isinstance(given, Mapping) else given

    return {name: column(name) for name in value}


class Schema(Setting):
    """The role of each column in a table, such as label or feature.

    Args:
        label: Name of the column with the label.
        client: Name of the column that gives each row's client, for the partition ``natural``.
        features: Names of the feature columns. Default: all columns without another role (in deployments: the keys of
            ``columns``).
        columns: Type or settings of each feature column, and of a numeric label column. If a column has no entry here,
            simulations guess its type. Deployments require an entry for every feature.
        classes: Names of all classes, in the order of the model's outputs. Default: the table's labels, sorted.
        missing: Cell contents, such as ``NA``, that mark missing values. Empty cells always mark missing values.
        ignore: Names of columns that the model does not use. Do not set both ``ignore`` and ``features``.
        test: Fraction of each client's rows (of all rows if ``client`` is not set) used for testing, stratified by
            class. Alternatively, the name of a column that marks each row as ``test`` or ``train`` (or as ``true``
            for test and ``false`` for train).
        delimiter: Cell separator of CSV files.
    """

    label: str
    client: str | None = None
    features: tuple[str, ...] | None = None
    columns: Annotated[dict[str, Column] | None, BeforeValidator(_columns)] = None
    classes: tuple[str, ...] | None = None
    missing: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    test: float | str = 0.2
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = ","

    @field_validator("test")
    @classmethod
    def _a_share(cls, test: float | str) -> float | str:
        if not isinstance(test, str) and not 0 < test < 1:
            raise ValueError("must be a fraction between 0 and 1 (both excluded), or the name of a column.")
        return test

    @model_validator(mode="after")
    def _agree(self) -> Schema:
        if self.features is not None and self.ignore:
            raise SpecError(
                "ignore", "has no effect, because 'features' is set. Remove one of the two keys.", list(self.ignore)
            )
        label = self.target
        if any(getattr(label, key) for key in ("categories", "impute", "indicator")) or label.type != "number":
            problem = "this column is the label, so it cannot be a feature. If the label is a number, set only unit, "
            raise SpecError(f"columns.{self.label}", problem + "range and missing. Otherwise, remove this key.")
        for name in self.inputs:
            if name in self.ignore or (self.features is not None and name not in self.features):
                key = "ignore" if self.ignore else "features"
                raise SpecError(
                    f"columns.{name}", f"describes a column that the key '{key}' excludes. Change one of the two keys."
                )
        return self

    @property
    def inputs(self) -> dict[str, Column]:
        """The entries of ``columns`` that describe features."""
        return {name: column for name, column in (self.columns or {}).items() if name != self.label}

    @property
    def target(self) -> Column:
        """The description of the label column, if labels are numbers."""
        given = (self.columns or {}).get(self.label, Column())
        return given if given.type is not None else given.model_copy(update={"type": "number"})

    @property
    def roles(self) -> dict[str, str]:
        """A mapping from each non-feature column to the key of its role, such as ``label``."""
        named = {"label": self.label, "client": self.client, "test": self.test if isinstance(self.test, str) else None}
        return {column: key for key, column in named.items() if column is not None}

    def completed(self, table: Table) -> Schema:
        """Return a copy of the schema that contains all settings (such as categories) of the table's feature columns.

        Raises:
            SpecError: The table lacks a column, a column has two roles, or no column is left as a feature.
        """
        for column, key in self.roles.items():
            table.require(column, f"data.schema.{key}")
        for column in self.ignore:
            table.require(column, "data.schema.ignore")
        names = self.features
        if names is None:
            given = self.inputs
            names = (*given, *(name for name in table.columns if name not in {*given, *self.roles, *self.ignore}))
        if not names:
            raise SpecError(
                "data.schema.features", "no column is left as a feature. Keep at least one column.", list(table.columns)
            )
        return self._with({name: self._completed(table, name) for name in names})

    def _with(self, inputs: dict[str, Column]) -> Schema:
        """Return a copy of the schema with ``inputs`` as feature columns. The label column does not change."""
        label = {name: column for name, column in (self.columns or {}).items() if name == self.label}
        return self.model_copy(update={"columns": {**inputs, **label}})

    def _completed(self, table: Table, name: str) -> Column:
        """Check that a column can be a feature. Return the column's settings, including its type and categories."""
        given = (self.columns or {}).get(name)
        key, column = ("data.schema.features", Column()) if given is None else (f"data.schema.columns.{name}", given)
        table.require(name, key)
        if name in self.roles:
            raise SpecError(
                key,
                f"this column is data.schema.{self.roles[name]}, so it cannot be a feature. Remove it from the "
                "features.",
                name if given is None else ...,
            )
        if column.type is not None and (column.type != "category" or column.categories is not None):
            return column
        cells = table.cells(name, (*self.missing, *column.missing))
        filled = {**dict(column), "type": column.type or _guess(table, name, cells)}
        if filled["type"] == "category":
            constant = [] if column.value is None else [column.value]
            filled["categories"] = tuple(sorted({text_of(cell) for cell in [*cells, *constant] if cell is not None}))
            if (count := len(filled["categories"])) > MOST_CATEGORIES:
                advice = f"Merge rare values, or leave the column out with ignore = {[name]} in [data.schema]."
                problem = f"column {name!r} has {count} categories, each of which becomes a feature. {advice}"
                warnings.warn(problem, stacklevel=2)
        return under(key, lambda: build(Column, filled))

    def closed(self, *, classes: bool = True) -> Schema:
        """Check that the schema suits a deployment, and return the schema.

        Sites read only the columns in the spec, and do not guess types.

        Args:
            classes: True if labels are classes; False if labels are numbers.

        Raises:
            SpecError: The spec lacks the classes, the description of a feature, or a feature's categories.
        """
        if classes:
            self.refuse_target()
        elif self.classes is not None:
            problem = "has no effect, because the labels of this task are numbers. Remove data.schema.classes."
            raise SpecError("data.schema.classes", problem, list(self.classes))
        for key in ("classes", "columns") if classes else ("columns",):
            if getattr(self, key) is None:
                other = ", or set task = 'regression' if labels are numbers" if key == "classes" else ""
                raise SpecError(
                    f"data.schema.{key}",
                    "is required in a deployment, because the sites' rows cannot be read in advance. List the "
                    f"{key}{other}.",
                )
        columns: dict[str, Column] = {}
        for name in self.features or self.inputs:
            if name == self.label:
                problem = "this column is the label, so it cannot be a feature. Remove it from the features."
                raise SpecError("data.schema.features", problem, name)
            key = f"data.schema.columns.{name}"
            if (given := (self.columns or {}).get(name)) is None:
                raise SpecError(
                    key,
                    "is required in a deployment, because the sites' rows cannot be read in advance. Describe the "
                    "column.",
                )
            column = under(key, partial(build, Column, {**dict(given), "type": given.type or "number"}))
            if column.type == "category" and column.categories is None:
                raise SpecError(
                    f"{key}.categories",
                    "is required in a deployment, because the sites' rows cannot be read in advance. List the "
                    "categories.",
                )
            if column.type == "number" and column.counted and column.step is None:
                problem = (
                    f"is required in a deployment, because impute = {column.impute!r} requires counts of rounded "
                    "numbers. "
                )
                raise SpecError(f"{key}.step", f"{problem}Set a rounding unit, or use impute = 'mean'.")
            columns[name] = column
        if not columns:
            raise SpecError("data.schema.columns", "describes no feature. Describe at least one column.")
        return self._with(columns).model_copy(update={"features": tuple(columns)})

    def refuse_target(self) -> None:
        """Raise ``SpecError`` if the label is described as a number although the task has classes."""
        if self.label in (self.columns or {}):
            problem = (
                "describes the label as a number, but the task has classes. Set task = 'regression', or remove the key."
            )
            raise SpecError(f"data.schema.columns.{self.label}", problem)

    def names(self) -> list[str]:
        """Return the name of every feature. The schema must be complete."""
        names = []
        for name, column in self.inputs.items():
            names += [f"{name}={each}" for each in column.categories or ()] if column.type == "category" else [name]
            names += [f"{name} missing"] if column.marks_missing else []
        return names


@dataclass(frozen=True)
class Table:
    """The rows of a file or data frame.

    Args:
        source: The name of the file or data frame, for error messages.
        columns: A mapping from column names to cells: strings, numbers or booleans, or None for a missing
            value.
        lines: For each row, the number of its first line in the file; None if the source is not a text file.
    """

    source: str
    columns: Mapping[str, Sequence[Any]]
    lines: Sequence[int] | None = None

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def require(self, column: str, key: str) -> None:
        """Raise ``SpecError`` if ``column``, the value of the setting ``key``, is not a column of the table."""
        if column not in self.columns:
            accepted = f"{nearest(column, self.columns)} Use one of: {_listed(self.columns)}."
            for other in ";\t|":
                if other in (only := ", ".join(self.columns)) and len(self.columns) == 1:
                    accepted = f", because its only column is {only!r}. Set data.schema.delimiter = {other!r}."
            error = SpecError(key, f"{self.source} has no such column{accepted}", column)
            raise error.publicly(f"{key} = {column!r}: there is no such column")

    def cells(self, column: str, missing: Iterable[str] = ()) -> list[Any]:
        """Return the cells of a column, with None for missing values.

        Args:
            column: The column.
            missing: Strings that mark missing values, in addition to empty cells.
        """
        marks = {"", *missing}
        cells = self.columns[column]
        if any(isinstance(cell, bytes) for cell in cells):
            cells = [self._decoded(row, column) for row in range(len(cells))]
        return [None if is_missing(cell) or text_of(cell) in marks else cell for cell in cells]

    def _decoded(self, row: int, column: str) -> Any:
        """Return a cell, decoded to a string if it contains bytes."""
        cell = self.columns[column][row]
        try:
            return cell.decode() if isinstance(cell, bytes) else cell
        except UnicodeDecodeError:
            problem = "contains bytes that are not UTF-8. Use strings, numbers or booleans."
            raise self.wrong(row, column, problem, f"a cell {problem}") from None

    def wrong(self, row: int, column: str, problem: str, public: str) -> DataError:
        """Return the error for an invalid cell.

        Args:
            row: The row of the cell, counted from 0.
            column: The column of the cell.
            problem: The error message, which may quote the cell.
            public: The error message for other parties, without the content of the cell.
        """
        where = f"line {self.lines[row]}" if self.lines is not None else f"row {row}"
        cell = self.columns[column][row]
        given = "" if is_missing(cell) else f" = {cell!r}"
        error = DataError(f"{self.source}, {where}, column {column!r}{given}: {problem}")
        return error.publicly(f"column {column!r}: {public}")


def parsed(table: Table, schema: Schema) -> Floats:
    """Return the feature columns as numbers, shape (N, K), with NaN for missing values.

    Args:
        table: The table to read.
        schema: A completed schema.

    Raises:
        DataError: A cell does not match the schema, or a value is missing in a column without a rule for missing
            values. The error message contains the file, the line and the column.
        SpecError: The table lacks a column.
    """
    for name in schema.inputs:
        table.require(name, f"data.schema.columns.{name}")
    columns = []
    for name, column in schema.inputs.items():
        cells = table.cells(name, (*schema.missing, *column.missing))
        values = np.empty(len(cells))
        for row, cell in enumerate(cells):
            if cell is None:
                if column.impute is None:
                    rules = f"Add a value, or a rule in [data.schema.columns]: {_rules(name, column)}."
                    others = [repr(each) for each in _without_rule(table, schema) if each != name]
                    rest = f" Other columns with missing values: {_listed(others)}." if others else ""
                    raise table.wrong(row, name, f"is missing. {rules}{rest}", f"a value is missing. {rules}")
                values[row] = math.nan
                continue
            try:
                values[row] = column.number(cell)
            except ValueError as error:
                public = f"some cells are not allowed. Use {column.accepted}."
                raise table.wrong(row, name, str(error), public) from None
        columns.append(values)
    return np.stack(columns, axis=1)


def held_out(table: Table, schema: Schema, seed: int, *, first: int = 0, task: Task | None = None) -> Bools:
    """Return whether each row is a test sample, shape (N,).

    Args:
        table: The table to read.
        schema: A completed schema.
        seed: The seed of the random choice, if the setting ``test`` is a fraction.
        first: The index of the table's first client among all clients of the federation. With this index, a site that
            has only some of the clients holds out the same rows as a simulation of all clients.
        task: The task; None for classification. Test samples are stratified by label only if the task has classes.

    Raises:
        DataError: A label or a client is missing, or a cell of the column ``test`` is not accepted.
    """
    if isinstance(schema.test, str):
        cells = [text_of(cell).lower() for cell in _known(table, schema.test, schema)]
        wrong = next((row for row, text in enumerate(cells) if text not in PARTS), None)
        if wrong is not None:
            problem = f"does not say whether the row is for training or testing. Use one of: {', '.join(PARTS)}."
            raise table.wrong(wrong, schema.test, problem, f"a cell {problem}")
        return np.array([PARTS[text] == 1 for text in cells], dtype=bool)
    labels = np.zeros(len(table), dtype=np.int64)
    if task is None or task.has_classes:
        labels = np.unique(ids(table, schema.label, schema), return_inverse=True)[1]
    owners = np.zeros_like(labels)
    if schema.client is not None:
        owners = np.unique(ids(table, schema.client, schema), return_inverse=True)[1]
    held = np.zeros(len(labels), dtype=bool)
    order = np.argsort(owners, kind="stable")
    for owner, rows in enumerate(np.split(order, np.cumsum(np.bincount(owners))[:-1])):
        size = min(max(round(schema.test * len(rows)), 1), len(rows) - 1)
        held[rows[stratified(labels[rows], size, rng(seed, "table split", first + owner))]] = True
    return held


def ids(table: Table, column: str, schema: Schema) -> NDArray[np.generic]:
    """Return the cells of the label or client column, shape (N,), as integers if possible, otherwise as strings.

    Raises:
        DataError: A cell is missing, or a label is not one of the schema's classes.
    """
    texts = [text_of(cell) for cell in _known(table, column, schema)]
    if (row := next((row for row, text in enumerate(texts) if text.endswith("\0")), None)) is not None:
        problem = "ends with a NUL character, which NumPy cuts off. Remove the character."
        raise table.wrong(row, column, problem, f"a string {problem}")
    if column == schema.label:
        schema.refuse_target()
    if column == schema.label and schema.classes is not None:
        wrong = next((row for row, text in enumerate(texts) if text not in schema.classes), None)
        if wrong is not None:
            accepted = f"Use one of {_listed(map(repr, schema.classes))}."
            raise table.wrong(wrong, column, f"is not a class. {accepted}", f"some labels are not classes. {accepted}")
        return np.array(texts)
    if all(text.removeprefix("-").isdecimal() and len(text) < 19 for text in texts):
        return np.array([int(text) for text in texts], dtype=np.int64)
    return np.array(texts)


def numbers_of(table: Table, schema: Schema, *, strict: bool) -> Floats | None:
    """Return the labels as float64 numbers, shape (N,).

    Args:
        table: The table to read.
        schema: The schema of the table.
        strict: If true, every cell must be a finite number in the column's range. If false, the range is not checked,
            and the function returns None if a cell is not a finite number.

    Raises:
        DataError: A cell is missing or, if ``strict`` is set, is not a finite number in the column's range.
    """
    column, target, numbers = schema.label, schema.target, np.zeros(len(table))
    for row, cell in enumerate(_known(table, column, schema)):
        try:
            numbers[row] = _float(cell)
        except (TypeError, ValueError):
            numbers[row] = math.nan
        if not math.isfinite(numbers[row]):
            if not strict:
                return None
            problem = "is not a number. This task requires numbers as labels."
            raise table.wrong(row, column, problem, f"a label {problem}")
        if not strict:
            continue
        try:
            target.refuse_outside(numbers[row])
        except ValueError as error:
            raise table.wrong(row, column, str(error), f"not all labels are in range. Use {target.accepted}.") from None
    return numbers


def _known(table: Table, column: str, schema: Schema) -> list[Any]:
    marks = (*schema.missing, *schema.target.missing) if column == schema.label else schema.missing
    cells = table.cells(column, marks)
    if (row := next((row for row, cell in enumerate(cells) if cell is None), None)) is not None:
        problem = f"{schema.roles[column]} is missing. Give a value in every row."
        raise table.wrong(row, column, f"the {problem}", f"a {problem}")
    return cells


def another_unit(number: float, span: tuple[float, float]) -> str:
    """Return a hint if a number would be in range after multiplication or division by 1,000; otherwise ""."""
    for factor, what in ((1e-3, "a thousandth of the number"), (1e3, "a thousand times the number")):
        if number and span[0] <= number * factor <= span[1]:
            return f" Check the unit, because {what} is in range."
    return ""


def is_missing(cell: object) -> bool:
    """Return True if a cell has no value: None, NaN, or the missing values of pandas."""
    if isinstance(cell, float):
        return math.isnan(cell)
    return cell is None or type(cell).__name__ in ("NAType", "NaTType")


def text_of(cell: object) -> str:
    """Return a cell as a string.

    The string does not depend on whether the value is stored as a string, number or boolean.

    >>> text_of(" 3 "), text_of(3.0), text_of(True)
    ('3', '3', 'true')
    """
    if isinstance(cell, str):
        return cell.strip()
    if isinstance(cell, bool):
        return str(cell).lower()
    return str(int(cell)) if isinstance(cell, float) and cell.is_integer() else str(cell)


def _without_rule(table: Table, schema: Schema) -> list[str]:
    """Return the features that have missing values, but no rule for missing values."""
    columns = ((name, column) for name, column in schema.inputs.items() if column.impute is None)
    return [name for name, column in columns if None in table.cells(name, (*schema.missing, *column.missing))]


def _rules(name: str, column: Column) -> str:
    """Return lines for a spec that set a suitable rule for the missing values of a column."""
    key = _key(name)
    first = f"{key} = {{ impute = '{'most-frequent' if column.type in ('category', 'boolean') else 'median'}' }}"
    if column.type != "category":
        return first
    return f"{first}, or {key} = {{ impute = 'separate-category' }}, which makes missing values a category of their own"


def _guess(table: Table, name: str, cells: Sequence[Any]) -> Literal["number", "category", "boolean"]:
    """Guess the type of a column from its cells.

    Warn if the column is read as a category, but probably has another type.

    Raises:
        DataError: The cells are dates or times.
    """
    known = [cell for cell in cells if cell is not None]
    if known and all(text_of(cell).lower() in ("true", "false") for cell in known):
        return "boolean"
    texts = [text_of(cell) for cell in known if not _is_number(cell)]
    if not texts:
        return "number"
    dates = [row for row, cell in enumerate(cells) if _is_date(cell)]
    if 2 * len(dates) > len(known):
        advice = (
            f"Derive a number from it, such as days since admission, or leave the column out with ignore = {[name]} "
        )
        advice += f"in [data.schema]. If there are few different values, use {_key(name)} = 'category' in "
        advice += "[data.schema.columns]."
        problem = f"is a date or a time, which a model cannot use directly. {advice}"
        raise table.wrong(dates[0], name, problem, problem)
    values = {text_of(cell) for cell in known}
    if 2 * len(texts) < len(known):
        odd = sorted(set(texts))
        message = (
            f"because some cells are not numbers: {_listed(map(repr, odd))}. If these cells mean a missing value, set "
        )
        message += f"missing = {odd[:SHOWN]}"
    elif len(known) > MANY and 2 * len(values) > len(known) and len(values) <= MOST_CATEGORIES:
        message = (
            f"so each of its {len(values)} values (in {len(known)} rows) becomes a feature. To omit the column, set "
        )
        message += f"ignore = {[name]}"
    else:
        return "category"
    warnings.warn(f"column {name!r} is read as a category, {message} in [data.schema].", stacklevel=2)
    return "category"


def _key(name: str) -> str:
    """Return the name of a column as a TOML key."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)


def _is_date(cell: object) -> bool:
    """Return True if a cell is a date or a time, or a string in the form of a date or time."""
    if isinstance(cell, str):
        return DATE.fullmatch(cell.strip()) is not None
    return isinstance(cell, (date, time, timedelta))


def _is_number(cell: object) -> bool:
    try:
        _float(cell)
    except (TypeError, ValueError):
        return False
    return True


def _float(cell: Any) -> float:
    """Return a cell as a number. Raise ``ValueError`` for ``1_0`` and non-ASCII digits, which Python would accept."""
    if isinstance(cell, str) and ("_" in cell or not cell.isascii()):
        raise ValueError(f"{cell!r} is not a number")
    return float(cell)


def _digits(cell: int | str) -> int | None:
    """Return a cell as an integer, without rounding; None if the cell is not written as an integer."""
    try:
        return int(cell)
    except ValueError:
        return None


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    return ", ".join(every[:SHOWN]) + (f", … ({len(every)} in all)" if len(every) > SHOWN else "")
