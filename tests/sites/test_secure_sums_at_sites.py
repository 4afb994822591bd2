"""Secure sums at real sites: the model of a simulation, and nothing but sums at the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cryptography")

from secure_sites import Deployment, peers, spec

import fedstrata as fs
from fedstrata.sites.wire import Ask


def same(one: fs.History, other: fs.History) -> bool:
    return all(torch.equal(one.params[name], other.params[name]) for name in one.params)


@pytest.mark.parametrize("sites", [3, 4])
def test_a_run_over_sites_has_the_model_of_a_simulation(sites: int, tmp_path: Path) -> None:
    made = spec(sites)
    history = Deployment(made, tmp_path).run()
    expected = fs.run(made)
    assert same(history, expected)
    for one, other in zip(history, expected, strict=True):
        for name in ("clients_trained", "clients_returned", "train_loss", "samples", "accuracy"):
            assert one[name] == other[name]
