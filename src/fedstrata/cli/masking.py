"""``fedstrata keys``: the keys that clients share for masked labels."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fedstrata.cli.common import add_command, add_output, print_json

if TYPE_CHECKING:
    from fedstrata.cli.common import Commands


def add_keys(commands: Commands) -> None:
    """Add ``fedstrata keys``."""
    examples = """
        fedstrata keys
        fedstrata keys --out /secure/keys
    """
    parser = add_command(commands, "keys", "make the clients' keys for masked labels", examples)
    parser.add_argument("--out", type=Path, default=Path("keys"), metavar="DIR", help="the folder (default: keys)")
    add_output(parser, progress=False)
    parser.set_defaults(work=_keys)


def _keys(options: argparse.Namespace) -> int:
    from fedstrata.stratify.masking.key_store import VARIABLE, Keys

    path = Keys.make().write(options.out)
    if options.json:
        print_json({"file": path, "variable": VARIABLE})
        return 0
    print(f"{path}: copy it to every client's site and set {VARIABLE} to its folder there; never give it to the server")
    return 0


COMMANDS = (add_keys,)
