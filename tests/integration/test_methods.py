"""Each registered method: a run that was killed and resumed, and a run with worker processes, give equal bytes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matrix
import pytest
from quick import others_long

import fedstrata as fs
from fedstrata.engines import local


class KilledError(Exception):
    pass


def kill(record: Mapping[str, Any]) -> None:
    if record["round"] == 2:
        raise KilledError


KINDS = (
    "scaffold",  # states of clients and of the server
    "fedstas",  # a state of the sampler, which strata have, and a sampler of samples
    "fedssar",  # a sampler that reads updates
    "power-of-choice",  # a sampler that asks for losses
    "stratify",
    "sfl",
    "fedtan",  # BatchNorm over several clients
    "rebafl",  # a moving average
    "ditto",  # personal models
    "ccvr",  # statistics of features
    "fedvarp",  # a memory of the aggregator
)
"""A method of each kind of state."""


@pytest.mark.slow
@pytest.mark.parametrize("name", others_long(matrix.EVERY_METHOD, KINDS))
def test_a_resumed_run_and_a_run_with_workers_have_the_same_bytes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = matrix.with_states(name)
    whole = fs.run(spec)
    with pytest.raises(KilledError):
        fs.run(spec, out=tmp_path, callbacks=[kill])
    resumed = fs.run(spec, out=tmp_path, resume=True)
    # Sharing is forced: such small work would not pay.
    monkeypatch.setattr(local, "STARTING_PAYS", -1.0)
    monkeypatch.setattr(local, "ASKING_PAYS", -1.0)
    shared = fs.run(spec.model_copy(update={"training": spec.training.model_copy(update={"workers": 2})}))
    for other in (resumed, shared):
        assert matrix.final_bytes(other) == matrix.final_bytes(whole)
        assert matrix.figures(other) == matrix.figures(whole)
    assert {record["clients_failed"] for record in whole} == {0}


@pytest.mark.long
@pytest.mark.parametrize("name", matrix.EVERY_METHOD)
def test_every_method_learns_digits(name: str) -> None:
    """The clients' own models, which are the global model except with personal methods; chance is right in 10 %."""
    table = matrix.EVERY_METHOD[name].to_spec()
    table["training"] |= {"rounds": 30, "batch_norm": "average"}
    table["evaluation"] = {"every": 30, "client_test": 0.2, "fine_tune": 0}
    assert fs.run(table)[-1]["personal"]["accuracy"]["mean"] > 0.5
