"""The command line: one small file a family of commands, each with its arguments beside its work."""

from fedstrata.cli.main import main

__all__ = ["main"]
