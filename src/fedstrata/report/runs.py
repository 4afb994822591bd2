"""Run folders and compare folders, read for a report."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedstrata.errors import DataError
from fedstrata.history import History, Record
from fedstrata.jsonl import read_jsonl


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


def load_runs(folders: Sequence[Path | str]) -> dict[str, list[Run]]:
    """The runs of run folders and compare folders, by label and in order of their seeds.

    A compare folder holds ``LABEL/seed-S/``; ``LABEL`` alone will do. A run folder by itself is called by its
    name. A label that comes from several places gets the names of the folders above it.

    Raises:
        DataError: A folder is neither, or there is none.
    """
    if not folders:
        raise DataError("no folder was given to report on")
    places = list(dict.fromkeys(place for folder in folders for place in _find(Path(folder))))
    groups: dict[Path, list[Path]] = {}
    for place in places:
        groups.setdefault(place.parent if place.name.startswith("seed-") else place, []).append(place)
    labels = _labels(list(groups))
    return {
        labels[group]: sorted(
            (_read(labels[group], member) for member in members),
            key=lambda run: (run.history.seed is None, run.history.seed or 0, run.folder.name),
        )
        for group, members in groups.items()
    }


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
            return found
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
