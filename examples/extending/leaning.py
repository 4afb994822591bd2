"""A partition: every client leans towards one class. partition = {name = "leaning:Leaning", share = 0.9}."""

import numpy as np
from pydantic import Field

import fedstrata as fs


class Leaning(fs.Partition):
    """A share of the samples goes to the clients that lean towards their class, the rest to anybody.

    Args:
        share: That share; 0 is nearly IID.
    """

    share: float = Field(default=0.8, ge=0, le=1)

    def assign(self, labels, domains, rng):
        """The owner of every sample; client k leans towards class k mod C."""
        classes = min(int(labels.max()) + 1, self.clients)
        ring = rng.integers(self.clients // classes, size=len(labels))
        leaning = labels % classes + classes * ring
        return np.where(rng.random(len(labels)) < self.share, leaning, rng.integers(self.clients, size=len(labels)))
