"""A slow variant of SCAFFOLD, so that a test can interrupt the middle of a round on any machine."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import fedstrata as fs
from fedstrata.methods.scaffold import SCAFFOLD
from fedstrata.objectives.scaffold import Scaffold

HURRY = "SLOWLY_UNTIL"
"""The environment variable with the path of a file; once the file exists, clients no longer wait."""

STUCK = "SLOWLY_STUCK"
"""An environment variable; if it is set, no client ever finishes its work."""


class SlowScaffold(Scaffold):
    """SCAFFOLD's objective, with a pause of half a second before the first step."""

    def client_init(self, model: Any, context: Any) -> Any:
        if os.environ.get(STUCK):
            time.sleep(3600)
        if not Path(os.environ[HURRY]).exists():
            time.sleep(0.5)
        return super().client_init(model, context)


class Slow(SCAFFOLD):
    """The slow method. Sites import it by name, like a package that they have installed."""

    def parts(self) -> fs.Parts:
        return {"objective": SlowScaffold()}
