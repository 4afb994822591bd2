"""Next-token prediction and segmentation end to end: every token or pixel counts once, and padding never counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.metrics import accuracy_score, jaccard_score
from torch import Tensor, nn

import fedstrata as fs
from fedstrata.data.dataset import Dataset, from_arrays
from fedstrata.data.tasks.segmentation import Segmentation
from fedstrata.evaluation.metrics import METRICS
from fedstrata.evaluation.predictions import collect
from fedstrata.evaluation.sums import task_sums
from fedstrata.federation.messages import Weights
from fedstrata.models.model import Model

Ints = NDArray[np.int64]

VOCABULARY, CLIENTS = 7, 10
LENGTHS = np.repeat([1, 2, 2, 3, 4, 5, 8, 12, 16, 20], 3)
"""The number of tokens of each sequence; client k has the sequences 3k, 3k + 1 and 3k + 2."""


class Reader(nn.Module):
    """Predicts the next token from the tokens so far."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(VOCABULARY, 6), nn.Dropout(dropout)
        self.lstm, self.head = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.lstm(self.drop(self.embed(x)))[0])
        return output


class Painter(nn.Module):
    """Predicts the class of each pixel from its neighbourhood."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 1))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers(x)
        return output


def sequences(width: int = 20) -> Dataset:
    """Return sequences of very different lengths, padded to ``width`` tokens."""
    draw = np.random.default_rng(5)
    x, y = np.zeros((30, width), dtype=np.int64), np.full((30, width), -100)
    for row, length in enumerate(LENGTHS.tolist()):
        text = draw.integers(0, VOCABULARY, length + 1)
        x[row, :length], y[row, :length] = text[:-1], text[1:]
    y[0, 0] = VOCABULARY - 1
    owners = np.repeat(np.arange(CLIENTS), 3)
    return from_arrays(
        x,
        y,
        x,
        y,
        clients=owners,
        clients_test=owners,
        domain_train=np.arange(30) % 2,
        domain_test=np.arange(30) % 2,
        normalize="keep",
        task="next-token",
    )


def pictures() -> Dataset:
    """Return pictures of 5×6 pixels, of which 1 to 30 count."""
    draw = np.random.default_rng(6)
    x, y = draw.normal(size=(30, 5, 6)), draw.integers(0, 3, (30, 5, 6))
    for row in range(30):
        y[row].reshape(-1)[row + 1 :] = 255
    owners = np.repeat(np.arange(CLIENTS), 3)
    return from_arrays(
        x,
        y,
        x,
        y,
        clients=owners,
        clients_test=owners,
        domain_train=np.arange(30) % 2,
        domain_test=np.arange(30) % 2,
        normalize="none",
        task=Segmentation(ignore=255),
    )


CASES = {"tokens": (sequences, Reader, -100), "pixels": (pictures, Painter, 255)}


def spec(method: Any = "fedavg", **changes: Any) -> fs.Experiment:
    """Return an experiment on natural clients: one round, one step on all samples."""
    training = fs.Training(rounds=1, batch_size=1000, local_epochs=1, lr=0.5)
    given = {"method": method, "partition": fs.Natural(), "training": training}
    return fs.Experiment(**given | changes)


def start_of(data: Dataset, model: type[nn.Module]) -> dict[str, Tensor]:
    """Return the parameters with which a run begins."""
    return fs.prepare(spec(), data=data, model=model).config.model.params()


def central_step(data: Dataset, model: type[nn.Module], ignore: int) -> dict[str, Tensor]:
    """Return the parameters after one plain PyTorch step on the mean loss over all places of all samples."""
    module = model()
    module.load_state_dict(start_of(data, model))
    outputs = module(data.inputs(slice(None)))
    logits = outputs if outputs.dim() == 3 else outputs.permute(0, 2, 3, 1)
    wanted = data.y_train.flatten()
    nn.functional.cross_entropy(logits.reshape(len(wanted), -1), wanted, ignore_index=ignore).backward()
    return {name: (w - 0.5 * w.grad).detach() for name, w in module.named_parameters()}


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    """Fail if two models differ in a parameter by more than the tolerance."""
    assert one.keys() == other.keys()
    assert max(float((one[name] - other[name]).abs().max()) for name in one) < tolerance


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", ["fedavg", "fedprox", "stratify"])
def test_a_round_over_unequal_clients_is_the_centralised_step(case: str, method: str):
    make, model, ignore = CASES[case]
    data = make()
    history = fs.run(spec(method), data=data, model=model)
    expected = central_step(data, model, ignore)
    assert_close(history.params, expected)
    start = start_of(data, model)
    assert max(float((expected[name] - start[name]).abs().max()) for name in start) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_one_client_with_all_samples_trains_as_a_centralised_run(case: str):
    """Three full-batch steps with the samples of all clients at one client."""
    make, model, _ = CASES[case]
    training = fs.Training(rounds=3, batch_size=1000, local_epochs=1, lr=0.5)
    many = fs.run(spec(training=training), data=make(), model=model).params
    one = fs.run(spec(training=training, partition=fs.IID(clients=1)), data=make(), model=model).params
    assert_close(many, one, 2e-6)


@pytest.mark.slow
def test_longer_padding_changes_nothing():
    training = fs.Training(rounds=3, batch_size=2, local_epochs=2, lr=0.5)
    short, long = (fs.run(spec(training=training), data=sequences(width), model=Reader) for width in (20, 33))
    assert_close(short.params, long.params, 2e-6)
    for before, after in zip(short, long, strict=True):
        for name in ("accuracy", "loss", "train_loss", "samples"):
            assert before[name] == pytest.approx(after[name], abs=1e-6), name
        assert before["test"] == pytest.approx(after["test"], abs=1e-6)
        for name in ("accuracy", "perplexity"):
            assert before["clients"][name] == pytest.approx(after["clients"][name], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        {"name": "fedsampling", "samples": 12},
        {"name": "fedstas", "strata": 3, "fraction": 0.5},
        {"name": "fedsts", "strata": 3},
        {"name": "power-of-choice", "candidates": 6},
        {"name": "fedprox", "mu": 0.1},
        {"name": "stratify", "mode": "single"},
    ],
    ids=lambda method: f"{method['name']} {method.get('mode', '')}".strip(),
)
@pytest.mark.parametrize("case", ["tokens", pytest.param("pixels", marks=pytest.mark.long)])
def test_methods_that_ask_clients_about_their_samples_run(case: str, method: dict[str, Any]):
    make, model, _ = CASES[case]
    training = fs.Training(rounds=3, batch_size=4, local_epochs=1, lr=0.2, clients_per_round=4)
    history = fs.run(spec(method, training=training), data=make(), model=model)
    assert all(np.isfinite([record["loss"], record["train_loss"]]).all() for record in history)
    assert {record["clients_failed"] for record in history} == {0}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_metrics_are_those_of_scikit_learn(case: str):
    """For the whole, for each client, and from sums of the clients' sums."""
    make, module, ignore = CASES[case]
    data, model = make(), Model(module())
    rows = collect(model, Weights(model.params(), model.buffers()), data, batch_size=4)
    with torch.no_grad():
        outputs = model.module.eval()(data.inputs(slice(None), "test"))
    logits = (outputs if case == "tokens" else outputs.permute(0, 2, 3, 1)).flatten(1, -2).double()
    wanted = data.y_test.flatten(1)
    owners = np.repeat(np.arange(CLIENTS), 3)

    def by_hand(which: Ints) -> dict[str, float]:
        counts = wanted[which] != ignore
        true, found = wanted[which][counts], logits[which].argmax(dim=-1)[counts]
        loss = float(nn.functional.cross_entropy(logits[which][counts], true))
        values = {"accuracy": accuracy_score(true, found), "log-loss": loss, "perplexity": np.exp(loss)}
        if case == "pixels":
            values["mean-iou"] = jaccard_score(true, found, average="macro")
        return values

    sums = [task_sums(rows[np.flatnonzero(owners == client)], data.task.tables) for client in range(CLIENTS)]
    total = sums[0]
    for other in sums[1:]:
        total = total + other
    everybody = np.arange(30)
    for name, value in by_hand(everybody).items():
        metric = METRICS.make(name, {})
        assert metric.by_client_of_rows(rows, np.zeros(30, dtype=np.int64), 1)[0] == pytest.approx(value, rel=1e-6)
        assert metric.of_task_sums(total) == pytest.approx(value, rel=1e-6)
        each = metric.by_client_of_rows(rows, owners, CLIENTS)
        for client in range(CLIENTS):
            expected = by_hand(np.flatnonzero(owners == client))[name]
            assert each[client] == pytest.approx(expected, rel=1e-6)
            assert metric.of_task_sums(sums[client]) == pytest.approx(expected, rel=1e-6)
