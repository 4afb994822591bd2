"""Compute the predictions of a model in batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedstrata.base.errors import SpecError
from fedstrata.base.inputs import Inputs, each
from fedstrata.data.dataset import Dataset, Split
from fedstrata.federation.messages import Params, Weights
from fedstrata.models.model import Model

Ints = NDArray[np.int64]
Reals = NDArray[np.float64]

OUTPUT_BYTES = 16 << 20
"""The maximum size of a batch's outputs in ``collect``, in bytes."""

KEPT_BYTES = 4 << 30
"""The maximum size of the values that an evaluation stores for all samples, in bytes."""


@dataclass(frozen=True, eq=False)
class Predictions:
    """The predictions of a model for N samples.

    Args:
        labels: True labels, shape (N,).
        logits: The model's outputs, shape (N, C), float32.
        predicted: The class with the largest logit for each sample, shape (N,).
        total_loss: Sum of the samples' cross-entropies, in nats.

    >>> Predictions.of(np.array([0, 1]), np.array([[2.0, 0.0], [0.0, 0.0]])).probabilities[1].tolist()
    [0.5, 0.5]
    """

    labels: Ints
    logits: NDArray[np.float32]
    predicted: Ints
    total_loss: float

    @classmethod
    def of(cls, labels: Ints, logits: NDArray[np.floating]) -> Predictions:
        """Create the predictions from the true labels, shape (N,), and the logits, shape (N, C)."""
        values = np.asarray(logits, dtype=np.float32)
        made = cls(np.asarray(labels, dtype=np.int64), values, values.argmax(axis=1).astype(np.int64), 0.0)
        return cls(made.labels, values, made.predicted, float(made.losses.sum()))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, part: slice | Ints) -> Predictions:
        """Return the predictions for a subset of the samples."""
        cut = Predictions(self.labels[part], self.logits[part], self.predicted[part], 0.0)
        return Predictions(cut.labels, cut.logits, cut.predicted, float(cut.losses.sum()))

    @property
    def classes(self) -> int:
        """The number C of classes."""
        return int(self.logits.shape[1])

    @cached_property
    def log_probabilities(self) -> Reals:
        """Logarithms of the predicted probabilities, shape (N, C)."""
        with np.errstate(invalid="ignore"):  # Logits may be infinite if a model has diverged.
            shifted = self.logits.astype(np.float64)
            shifted -= shifted.max(axis=1, keepdims=True, initial=-np.inf)
            shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        return shifted

    @cached_property
    def probabilities(self) -> Reals:
        """Predicted probabilities, which are the softmax of the logits, shape (N, C)."""
        return np.exp(self.log_probabilities)

    @property
    def losses(self) -> Reals:
        """Cross-entropy of each sample in nats, shape (N,)."""
        return -self.log_probabilities[np.arange(len(self)), self.labels]


@dataclass(frozen=True, eq=False)
class Rows:
    """The values that an evaluation stores for N samples of a task other than plain classification.

    Args:
        arrays: The entries of ``Task.rows``, each of shape (N, …).
        losses: The loss of each sample, summed over its tokens or pixels, shape (N,).
        weights: The weight of each sample, which is 1 or its number of tokens or pixels, shape (N,).
    """

    arrays: Mapping[str, NDArray[Any]]
    losses: Reals
    weights: Reals

    def __len__(self) -> int:
        return len(self.losses)

    def __getitem__(self, part: slice | Ints) -> Rows:
        """Return the stored values for a subset of the samples."""
        arrays = {name: array[part] for name, array in self.arrays.items()}
        return Rows(arrays, self.losses[part], self.weights[part])

    def sums(self, name: str, owners: Ints, clients: int) -> Reals:
        """Return, for each client, the sum of one entry of ``arrays`` over the client's samples.

        Args:
            name: The name of the entry.
            owners: The client of each sample, shape (N,).
            clients: The number of clients.

        Returns:
            The sums, shape (clients, …).
        """
        array = self.arrays[name]
        sums = np.zeros((clients, *array.shape[1:]))
        np.add.at(sums, owners, array)
        return sums


@torch.no_grad()
def collect(
    model: Model,
    weights: Weights,
    data: Dataset,
    split: Split = "test",
    indices: Ints | None = None,
    *,
    batch_size: int = 1000,
    batch_statistics: bool = False,
) -> Rows:
    """Compute the values that an evaluation stores for each sample.

    See ``predict`` for the arguments. Batches are smaller than ``batch_size`` if their outputs would otherwise need
    more than ``OUTPUT_BYTES`` of memory.

    Raises:
        SpecError: The values of all samples would need more than ``KEPT_BYTES`` of memory.
    """
    n = len(data.y_train if split == "train" else data.y_test) if indices is None else len(indices)
    every = np.arange(n) if indices is None else indices
    # Copy results into arrays. Otherwise, small tensors of each batch would fragment the memory.
    arrays, losses, counts = dict[str, NDArray[Any]](), np.zeros(n), np.zeros(n)
    size = min(batch_size, _samples_in_memory(model, weights, data, split, every)) if n else 1
    with _evaluating(model, weights, batch_statistics and n > 1) as (params, device):
        for begin, end in itertools.pairwise(np.linspace(0, n, -(-n // size) + 1).astype(int).tolist()):
            x, y = _batch(data, every[begin:end], split, device)
            output = model(params, x).float()
            loss, weight = data.task.losses(output, y)
            losses[begin:end], counts[begin:end] = loss.cpu().numpy(), weight.cpu().numpy()
            for name, tensor in data.task.rows(output, y).items():
                part = tensor.cpu().numpy()
                if begin == 0:
                    arrays[name] = np.empty((n, *part.shape[1:]), part.dtype)
                arrays[name][begin:end] = part
            del output
    return Rows(arrays, losses, counts)


def _batch(data: Dataset, part: Ints | slice, split: Split, device: torch.device) -> tuple[Inputs, Tensor]:
    """Return the inputs and targets of a batch, on the given device."""
    return each(data.inputs(part, split), lambda tensor: tensor.to(device)), data.targets(part, split).to(device)


def _samples_in_memory(model: Model, weights: Weights, data: Dataset, split: Split, every: Ints) -> int:
    """Estimate, from one sample, the number of samples whose outputs fit into ``OUTPUT_BYTES``, at least 1.

    Raises:
        SpecError: The values of all samples would need more than ``KEPT_BYTES`` of memory.
    """
    with _evaluating(model, weights, False) as (params, device):
        x, y = _batch(data, every[:1], split, device)
        output = model(params, x).float()
        rows = data.task.rows(output, y)
    kept = len(every) * sum(tensor.numel() * tensor.element_size() for tensor in rows.values())
    if kept > KEPT_BYTES:
        problem = f"an evaluation would store {kept / 2**30:.1f} GiB, but the limit is {KEPT_BYTES >> 30} GiB. "
        raise SpecError("task", f"{problem}Let the task's method rows() return fewer values.", data.task.name)
    return int(max(1, OUTPUT_BYTES // max(1, output.numel() * 4)))


@contextmanager
def _evaluating(model: Model, weights: Weights, batch_statistics: bool) -> Iterator[tuple[Params, torch.device]]:
    """Load a model for evaluation during the ``with`` block. Yield the model's parameters and their device."""
    with model.loaded(weights.params, weights.buffers, train=False) as params:
        norms = [m for m in model.module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        for layer in norms:
            layer.train(batch_statistics)
        yield params, next(iter(params.values())).device
        for layer in norms:
            layer.eval()


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
    """Compute a model's predictions for samples of a data set.

    Args:
        model: The architecture.
        weights: The parameters and buffers.
        data: The data set.
        split: ``"train"`` or ``"test"``.
        indices: The indices of the samples to predict, in the order of the predictions. Default: all samples of the
            split.
        batch_size: Number of samples per batch.
        batch_statistics: Whether BatchNorm normalises with each batch's statistics instead of the running statistics.
    """
    labels = data.y_train if split == "train" else data.y_test
    n = len(labels) if indices is None else len(indices)
    logits, predicted, loss = np.empty((n, data.outputs), dtype=np.float32), np.empty(n, dtype=np.int64), 0.0
    # For a single sample, BatchNorm uses running statistics, because it cannot compute statistics of one sample.
    with _evaluating(model, weights, batch_statistics and n > 1) as (params, device):
        # Make batches of nearly equal size, so that the last batch is not a single sample.
        bounds = np.linspace(0, n, -(-n // batch_size) + 1).astype(int).tolist()
        for begin, end in itertools.pairwise(bounds):
            part = slice(begin, end) if indices is None else indices[begin:end]
            x, y = _batch(data, part, split, device)
            output = model(params, x)
            loss += data.task.total_loss(output, y)
            predicted[begin:end] = output.argmax(dim=1).cpu().numpy()
            logits[begin:end] = output.float().cpu().numpy()
    true = labels.cpu().numpy()
    return Predictions(true if indices is None else true[indices], logits, predicted, loss)
