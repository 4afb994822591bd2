"""The predictions of a model, computed in batches."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from fedstrata.data.dataset import Dataset, Split
from fedstrata.federation.messages import Weights
from fedstrata.models.model import Model

Ints = NDArray[np.int64]
Reals = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Predictions:
    """The predictions of a model for N samples.

    Args:
        labels: True labels, (N,).
        logits: The model's outputs, (N, C), float32.
        predicted: The class of the largest logit of each sample, (N,).
        total_loss: Sum of the samples' cross-entropies, in nats; ``predict`` computes it in float32, batch by batch.

    >>> Predictions.of(np.array([0, 1]), np.array([[2.0, 0.0], [0.0, 0.0]])).probabilities[1].tolist()
    [0.5, 0.5]
    """

    labels: Ints
    logits: NDArray[np.float32]
    predicted: Ints
    total_loss: float

    @classmethod
    def of(cls, labels: Ints, logits: NDArray[np.floating]) -> Predictions:
        """Make predictions from labels (N,) and logits (N, C)."""
        values = np.asarray(logits, dtype=np.float32)
        made = cls(np.asarray(labels, dtype=np.int64), values, values.argmax(axis=1).astype(np.int64), 0.0)
        return cls(made.labels, values, made.predicted, float(made.losses.sum()))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, part: slice | Ints) -> Predictions:
        """Return the predictions of some samples."""
        cut = Predictions(self.labels[part], self.logits[part], self.predicted[part], 0.0)
        return Predictions(cut.labels, cut.logits, cut.predicted, float(cut.losses.sum()))

    @property
    def classes(self) -> int:
        """C, the number of classes."""
        return int(self.logits.shape[1])

    @cached_property
    def log_probabilities(self) -> Reals:
        """Logarithm of the softmax, (N, C)."""
        with np.errstate(invalid="ignore"):  # the logits of a model that has diverged may be infinite
            shifted = self.logits.astype(np.float64)
            shifted -= shifted.max(axis=1, keepdims=True, initial=-np.inf)
            shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        return shifted

    @cached_property
    def probabilities(self) -> Reals:
        """Softmax of the logits, (N, C)."""
        return np.exp(self.log_probabilities)

    @property
    def losses(self) -> Reals:
        """Cross-entropy of each sample in nats, (N,)."""
        return -self.log_probabilities[np.arange(len(self)), self.labels]


@torch.no_grad()
def predict(
    model: Model,
    weights: Weights,
    data: Dataset,
    split: Split = "test",
    indices: Ints | None = None,
    *,
    batch_size: int = 1000,
    batch_statistics: bool = False,
) -> Predictions:
    """Compute the predictions of a model for samples of a data set.

    Args:
        model: The architecture.
        weights: The parameters and buffers.
        data: The data set.
        split: ``"train"`` or ``"test"``.
        indices: The indices of the samples to predict, in this order; by default, all samples of the split.
        batch_size: Samples per batch.
        batch_statistics: Let BatchNorm normalise with each batch's statistics instead of the running ones.
    """
    labels = data.y_train if split == "train" else data.y_test
    n = len(labels) if indices is None else len(indices)
    logits, predicted, loss = np.empty((n, data.classes), dtype=np.float32), np.empty(n, dtype=np.int64), 0.0
    with model.loaded(weights.params, weights.buffers, train=False) as params:
        device = next(iter(params.values())).device
        norms = [m for m in model.module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        for layer in norms:
            # BatchNorm cannot compute statistics of a single sample. It then uses the running statistics.
            layer.train(batch_statistics and n > 1)
        # Make batches of nearly equal size, so that the last batch is not a single sample.
        bounds = np.linspace(0, n, -(-n // batch_size) + 1).astype(int).tolist()
        for begin, end in itertools.pairwise(bounds):
            part = slice(begin, end) if indices is None else indices[begin:end]
            x, y = data.inputs(part, split).to(device), data.labels(part, split).to(device)
            output = model(params, x)
            loss += float(F.cross_entropy(output, y, reduction="sum"))
            predicted[begin:end] = output.argmax(dim=1).cpu().numpy()
            logits[begin:end] = output.float().cpu().numpy()
        for layer in norms:
            layer.eval()
    true = labels.cpu().numpy()
    return Predictions(true if indices is None else true[indices], logits, predicted, loss)
