"""An aggregator: by size, but nobody counts for more than a cap. method.aggregator = "capped:Capped"."""

from typing import ClassVar

import numpy as np
from pydantic import PositiveInt

import fedstrata as fs


class Capped(fs.Aggregator):
    """Clients count by their samples, the largest for no more than ``cap`` of them.

    Args:
        cap: The most samples that a client counts for.
    """

    needs_counts: ClassVar[bool] = True  # so it is refused where clients keep their sizes private
    cap: PositiveInt = 100

    def coefficients(self, selection, returned, samples):
        """Of those who returned, adding up to one."""
        counted = np.minimum(samples, self.cap) * selection.draws[returned]
        return counted / max(counted.sum(), 1)
