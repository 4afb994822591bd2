"""A guard refuses whatever it refused when verdicts.json.gz was written: see ``tests/sites/support/verdicts.py``."""

from __future__ import annotations

from collections import Counter

import pytest
from verdicts import ACCEPTED, JOBS, MUTANTS, judged, known, made_on


@pytest.mark.long
@pytest.mark.parametrize("job", JOBS)
def test_nothing_that_was_refused_is_accepted(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = known()["jobs"][job]
    found = judged(job, before["fields"])
    if found.tape != before["tape"] and known()["made_on"] != made_on():
        pytest.skip(f"verdicts.json.gz was written on {known()['made_on']}")
    assert found.tape == before["tape"], "the run puts other questions, or in another order: the mutants are others too"
    assert found.verdicts.keys() == before["verdicts"].keys()
    more, fewer = Counter[str](), Counter[str]()
    for phase, letters in found.verdicts.items():
        assert len(letters) == MUTANTS
        for number, (old, new) in enumerate(zip(before["verdicts"][phase], letters, strict=True)):
            if (old == ACCEPTED) != (new == ACCEPTED):
                (more if new == ACCEPTED else fewer)[f"{phase} {number}: {old} → {new}"] += 1
    if fewer:
        with capsys.disabled():
            print(f"\n{job}: {len(fewer)} requests are refused that were accepted, such as {next(iter(fewer))}")
    assert not more, f"{len(more)} requests are accepted that were refused"
