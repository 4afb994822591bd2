"""An aggregator, which combines the clients' replies. Try it:

fedstrata run --set method.aggregator={module}:BySquareRoot
"""

from typing import ClassVar

import numpy as np
from pydantic import Field

import fedstrata as fs


class BySquareRoot(fs.Aggregator):
    """The averaging weight of a client is a power of its number of samples.

    Args:
        power: Exponent of a client's number of samples. With exponent 1, all samples have equal weights. With exponent
            0, all clients have equal weights.
    """

    needs_counts: ClassVar[bool] = True  # the server must know the numbers of samples; otherwise, an error is raised
    power: float = Field(default=0.5, ge=0, le=1)  # a setting; set it with --set method.aggregator.power=1

    def coefficients(self, selection, returned, samples):
        """Return the averaging weight of each reply. The model w becomes w + Σ weight × (client's model − w)."""
        weights = np.maximum(samples, 0.0) ** self.power * selection.draws[returned]
        return weights / max(weights.sum(), 1e-12)
