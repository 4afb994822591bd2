"""Run the command line with ``python -m fedstrata``."""

from __future__ import annotations

import sys

if not sys.flags.safe_path:
    # Remove the working directory from sys.path. Otherwise, a file in this directory could replace an installed module.
    # Only commands that may load a user's own code put the directory back.
    del sys.path[0]

from fedstrata.cli import main

sys.exit(main())
