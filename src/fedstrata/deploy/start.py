"""What a kit's start script does before NVFlare begins: ``python -m fedstrata.deploy.start KIT [--verbose]``."""

from __future__ import annotations

import sys
from pathlib import Path

from fedstrata.deploy.check import check
from fedstrata.deploy.kits import close, logged, placed


def start(kit: Path, *, verbose: bool) -> int:
    """Make a kit ready, and say what is wrong with it; the exit code, 0 where it may start."""
    found = [each for each in check(kit, server=False, data=False) if each.state != "ok"]
    for each in found:
        print(f"fedstrata: {each}", flush=True)
    if any(each.state == "problem" for each in found):
        return 1
    placed(kit)
    logged(kit, verbose=verbose)
    for part in ("startup", "local"):
        close(kit / part)
    return 0


if __name__ == "__main__":
    sys.exit(start(Path(sys.argv[1]), verbose="--verbose" in sys.argv))
