"""Add the command ``fedstrata keys``, which creates secret keys for masking the clients' labels."""

from __future__ import annotations

import argparse
from pathlib import Path

from fedstrata.cli.common import Commands, add_command, add_output, print_result


def add_keys(commands: Commands) -> None:
    """Add the command ``fedstrata keys``."""
    examples = """
        fedstrata keys
        fedstrata keys --out /secure/keys
    """
    parser = add_command(commands, "keys", "create the keys with which clients mask their labels", examples, work=_keys)
    parser.add_argument(
        "--out", type=Path, default=Path("keys"), metavar="DIR", help="folder to store the keys in (default: keys)"
    )
    add_output(parser, progress=False)


def _keys(options: argparse.Namespace) -> None:
    from fedstrata.stratify.masking.key_store import VARIABLE, Keys

    path = Keys.make().write(options.out)
    text = f"copy {path} to each site, but never to the server. At each site, set {VARIABLE} to the folder of the copy."
    print_result(options, {"file": path, "variable": VARIABLE}, text)


COMMANDS = (add_keys,)
