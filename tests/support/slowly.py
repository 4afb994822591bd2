"""SCAFFOLD that takes its time, so that a test can hit the middle of a round on any machine."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import fedstrata as fs
from fedstrata.methods.scaffold import SCAFFOLD
from fedstrata.objectives.scaffold import Scaffold

HURRY = "SLOWLY_UNTIL"
"""Names a file; once it is there, nobody takes time any more."""

STUCK = "SLOWLY_STUCK"
"""Where this is set, no client ends its work."""


class SlowScaffold(Scaffold):
    """Half a second before the first step."""

    def client_init(self, model: Any, context: Any) -> Any:
        if os.environ.get(STUCK):
            time.sleep(3600)
        if not Path(os.environ[HURRY]).exists():
            time.sleep(0.5)
        return super().client_init(model, context)


class Slow(SCAFFOLD):
    """Sites find it by name: like a package of their own that they installed."""

    def parts(self) -> fs.Parts:
        return {"objective": SlowScaffold()}
