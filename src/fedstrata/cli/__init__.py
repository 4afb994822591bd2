"""The command line, with a file for each family of commands."""

from fedstrata.cli.main import main

__all__ = ["main"]
