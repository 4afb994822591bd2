"""Small data and a model for each task, for tests that run methods on all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

import fedstrata as fs
from fedstrata.data.dataset import Dataset, from_arrays
from fedstrata.data.tasks.base import TASKS

TRAIN, TEST = 40, 12
WORDS, LENGTH, SIDE, CLASSES = 6, 5, 4, 3

CASES: dict[str, dict[str, Any]] = {
    "classification": {"name": "classification"},
    "classification, weights": {"name": "classification", "class_weights": [1, 2, 3], "label_smoothing": 0.1},
    "classification, several inputs": {"name": "classification"},
    "regression": {"name": "regression"},
    "regression, bins": {"name": "regression", "bins": 3},
    "multilabel": {"name": "multilabel"},
    "multilabel, stratum": {"name": "multilabel", "stratum": "b"},
    "next-token, domains": {"name": "next-token"},
    "segmentation": {"name": "segmentation"},
}
"""The settings of a task for each case."""


class Network(nn.Module):
    """A body and a linear head, with BatchNorm on request."""

    def __init__(self, body: list[nn.Module], head: nn.Module, norm: nn.Module | None) -> None:
        super().__init__()
        self.body = nn.Sequential(*body, *([] if norm is None else [norm]), nn.Tanh())
        self.head = head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


class SeveralInputs(Network):
    """A network of the ids of words, a mask of those that count, and numbers."""

    def __init__(self, norm: nn.Module | None) -> None:
        super().__init__([nn.Linear(6, 8)], nn.Linear(8, CLASSES), norm)
        self.words = nn.Embedding(WORDS, 4)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        counts = mask.float()[..., None]
        mean = (self.words(ids) * counts).sum(dim=1) / counts.sum(dim=1)
        return super().forward(torch.cat([mean, numbers], dim=1))


class Normed(nn.Module):
    """BatchNorm of the features of tokens, (B, T, F)."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.flatten(0, 1)).view(x.shape)


class Networks:
    """Makes models; an object and not a closure, so that workers can receive it."""

    def __init__(self, case: str, norm: bool = False) -> None:
        self.case, self.norm = case, norm

    def __call__(self) -> nn.Module:
        name = CASES[self.case]["name"]
        if self.case == "classification, several inputs":
            return SeveralInputs(nn.BatchNorm1d(8) if self.norm else None)
        if name == "next-token":
            norm = Normed(8) if self.norm else None
            return Network([nn.Embedding(WORDS, 8)], nn.Linear(8, WORDS), norm)
        if name == "segmentation":
            norm = nn.BatchNorm2d(4) if self.norm else None
            return Network([nn.Conv2d(1, 4, 3, padding=1)], nn.Conv2d(4, CLASSES, 1), norm)
        outputs = 2 if name == "regression" else CLASSES
        return Network([nn.Linear(4, 8)], nn.Linear(8, outputs), nn.BatchNorm1d(8) if self.norm else None)


def data_of(case: str) -> Dataset:
    """Return a small data set; its targets depend on its inputs."""
    generator = np.random.default_rng(5)
    settings, n = CASES[case], TRAIN + TEST
    more: dict[str, Any] = {}
    x: Any = generator.normal(size=(n, 4)).astype(np.float32)
    match settings["name"]:
        case "classification":
            y: Any = np.arange(n) % CLASSES
            x[:, 0] += y
            if case == "classification, several inputs":
                mask = np.arange(LENGTH) < 1 + np.arange(n)[:, None] % LENGTH
                x = {"ids": generator.integers(0, WORDS, (n, LENGTH)), "mask": mask, "numbers": x[:, :2]}
        case "regression":
            y = np.stack([100 + 20 * x[:, 0], x[:, 1] - x[:, 2]], axis=1)
        case "multilabel":
            y, more = (x[:, :CLASSES] > 0).astype(np.float32), {"class_names": ["a", "b", "c"]}
        case "next-token":
            x = generator.integers(0, WORDS, (n, LENGTH))
            y = (x + 1) % WORDS
            for row in range(n):  # sequences of 2 to 5 tokens
                y[row, 2 + row % 4 :] = -100
            domains = np.where(np.arange(n) % 3 == 0, "prose", "verse")
            more = {"normalize": "keep", "domain_train": domains[:TRAIN], "domain_test": domains[TRAIN:]}
        case "segmentation":
            x = generator.normal(size=(n, SIDE, SIDE)).astype(np.float32)
            y = np.digitize(x, [-0.5, 0.5])
            y[::3, 0] = -100
    train, test = (
        {name: array[part] for name, array in x.items()} if isinstance(x, dict) else x[part]
        for part in (slice(TRAIN), slice(TRAIN, n))
    )
    return from_arrays(train, y[:TRAIN], test, y[TRAIN:], task=TASKS.parse(settings), **more)


def spec_of(method: Any = "fedavg", **tables: Any) -> fs.Experiment:
    """Return the spec of two rounds with four clients."""
    training = {"rounds": 2, "batch_size": 4, "lr": 0.05, "execution": "per-client"} | tables.pop("training", {})
    table = {"method": method, "partition": {"name": "iid", "clients": 4}, "training": training}
    return fs.Experiment.from_table(table | tables)


def prepared_of(
    case: str, method: Any = "fedavg", *, norm: bool = False, **tables: Any
) -> fs.runs.preparation.Prepared:
    """Prepare a run."""
    return fs.prepare(spec_of(method, **tables), data=data_of(case), model=Networks(case, norm))


class Tamed(fs.Objective):
    """The loss of any task, and a penalty."""

    tasks = None

    def loss(self, model: Any, params: Any, batch: Any, context: Any) -> Any:
        return context.task.mean_loss(model(params, batch.x), batch.y) + sum(p.square().sum() for p in params.values())


class Undeclared(Tamed):
    """The same, which does not say that it accepts any task."""

    tasks = fs.Objective.tasks
