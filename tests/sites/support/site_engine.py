"""A function that builds the engine of sites with settings for tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fedstrata.federation.engine import FederationConfig
from fedstrata.sites.engine import NVFlareEngine
from fedstrata.sites.messenger import Messenger
from fedstrata.sites.sums import Sums


def make_site_engine(
    config: FederationConfig,
    transport: Any,
    site_of_client: Sequence[str],
    sums: Sums,
    *,
    patience: float = math.inf,
    least: int = 1,
    fewer: Any = "go-on",
    **options: Any,
) -> NVFlareEngine:
    """Make the engine over a transport."""
    messenger = Messenger(transport, site_of_client, patience=patience, least=least, fewer=fewer)
    return NVFlareEngine(config, messenger, sums, **options)
