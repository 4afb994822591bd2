"""Specs in which each client has only few classes."""

from __future__ import annotations

from typing import Any

ONE_CLASS: dict[str, Any] = {
    "data": {"name": "digits", "limit": 300},
    "partition": {"name": "classes", "clients": 10, "per_client": 1},
    "model": {"name": "mlp", "hidden": [8]},
    "training": {"rounds": 2, "clients_per_round": 10, "local_epochs": 1},
}
"""A spec with ten clients of one class each."""

LEFT_OVER: dict[str, Any] = {
    **ONE_CLASS,
    "partition": {"name": "classes", "clients": 10, "per_client": 2, "size": 10},
    "method": {"name": "fedavg-ft", "per_class": 5, "steps": 3, "lr": 0.2, "momentum": 0.5, "weight_decay": 0.01},
}
"""A spec with ten clients of two classes and few samples each. The server fine-tunes the head on the other samples."""
