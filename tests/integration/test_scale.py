"""What a round costs when almost nobody is invited."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import fedstrata as fs
from fedstrata.clients.client import Client

LARGE = """
import sys
from pathlib import Path
import numpy as np, torch
import fedstrata as fs
torch.set_num_threads(1)
draw = np.random.default_rng(0)
x = draw.integers(0, 256, size=(61_000, 28, 28), dtype=np.uint8)
y = np.arange(61_000) % 10
history = fs.run(
    fs.Experiment(
        partition=fs.IID(clients=10_000),
        availability=fs.Bernoulli(p=0.5),
        method="scaffold",
        training=fs.Training(rounds=2, clients_per_round=100, local_epochs=1),
        evaluation=fs.Evaluation(every=0),
    ),
    data=(x[:60_000], y[:60_000], x[60_000:], y[60_000:]),
)
assert history[1]["clients_invited"] == 100
status = Path("/proc/self/status")
if status.exists():  # what getrusage calls the most that was resident begins with what the parent held
    print(next(line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM")))
else:
    import resource
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (1024 if sys.platform == "darwin" else 1))
"""


@pytest.mark.long
@pytest.mark.slow
def test_ten_thousand_clients_stay_under_a_gigabyte_and_a_half():
    done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1_500_000, "kilobytes"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedstas"])
def test_a_round_touches_only_who_takes_part(monkeypatch, method):
    """The same work, client for client, whether there are a thousand clients or ten thousand."""
    made: list[int] = []
    start = Client.__init__

    def counting(self, number, *args, **kwargs):
        made.append(number)
        start(self, number, *args, **kwargs)

    monkeypatch.setattr(Client, "__init__", counting)
    counts = {}
    for clients in (1_000, 10_000):
        made.clear()
        x = np.random.default_rng(0).normal(size=(2 * clients + 50, 4)).astype(np.float32)
        y = np.arange(len(x)) % 2
        choice = {"name": method, "refresh": "participants", "gradients": "asked"} if method == "fedstas" else method
        history = fs.run(
            fs.Experiment(
                partition=fs.IID(clients=clients),
                method=choice,
                training=fs.Training(rounds=3, clients_per_round=20, local_epochs=1, workers=1),
                evaluation=fs.Evaluation(every=0),
            ),
            data=(x[: 2 * clients], y[: 2 * clients], x[2 * clients :], y[2 * clients :]),
        )
        assert len(history) == 3
        counts[clients] = len(made)
    # A round of FedSTaS asks for sizes, for training, and for compressed gradients of those of the last round and as
    # many strangers.
    most = {"fedstas": 3 * 4 * 20}.get(method, 3 * 20)
    assert counts[1_000] <= most
    assert counts[10_000] <= most
    assert method == "fedstas" or counts[1_000] == counts[10_000] == most


def test_nothing_is_drawn_for_who_is_not_asked(tiny, monkeypatch):
    drawn: list[int] = []
    online = fs.Bernoulli.online

    def counting(self, clients, round, seed):
        drawn.extend(clients.tolist())
        return online(self, clients, round, seed)

    monkeypatch.setattr(fs.Bernoulli, "online", counting)
    federation = tiny(5000, availability=fs.Bernoulli(p=0.5))
    federation.fit(17, 4000)
    federation.fit(17, 4000)
    assert drawn == [17, 4000]
    assert len(federation.store.clients) == 0  # FedAvg's clients have nothing to remember


def test_an_assignment_of_a_million_clients_is_two_arrays():
    sizes = np.full(1_000_000, 2)
    assignment = fs.Assignment(np.arange(2_000_000), np.concatenate(([0], np.cumsum(sizes))))
    assert assignment[999_999].tolist() == [1_999_998, 1_999_999]
    assert {name for name, held in vars(assignment).items() if held is not None} == {"indices", "offsets"}
