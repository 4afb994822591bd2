"""Convert a trace of FedScale (https://github.com/SymbioticLab/FedScale) to a trace in seconds.

python fedscale_trace.py client_behave_trace trace.csv --clients 100 --seconds 6000
fedstrata run --set availability=trace --set availability.file=trace.csv --set availability.round_seconds=60

The file has one dictionary per device. The device is online from second ``active[i]`` to second ``inactive[i]``, and
repeats these times after ``finish_time`` seconds. Client k has the trace of the k-th device. If there are more clients
than devices, devices are used several times.
"""

import argparse
import csv
import pickle
from pathlib import Path


class PlainValues(pickle.Unpickler):
    """Reads only dictionaries, lists, numbers and texts, so that a file cannot run code."""

    def find_class(self, module, name):
        """Refuse any class or function."""
        raise pickle.UnpicklingError(f"the file contains {module}.{name}, which is not a plain value")


def intervals(device, seconds):
    """Yield the first and the last second of each time online, from 0 until ``seconds``."""
    for start in range(0, seconds, device["finish_time"]):
        for first, last in zip(device["active"], device["inactive"], strict=False):
            if first <= last and start + first < seconds:  # in FedScale, a device with first > last is never online
                yield start + first, start + last


def main(arguments=None):
    """Write the trace of the first clients."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="trace file of FedScale, such as client_behave_trace")
    parser.add_argument("target", type=Path, help="CSV file to write")
    parser.add_argument("--clients", type=int, required=True, help="number of clients")
    parser.add_argument(
        "--seconds",
        type=int,
        required=True,
        help="length of the trace in seconds: number of rounds times seconds per round",
    )
    options = parser.parse_args(arguments)
    with options.source.open("rb") as file:
        devices = list(PlainValues(file).load().values())
    with options.target.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["client", "first", "last"])
        for client in range(options.clients):
            writer.writerows((client, *each) for each in intervals(devices[client % len(devices)], options.seconds))


if __name__ == "__main__":
    main()
