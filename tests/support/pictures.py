"""Grey pictures that tests write instead of charts, because drawing a chart takes longer than a short run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from fedstrata.evaluation.history import History
from fedstrata.reporting import plots, tables
from fedstrata.runs import run_folder

GREY = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b55"
    "0000000a49444154789c636800000082008177cd72b60000000049454e44ae426082"
)
"""A PNG file with one pixel."""


def _written(folder: Path | str, names: list[str]) -> list[Path]:
    files = [Path(folder) / name for name in names]
    for file in files:
        file.write_bytes(GREY)
    return files


def _run(history: History, folder: Path | str) -> list[Path]:
    return _written(folder, [f"{name}.png" for name in (history.primary, "loss", "participation", "communication")])


def _comparison(curves: Any, folder: Path | str) -> list[Path]:
    names = (tables.primary(curves), "traffic")
    return _written(folder, [f"{name}{suffix}" for name in names for suffix in (".png", ".pdf")])


Pictures = Mapping[tuple[Any, str], Callable[..., object]]
"""A mapping from a module and a name in it to a function that draws."""

REAL_ONES: Pictures = {
    (run_folder, "draw_partition"): run_folder.draw_partition,
    (plots, "plot_run"): plots.plot_run,
    (plots, "plot_comparison"): plots.plot_comparison,
}
GREY_ONES: Pictures = {
    (run_folder, "draw_partition"): lambda assignment, data, path: path.write_bytes(GREY),
    (plots, "plot_run"): _run,
    (plots, "plot_comparison"): _comparison,
}


def replace(patch: pytest.MonkeyPatch, pictures: Pictures) -> None:
    """Let commands draw other pictures."""
    for (module, name), draw in pictures.items():
        patch.setattr(module, name, draw)
