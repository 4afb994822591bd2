"""Run folders and compare folders, read for a report, a table or a data frame."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedstrata.base.errors import DataError
from fedstrata.base.jsonl import read_jsonl, write_json
from fedstrata.evaluation.history import History, Record, frame

if TYPE_CHECKING:
    from pandas import DataFrame

LABELS = "labels.json"
"""Where a compare folder has its labels in their order."""


@dataclass(frozen=True)
class Run:
    """One run folder.

    Args:
        label: What to call it; runs that differ only in their seed share one.
        history: Its records.
        folder: Where it is.
        events: Its events, empty where none were recorded.
        spec: The text of its ``spec.toml``, empty where there is none.
    """

    label: str
    history: History
    folder: Path
    events: list[Record]
    spec: str

    @property
    def name(self) -> str:
        """What tells it from others of its label: its seed, or its folder where that is not known."""
        return self.folder.name if self.history.seed is None else f"seed {self.history.seed}"

    @property
    def partition(self) -> Path | None:
        """The picture of its partition, where there is one."""
        path = self.folder / "partition.png"
        return path if path.is_file() else None

    @property
    def finished(self) -> bool:
        """Whether it is over: a run that was broken off has no summary yet."""
        return (self.folder / "summary.json").is_file()

    @property
    def data(self) -> str:
        """The name of its data set, empty where no spec tells."""
        section = tomllib.loads(self.spec).get("data")
        return str(section.get("name", "")) if isinstance(section, dict) else ""


class Runs(dict[str, list[Run]]):
    """The runs of each label, in order of their seeds; a dict."""

    def finished(self) -> Runs:
        """Those that are over, where there are any, else all of them.

        One that was broken off would stand in a table with the accuracy that it had, and in means over seeds.
        """
        over = {label: done for label, members in self.items() if (done := [run for run in members if run.finished])}
        return Runs(over) if over else self

    def to_frame(self) -> DataFrame:
        """A pandas data frame with a row a run, by label, seed and what ``summary.json`` holds.

        Raises:
            ExtraMissingError: The extra ``tables`` is not installed.
        """
        return frame(
            [
                {"label": label, "data": run.data, **run.history.summary}
                | {"finished": run.finished, "folder": str(run.folder)}
                for label, members in self.items()
                for run in members
            ]
        )


def load_runs(folders: Path | str | Sequence[Path | str]) -> Runs:
    """The runs of run folders and compare folders, by label and in order of their seeds.

    A compare folder holds ``LABEL/seed-S/``; ``LABEL`` alone will do. Its labels come in the order of their comparison,
    or by name. A run folder by itself is called by its name. A label that comes from several places gets the names of
    the folders above it.

    Args:
        folders: One of them, or several.

    Raises:
        DataError: A folder is neither, or there is none.
    """
    folders = [folders] if isinstance(folders, (Path, str)) else folders
    if not folders:
        raise DataError("no folder was given to report on")
    places = list(dict.fromkeys(place for folder in folders for place in _find(Path(folder))))
    groups: dict[Path, list[Path]] = {}
    for place in places:
        groups.setdefault(place.parent if place.name.startswith("seed-") else place, []).append(place)
    labels = _labels(list(groups))
    return Runs(
        {
            labels[group]: sorted(
                (_read(labels[group], member) for member in members),
                key=lambda run: (run.history.seed is None, run.history.seed or 0, run.folder.name),
            )
            for group, members in groups.items()
        }
    )


def keep_order(folder: Path, labels: Iterable[str]) -> None:
    """Note the order of a comparison's labels in its folder; others that it holds already come after them."""
    labels = list(labels)
    write_json(folder / LABELS, labels + [label for label in _order(folder) if label not in labels])


def _order(folder: Path) -> list[str]:
    """The labels of a compare folder, as far as their order was noted.

    Raises:
        DataError: The file is damaged.
    """
    try:
        text = (folder / LABELS).read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    try:
        return [str(label) for label in json.loads(text)]
    except (ValueError, TypeError) as error:
        raise DataError(f"{folder / LABELS} cannot be read: {error}") from error


def by_data(runs: Mapping[str, Sequence[Run]]) -> dict[str, dict[str, list[Run]]]:
    """The runs of each label, by data set: accuracies on different data are not for one table."""
    found: dict[str, dict[str, list[Run]]] = {}
    for label, members in runs.items():
        for run in members:
            found.setdefault(run.data, {}).setdefault(label, []).append(run)
    return found


def histories(runs: Mapping[str, Sequence[Run]]) -> dict[str, list[History]]:
    """Only the histories."""
    return {label: [run.history for run in members] for label, members in runs.items()}


def _find(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder")
    root = folder.resolve()
    for pattern in ("metrics.jsonl", "seed-*/metrics.jsonl", "*/seed-*/metrics.jsonl"):
        if found := sorted(path.parent for path in root.glob(pattern)):
            ranks = {label: rank for rank, label in enumerate(_order(root))}
            return sorted(found, key=lambda place: ranks.get(place.parent.name, len(ranks)))
    raise DataError(
        f"{folder} is neither a run folder (with metrics.jsonl) nor a compare folder (with LABEL/seed-S/metrics.jsonl)"
    )


def _labels(groups: list[Path]) -> dict[Path, str]:
    """The shortest ends of the paths that tell them apart."""
    labels: dict[Path, str] = {}
    for group in groups:
        depth = 1
        while depth < len(group.parts) - 1 and any(
            other != group and other.parts[-depth:] == group.parts[-depth:] for other in groups
        ):
            depth += 1
        labels[group] = "/".join(group.parts[-depth:])
    return labels


def _read(label: str, folder: Path) -> Run:
    events, spec = folder / "events.jsonl", folder / "spec.toml"
    return Run(
        label=label,
        history=History.load(folder),
        folder=folder,
        events=read_jsonl(events) if events.is_file() else [],
        spec=spec.read_text(encoding="utf-8") if spec.is_file() else "",
    )
