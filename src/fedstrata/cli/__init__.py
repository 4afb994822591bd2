"""The command-line program ``fedstrata``, with one module for each group of commands."""

from fedstrata.cli.main import main

__all__ = ["main"]
