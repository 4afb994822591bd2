"""How good a model is on the test set."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fedstrata.data.dataset import Dataset
from fedstrata.federation.messages import Weights
from fedstrata.nn.model import Model


@dataclass(frozen=True)
class Score:
    """The result of an evaluation.

    Args:
        loss: Mean cross-entropy.
        accuracy: Share of samples whose largest logit is that of their label (top-1), in [0, 1].
        per_class: The same within each class; None for a class without test samples.
    """

    loss: float
    accuracy: float
    per_class: list[float | None]


@torch.no_grad()
def evaluate(
    model: Model, weights: Weights, data: Dataset, *, batch_size: int = 1000, batch_statistics: bool = False
) -> Score:
    """Evaluate on the test set.

    Args:
        model: The architecture.
        weights: What to evaluate.
        data: Its test set is used.
        batch_size: Samples at once.
        batch_statistics: Let BatchNorm normalise with each test batch's statistics instead of the running ones.
    """
    n = len(data.y_test)
    loss = 0.0
    hits = torch.zeros(data.classes, dtype=torch.int64)
    with model.loaded(weights.params, weights.buffers, train=False) as params:
        device = next(iter(params.values())).device
        norms = [m for m in model.module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        for layer in norms:
            layer.train(batch_statistics)
        # Batches of nearly equal size: a last one of a single sample would have no batch statistics.
        bounds = np.linspace(0, n, -(-n // batch_size) + 1).astype(int).tolist()
        for begin, end in itertools.pairwise(bounds):
            part = slice(begin, end)
            x, y = data.inputs(part, "test").to(device), data.labels(part, "test").to(device)
            logits = model(params, x)
            loss += float(F.cross_entropy(logits, y, reduction="sum"))
            hits += torch.bincount(y[logits.argmax(dim=1) == y], minlength=data.classes).cpu()
        for layer in norms:
            layer.eval()
    totals = torch.bincount(data.y_test, minlength=data.classes)
    per_class = [h / t if t else None for h, t in zip(hits.tolist(), totals.tolist(), strict=True)]
    return Score(loss / max(n, 1), int(hits.sum()) / max(n, 1), per_class)
