"""Prepare the start of a party; a kit's start script runs ``python -m fedstrata.sites.start KIT [--verbose]``.

``start.sh`` runs it twice: first in the foreground with ``--check``, then in the background with ``--checked``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fedstrata.base.printable import print_lines
from fedstrata.sites.check import check
from fedstrata.sites.kits import close, configure_logging, set_paths


def checked_kit(kit: Path) -> int:
    """Print the problems and warnings of a kit, and return the exit code: 0 if the party may start."""
    findings = [each for each in check(kit, server=False, data=False) if each.state != "ok"]
    for each in findings:
        print_lines(f"fedstrata: {each}")
    return int(any(each.state == "problem" for each in findings))


def start(kit: Path, *, verbose: bool, checked: bool = False) -> int:
    """Check a kit. If the party may start, prepare the kit: set its paths, logging and file permissions.

    Args:
        kit: A party's folder.
        verbose: Whether NVFlare logs everything, not only errors.
        checked: Whether the kit has just been checked, so that the check is skipped.

    Returns:
        The exit code: 0 if the party may start.
    """
    if not checked and checked_kit(kit):
        return 1
    set_paths(kit)
    configure_logging(kit, verbose=verbose)
    for part in ("startup", "local"):
        close(kit / part)
    return 0


if __name__ == "__main__":
    folder, given = Path(sys.argv[1]), sys.argv[2:]
    if "--check" in given:
        sys.exit(checked_kit(folder))
    sys.exit(start(folder, verbose="--verbose" in given, checked="--checked" in given))
