"""What a kit's start script does before NVFlare begins: ``python -m fedstrata.sites.start KIT [--verbose]``.

``start.sh`` first asks with ``--check``, while somebody waits for it. What then goes on in the background begins with
``--checked``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fedstrata.sites.check import check
from fedstrata.sites.kits import close, logged, placed


def looked_at(kit: Path) -> int:
    """Say what is wrong with a kit; the exit code, 0 where it may start."""
    findings = [each for each in check(kit, server=False, data=False) if each.state != "ok"]
    for each in findings:
        print(f"fedstrata: {each}", flush=True)
    return int(any(each.state == "problem" for each in findings))


def start(kit: Path, *, verbose: bool, checked: bool = False) -> int:
    """Say what is wrong with a kit, and make it ready where it may start.

    Args:
        kit: A party's folder.
        verbose: Whether NVFlare says all.
        checked: Whether it was looked at just now.

    Returns:
        The exit code, 0 where it may start.
    """
    if not checked and looked_at(kit):
        return 1
    placed(kit)
    logged(kit, verbose=verbose)
    for part in ("startup", "local"):
        close(kit / part)
    return 0


if __name__ == "__main__":
    folder, given = Path(sys.argv[1]), sys.argv[2:]
    if "--check" in given:
        sys.exit(looked_at(folder))
    sys.exit(start(folder, verbose="--verbose" in given, checked="--checked" in given))
