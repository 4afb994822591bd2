"""Runs the conformance suite and the stranger's zoo, and writes what came of them: ``docs/project/conformance.md``.

``python tests/tables.py`` takes half an hour. With ``--fast``, it leaves out real sites and takes two minutes.
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
    "tests/sites/test_conformance_sites.py",
    "tests/integration/test_strangers.py",
    "tests/sites/test_strangers_at_sites.py",
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
"""A mapping from each test that uses only one method to this method."""

CASES = {
    "a state counts once its answer did": "a client's new state is stored if the server uses its reply",
    "an answer that does not count leaves no trace": "an invalid reply changes neither the result nor any state",
    "a sum is of those that count": "a sum excludes invalid replies",
    "a group adds up": "all clients of a group receive the sum of their tensors",
    "a group stands or falls together": "if one client fails, all replies of its group are discarded",
    "a relay counts every visit": "a relay can visit a client several times",
    "a hop that does not count leaves no trace": "in a relay, a failed client changes neither the model nor its state",
    "a model that is spoilt on its way is not passed on": "in a relay, a damaged model is not sent to the next client",
    "a slow client counts": "the server uses the reply of a slow client",
    "answers of any size": "replies can contain any number of values",
    "answers that do not fit into one message come in several": "large replies are sent in several messages",
    "a model is measured alike and nothing changes": "an evaluation gives the same metrics, and changes no state",
    "nobody to ask": "a request to an empty list of clients gives an empty result",
    "beyond one message": "two replies together exceed the maximum size of a message",
    "garbled asked": "a site's reply is damaged during the transfer",
    "garbled in a group": "in a group, a site's reply is damaged during the transfer",
    "garbled on a way": "in a relay, a message is damaged during the transfer",
    "hung asked": "a client hangs after a request",
    "hung in a group": "in a group, a client hangs",
    "hung in a sum": "a client hangs while a sum is computed",
    "hung on a way": "in a relay, a client hangs",
    "dies asked": "a site dies after a request",
    "dies in a group": "a site dies while its group sums tensors",
    "dies on a way": "in a relay, a site dies",
}
"""A mapping from each name of a case to its description."""
FAULTS = {
    "raise": "error",
    "nan": "NaN",
    "kind": "wrong class",
    "type": "wrong type",
    "check": "wrong value",
    "raise-False": "error before the sum",
    "raise-True": "error after the sum",
    "nan-True": "NaN after the sum",
    "check-True": "wrong value after the sum",
    "0": "none",
    "1": "one",
    "2097152": "2,097,152",
}
"""A mapping from the parameters of cases to their descriptions."""

CONFORMANCE = """\
# Conformance of engines

An *engine* decides where clients run. All engines handle the same requests in the same way, and can train any model.
`python tests/tables.py` runs the tests, and writes this page.

## Test cases on each engine

| engine | clients run in |
| --- | --- |
| local | this process |
| workers | worker processes of this machine |
| ray | actors of a Ray cluster |
| sites | sites of NVFlare in one process, with serialised messages |
| sites, real | sites of NVFlare, each in its own process |
| …, through the server | sites of NVFlare, which send messages to each other only through the server |

Each row names all engines to which its case applies. Words in brackets name the fault, or
give the number of values in the reply.

:::{dropdown} All cases
"""
NOT_THERE = """:::
"""
ZOO = """
## Any model

We train ten models that are not part of fedstrata (`tests/support/strangers.py`) with every method. Each letter stands
for a test that passed:

| letter | test |
| --- | --- |
| L | two runs on the local engine give byte-identical results, and no client fails |
| W | runs with two worker processes give byte-identical results |
| F | with `execution = "fused"`, a batch's gradient differs from the sum of the clients' gradients by at most 1e-5 |
| A | Stratify's single-sample steps give the same results as steps with PyTorch's autograd |
| R | Ray and the local engine give byte-identical results |
| N | processes of NVFlare and the local engine give byte-identical results |

If a letter is in brackets, the method refuses the model before the first round. The tests R and N cover only
some methods. The tests F and A exclude models that draw random numbers or have buffers.

:::{dropdown} All models and methods
"""


class Seen:
    """A pytest plugin that records the outcome of each test: ``passed``, ``failed`` or ``skipped``."""

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
    """Return a table with a row per case, which names the engines on which the case passed or failed."""
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
            described(case),
            "all" if all(row.get(engine) for engine in engines) else "; ".join(e for e in engines if row.get(e)),
            "; ".join(engine for engine in engines if row.get(engine) is False),
        ]
        for case, row in cells.items()
    ]
    return table(["case", "passed on", "failed on"], rows)


def described(case: str) -> str:
    """Return the description of a case, which may contain parameters in brackets."""
    name, _, parameters = case.removeprefix("test_").replace("_", " ").rstrip("]").partition("[")
    return CASES.get(name, name) + (f" ({FAULTS.get(parameters, parameters)})" if parameters else "")


def zoo(seen: Seen) -> str:
    """Return a table with a row per method, which has the letters of most models, and those of other models."""
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
    rows = []
    for method, row in cells.items():
        groups: dict[str, list[str]] = defaultdict(list)
        for model in models:
            letters = sorted(row[model], key=lambda cell: "LWFARN".index(cell.strip("()✗")))
            groups[" ".join(letters)].append(model)
        most, *others = sorted(groups, key=lambda letters: -len(groups[letters]))
        rows.append([method, most, "; ".join(f"{letters}: {', '.join(groups[letters])}" for letters in others)])
    reasons_text = "".join(f"\nThe error message for refused models: *{reason}*\n" for reason in reasons)
    return table(["method", "most models", "other models"], rows) + reasons_text


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown, without empty columns."""
    filled = [(name, *column) for name, *column in zip(head, *rows, strict=True) if any(column)]
    head, *rows = (list(row) for row in zip(*filled, strict=True))
    return "".join(f"| {' | '.join(row)} |\n" for row in [head, ["---"] * len(head), *rows])


if __name__ == "__main__":
    seen = Seen()
    quick = "--fast" in sys.argv
    code = pytest.main(["-q", "-m", "not long" if quick else "", *(str(ROOT / file) for file in FILES)], plugins=[seen])
    text = f"{CONFORMANCE}\n{conformance(seen)}{NOT_THERE}{ZOO}\n{zoo(seen)}:::\n"
    (print if quick else (ROOT / "docs" / "project" / "conformance.md").write_text)(text)
    sys.exit(code)
