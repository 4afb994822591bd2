"""Build data sets from tables: CSV files, Parquet files and data frames.

Python's module ``csv`` reads CSV files: it provides line numbers and does not convert cells. Parquet files are
read with the package pyarrow.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstrata.base.arrays import Bools
from fedstrata.base.config import build
from fedstrata.base.errors import DataError, ExtraMissingError
from fedstrata.data.dataset import Dataset, from_arrays, task_of
from fedstrata.data.fitting import Unfitted, fit
from fedstrata.data.normalisation import Normalize
from fedstrata.data.schema import Schema, Table, held_out, ids, numbers_of, parsed
from fedstrata.data.tasks.base import TASKS, Task

SUFFIXES = (".csv", ".parquet")
"""The suffixes of files that are read as tables."""


def read_table(path: Path, schema: Schema) -> Table:
    """Read the rows of a CSV or Parquet file.

    Args:
        path: The path of the file.
        schema: The schema, of which only the setting ``delimiter`` is used.

    Raises:
        DataError: The file is missing or damaged.
        ExtraMissingError: The file is a Parquet file, but the extra ``tables`` is not installed.
    """
    try:
        path = path.expanduser()
        if path.exists() and not path.is_file():
            raise DataError(f"{path} is not a file. Give a .csv or .parquet file.")
        return read_parquet(path) if path.suffix == ".parquet" else read_csv(path, schema.delimiter)
    except FileNotFoundError:
        raise DataError(f"there is no file {path.absolute()}. Check the path.") from None
    except (OSError, RuntimeError, csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}. Check the file.") from None


def from_dataframe(
    frame: Any,
    *,
    label: str,
    client: str | None = None,
    test: Any = 0.2,
    normalize: Normalize = "standard",
    seed: int = 0,
    name: str = "table",
    task: Task | str | None = None,
    **settings: Any,
) -> Dataset:
    """Build a data set from a data frame of pandas or polars.

    Args:
        frame: A mapping from column names to lists, or any object whose columns have a method ``to_list``.
        label: The name of the label column.
        client: The name of the column with the client of each row.
        test: The fraction of rows that become test samples. Alternatively, the name of a column that marks test rows,
            or a second data frame with the test samples.
        normalize: See ``from_arrays``.
        seed: The seed for drawing test samples, if ``test`` is a fraction.
        name: The name of the data set in reports.
        task: The task, or its name. Default: regression if some labels are not integers, otherwise classification.
        settings: Other settings of ``Schema``, such as ``columns`` and ``missing``.

    Raises:
        DataError: A cell does not match the schema. The error message contains the row and the column.
        SpecError: The frame lacks a column, or a setting is wrong.
    """
    table, task = table_of(frame, name), TASKS.make(task, {}) if isinstance(task, str) else task
    given = {"label": label, "client": client, **settings}
    if not hasattr(test, "columns"):
        schema = build(Schema, {**given, "test": test}).completed(table)
        task = task or task_of_table(table, schema)
        held = held_out(table, schema, seed, task=task)
    else:
        other, train_size = table_of(test, f"{name} (test)"), len(table)
        for column in table.columns:
            other.require(column, "test")
        table = Table(name, {column: [*cells, *other.columns[column]] for column, cells in table.columns.items()})
        schema, held = build(Schema, given).completed(table), np.arange(len(table)) >= train_size
    return dataset_of(table, schema, held, name=name, normalize=normalize, task=task or task_of_table(table, schema))


def dataset_of(
    table: Table,
    schema: Schema,
    held: Bools,
    *,
    name: str,
    normalize: Normalize = "standard",
    given: tuple[Tensor, Tensor] | None = None,
    task: Task | None = None,
) -> Dataset:
    """Build a data set whose features are imputed and normalised with statistics of all training rows.

    When a run begins, the features are computed again, with statistics of the rows that clients train on.

    Args:
        table: The table to convert.
        schema: A completed schema.
        held: Whether each row is a test sample, shape (N,).
        name: The name of the data set in reports.
        normalize: See ``from_arrays``.
        given: The shift and scale that the spec sets; None if shift and scale are computed from the training rows.
        task: The task. If None, the labels determine the task; see ``task_of``.

    Raises:
        DataError: A cell does not match the schema, or a missing value cannot be imputed.
    """
    cells, y = torch.from_numpy(parsed(table, schema)), targets_of(table, schema, task)
    owners = ids(table, schema.client, schema) if schema.client is not None else None
    size, n_test, n_labels = len(table), int(held.sum()), len(np.unique(y))
    with_classes = task is None or task.has_classes
    if n_test in (0, size) or (with_classes and n_labels == size):
        rows = f"there are too few rows ({size - n_test} for training, {n_test} for testing) for {n_labels} label(s)"
        raise DataError(f"{rows}. Add rows, so that training rows and test rows have a label in common.")
    unfitted = Unfitted(normalize, cells[~held], cells[held], schema, given)
    known = unfitted.statistics([np.arange(int((~held).sum()))])
    x_train, x_test, _, _ = unfitted.fitted(known)
    data = from_arrays(
        x_train,
        y[~held],
        x_test,
        y[held],
        name=name,
        class_names=schema.classes,
        clients=None if owners is None else owners[~held],
        clients_test=None if owners is None else owners[held],
        normalize="none",
        task=task,
    )
    return fit(replace(data, unfitted=unfitted), known, again=True)


def task_of_table(table: Table, schema: Schema) -> Task | None:
    """Return the regression task if a table's labels are numbers, and some are not integers; otherwise, None.

    Raises:
        DataError: A label is missing.
        SpecError: The labels are integers that could be classes or quantities.
    """
    if schema.classes is not None:
        return None
    numbers = numbers_of(table, schema, strict=False)
    return None if numbers is None else task_of(None, numbers)


def targets_of(table: Table, schema: Schema, task: Task | None) -> NDArray[np.generic]:
    """Return the labels of a table's N rows, shape (N,): numbers if the task needs numbers, otherwise class names.

    Raises:
        DataError: A label is missing, is not one of the classes, or is not a number in range.
        SpecError: The schema describes the label as a number, but the task has classes.
    """
    if task is None or task.has_classes:
        return ids(table, schema.label, schema)
    numbers = numbers_of(table, schema, strict=True)
    assert numbers is not None
    return numbers


def read_csv(path: Path, delimiter: str = ",") -> Table:
    """Read a CSV file in UTF-8. The file's first line contains the column names.

    Raises:
        DataError: The file has no rows, two columns of the same name, or a line with too many or too few cells.
    """
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        names = [name.strip() for name in next(reader, [])]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            problem = f"the column {twice[0]!r} occurs twice. Give each column its own name."
            public = "two columns have the same name. Give each column its own name."
            raise DataError(f"{path}, line 1: {problem}").publicly(public)
        rows, lines, before = [], [], reader.line_num
        for row in reader:
            if row:  # the reader returns an empty list for an empty line
                if len(row) != len(names):
                    problem = (
                        f"the row has {len(row)} cells, but line 1 has {len(names)}. Correct one of the two lines."
                    )
                    raise DataError(f"{path}, line {before + 1}: {problem}")
                rows.append(row)
                lines.append(before + 1)
            before = reader.line_num
    if not rows:
        raise DataError(f"{path} has no rows below the line with the names of the columns. Add rows.")
    return Table(str(path), dict(zip(names, zip(*rows, strict=True), strict=True)), lines)


def read_parquet(path: Path) -> Table:
    """Read a Parquet file.

    Raises:
        DataError: The file is damaged, has another format, or has no rows.
        ExtraMissingError: pyarrow is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ExtraMissingError(f"data {str(path)!r}", "tables") from None
    try:
        columns = pyarrow.parquet.read_table(path).to_pydict()
    except (pyarrow.ArrowException, ValueError) as error:
        raise DataError(f"{path} is not a Parquet file, or is damaged: {error}. Check the file.") from None
    if not any(columns.values()):
        raise DataError(f"{path} has no rows. Add rows.")
    return Table(str(path), columns)


def table_of(rows: Any, name: str) -> Table:
    """Convert a data frame, or a mapping from column names to cells, to a ``Table``.

    Args:
        rows: A mapping from column names to lists, arrays or tensors, or any object whose columns have a method
            ``to_list``.
        name: The name of the table, for error messages.

    Raises:
        DataError: ``rows`` is neither a data frame nor a mapping, has no rows, or has columns of different lengths.
    """
    try:
        names = rows if isinstance(rows, Mapping) else rows.columns
        columns = {str(column): _cells(rows[column]) for column in names}
    except (AttributeError, TypeError, KeyError) as error:
        raise DataError(
            f"{name} cannot be read as a table: {error}. Give a data frame, or a mapping from names to lists."
        ) from None
    if not any(columns.values()):
        raise DataError(f"{name} has no rows. Add rows.")
    sizes = {column: len(cells) for column, cells in columns.items()}
    if len(set(sizes.values())) > 1:
        raise DataError(f"{name}: the columns have different lengths: {sizes}. Give one cell per row in each column.")
    return Table(name, columns)


def _cells(column: Any) -> list[Any]:
    if isinstance(column, (list, tuple)):
        return list(column)
    if isinstance(column, np.ndarray) and column.dtype.kind in "mM":
        # Convert times to microseconds, because ``tolist`` returns nanoseconds as integers instead of dates.
        column = column.astype(f"{column.dtype.kind}8[us]")
    cells = column.to_list() if hasattr(column, "to_list") else column.tolist()
    if not isinstance(cells, list):
        raise TypeError(f"{cells!r} is a single cell, but a column must be a list of cells")
    return cells
