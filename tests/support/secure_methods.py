"""The methods with secure sums, and the reasons why the other methods have none."""

from __future__ import annotations

from typing import Any

from fedstrata.methods.base import METHODS

NEEDS_REPLIES = {
    "fedsts": "forms groups of clients from their gradients",
    "fedstas": "forms groups of clients from their gradients",
    "fedssar": "forms groups of clients from their models",
    "clustered": "forms groups of clients from their numbers of samples or updates",
    "power-of-choice": "compares the losses of individual clients",
    "fedentopt": "asks each client for its label counts",
    "fedgs": "asks each client for its label counts",
    "sfl": "sends the model from client to client",
    "fedtan": "adds up statistics between clients in the middle of a step",
    "ccvr": "asks each client for the moments of its features",
    **dict.fromkeys(("fedau", "mifa", "fedawe", "fedvarp"), "stores values of individual clients"),
}
"""The methods that need individual replies, and the reason in the error."""

METHOD_SETTINGS: dict[str, dict[str, Any]] = {
    "fedsampling": {"method": {"name": "fedsampling", "samples": 500, "reuse": False}},
    "fedavg-ft": {"partition": {"name": "classes", "clients": 8, "per_client": 3, "size": 60}},
}
"""Sections with which a method has secure sums for eight clients."""


METHOD_CASES = {
    name: METHOD_SETTINGS.get(name, {"method": name}) for name in METHODS if name not in (*NEEDS_REPLIES, "stratify")
}
"""The sections of the spec of each method that needs only the sums of a round."""
