"""Read run folders and the folders of comparisons (compare folders), for reports, tables and data frames."""

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
"""The file in a comparison's folder that lists the labels in the order of the comparison."""


@dataclass(frozen=True)
class Run:
    """The content of a run folder.

    Args:
        label: The name of the run in reports. Runs that differ only by their seeds have the same label.
        history: The records of all rounds.
        folder: The path of the run folder.
        events: The events; empty if the run did not record events.
        spec: The text of ``spec.toml``; empty if the folder does not contain this file.
    """

    label: str
    history: History
    folder: Path
    events: list[Record]
    spec: str

    @property
    def name(self) -> str:
        """A name that is unique among the runs with the same label: the seed or, without a seed, the folder's name."""
        return self.folder.name if self.history.seed is None else f"seed {self.history.seed}"

    @property
    def finished(self) -> bool:
        """Whether the run is finished. Only finished runs have a summary."""
        return (self.folder / "summary.json").is_file()

    @property
    def data(self) -> str:
        """The name of the run's data set; empty if the spec is unknown."""
        section = tomllib.loads(self.spec).get("data")
        return str(section.get("name", "")) if isinstance(section, dict) else ""


class Runs(dict[str, list[Run]]):
    """A mapping from each method's label to its runs, sorted by seed."""

    def finished(self) -> Runs:
        """Return the finished runs, or all runs if none is finished.

        Unfinished runs are left out, because their last accuracy is not final.
        """
        finished = {label: done for label, runs in self.items() if (done := [run for run in runs if run.finished])}
        return Runs(finished) if finished else self

    def to_frame(self) -> DataFrame:
        """Return a pandas data frame. Each run has a row: its label, data set, all metrics and ``summary.json`` values.

        Raises:
            ExtraMissingError: The extra ``tables`` is not installed.
        """
        return frame(
            [
                {"label": label, "data": run.data, **run.history.row}
                | {"finished": run.finished, "folder": str(run.folder)}
                for label, members in self.items()
                for run in members
            ]
        )


def load_runs(folders: Path | str | Sequence[Path | str]) -> Runs:
    """Read the runs in run folders and compare folders, and group the runs by label.

    A compare folder contains run folders ``LABEL/seed-S/``. The function also accepts a single folder ``LABEL``. The
    labels of a compare folder are in the order of the comparison. If the order is unknown, the labels are sorted by
    name. The label of a single run folder is the folder's name. If several folders have the same name, each
    label also contains the name of the parent folder.

    Args:
        folders: One folder, or several.

    Raises:
        DataError: A folder is neither a run folder nor a compare folder, or the list of folders is empty.
    """
    folders = [folders] if isinstance(folders, (Path, str)) else folders
    if not folders:
        raise DataError("a folder is required. Give the folder of a run or comparison.")
    groups: dict[Path, list[Path]] = {}
    for path in dict.fromkeys(path for folder in folders for path in _find(Path(folder))):
        groups.setdefault(path.parent if path.name.startswith("seed-") else path, []).append(path)
    labels = _labels(list(groups))
    runs = {labels[group]: [_read(labels[group], path) for path in paths] for group, paths in groups.items()}
    for members in runs.values():
        members.sort(key=lambda run: (run.history.seed is None, run.history.seed or 0, run.folder.name))
    return Runs(runs)


def keep_order(folder: Path, labels: Iterable[str]) -> None:
    """Store the order of a comparison's labels in the comparison's folder.

    If ``labels`` contains all stored labels, replace the stored order by the order of ``labels``. Otherwise, add new
    labels at the end, so that the first label (the baseline) stays first.
    """
    before, labels = _order(folder), list(labels)
    write_json(folder / LABELS, list(dict.fromkeys([*(() if {*before} <= {*labels} else before), *labels])))


def _order(folder: Path) -> list[str]:
    """Read the order of a compare folder's labels. The list is empty if the file does not exist.

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
        raise DataError(f"{folder / LABELS} cannot be read: {error}. Restore the file.") from error


def by_data(runs: Mapping[str, Sequence[Run]]) -> dict[str, dict[str, list[Run]]]:
    """Group runs by data set, because accuracies on different data sets cannot be compared.

    Returns:
        For each data set, a mapping from each method's label to its runs.
    """
    groups: dict[str, dict[str, list[Run]]] = {}
    for label, members in runs.items():
        for run in members:
            groups.setdefault(run.data, {}).setdefault(label, []).append(run)
    return groups


def histories(runs: Mapping[str, Sequence[Run]]) -> dict[str, list[History]]:
    """Return a mapping from each method's label to the histories of its runs."""
    return {label: [run.history for run in members] for label, members in runs.items()}


def _find(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise DataError(f"folder = {str(folder)!r}: is not a folder. Give the folder of a run or comparison.")
    root = folder.resolve()
    for pattern in ("metrics.jsonl", "seed-*/metrics.jsonl", "*/seed-*/metrics.jsonl"):
        if paths := sorted(path.parent for path in root.glob(pattern)):
            ranks = {label: rank for rank, label in enumerate(_order(root))}
            return sorted(paths, key=lambda path: ranks.get(path.parent.name, len(ranks)))
    compare = "a compare folder (with LABEL/seed-S/metrics.jsonl)"
    problem = f"the folder is neither a run folder (with metrics.jsonl) nor {compare}"
    raise DataError(f"folder = {str(folder)!r}: {problem}. Give the folder of a run or comparison.")


def _labels(groups: list[Path]) -> dict[Path, str]:
    """Return a mapping from each path to its label: the shortest end of the path that is unique among the paths."""
    labels: dict[Path, str] = {}
    for group in groups:
        ends = [group.parts[-depth:] for depth in range(1, len(group.parts))]
        others = [other.parts for other in groups if other != group]
        unique = (end for end in ends if all(parts[-len(end) :] != end for parts in others))
        labels[group] = "/".join(next(unique, ends[-1]))
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
