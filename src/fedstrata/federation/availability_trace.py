"""Read the availability of clients from a file, such as a trace of real devices."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveFloat, PrivateAttr, model_validator

from fedstrata.base.errors import SpecError
from fedstrata.federation.availability import Availability, Clients, Population


class Trace(Availability):
    """A file contains the rounds in which each client is online.

    Args:
        file: Path of a CSV file, relative to the spec or the working directory. A line ``client,first,last`` means that
            a client is online from round ``first`` (counted from 1) to round ``last``.
        round_seconds: Seconds between the starts of consecutive rounds. With this setting, ``first`` and ``last`` are
            seconds since the start of round 1.
    """

    file: str
    round_seconds: PositiveFloat | None = None

    _intervals: dict[int, list[tuple[float, float]]] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _read(self) -> Trace:
        try:
            with Path(self.file).expanduser().open(newline="", encoding="utf-8") as lines:
                self._parse(csv.DictReader(lines))
        except FileNotFoundError:
            problem = "the file does not exist. Give a CSV file with the columns 'client', 'first' and 'last'."
            raise SpecError("file", problem, self.file) from None
        except (OSError, RuntimeError, ValueError, csv.Error) as error:
            # expanduser raises RuntimeError for an unknown user.
            raise SpecError(
                "file", f"is not a valid trace of availability ({error}). Correct the file.", self.file
            ) from None
        return self

    def _parse(self, reader: csv.DictReader[str]) -> None:
        """Read the intervals. Do not quote the file in errors, because another organisation may read the errors."""
        if not {"client", "first", "last"} <= set(reader.fieldnames or ()):
            raise ValueError("line 1 must be 'client,first,last'")
        number: type[int | float] = int if self.round_seconds is None else float
        numbers = "three integers" if self.round_seconds is None else "an integer and two numbers"
        least = 1 if self.round_seconds is None else 0
        for line, row in enumerate(reader, start=2):
            try:
                client, first, last = int(row["client"]), number(row["first"]), number(row["last"])
            except (TypeError, ValueError):
                raise ValueError(f"line {line} must have {numbers}") from None
            if not least <= first <= last:
                raise ValueError(f"the columns of line {line} must satisfy {least} <= first <= last")
            self._intervals.setdefault(client, []).append((first, last))

    def check(self, population: Population) -> None:
        """Raise ``SpecError`` if the file contains a client that does not exist."""
        unknown = [client for client in self._intervals if not 0 <= client < population.clients]
        if unknown:
            last = population.clients - 1
            problem = f"contains client {unknown[0]}, which does not exist. Use only clients 0 to {last}."
            raise SpecError("file", problem, self.file)

    def online(self, clients: Clients, round: int, seed: int) -> NDArray[np.bool_]:
        """Return, for each client, whether the client is online in a round, according to the intervals in the file."""
        time = round if self.round_seconds is None else (round - 1) * self.round_seconds
        online = [any(a <= time <= b for a, b in self._intervals.get(int(c), ())) for c in clients]
        return np.array(online, dtype=bool)
