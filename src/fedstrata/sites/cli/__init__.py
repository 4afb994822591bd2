"""The commands of a deployment."""

from __future__ import annotations

from fedstrata.sites.cli import deploy, ledger

COMMANDS = (*deploy.COMMANDS, *ledger.COMMANDS)
