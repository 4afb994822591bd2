"""Choose the device on which clients compute, and copy the model (and data sets that fit) to a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedstrata.base.errors import SpecError
from fedstrata.base.inputs import tensors_of
from fedstrata.clients.client import ClientContext
from fedstrata.data.dataset import Dataset
from fedstrata.federation.messages import Weights
from fedstrata.models.model import Model

CPU = torch.device("cpu")

RESIDENT = 0.25
"""Maximum fraction of a GPU's memory that the data set may fill. Larger data sets are copied batch by batch."""


@dataclass(frozen=True)
class Placed:
    """A device, and the model and the data of a client that computes on this device.

    Args:
        device: The device.
        model: The model with its parameters on the device.
        data: The data set: on the device if it is small enough (see ``RESIDENT``), otherwise in main memory.
    """

    device: torch.device
    model: Model
    data: Dataset


def device_of(setting: str) -> torch.device:
    """Convert a value of ``training.device`` to a PyTorch device.

    Raises:
        SpecError: This machine does not have the device.

    >>> device_of("cpu")
    device(type='cpu')
    """
    if setting == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if setting == "auto":
        return torch.device("cuda" if count else "cpu")
    device = torch.device(setting)
    if device.type == "cuda" and (device.index or 0) >= count:
        accepted = "'cpu', 'auto', 'cuda:N'" if count else "'cpu', 'auto'"
        problem = f"PyTorch finds {count} CUDA devices on this machine. Use one of: {accepted}."
        raise SpecError("training.device", problem, setting)
    return device


def on_device(context: ClientContext) -> Placed:
    """Return the device that ``training.device`` names, and the model and the data for this device.

    Raises:
        SpecError: This machine does not have the device.
    """
    device = device_of(context.config.training.device)
    model, data = context.config.model, context.data
    if device.type != "cpu":
        model = model.clone().to(device)
        tensors = [tensor for value in data.tensors().values() for tensor in tensors_of(value)]
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if size <= RESIDENT * torch.cuda.get_device_properties(device).total_memory:
            data = data.to(device)
    return Placed(device, model, data)


def to_device(tree: Any, device: torch.device) -> Any:
    """Move all tensors in nested mappings, tuples, lists and ``Weights`` to a device."""
    if isinstance(tree, Tensor):
        return tree.to(device)
    if isinstance(tree, Weights):
        return Weights(to_device(tree.params, device), to_device(tree.buffers, device))
    if isinstance(tree, tuple):
        return tuple(to_device(item, device) for item in tree)
    if isinstance(tree, list):
        return [to_device(item, device) for item in tree]
    return {key: to_device(item, device) for key, item in tree.items()} if isinstance(tree, Mapping) else tree
