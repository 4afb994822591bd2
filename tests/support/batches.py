"""Helpers for tests of Stratify's batches: specs, the samples of every batch, and a centralised run on them."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import fedstrata as fs
from fedstrata.runs.preparation import prepare

PARTITIONS = {
    "#C=1": {"name": "classes", "per_client": 1},
    "dirichlet": {"name": "dirichlet", "alpha": 0.3},
    "iid": {"name": "iid"},
}


def spec_of(partition: str | dict, clients: int = 10, availability: object = "always", **rest: object) -> fs.Experiment:
    split = PARTITIONS[partition] if isinstance(partition, str) else partition
    training = {"batch_size": 20, "lr": 0.1, **rest.pop("training", {})}  # type: ignore[dict-item]
    table = {"partition": {"clients": clients, **split}, "training": training, "model": {"name": "mlp", "hidden": [16]}}
    return fs.Experiment.from_table(table | {"method": {"name": "stratify", **rest}, "availability": availability})


def order_of(started, spec, data) -> list[np.ndarray]:
    """Return the indices of the samples of every batch of the epoch; in a batch, they are sorted by client."""
    assignment = prepare(spec, data=data).assignment
    parts: dict[int, list[np.ndarray]] = {}
    for client in sorted(started.store.clients):
        kept = started.store.get(client).get("stratify")
        if kept is None:  # the client takes no part, because it may not reveal any of its labels
            continue
        for batch in np.unique(kept.batches).tolist():
            parts.setdefault(batch, []).append(assignment[client][kept.places[kept.batches == batch]])
    return [np.concatenate(parts[batch]) for batch in sorted(parts)]


def centralised(module: nn.Module, data, batches, make) -> dict[str, torch.Tensor]:
    optimizer = make(list(module.parameters()))
    module.train()
    for indices in batches:
        optimizer.zero_grad()
        x, y = data.inputs(indices), data.targets(torch.from_numpy(indices))
        F.cross_entropy(module(x), y).backward()
        optimizer.step()
    return {name: tensor.detach() for name, tensor in module.state_dict().items()}


def assert_same(started, expected, tolerance) -> None:
    got = {**started.state.weights.params, **started.state.weights.buffers}
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        if tensor.is_floating_point():
            error = (got[name] - tensor).norm() / tensor.norm().clamp(min=1e-3)
            assert error < tolerance, (name, float(error))
        else:
            assert torch.equal(got[name], tensor)


class Spoilt(fs.Dataset):
    """A copy of a data set whose fourth sample becomes NaN when it is read."""

    def __init__(self, data: fs.Dataset) -> None:
        super().__init__(*(getattr(data, key) for key in data.__dataclass_fields__))

    def inputs(self, indices, split="train"):
        found = super().inputs(indices, split)
        if split == "train" and torch.is_tensor(indices):
            found[indices == 3] = float("nan")
        return found
