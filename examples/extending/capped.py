"""An aggregator that weights clients by size, up to a cap. In a spec: method.aggregator = "capped:Capped"."""

from typing import ClassVar

import numpy as np
from pydantic import PositiveInt

import fedstrata as fs


class Capped(fs.Aggregator):
    """Weights each client by its number of samples, but at most by ``cap``.

    Args:
        cap: Largest number of samples that counts for the weight of a client.
    """

    needs_counts: ClassVar[bool] = True  # the run is refused if the numbers of samples are private
    cap: PositiveInt = 100

    def coefficients(self, selection, returned, samples):
        """Return the weights of the clients that replied, which add up to 1."""
        counted = np.minimum(samples, self.cap) * selection.draws[returned]
        return counted / max(counted.sum(), 1)
