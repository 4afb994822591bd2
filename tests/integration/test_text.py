"""A small LSTM predicts the next character of a text, from the first round to ``fs.load``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quick import others_long
from torch import Tensor, nn

import fedstrata as fs
from fedstrata.base.errors import DataError, SpecError
from fedstrata.data.dataset import Dataset, from_arrays
from fedstrata.engines import local
from fedstrata.evaluation.history import History

TEXT = "the cat sat on the mat. the dog sat on the log. " * 40
LETTERS = sorted(set(TEXT))
WIDTH = 12


def windows() -> Dataset:
    """Return 12-character windows of the text, at twelve clients, with the character that follows each as target."""
    ids = np.array([LETTERS.index(letter) for letter in TEXT])
    rows = np.lib.stride_tricks.sliding_window_view(ids, WIDTH + 1)[::7]
    x, y = rows[:, :-1], rows[:, 1:].copy()
    y[::3, WIDTH // 2 :] = -100  # every third window counts half
    clients = np.arange(len(x)) % 12
    return from_arrays(x, y, x, y, clients=clients, clients_test=clients, normalize="keep", task="next-token")


class Writer(nn.Module):
    """An LSTM over characters."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(len(LETTERS), 8), nn.Dropout(dropout)
        self.lstm, self.head = nn.LSTM(8, 24, batch_first=True), nn.Linear(24, len(LETTERS))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.drop(self.lstm(self.embed(x))[0]))
        return output


def forgetful() -> Writer:
    """Return an LSTM with dropout."""
    return Writer(dropout=0.3)


def spec(method: Any = "fedavg", *, rounds: int = 4, **training: Any) -> fs.Experiment:
    """Return an experiment in which half of the clients train in each round."""
    given = {"rounds": rounds, "clients_per_round": 6, "batch_size": 8, "local_epochs": 1, "lr": 1.0}
    return fs.Experiment(
        method=method,
        partition=fs.Natural(),
        training=fs.Training(**given | training),
        evaluation=fs.Evaluation(checkpoint_every=1),
    )


def train(experiment: fs.Experiment, model: Any = Writer, **more: Any) -> History:
    """Run an experiment on the text."""
    return fs.run(experiment, data=windows(), model=model, **more)


def same(one: History, other: History) -> bool:
    """Return whether two runs ended with the same model, bit for bit, and measured the same."""
    measured = [[{k: v for k, v in each.items() if k != "seconds"} for each in history] for history in (one, other)]
    return measured[0] == measured[1] and all(torch.equal(one.params[name], w) for name, w in other.params.items())


METHODS = ["fedavg", "scaffold", {"name": "fedsts", "strata": 3}]
NAMES = ["fedavg", "scaffold", "fedsts"]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_an_lstm_learns_the_text(method: Any):
    history = train(spec(method, rounds=15))
    assert history[-1]["test"]["perplexity"] < 0.6 * history[0]["test"]["perplexity"]
    assert history[-1]["accuracy"] > 2.5 / len(LETTERS)


@pytest.mark.slow
@pytest.mark.parametrize("method", others_long(METHODS, METHODS[1:]), ids=NAMES)
def test_a_run_that_is_resumed_equals_one_that_was_not_stopped(method: Any, tmp_path: Path):
    whole = train(spec(method))

    def stop(record: dict[str, Any]) -> None:
        if record["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(spec(method), out=tmp_path / "run", callbacks=[stop])
    assert same(train(spec(method), out=tmp_path / "run", resume=True), whole)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("model", [Writer, forgetful])
@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_the_number_of_workers_changes_no_bit(method: Any, model: Any, monkeypatch: pytest.MonkeyPatch):
    for threshold in ("STARTING_PAYS", "ASKING_PAYS"):
        monkeypatch.setattr(local, threshold, -1.0)  # workers for the smallest task
    assert same(train(spec(method, workers=1), model), train(spec(method, workers=2), model))


@pytest.mark.slow
@pytest.mark.parametrize("model", [Writer, forgetful])
def test_fused_execution_changes_no_bit(model: Any):
    """A model with dropout draws the same random numbers for a client wherever the client is trained."""
    assert same(train(spec(execution="fused"), model), train(spec(execution="per-client"), model))


@pytest.mark.slow
def test_dropout_of_models_of_ids_is_noticed():
    data = windows()
    assert fs.prepare(spec(), data=data, model=forgetful).config.random
    assert not fs.prepare(spec(), data=data, model=Writer).config.random
    assert not same(train(spec(rounds=1), forgetful), train(spec(rounds=1)))
    assert same(train(spec(rounds=1), forgetful), train(spec(rounds=1), forgetful))


@pytest.mark.slow
def test_a_loaded_model_predicts_the_next_character_of_each_position(tmp_path: Path):
    history, data = train(spec(), out=tmp_path / "run"), windows()
    predictor = fs.load(tmp_path / "run", model=Writer)
    found = predictor.predict(data.x_test.numpy())
    assert (found.shape, found.dtype) == (data.x_test.shape, np.int64)
    counts = data.y_test.numpy() != -100
    assert (found == data.y_test.numpy())[counts].mean() == pytest.approx(history.summary["final_accuracy"], abs=1e-12)
    with pytest.raises(SpecError, match=r"task = 'next-token': does not predict probabilities. Call predict"):
        predictor.predict_proba(data.x_test.numpy())
    with pytest.raises(DataError, match=r"x has the shape \(\d+, 5\), but this model takes \(B, 12\)"):
        predictor.predict(data.x_test.numpy()[:, :5])
    with pytest.raises(DataError, match=r"inputs must be integers of shape \(N, …\)"):
        predictor.predict(data.x_test.numpy() * 0.5)
