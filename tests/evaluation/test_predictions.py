from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedstrata as fs
from fedstrata.data.dataset import from_arrays
from fedstrata.evaluation.predictions import Predictions, collect, predict
from fedstrata.federation.messages import Weights
from fedstrata.models.model import Model


def norm():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))


def test_by_hand(tiny):
    federation = tiny()
    data = federation.engine.context.data
    with torch.no_grad():
        logits = federation.config.model.module(data.inputs(slice(None), "test"))
    for batch_size in (7, 30, 1000):
        found = predict(federation.config.model, federation.weights, data, batch_size=batch_size)
        assert found.predicted.tolist() == logits.argmax(1).tolist()
        assert found.logits == pytest.approx(logits.numpy(), abs=1e-6)
        assert found.total_loss / 30 == pytest.approx(float(F.cross_entropy(logits, data.y_test)), rel=1e-6)
        assert found.losses == pytest.approx(F.cross_entropy(logits, data.y_test, reduction="none").numpy(), rel=1e-5)
        assert found.probabilities == pytest.approx(logits.softmax(1).numpy(), abs=1e-6)


def test_of_chosen_samples(tiny):
    federation = tiny()
    data = federation.engine.context.data
    indices = np.array([9, 2, 30, 3])
    found = predict(federation.config.model, federation.weights, data, "train", indices, batch_size=3)
    with torch.no_grad():
        logits = federation.config.model.module(data.inputs(indices))
    assert found.labels.tolist() == data.y_train[indices].tolist()
    assert found.logits == pytest.approx(logits.numpy(), abs=1e-6)
    part = found[np.array([1, 3])]
    assert part.labels.tolist() == data.y_train[[2, 3]].tolist()
    assert part.total_loss == pytest.approx(float(F.cross_entropy(logits[[1, 3]], data.y_train[[2, 3]])) * 2, rel=1e-5)
    assert len(predict(federation.config.model, federation.weights, data, "train", indices[:0])) == 0


def test_with_local_statistics_the_test_batches_own_are_used(tiny):
    federation = tiny(module=norm())
    weights, data = federation.weights, federation.engine.context.data
    weights.buffers["1.running_mean"] += 100.0
    found = predict(federation.config.model, weights, data, batch_size=30, batch_statistics=True)
    module = norm().train()
    with torch.no_grad():
        logits = module(data.inputs(slice(None), "test"))
    assert found.total_loss / 30 == pytest.approx(float(F.cross_entropy(logits, data.y_test)), rel=1e-5)
    running = predict(federation.config.model, weights, data, batch_size=30)
    assert running.total_loss != pytest.approx(found.total_loss, rel=1e-3)


def test_with_batch_statistics_there_is_no_batch_of_one():
    norm = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    prepared = fs.prepare(fs.Experiment(), model=norm)
    model = prepared.config.model
    weights = Weights(model.params(), model.buffers())
    size = len(prepared.data.y_test) - 1
    found = predict(model, weights, prepared.data, batch_size=size, batch_statistics=True)
    assert np.isfinite(found.total_loss)
    assert torch.equal(model.buffers()["2.running_mean"], torch.zeros(8))
    # A single sample has no statistics of its own: those of the model serve.
    alone = predict(model, weights, prepared.data, "test", np.array([3]), batch_statistics=True)
    assert np.isfinite(alone.logits).all()


def test_logits_as_large_as_they_may_be():
    found = Predictions.of(np.array([0, 1]), np.array([[1e38, -1e38], [1e38, -1e38]]))
    assert found.probabilities.tolist() == [[1.0, 0.0], [1.0, 0.0]]
    assert found.losses[0] == 0
    assert found.losses[1] == pytest.approx(2e38)


VOCABULARY = """
import resource, sys
import numpy as np, torch
from torch import nn
from fedstrata.data.dataset import from_arrays
from fedstrata.evaluation.predictions import collect
from fedstrata.federation.messages import Weights
from fedstrata.models.model import Model
torch.set_num_threads(1)
n = int(sys.argv[1])
ids = np.random.default_rng(0).integers(0, 30_000, (n, 81))
data = from_arrays(ids[:2, :-1], ids[:2, 1:], ids[:, :-1], ids[:, 1:], normalize="keep", task="next-token")
model = Model(nn.Sequential(nn.Embedding(30_000, 4), nn.Linear(4, 30_000)))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
rows = collect(model, Weights(model.params(), model.buffers()), data)
assert rows.weights.sum() == 80 * n
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(grown // (2**20 if sys.platform == "darwin" else 2**10))
"""


@pytest.mark.long
@pytest.mark.parametrize(("samples", "megabytes"), [(200, 300), (20_000, 1000)])
def test_the_logits_of_a_large_vocabulary_are_never_held_together(samples: int, megabytes: int):
    """Those of 200 sequences have 1.9 GB, and those of 20,000 have 192 GB."""
    command = [sys.executable, "-c", VOCABULARY, str(samples)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=1800)
    assert int(answer.stdout) < megabytes


def test_batches_of_rows_fit_batchnorm_of_local_statistics():
    """The first batch is as large as the others: BatchNorm cannot normalise one sample with its own statistics."""
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(9, 2)), draw.normal(size=9)
    data = from_arrays(x, y, x, y, normalize="none", task="regression")
    model = Model(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)))
    rows = collect(model, Weights(model.params(), model.buffers()), data, batch_size=5, batch_statistics=True)
    outputs = torch.cat([model.module.train()(data.inputs(part, "test")) for part in (slice(0, 4), slice(4, 9))])
    assert rows.losses == pytest.approx(data.task.losses(outputs, data.y_test)[0].detach().numpy(), abs=1e-6)
