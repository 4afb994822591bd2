"""``python -m fedstrata``."""

from __future__ import annotations

import sys

if not sys.flags.safe_path:
    # Python puts the working directory first. Commands that train look there again; the others never do.
    del sys.path[0]

from fedstrata.cli import main

sys.exit(main())
