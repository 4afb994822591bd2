from __future__ import annotations

import pytest

import fedstrata as fs
from fedstrata.base.errors import SpecError
from fedstrata.reporting.draw import over_seeds


@pytest.mark.slow
def test_a_seed_that_lacks_a_methods_own_column_does_not_count(tmp_path):
    """The report, and with it the end of a comparison, failed."""
    seeds = [
        fs.History(
            [{"round": 1, "accuracy": 0.5, "idle_clients": 2}, {"round": 2, "accuracy": 0.6, "idle_clients": 4}]
        ),
        fs.History([{"round": 1, "accuracy": 0.5}, {"round": 2, "accuracy": 0.7}]),
    ]
    band = over_seeds(seeds, "idle_clients")
    assert (band.rounds.tolist(), band.mean.tolist(), band.sd.tolist()) == ([1, 2], [2.0, 4.0], [0.0, 0.0])
    fs.plot({"bsm": seeds}, "idle_clients", tmp_path / "idle.png")
    with pytest.raises(SpecError, match=r"is not a column of numbers\. Use one of: accuracy"):
        over_seeds(seeds, "idle_clientz")
