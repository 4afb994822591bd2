"""The example that readers start with runs, and says what it promises."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "stratify_from_scratch.py"


@pytest.mark.long
@pytest.mark.slow
def test_it_beats_fedavg_and_agrees_with_the_library(capsys):
    with torch.random.fork_rng():
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    said = capsys.readouterr().out
    rows = re.findall(r"^ +(\d+) +([\d.]+)% +([\d.]+)% +([\d.]+)% +(\d+)$", said, re.MULTILINE)
    assert [int(row[0]) for row in rows] == [1, 2, 3, 4, 5]
    fedavg, single, batch, hops = map(float, rows[-1][1:])
    library = float(re.search(r"own batch mode after 5 epochs: ([\d.]+)%", said).group(1))
    assert min(single, batch, library) > 90 > fedavg + 20
    assert abs(library - batch) < 4
    assert hops <= 1437  # with one digit a client, a hop trains at least one sample


def test_it_is_one_short_file_and_imports_the_library_only_to_check():
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) < 200
    assert [line.strip() for line in text.splitlines() if "import fedstrata" in line] == ["import fedstrata as fs"]
