"""A partition where each client prefers one class. In a spec: partition = {name = "leaning:Leaning", share = 0.9}."""

import numpy as np
from pydantic import Field

import fedstrata as fs


class Leaning(fs.Partition):
    """Assigns a share of the samples to clients that prefer the sample's class, and other samples to random clients.

    Args:
        share: Share of the samples that go to clients that prefer their class. With 0, clients are nearly IID.
    """

    share: float = Field(default=0.8, ge=0, le=1)

    def assign(self, labels, domains, rng):
        """Return the client of each sample. Client k prefers the class k mod C, where C is the number of classes."""
        classes = min(int(labels.max()) + 1, self.clients)
        ring = rng.integers(self.clients // classes, size=len(labels))
        leaning = labels % classes + classes * ring
        return np.where(rng.random(len(labels)) < self.share, leaning, rng.integers(self.clients, size=len(labels)))
