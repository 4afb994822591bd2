"""Each fault of ``python -m tests.mutants`` can still be made, and those who must notice it are still there."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from tests.mutants.catalog import MUTANTS  # noqa: E402

from fedstrata.base import outer  # noqa: E402


def test_the_line_of_each_mutant_stands_once_and_its_tests_exist():
    wrong = []
    absent = set(outer.OUTER) - set(outer.installed())
    absent |= {"hostile"} if "sites" in absent else set()
    for mutant in MUTANTS:
        if Path(mutant.file).parts[0] in absent:
            continue
        text = (ROOT / "src" / "fedstrata" / mutant.file).read_text(encoding="utf-8")
        if text.count(mutant.old) != 1 or mutant.old == mutant.new:
            wrong.append(f"{mutant.file}: {mutant.label}")
        wrong += [
            path for path in mutant.tests if Path(path).parts[0] not in absent and not (ROOT / "tests" / path).exists()
        ]
    assert wrong == []
    assert len(MUTANTS) >= 60
