"""A site's guard before clients on Ray: each job asks what it declares there too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import combinations
import matrix
import pytest
import recorder
from lazy import Lazy

import fedstrata as fs
from fedstrata.clients.client import StateStore
from fedstrata.runs.simulation import make_context, run_prepared
from fedstrata.sites.policy import Policy

ray = Lazy("ray")

from fedstrata.engines.ray import RayEngine, WorkerPool  # noqa: E402

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("servers"), pytest.mark.filterwarnings("ignore")]


class Watched(recorder.Watching, RayEngine):
    """With a site's guard in front of every client."""


def rows(history: fs.History) -> list[dict[str, Any]]:
    return [{key: value for key, value in record.items() if key != "seconds"} for record in history]


@pytest.mark.parametrize("name", combinations.EVERY_CHOICE)
def test_every_choice_asks_what_it_declares_and_gives_the_same_bytes(
    name: str, pool: WorkerPool, tmp_path: Path
) -> None:
    prepared = fs.prepare(combinations.spec_of(name))
    engine = Watched(make_context(prepared), StateStore(), pool=pool)
    engine.watch(prepared, tmp_path, policy=Policy(jobs="within-policy", min_samples=1))
    there, here = run_prepared(prepared, None, engine), fs.run(prepared.spec)
    assert engine.counts
    assert matrix.final_bytes(here) == matrix.final_bytes(there)
    assert rows(here) == rows(there)
