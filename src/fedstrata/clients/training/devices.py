"""Where clients compute: the processor, or a GPU that holds the data and a model of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedstrata.base.errors import SpecError
from fedstrata.clients.context import ClientContext
from fedstrata.data.dataset import Dataset
from fedstrata.models.model import Model

CPU = torch.device("cpu")

RESIDENT = 0.25
"""Share of a GPU's memory that the data set may take; a larger one is copied there piece by piece."""


@dataclass(frozen=True)
class Placed:
    """What a device computes with.

    Args:
        device: The device.
        model: The architecture, there.
        data: The data set, there unless it is too large.
    """

    device: torch.device
    model: Model
    data: Dataset


def device_of(setting: str) -> torch.device:
    """The device that ``training.device`` names.

    Raises:
        SpecError: There is none.

    >>> device_of("cpu")
    device(type='cpu')
    """
    if setting == "cpu":
        return torch.device("cpu")
    there = torch.cuda.is_available()
    if setting == "auto":
        return torch.device("cuda" if there else "cpu")
    device = torch.device(setting)
    if device.type == "cuda":
        count = torch.cuda.device_count() if there else 0
        if (device.index or 0) >= count:
            problem = f"PyTorch sees {count} CUDA devices here; accepted: 'cpu', 'auto'" + ", 'cuda:N'" * (count > 0)
            raise SpecError("training.device", problem, setting)
    return device


def placed(context: ClientContext) -> Placed:
    """Model and data on the device of the settings.

    Raises:
        SpecError: There is no such device.
    """
    device = device_of(context.config.training.device)
    model, data = context.config.model, context.data
    if device.type != "cpu":
        model = model.clone().to(device)
        tensors = [value for value in vars(data).values() if isinstance(value, Tensor)]
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if size <= RESIDENT * torch.cuda.get_device_properties(device).total_memory:
            data = data.to(device)
    return Placed(device, model, data)


def moved(tree: Any, device: torch.device) -> Any:
    """Return a tree of tables, tuples and tensors on a device."""
    if isinstance(tree, Tensor):
        return tree.to(device)
    if isinstance(tree, tuple):
        return tuple(moved(item, device) for item in tree)
    return {key: moved(item, device) for key, item in tree.items()} if isinstance(tree, Mapping) else tree
