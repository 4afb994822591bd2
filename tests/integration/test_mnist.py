"""Real data at full size, where ``mnist.npz`` is there: accuracies that were measured, with a margin."""

from __future__ import annotations

import pytest

import fedstrata as fs
from fedstrata.data.catalog import folders

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not any((folder / "mnist.npz").is_file() for folder in folders()),
        reason="no mnist.npz in $FEDSTRATA_DATA or ~/.cache/fedstrata",
    ),
]
LAST_ONLY = {"every": 0}


def test_fedavg_learns_from_skewed_clients_in_six_rounds():
    spec = fs.Experiment(
        data="mnist",
        partition=fs.Dirichlet(alpha=0.5, clients=50),
        method="fedavg",
        training={"rounds": 6, "clients_per_round": 10, "local_epochs": 1, "lr": 0.1},
        evaluation=LAST_ONLY,
    )
    history = fs.run(spec)
    # 0.903, 0.904 and 0.898 with seeds 0, 1 and 2.
    assert history.final_accuracy > 0.87
    assert all(record["clients_returned"] == 10 for record in history)


@pytest.mark.long  # with digits, quick tests have the same
def test_stratify_needs_one_epoch_even_with_one_class_a_client():
    spec = fs.Experiment(
        data="mnist",
        partition=fs.Classes(clients=10, per_client=1),
        method="stratify",
        training={"rounds": 1, "lr": 0.1},
        evaluation=LAST_ONLY,
    )
    history = fs.run(spec)
    # 0.963, 0.970 and 0.968 with seeds 0, 1 and 2.
    assert history.final_accuracy > 0.94
    assert history[0]["clients_failed"] == 0
    assert history[0]["samples"] == history[0]["scheduled"] > 55_000
