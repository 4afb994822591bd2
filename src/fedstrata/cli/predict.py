"""Add the command ``fedstrata predict``, which uses a run's model to predict a target for each row of a table."""

from __future__ import annotations

import argparse
import csv
import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fedstrata.base.errors import SpecError
from fedstrata.base.printable import csv_cell
from fedstrata.cli.common import add_command, add_output, add_trust, print_json

if TYPE_CHECKING:
    from fedstrata.cli.common import Commands


def add_predict(commands: Commands) -> None:
    """Add the command ``fedstrata predict``."""
    examples = """
        fedstrata predict runs/visits/fedavg/seed-0 new-visits.csv
        fedstrata predict runs/visits/fedavg/seed-0 new-visits.csv --keep visit --out predictions.csv
    """
    help = "predict the target of each row of a table with the model of a run"
    more = "The rows need the columns that the model was trained on. Other columns, such as the label, are ignored."
    parser = add_command(commands, "predict", help, examples, more, work=_predict)
    parser.add_argument(
        "run",
        type=Path,
        metavar="RUN",
        help="folder of a run that trained a model on a table, or folder with the result of a deployment's job",
    )
    parser.add_argument("rows", type=Path, metavar="ROWS", help="CSV or Parquet file with the rows to predict")
    parser.add_argument(
        "--keep",
        default="",
        metavar="COLUMN,…",
        help="comma-separated names of columns to copy from the table to the predictions, such as id",
    )
    parser.add_argument("--out", type=Path, help="CSV file to write the predictions to (default: standard output)")
    add_trust(parser)
    add_output(parser, progress=False)


def _predict(options: argparse.Namespace) -> int:
    import numpy as np

    from fedstrata.base.jsonl import replace_file
    from fedstrata.data.tables import read_table
    from fedstrata.runs.predictor import load

    predictor = load(options.run)
    if predictor.schema is None:
        problem = f"this run's model needs arrays of shape {predictor.shape}, not rows of a table. In Python, use "
        raise SpecError("RUN", f"{problem}fedstrata.load(RUN).predict(arrays).", str(options.run))
    rows = read_table(options.rows, predictor.schema)
    names = list(filter(None, options.keep.split(",")))
    for column in names:
        rows.require(column, "--keep")
    kept = [{column: rows.columns[column][row] for column in names} for row in range(len(rows))]
    predicted = predictor.predict(rows).tolist()
    classes = predictor.classes if predictor.task.has_classes else ()
    probabilities = predictor.predict_proba(rows) if classes else np.empty((len(rows), 0))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*map(csv_cell, names), "predicted", *(f"p_{label}" for label in classes)])
    for cells, label, of_row in zip(kept, predicted, probabilities, strict=True):
        writer.writerow([*(csv_cell("" if cell is None else cell) for cell in cells.values()), label, *of_row])
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        replace_file(options.out, text.getvalue().encode())
    if options.json:
        named = [dict(zip(classes, of_row, strict=True)) for of_row in probabilities.tolist()]
        more = [{"probabilities": likely} if classes else {} for likely in named]
        each = zip(kept, predicted, more, strict=True)
        print_json([{**cells, "predicted": label, **added} for cells, label, added in each])
    elif options.out is None:
        sys.stdout.write(text.getvalue())
    else:
        print(f"{len(predicted)} predictions: {options.out}")
    return 0


COMMANDS = (add_predict,)
