"""Find the optional packages on top of the library by name, so that the library itself does not import them."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

from fedstrata.base.errors import FedstrataError

OUTER = ("papers", "audits", "sites")
"""The packages on top of the library. Each has a module ``cli`` with its commands."""


def installed() -> list[str]:
    """Return the names of those outer packages that are installed."""
    return [name for name in OUTER if find_spec(f"fedstrata.{name}") is not None]


def commands() -> list[Any]:
    """Return the modules with the commands of those outer packages that are installed."""
    return [importlib.import_module(f"fedstrata.{name}.cli") for name in installed()]


def load(path: str) -> Any:
    """Return an object of an outer package.

    Args:
        path: The module below ``fedstrata`` and the object's name, such as ``"sites.simulator:simulate"``.

    Raises:
        FedstrataError: The package is not installed.
    """
    module, _, name = path.partition(":")
    package = module.partition(".")[0]
    if package not in installed():
        raise FedstrataError(f"the package fedstrata.{package} is not installed here. Install fedstrata as a whole.")
    return getattr(importlib.import_module(f"fedstrata.{module}"), name)
