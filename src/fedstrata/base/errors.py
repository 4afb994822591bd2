"""Define the exceptions that fedstrata raises. The messages of these exceptions say what to do."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from typing import Self

LONGEST = 500
"""The maximum number of characters of a value in an error message. Longer values are cut off."""


class FedstrataError(Exception):
    """Base class of fedstrata's errors. The command-line program prints each error in one line."""

    public = ""
    """A description that other parties may see, if the error is about one party's data.

    The description states the column and the violated rule, but does not contain values from the data.
    """

    def publicly(self, text: str) -> Self:
        """Set ``public`` to ``text``, and return the error. The text must not disclose data or counts."""
        self.public = text
        return self


class SpecError(FedstrataError):
    """A setting that is unknown, has the wrong type or is out of range.

    Args:
        key: The dotted name of the setting, such as ``"partition.alpha"``.
        problem: The problem, and the accepted values.
        value: The value of the setting, if the message should show the value.
        place: The file and line of the setting, if they are known.
    """

    def __init__(self, key: str, problem: str, value: object = ..., place: str = "") -> None:
        self.key, self.problem, self.value, self.place = key, problem, value, place
        given = "" if value is ... else f" = {_shown(value)}"
        given += f" ({place})" if place else ""
        super().__init__(f"{key}{given}: {problem}" if key or given else problem)

    def __reduce__(self) -> tuple[type[SpecError], tuple[object, ...]]:
        return SpecError, (self.key, self.problem, self.value, self.place)

    def under(self, section: str) -> SpecError:
        """Return a copy of the error with the key ``section.KEY``, where ``KEY`` is the key of this error."""
        return SpecError(f"{section}.{self.key}" if self.key else section, self.problem, self.value, self.place)


class DataError(FedstrataError):
    """A data set that is missing, unreadable or invalid."""


class WireError(FedstrataError):
    """Bytes that are not a fedstrata message: damaged, too large or of an unknown type."""


class ReplyRefusedError(FedstrataError):
    """A client's reply that cannot be used, for example because tensors are missing, misshapen or not finite."""


class WithheldError(FedstrataError):
    """A reply that a client does not send, because too few samples contributed or the site forbids the reply."""


class QuorumError(FedstrataError):
    """A round in which fewer clients replied than the method needs."""


class ClientsFailedError(FedstrataError):
    """A request that failed with an exception at every client, probably because of a bug."""


class CheckpointError(FedstrataError):
    """A checkpoint that is missing or damaged."""


class ExtraMissingError(FedstrataError):
    """An attempt to use a feature whose optional package is not installed."""

    def __init__(self, feature: str, extra: str) -> None:
        self.feature, self.extra = feature, extra
        install = f"pip install 'fedstrata[{extra}]', or pip install '.[{extra}]' in a copy of the repository"
        super().__init__(f"{feature}: optional packages are not installed. Run {install}.")

    def __reduce__(self) -> tuple[type[ExtraMissingError], tuple[str, str]]:
        return ExtraMissingError, (self.feature, self.extra)


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # the value is nested too deeply, or contains a number with too many digits
        return f"({type(value).__name__} too large to show)"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def nearest(word: str, accepted: Iterable[str]) -> str:
    """Suggest an accepted word that is similar to an unknown word, as the end of a sentence in an error message.

    >>> nearest("alfa", ["alpha", "clients"]), nearest("rounds", ["alpha", "clients"])
    ("; did you mean 'alpha'?", '.')
    """
    spellings = {each.casefold(): each for each in accepted}
    close = difflib.get_close_matches(word.casefold(), list(spellings), n=1, cutoff=0.6)
    return f"; did you mean {spellings[close[0]]!r}?" if close else "."


def not_among(problem: str, word: str, accepted: Collection[str], use: str = "Use one of") -> str:
    """Return an error message about an unknown word: the problem, a suggestion, and all accepted words.

    >>> not_among("is not a known key", "alfa", ["alpha", "clients"])
    "is not a known key; did you mean 'alpha'? Use one of: alpha, clients."
    """
    return f"{problem}{nearest(word, accepted)} {use}: {', '.join(accepted)}."
