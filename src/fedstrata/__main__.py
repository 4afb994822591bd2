"""``python -m fedstrata``."""

from __future__ import annotations

import sys

from fedstrata.cli import main

sys.exit(main())
