"""Runs the conformance suite and the stranger's zoo, and writes what came of them: ``docs/engines.md``.

python tests/tables.py [--fast]; half an hour, or without real sites two minutes.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FILES = [
    "tests/engines/test_conformance.py",
    "tests/deploy/test_conformance_sites.py",
    "tests/integration/test_strangers.py",
]
LETTERS = {
    "test_a_run_repeats_to_the_bit_and_nobody_fails": "L",
    "test_workers_give_the_same_bits": "W",
    "test_a_fused_batch_is_the_sum_of_its_parts": "F",
    "test_single_sample_steps_are_those_of_autograd": "A",
    "test_ray_gives_the_bytes_of_the_local_engine": "R",
    "test_nvflare_gives_the_bytes_of_the_local_engine": "N",
    "test_nvflare_refuses_by_name": "N",
}
METHODS = {
    "test_workers_give_the_same_bits": "scaffold",
    "test_a_fused_batch_is_the_sum_of_its_parts": "stratify",
    "test_single_sample_steps_are_those_of_autograd": "stratify, single",
}
"""Tests with one method."""

CONFORMANCE = """\
# What engines were seen to do

Written by `python tests/tables.py`, which runs the tests and notes what came of each.

## Conformance

The same questions to every engine: `tests/engines/test_conformance.py`; over processes of NVFlare, in whose server
and sites the same cases run, `tests/deploy/test_conformance_sites.py`. *Sites* are those of one process, between
which bytes cross; *real* are processes. ✓ passed, ✗ failed, – not possible:

- Clients that hang: local, workers and Ray wait for whoever computes, and have no deadline in real time. The line to
  sites of one process is a call, which nobody can give up: `tests/engines/nvflare/test_patience.py` has one with a
  limit.
- Clients that die take the process of local clients with them, and a site of one process the whole test. Workers that
  die are in `tests/engines/test_team.py`, Ray's in `tests/engines/test_ray.py`.
- Messages that cannot be read: local, workers and Ray send none between parties that do not trust each other; for
  sites of one process `tests/engines/nvflare/test_sites.py` has them.
- Answers in several messages by a limit that the test sets: real sites are other processes, so that answers beyond
  the real limit take its place there.

"""
ZOO = """
## A stranger's models

Ten models that the library does not have, `tests/integration/strangers.py`, through every method. **L**: two runs of
the local engine, clients one by one, give equal bytes and nobody fails. **W**: two worker processes give equal bytes.
**F**: a fused batch is the sum of its parts (1e-5). **A**: Stratify's single-sample steps are those of autograd.
**R**, **N**: Ray and real processes of NVFlare give the bytes of the local engine, one method a kind of exchange and
state. *Together* and FedTAN are with BatchNorm, whose sums cross clients in the middle of a pass. A letter in
brackets: refused by name, for the reason below; ✗: failed; nothing: not run.

F is not run for models that draw random numbers, because each client draws its own, nor for statistics of whole
batches; A not for buffers that are bound anew, which one sample at a time are other numbers.

"""


class Seen:
    """What came of each test: ``passed``, ``failed`` or ``skipped``, with its parameters."""

    def __init__(self) -> None:
        self.found: list[tuple[str, dict[str, Any], str, str]] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any) -> Iterator[None]:
        report: Any = yield
        if report.when == "call" or not report.passed:
            parameters = item.callspec.params if hasattr(item, "callspec") else {}
            reason = dict(report.user_properties).get("refused", "")
            self.found.append((item.originalname, parameters, report.outcome, str(reason)))
        return report


def conformance(seen: Seen) -> str:
    """Case by engine."""
    cells: dict[str, dict[str, bool]] = defaultdict(dict)
    for test, parameters, outcome, _ in seen.found:
        parameters = dict(parameters)
        if "federation" in parameters:
            engine = parameters.pop("federation")
            case = test + (f"[{'-'.join(map(str, parameters.values()))}]" if parameters else "")
        elif "outcomes" in parameters:
            engine, case = parameters["outcomes"], parameters["case"]
        elif "point" in parameters:
            engine, case = parameters["deaths"], f"dies_{parameters['point']}"
        else:
            continue
        cells[case][engine] = cells[case].get(engine, True) and outcome == "passed"
    engines = list(dict.fromkeys(engine for row in cells.values() for engine in row))
    rows = [
        [
            case.removeprefix("test_").replace("_", " ").replace("[", ": ").rstrip("]"),
            *({True: "✓", False: "✗", None: "–"}[row.get(e)] for e in engines),
        ]
        for case, row in cells.items()
    ]
    return table(["case", *engines], rows)


def zoo(seen: Seen) -> str:
    """Model by method, with the engines of each pair."""
    cells: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    reasons: dict[str, None] = {}
    for test, parameters, outcome, reason in seen.found:
        if test not in LETTERS:
            continue
        letter = LETTERS[test]
        letter = f"({letter})" if reason else letter
        cells[parameters.get("method", METHODS.get(test))][parameters["model"]].add(
            letter if outcome == "passed" else f"{letter}✗"
        )
        reasons |= {reason: None} if reason else {}
    models = list(dict.fromkeys(model for row in cells.values() for model in row))
    rows = [
        [
            method,
            *(" ".join(sorted(row[model], key=lambda cell: "LWFARN".index(cell.strip("()✗")))) for model in models),
        ]
        for method, row in cells.items()
    ]
    return table(["", *models], rows) + "".join(f"\nRefused: {reason}.\n" for reason in reasons)


def table(head: list[str], rows: list[list[str]]) -> str:
    """In Markdown."""
    return "".join(f"| {' | '.join(row)} |\n" for row in [head, ["---"] * len(head), *rows])


if __name__ == "__main__":
    seen = Seen()
    quick = "--fast" in sys.argv
    code = pytest.main(["-q", "-m", "not long" if quick else "", *(str(ROOT / file) for file in FILES)], plugins=[seen])
    text = CONFORMANCE + conformance(seen) + ZOO + zoo(seen)
    (print if quick else (ROOT / "docs" / "engines.md").write_text)(text)
    sys.exit(code)
