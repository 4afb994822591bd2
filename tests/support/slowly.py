"""SCAFFOLD that takes its time, so that a test can hit the middle of a round on any machine."""

from __future__ import annotations

import time
from typing import Any

from fedstrata.methods.scaffold import SCAFFOLD
from fedstrata.objectives.scaffold import Scaffold


class SlowScaffold(Scaffold):
    """Half a second before the first step."""

    def client_init(self, model: Any, context: Any) -> Any:
        time.sleep(0.5)
        return super().client_init(model, context)


class Slow(SCAFFOLD):
    """Sites find it by name: like a package of their own that they installed."""

    objective = SlowScaffold()
