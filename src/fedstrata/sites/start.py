"""Prepare the start of NVFlare at the server or a site.

KIT is the folder of the server or the site, with its certificate, settings and scripts.

The script ``start.sh`` in this folder runs ``python -m fedstrata.sites.start KIT [--verbose]`` twice. The first call
runs in the foreground with ``--check``, and only prints problems. The second call runs in the background with
``--checked``, and does not check the folder again.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fedstrata.base.printable import print_lines
from fedstrata.sites.check import check
from fedstrata.sites.kits import close, configure_logging, set_paths


def checked_kit(kit: Path) -> int:
    """Print the problems in the folder of the server or a site. Return the exit code: 0 if this party may start."""
    findings = [each for each in check(kit, server=False, data=False) if each.state != "ok"]
    for each in findings:
        print_lines(f"fedstrata: {each}")
    return int(any(each.state == "problem" for each in findings))


def start(kit: Path, *, verbose: bool, checked: bool = False) -> int:
    """Check the folder of the server or a site, and prepare the start of NVFlare.

    If this party may start, set its paths, its log settings, and the permissions of ``startup`` and ``local``.

    Args:
        kit: The folder.
        verbose: Whether to log all messages of NVFlare, and not only errors.
        checked: Whether to skip the check, because the folder has just been checked.

    Returns:
        The exit code: 0 if the server or site may start.
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
