"""Import optional packages of fedstrata, such as the package for deployments, only when they are needed."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

from fedstrata.base.errors import FedstrataError

OUTER = ("papers", "audits", "sites")
"""The optional (outer) packages. The module ``cli`` of each package contains the package's commands."""


def installed() -> list[str]:
    """Return the names of the outer packages that are installed."""
    return [name for name in OUTER if find_spec(f"fedstrata.{name}") is not None]


def commands() -> list[Any]:
    """Return the module ``cli`` of each installed optional package, which defines the package's commands."""
    return [importlib.import_module(f"fedstrata.{name}.cli") for name in installed()]


def load(path: str) -> Any:
    """Import an object from an optional package of fedstrata; see ``OUTER``.

    Args:
        path: The module in ``fedstrata`` and the object's name, such as ``"sites.simulator:simulate"``.

    Raises:
        FedstrataError: The package is not installed.
    """
    module, _, name = path.partition(":")
    package = module.partition(".")[0]
    if package not in installed():
        raise FedstrataError(f"the package fedstrata.{package} is not installed. Install fedstrata again.")
    return getattr(importlib.import_module(f"fedstrata.{module}"), name)
