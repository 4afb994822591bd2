"""The command line ``fedstrata``, with a module for each group of commands."""

from fedstrata.cli.main import main

__all__ = ["main"]
